"""Chat template rendering and the loss mask, right for any template and without a table of models.

The rule (DESIGN section 4): supervised is exactly what the target itself would generate after the
generation prompt, through the end-of-turn token. How the span of assistant turn k is found:

1. prompt = render(messages before k, add_generation_prompt=True): what the target would read.
2. full = render(messages up to and including k). Where it starts with the prompt, the rest is what
   the target wrote; text that the template adds after the end-of-turn token (a line break) is not.
3. Where a template ignores add_generation_prompt, or the prompt pre-fills a scaffold such as
   `<think>` that `full` lacks, a stand-in answer shows which header the template writes.
4. Turns whose spans agree with a longer rendering share one row. A template that rewrites earlier
   turns (drops their reasoning, changes their end) gives one row per answer, as inference sees it.
5. The full text is encoded once, with character offsets. A token is supervised if it lies within a
   span; one that straddles the edge was not generated in one piece, so it is not.

`{% generation %}` tags are not needed; a test compares with them. Check: tests/test_chat_mask.py.
"""

from __future__ import annotations

import bisect
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.data.chat_template import added_special_ids, bos_to_add, render_chat
from draftsmith.data.conversations import Conversation, RowError

MASK_RULE_VERSION = 1
"""Raised when the rule changes: prepared data made by an older rule is then not reused."""

STAND_IN = "\ue000answer\ue000"
"""An answer that no template treats specially (private-use characters)."""

_OPEN_TAG_AT_END = re.compile(r"<([\w:|]+)>\s*$")
_EMPTY_BLOCK = re.compile(r"\s*<([\w:|]+)>\s*</\1>\s*")
_CLOSING_TAG = re.compile(r"</([\w:|]+)>")
# Byte-level BPE and SentencePiece write a leading space or line break as these.
_SPACE_MARKS = ("\u0120", "\u010a", "\u2581", " ", "\n")


@dataclass(frozen=True)
class Span:
    """Characters [start, end) of a text that the target wrote in one turn."""

    start: int
    end: int


@dataclass(frozen=True)
class MaskedText:
    """One training text and what in it is supervised."""

    text: str
    spans: tuple[Span, ...]
    turn: int
    """Index of the last message in it."""


@dataclass
class EncodedText:
    """Token ids with their loss mask; what follows the last supervised token is left out."""

    input_ids: list[int]
    loss_mask: list[int]
    end_ids: list[int] = field(default_factory=list)
    """The last supervised token of each span: end-of-turn tokens, unless the answer was cut."""


@dataclass(frozen=True)
class _Turn:
    index: int
    text: str
    span: Span
    complete: bool
    """The span includes an end of turn."""
    cut: bool


