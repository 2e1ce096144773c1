"use strict";
// The note at a token, walking with the arrow keys, and the filters. All text is there without it.
(() => {
  const tip = document.getElementById("tip");
  let current = null; // The token that the note is about.

  // ---- the note -------------------------------------------------------------------------------

  function row(list, name, value) {
    const term = document.createElement("dt");
    const said = document.createElement("dd");
    term.textContent = name;
    said.textContent = value;
    list.append(term, said);
  }

  function origin(data) {
    if (data.d !== "0") return `drafted at depth ${data.d}, accepted`;
    return data.r === "0" ? "the target's own, from prefill" : "the target's own";
  }

  function fill(token) {
    const data = token.dataset;
    const name = document.createElement("p");
    name.textContent = JSON.stringify(token.textContent);
    const list = document.createElement("dl");
    row(list, "Origin", origin(data));
    row(list, "Round", data.r === "0" ? "before the first" : data.r);
    if (data.d !== "0") row(list, "Draft probability", data.q ?? "not reported");
    row(list, "Target probability", data.p ?? "not reported");
    if (token.matches(".differs")) row(list, "Plain decoding", "has another token here");
    tip.replaceChildren(name, list);
  }

  // Below the token if there is room, else above; never beyond the window's edges.
  function place() {
    if (!current) return;
    const spot = current.getClientRects()[0] ?? current.getBoundingClientRect();
    const { width, height } = tip.getBoundingClientRect();
    const right = document.documentElement.clientWidth - width - 8;
    const below = spot.bottom + 8;
    const above = spot.top - height - 8;
    tip.style.left = `${Math.max(8, Math.min(spot.left, right))}px`;
    tip.style.top = `${below + height > window.innerHeight && above > 0 ? above : below}px`;
  }

  function* sameRound(token) {
    yield token;
    for (const step of ["previousElementSibling", "nextElementSibling"]) {
      for (let one = token[step]; one && one.dataset.r === token.dataset.r; one = one[step]) {
        yield one;
      }
    }
  }

  function show(token) {
    if (token === current) return;
    hide();
    current = token;
    for (const one of sameRound(token)) one.classList.add("mate");
    fill(token);
    tip.hidden = false;
    token.setAttribute("aria-describedby", "tip");
    place();
  }

  function hide() {
    if (!current) return;
    for (const one of sameRound(current)) one.classList.remove("mate");
    current.removeAttribute("aria-describedby");
    current = null;
    tip.hidden = true;
  }

  const tokenAt = (event) => event.target.closest?.(".tokens > [data-d]");

  document.addEventListener("pointerover", (event) => {
    if (event.pointerType === "touch") return;
    const token = tokenAt(event);
    if (token) show(token);
    else if (current && current !== document.activeElement) hide();
  });
  document.addEventListener("focusin", (event) => {
    const token = tokenAt(event);
    if (token) show(token);
    else hide();
  });
  document.addEventListener("focusout", hide);
  document.addEventListener("click", (event) => {
    const token = tokenAt(event);
    if (!token) return hide();
    // Selecting text by dragging must not be disturbed.
    if (String(window.getSelection())) return undefined;
    enter(token);
    return show(token);
  });
  document.addEventListener("scroll", place, { passive: true, capture: true });
  window.addEventListener("resize", place);

  // ---- the keyboard: one token of each answer takes part in Tab (a roving tabindex) -------------

  function enter(token) {
    token.parentElement.querySelector(":scope > [tabindex]")?.removeAttribute("tabindex");
    token.tabIndex = 0;
    token.focus();
  }

  // The token nearest to this one, left to right, on the next line up or down.
  function onNextLine(token, step) {
    const box = (one) => one.getClientRects()[0];
    const from = box(token);
    const middle = from.left + from.width / 2;
    let line = null;
    let best = null;
    let distance = Infinity;
    for (let one = token[step]; one; one = one[step]) {
      const spot = box(one);
      if (!spot || Math.abs(spot.top - from.top) < from.height / 2) continue;
      if (line !== null && Math.abs(spot.top - line) > from.height / 2) break;
      line = spot.top;
      const away = Math.abs(spot.left + spot.width / 2 - middle);
      if (away < distance) [best, distance] = [one, away];
    }
    return best;
  }

  const moves = {
    ArrowRight: (token) => token.nextElementSibling,
    ArrowLeft: (token) => token.previousElementSibling,
    ArrowDown: (token) => onNextLine(token, "nextElementSibling"),
    ArrowUp: (token) => onNextLine(token, "previousElementSibling"),
    Home: (token) => token.parentElement.firstElementChild,
    End: (token) => token.parentElement.lastElementChild,
  };

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    const token = tokenAt(event);
    if (!token || event.ctrlKey || event.metaKey || event.altKey) return undefined;
    const target = moves[event.key]?.(token);
    if (!target) return undefined;
    event.preventDefault();
    return enter(target);
  });

  // ---- filters --------------------------------------------------------------------------------

  const cards = [...document.querySelectorAll(".answer")];
  const category = document.getElementById("category");
  const search = document.getElementById("search");
  const shown = document.getElementById("shown");
  const texts = new Map(); // Lower-case text of each card, made at the first search.

  function text(card) {
    if (!texts.has(card)) texts.set(card, card.textContent.toLowerCase());
    return texts.get(card);
  }

  function filter() {
    const wanted = search.value.trim().toLowerCase();
    let count = 0;
    for (const card of cards) {
      const fits =
        (category.value === "" || card.dataset.category === category.value.slice(1)) &&
        (wanted === "" || text(card).includes(wanted));
      card.hidden = !fits;
      count += fits;
    }
    shown.textContent = `${count} of ${cards.length} prompts`;
    document.getElementById("none-found").hidden = count > 0;
    hide();
  }

  category.addEventListener("change", filter);
  search.addEventListener("input", filter);
  document.getElementById("depths").addEventListener("change", (event) => {
    document.body.classList.toggle("digits", event.target.checked);
    place();
  });
  document.getElementById("filters").hidden = false;
  filter();
})();
