"""Decodes prompts with vLLM, with or without a draft model, and writes down what it counted.

Runs in the environment of `make engine-check` as a child of bench/engine_check.py and imports
nothing of draftsmith. Reads a request and writes an answer, both JSON files:

    python bench/engine_vllm.py REQUEST ANSWER

Request: `target` (folder), `draft` (folder or null for plain decoding), `method` (vLLM's name, for
example eagle3), `num_draft_tokens`, `prompts` (lists of token ids), `max_new_tokens`,
`stop_token_ids`, `dtype`, `max_model_len`.

Answer: `engine` and `version`; `architectures` (what vLLM took the draft for); `answers`,
one per prompt: `token_ids`, `finish_reason`, `num_drafts`, `num_draft_tokens`,
`num_accepted_tokens`, `accepted_by_position` (vLLM's counters, of this prompt alone).

Prompts go one after the other, so that the difference of the counters before and after belongs to
one prompt. Greedy, eager mode, no prefix caching: nothing is left over from the prompt before.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import vllm
from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Vector

COUNTERS = {
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
}
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


def start(request: dict[str, Any]) -> LLM:
    """The engine, with the draft model where one is given."""
    speculative = None
    if request["draft"] is not None:
        speculative = {
            "method": request["method"],
            "model": request["draft"],
            "num_speculative_tokens": request["num_draft_tokens"],
        }
    return LLM(
        request["target"],
        dtype=request["dtype"],
        max_model_len=request["max_model_len"],
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculative,
        seed=0,
    )


def read_counters(engine: LLM, depth: int) -> list[int]:
    """Drafts, drafted tokens, accepted tokens, then accepted tokens by position; all so far."""
    found = dict.fromkeys(COUNTERS.values(), 0)
    by_position = [0] * depth
    for metric in engine.get_metrics():
        if isinstance(metric, Counter) and metric.name in COUNTERS:
            found[COUNTERS[metric.name]] += metric.value
        elif isinstance(metric, Vector) and metric.name == BY_POSITION:
            by_position = [a + b for a, b in zip(by_position, metric.values, strict=True)]
    return [*found.values(), *by_position]


def decode(engine: LLM, request: dict[str, Any]) -> list[dict[str, Any]]:
    """All prompts, one after the other."""
    depth = 0 if request["draft"] is None else request["num_draft_tokens"]
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=request["max_new_tokens"],
        stop_token_ids=request["stop_token_ids"],
        skip_special_tokens=False,
    )
    answers = []
    before = read_counters(engine, depth)
    for prompt in request["prompts"]:
        output = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0]
        after = read_counters(engine, depth)
        counts = [new - old for new, old in zip(after, before, strict=True)]
        before = after
        answers.append(
            {
                "token_ids": list(output.outputs[0].token_ids),
                "finish_reason": output.outputs[0].finish_reason,
                **dict(zip(COUNTERS.values(), counts, strict=False)),
                "accepted_by_position": counts[len(COUNTERS) :],
            }
        )
    return answers


def architecture(engine: LLM) -> list[str]:
    """Names of the classes that the draft model's configuration asks for."""
    speculative = engine.llm_engine.vllm_config.speculative_config
    if speculative is None:
        return []
    return list(speculative.draft_model_config.hf_config.architectures)


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    engine = start(request)
    answer = {
        "engine": "vLLM",
        "version": vllm.__version__,
        "architectures": architecture(engine),
        "answers": decode(engine, request),
    }
    Path(sys.argv[2]).write_text(json.dumps(answer) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