class ChatMasker:
    """Renders conversations with a tokenizer's chat template and marks what the target writes.

    Args:
        tokenizer: a fast tokenizer of transformers.
        eos_token_ids: tokens that end generation (a model may have several).
        template_kwargs: passed to the template, for example {"enable_thinking": False}.
        train_on: all or last (which assistant turns are supervised).

    Attributes:
        notes: counts of what a person should know although rows were kept.

    Raises:
        ValueError: the tokenizer cannot report character offsets.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        eos_token_ids: Sequence[int] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        train_on: str = "all",
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"{type(tokenizer).__name__} is a slow tokenizer and cannot say which characters a "
                "token covers, so no loss mask can be made. Convert it: save the tokenizer with a "
                "tokenizer.json (AutoTokenizer with a fast backend) and name that folder."
            )
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self.train_on = train_on
        self.notes: Counter[str] = Counter()
        self.eos_token_ids = frozenset(eos_token_ids) | (
            {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
        )
        self._eos_texts = [t for t in map(self._token_text, sorted(self.eos_token_ids)) if t]
        special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        self._end_texts = sorted({*self._eos_texts, *special}, key=len, reverse=True)
        self._prefix_ids, self._suffix_ids = added_special_ids(tokenizer)
        self._generation_header = ""
        self._closing: str | None = None

    def _token_text(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    # Rendering

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """The template's text for some messages (none at all is allowed).

        Raises:
            ValueError: the tokenizer has no chat template.
            RowError: the template refused the messages.
        """
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"The tokenizer {self.tokenizer.name_or_path or '(unnamed)'} has no chat template, "
                "but the data are conversations. Use an instruction-tuned target, put a "
                "chat_template.jinja into its folder, or give plain text (field text)."
            )
        return render_chat(
            self.tokenizer,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=self.template_kwargs,
        )

    def _with_readable_arguments(self, conversation: Conversation) -> list[dict[str, Any]]:
        """Messages whose tool arguments are in the form that this template can write.

        Most templates take a mapping and write JSON; some join a string. A mapping given to the
        latter raises TypeError or comes out as Python's own notation with single quotes.
        """
        messages = conversation.messages
        calls = [c["function"] for m in messages for c in m.get("tool_calls", ())]
        if not calls:
            return messages
        written = [{**m, "tool_calls": [_text_arguments(c) for c in m["tool_calls"]]}
                   if "tool_calls" in m else m for m in messages]  # fmt: skip
        try:
            text = self.render(messages, conversation.tools)
        except RowError as error:
            if not isinstance(error.__cause__, TypeError):
                raise
            return written
        notation = any(c["arguments"] and str(c["arguments"]) in text for c in calls)
        return written if notation else messages

    # Spans

    def masked_texts(self, conversation: Conversation) -> list[MaskedText]:
        """The training texts of a conversation, usually one.

        Raises:
            RowError: the template refuses it, or an answer cannot be found in the rendering.
        """
        messages = self._with_readable_arguments(conversation)
        answers = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
        if self.train_on == "last":
            answers = answers[-1:]
        turns, opening_error = [], None
        for index in answers:
            if index in conversation.untrained_turns:
                continue
            message = messages[index]
            if not message["content"].strip() and not message.get("tool_calls"):
                # The end of turn right after the header is nothing that the target would write.
                self.notes["empty answers, not supervised"] += 1
                continue
            cut = index in conversation.cut_turns
            try:
                turns.append(self._turn(messages[: index + 1], conversation.tools, cut))
            except RowError as error:
                if any(m["role"] != "system" for m in messages[:index]):
                    raise
                # An opening line of the assistant answers no prompt: it can only be context.
                opening_error = error
        if not turns:
            raise opening_error or RowError(
                "no assistant text", "every assistant turn is empty or has weight 0"
            )
        if opening_error is not None:
            self.notes["opening answers without a prompt, not supervised"] += 1
        self._note_lost_messages(messages[: turns[-1].index], turns[-1].text)
        return self._share_rows(turns)

    def _share_rows(self, turns: list[_Turn]) -> list[MaskedText]:
        """Groups turns whose rendering as history equals what they were when written."""
        remaining, rows = list(turns), []
        while remaining:
            last = remaining[-1]
            agree = [t for t in remaining if last.text[: t.span.end] == t.text[: t.span.end]]
            spans = tuple(self._closed_by_next_header(t, last.text) for t in agree)
            rows.append(MaskedText(last.text, spans, last.index))
            shared = {t.index for t in agree}
            remaining = [t for t in remaining if t.index not in shared]
        if len(rows) > 1:
            self.notes["conversations split: the template rewrites earlier answers"] += 1
        return rows[::-1]

    def _closed_by_next_header(self, turn: _Turn, text: str) -> Span:
        """Some models stop by writing the next turn's header token (it is one of their EOS ids)."""
        if not turn.complete and not turn.cut:
            for eos in self._eos_texts:
                if text.startswith(eos, turn.span.end):
                    return Span(turn.span.start, turn.span.end + len(eos))
        return turn.span

    def _turn(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, cut: bool
    ) -> _Turn:
        """Finds the span of the last message of `messages`."""
        answer = messages[-1]
        prefix = messages[:-1]
        prompt = self.render(prefix, tools, add_generation_prompt=True)
        text = self.render(messages, tools)
        has_header = self._has_header(prompt, prefix, tools)
        if has_header and text.startswith(prompt):
            start = len(prompt)
            if not self._keeps_answer(answer, text[start:]):
                text = self._completed(prompt, prefix, answer, tools)
            else:
                start = self._after_empty_scaffold(text, start, prefix, answer, tools)
        elif has_header and self._opens_reasoning_that_answer_closes(prompt, answer):
            start, text = len(prompt), self._completed(prompt, prefix, answer, tools)
        else:
            start, text = self._after_header(prompt, text, prefix, answer, tools)
            if not self._keeps_answer(answer, text[start:]):
                raise RowError(
                    "answer not found in the rendering",
                    f"message {len(prefix)} starts {answer['content'][:60]!r}, "
                    f"the template wrote {text[start:][:60]!r}",
                )
        content_end, turn_end = self._ends(text, start, prefix, answer, tools)
        end = content_end if cut else turn_end
        return _Turn(len(prefix), text, Span(start, end), turn_end > content_end, cut)

    def _has_header(self, prompt: str, prefix: list[dict[str, Any]], tools: Any) -> bool:
        """Whether add_generation_prompt added anything to this prompt."""
        if self._generation_header and prompt.endswith(self._generation_header):
            return True
        plain = self.render(prefix, tools)
        if prompt == plain:
            return False
        if prefix and prompt.startswith(plain):
            # Remembered, so that most turns need one rendering less.
            self._generation_header = prompt[len(plain) :]
        return True

    def _frame(self, prefix: list[dict[str, Any]], tools: Any) -> tuple[str, str]:
        """What the template writes before and after a stand-in answer."""
        text = self.render([*prefix, {"role": "assistant", "content": STAND_IN}], tools)
        before, found, after = text.rpartition(STAND_IN)
        if not found:
            raise RowError("answer not found in the rendering", "the template leaves answers out")
        return before, after

    def _after_header(
        self,
        prompt: str,
        text: str,
        prefix: list[dict[str, Any]],
        answer: Mapping[str, Any],
        tools: Any,
    ) -> tuple[int, str]:
        """Start of an answer that does not simply follow the generation prompt, and the text."""
        before, _ = self._frame(prefix, tools)
        if text.startswith(before) and before.startswith(prompt):
            # No generation prompt: `before` ends in the template's header. Tokenizers join a space
            # to the word after it, so the header's last spaces go with the answer.
            return len(before.rstrip(" ")), text
        # The prompt may go on with a scaffold after the very same header; else it is no header.
        scaffold = prompt[len(before) :]
        contradicts = any(
            f"</{tag}>" in answer["content"] for tag in _CLOSING_TAG.findall(scaffold)
        )
        if not text.startswith(before) or not prompt.startswith(before) or contradicts:
            common = len(os.path.commonprefix([prompt, text]))
            raise RowError(
                "answer does not follow the generation prompt",
                f"the prompt of message {len(prefix)} ends {prompt[-60:]!r}, the conversation goes "
                f"on {text[common:][:60]!r}",
            )
        if _EMPTY_BLOCK.fullmatch(scaffold) and not answer.get("tool_calls"):
            # Written without reasoning, after a prompt that closes it: the prompt is the context.
            return len(prompt), self._completed(prompt, prefix, answer, tools)
        self.notes["answers without the scaffold that the generation prompt pre-fills"] += 1
        return len(before), text

    def _after_empty_scaffold(
        self,
        text: str,
        start: int,
        prefix: list[dict[str, Any]],
        answer: Mapping[str, Any],
        tools: Any,
    ) -> int:
        """Skips an empty reasoning block that the template, not the answer, put in front."""
        opened = _OPEN_TAG_AT_END.search(text[:start])
        block = _EMPTY_BLOCK.match(text, start)
        if block is None and opened is not None:
            block = re.compile(rf"\s*</({re.escape(opened.group(1))})>\s*").match(text, start)
        if block is None or f"</{block.group(1)}>" in answer["content"]:
            return start
        self.notes["empty reasoning blocks of the template, not supervised"] += 1
        before, _ = self._frame(prefix, tools)
        # The stand-in tells the template's white space from the answer's own.
        return len(before) if text.startswith(before) else block.end()

    def _opens_reasoning_that_answer_closes(self, prompt: str, answer: Mapping[str, Any]) -> bool:
        opened = _OPEN_TAG_AT_END.search(prompt)
        return opened is not None and f"</{opened.group(1)}>" in answer["content"]

    def _keeps_answer(self, answer: Mapping[str, Any], written: str) -> bool:
        """Whether the template wrote all of the answer (it may trim and re-arrange white space).

        Raises:
            RowError: reasoning or a tool call, which have no form but the template's, was left out.
        """
        squeezed = _squeeze(written)
        if _squeeze(answer.get("reasoning_content", "")) not in squeezed:
            raise RowError(
                "reasoning not rendered",
                "the template leaves reasoning_content out; put it into content, as generated",
            )
        for call in answer.get("tool_calls", ()):
            if call["function"]["name"] not in written:
                raise RowError(
                    "tool call not rendered",
                    f"the template leaves out the call of {call['function']['name']}",
                )
        content = answer["content"]
        if _squeeze(content) in squeezed:
            return True
        # Templates that take reasoning apart write its pieces back between tags of their own.
        pieces = [re.sub(r"^\s*<[\w:|]+>", "", piece) for piece in _CLOSING_TAG.split(content)[::2]]
        return len(pieces) > 1 and all(_squeeze(piece) in squeezed for piece in pieces)

    def _completed(
        self, prompt: str, prefix: list[dict[str, Any]], answer: Mapping[str, Any], tools: Any
    ) -> str:
        """The prompt followed by the answer byte for byte: what generation gave.

        For templates that cannot write the answer as it was generated: those that drop everything
        up to `</think>` in any turn, or leave the prompt's scaffold out.
        """
        if answer.get("tool_calls") or answer.get("reasoning_content"):
            raise RowError(
                "answer not found in the rendering",
                "the template changes the content of a turn with tool calls or reasoning",
            )
        content = answer["content"]
        opened = _OPEN_TAG_AT_END.search(prompt)
        if opened is not None:
            # The opening tag may be in the answer too: once is enough.
            tag = re.escape(opened.group(1))
            content = re.sub(rf"^\s*<{tag}>\n?", "", content)
        self.notes["answers put after the generation prompt as they were generated"] += 1
        return prompt + content + self._frame(prefix, tools)[1]

    def _ends(
        self,
        text: str,
        start: int,
        prefix: list[dict[str, Any]],
        answer: Mapping[str, Any],
        tools: Any,
    ) -> tuple[int, int]:
        """Where the answer's content ends, and where its end of turn does."""
        content = answer["content"]
        forms = [form for form in (content, content.strip()) if form]
        closing = self._closing
        plain = not answer.get("tool_calls")
        if closing is None or not (plain and any(text.endswith(f + closing) for f in forms)):
            closing = self._closing = self._frame(prefix, tools)[1]
        if text.endswith(closing) and len(text) - len(closing) >= start:
            content_end = len(text) - len(closing)
            generated = self._generated_part(closing)
            if generated or plain:
                if not generated:
                    self.notes["answers without an end of turn in the template"] += 1
                return content_end, content_end + generated
        # A turn that calls tools may end in a token of its own.
        stripped = text.rstrip()
        for token in self._end_texts:
            if stripped.endswith(token) and len(stripped) - len(token) >= start:
                return len(stripped) - len(token), len(stripped)
        self.notes["answers without an end of turn in the template"] += 1
        return len(stripped), len(stripped)

    def _generated_part(self, closing: str) -> int:
        """How much of the text after an answer the target writes: through its end-of-turn token."""
        found = [(closing.find(t), -len(t)) for t in self._end_texts if t in closing]
        if found:
            position, negative_length = min(found)
            return position - negative_length
        # No special token: words such as "</s>" or "###" are the end, a mere line break is not.
        return len(closing.rstrip()) if closing.strip() else 0

    def _note_lost_messages(self, messages: list[dict[str, Any]], text: str) -> None:
        """Counts conversations whose system, user or tool text the template leaves out."""
        squeezed = _squeeze(text)
        for message in messages:
            content = message["content"]
            if message["role"] == "assistant" or _squeeze(content) in squeezed:
                continue
            if _squeeze(json.dumps(content, ensure_ascii=False)[1:-1]) not in squeezed:
                self.notes[f"{message['role']} texts that the template leaves out or changes"] += 1

    # Tokens

    def encode(self, masked: MaskedText) -> EncodedText:
        """Encodes a rendered text once and lays the spans over the tokens."""
        ids, offsets = self._encode_text(masked.text)
        mask = [0] * len(ids)
        ends = []
        for span in masked.spans:
            inside = self._tokens_in_span(ids, offsets, span)
            for position in inside:
                mask[position] = 1
            if inside:
                ends.append(ids[inside[-1]])
        added = bos_to_add(self.tokenizer, self._prefix_ids, masked.text)
        ids, mask = added + ids, [0] * len(added) + mask
        used = max((n for n, supervised in enumerate(mask) if supervised), default=-1) + 1
        return EncodedText(ids[:used], mask[:used], ends)

    def encode_document(self, text: str) -> EncodedText:
        """Encodes plain text with the tokenizer's own BOS and EOS; all but BOS is supervised."""
        ids = self._encode_text(text)[0]
        added = bos_to_add(self.tokenizer, self._prefix_ids, text)
        end = [] if ids[-1:] == self._suffix_ids[-1:] else self._suffix_ids
        mask = [0] * len(added) + [1] * (len(ids) + len(end))
        if not added and ids and self.tokenizer.bos_token_id == ids[0]:
            mask[0] = 0  # written in the text itself; still nothing that a model generates
        return EncodedText(added + ids + end, mask, end[-1:])

    def _encode_text(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self.tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return list(encoded["input_ids"]), [tuple(pair) for pair in encoded["offset_mapping"]]

    def _tokens_in_span(
        self, ids: list[int], offsets: list[tuple[int, int]], span: Span
    ) -> list[int]:
        """Positions of the tokens that lie in a span, up to the first that ends generation."""
        inside = []
        first = bisect.bisect_left([end for _, end in offsets], span.start)
        for position in range(first, len(ids)):
            start, end = offsets[position]
            if start >= span.end:
                break
            if end == span.start and start < end:
                continue  # the header's last token
            # Byte-level tokenizers may report a word without the space that its token includes.
            reached = offsets[position - 1][1] if position else 0
            across = reached < span.start <= start and self._starts_with_space(ids[position])
            if start < span.start or end > span.end or across:
                self.notes["tokens across the edge of an answer, not supervised"] += 1
                continue
            inside.append(position)
            if ids[position] in self.eos_token_ids:
                if end < span.end:
                    self.notes["answers that go on after an end token, cut there"] += 1
                break
        return inside

    def _starts_with_space(self, token_id: int) -> bool:
        return self.tokenizer.convert_ids_to_tokens(token_id).startswith(_SPACE_MARKS)


def _text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    written = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": written}}


def _squeeze(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())
