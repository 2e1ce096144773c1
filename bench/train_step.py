"""Measures one training step beside the matrix products that it consists of.

    make bench-train BENCH_ARGS="--json train.json"
    python bench/train_step.py --cases "all supervised;half" --repeats 15
    python bench/train_step.py --peer their_package.step:make_step

A step is forward, backward and a fused AdamW update on one batch of 2 x 512 tokens. The *floor* is
the CPU time of the same matrix products at the same shapes and nothing else, forward and backward
(bench/step_floor.py lists them). Step, floor and peer take turns in one process, so that a
disturbance of the machine hits all alike; peak memory is that of a fresh process that does steps
only. Times are CPU seconds of the process (all threads) and wall-clock seconds; ratios are between
minima of the same run.

A peer is any importable function. It is called with the case's sizes (a dict) and returns a
callable; each call of that with the batch (a dict of tensors) does one whole step.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.models.block_anchors import anchor_candidates, plan_blocks
from draftsmith.models.dflash import DFlashMethod
from draftsmith.models.dspark import DSparkMethod
from draftsmith.models.eagle import EagleMethod
from draftsmith.models.eagle3 import Eagle3Method
from draftsmith.models.protocols import TrainBatch
from draftsmith.models.target import TargetHead
from draftsmith.models.target_structure import find_structure
from draftsmith.models.ttt_slots import plan_slots, supervised_places
from draftsmith.train.objectives import make_objective

sys.path.append(str(Path(__file__).parent))

from step_floor import AUX_LAYERS, Case, Floor, products_of

SEED = 0
OBJECTIVES = {"dflash": "ce", "dspark": "ce_l1"}
"""As published; kl otherwise."""


CASES = (
    Case("eagle3, all supervised, 1 thread"),
    Case("eagle3, all supervised, 2 threads", threads=2),
    Case("eagle3, half supervised, 1 thread", supervised=0.5),
    Case("eagle3, half supervised, 2 threads", supervised=0.5, threads=2),
    Case("eagle3, all supervised, 1 thread, bfloat16", dtype="bfloat16"),
    Case("eagle3, draft vocabulary 2000, 1 thread", draft_vocab=2000),
    Case("eagle1, all supervised, 1 thread", method="eagle1", steps=1),
    Case("eagle1, 3 steps, 1 thread", method="eagle1", steps=3),
    Case("eagle3, recomputed steps, 1 thread", checkpoint_steps=True),
    *(
        Case(
            f"{method}, {anchors} blocks, 1 thread",
            method=method,
            layers=5,
            anchors=anchors,
            block=block,
        )
        for method, block in (("dflash", 16), ("dspark", 7))
        for anchors in (64, 128)
    ),
    Case("memory: 3 steps", steps=3, memory_only=True),
    Case("memory: 7 steps", memory_only=True),
    Case("memory: 3 recomputed steps", steps=3, checkpoint_steps=True, memory_only=True),
    Case("memory: 7 recomputed steps", checkpoint_steps=True, memory_only=True),
    Case("memory: vocabulary 32000", vocab=32000, draft_vocab=32000, memory_only=True),
)


class DraftVocabulary:
    """Every so-manieth token."""

    def __init__(self, case: Case) -> None:
        self.draft_to_target = torch.arange(case.draft_vocab) * (case.vocab // case.draft_vocab)


def make_head(case: Case) -> TargetHead:
    """Embeddings and head of a random target."""
    config = LlamaConfig(
        vocab_size=case.vocab,
        hidden_size=case.hidden,
        intermediate_size=case.intermediate,
        num_hidden_layers=1,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        head_dim=case.head_dim,
        max_position_embeddings=4 * case.seq,
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    return TargetHead(model, find_structure(model))


def make_draft(case: Case, head: TargetHead) -> Any:
    """The draft model as a run would build it."""
    sizes: dict[str, Any] = {
        "intermediate_size": case.intermediate,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "num_steps": case.steps,
        "checkpoint_steps": case.checkpoint_steps,
    }
    if case.is_block:
        del sizes["num_steps"], sizes["checkpoint_steps"]
        sizes |= {"num_hidden_layers": case.layers, "block_size": case.block}
        sizes |= {"num_anchors": case.anchors, "mask_token_id": case.vocab - 1}
        if case.method == "dspark":
            return DSparkMethod(**sizes, markov_rank=case.rank).build(head, None, AUX_LAYERS)
        return DFlashMethod(**sizes).build(head, None, AUX_LAYERS)
    vocabulary = DraftVocabulary(case) if case.draft_vocab < case.vocab else None
    if case.method == "eagle1":
        return EagleMethod(**sizes).build(head, vocabulary, ())
    return Eagle3Method(**sizes).build(head, vocabulary, AUX_LAYERS)


def make_batch(case: Case) -> TrainBatch:
    """Random tokens and states; the end of each row is supervised."""
    shape = (case.batch, case.seq)
    positions = torch.arange(case.seq).expand(shape)
    return TrainBatch(
        input_ids=torch.randint(0, case.vocab, shape),
        supervised_mask=positions >= round(case.seq * (1 - case.supervised)),
        keep_mask=torch.ones(shape, dtype=torch.bool),
        position_ids=positions.contiguous(),
        aux_hidden_states=torch.randn(*shape, len(AUX_LAYERS) * case.hidden),
        final_hidden_states=torch.randn(*shape, case.hidden),
    )


def make_step(case: Case, draft: Any, head: TargetHead, batch: TrainBatch) -> Callable[[], None]:
    """One whole training step, as train/loop.py does it on one process."""
    objective = make_objective(OBJECTIVES.get(case.method, "kl"))
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-4, weight_decay=0.0, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        count = draft.normaliser(batch).float()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.dtype == "bfloat16"):
            output = draft(batch, target_head=head, objective=objective)
        (output.loss_sum / count).backward()
        optimizer.step()

    return step


def make_plan(case: Case, draft: Any, batch: TrainBatch) -> Any:
    """The slots or blocks that a step works on; anchors are evenly spread here, drawn in a step."""
    if case.is_block:
        candidates = anchor_candidates(batch)
        spread = torch.arange(case.anchors) * len(candidates) // case.anchors
        return plan_blocks(
            batch,
            candidates[spread],
            num_steps=draft.config.num_steps,
            cumulative=draft.cumulative_supervision,
        )
    places = supervised_places(batch.supervised_mask, batch.keep_mask, draft.config.mask_alignment)
    return plan_slots(places, batch.keep_mask, num_steps=case.steps)


# Measuring, in a process of its own.


def load_peer(name: str, case: Case, batch: TrainBatch) -> Callable[[], None]:
    """A step of MODULE:FUNCTION.

    Raises:
        ValueError: the name has no colon.
    """
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(f"--peer is {name!r}, expected MODULE:FUNCTION.")
    step = getattr(importlib.import_module(module), function)(asdict(case))
    tensors = {key: value.clone() for key, value in vars(batch).items()}
    return lambda: step(tensors)


def measure_times(case: Case, repeats: int, peer: str | None) -> dict[str, Any]:
    """CPU and wall seconds of step, floor and peer, taking turns."""
    torch.manual_seed(SEED)
    head, batch = make_head(case), make_batch(case)
    draft = make_draft(case, head)
    products = products_of(case, make_plan(case, draft, batch))
    ways = {"step": make_step(case, draft, head, batch)} | {
        name: Floor(some, case.dtype).run for name, some in products.items()
    }
    if peer is not None:
        ways["peer"] = load_peer(peer, case, batch)
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    wall: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats + 2):  # Two rounds to warm up.
        for name, way in ways.items():
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            way()
            if number >= 2:
                cpu[name].append(time.process_time() - cpu_start)
                wall[name].append(time.perf_counter() - wall_start)
    least = {name: min(seconds) for name, seconds in cpu.items()}
    floor = least["linear"] + least["plain"]
    found = {
        "cpu_s_min": least["step"],
        "cpu_s_median": statistics.median(cpu["step"]),
        "wall_s_median": statistics.median(wall["step"]),
        "floor_s": floor,
        "floor_needed_s": least["linear"] + least["needed"],
        "ratio_to_floor": least["step"] / floor,
        "ratio_to_needed_floor": least["step"] / (least["linear"] + least["needed"]),
        "floor_gflops": sum(one.flops for one in products["linear"]) / least["linear"] / 1e9,
    }
    if peer is not None:
        found |= {
            "peer": peer,
            "peer_cpu_s_min": least["peer"],
            "peer_cpu_s_median": statistics.median(cpu["peer"]),
            "peer_wall_s_median": statistics.median(wall["peer"]),
            "peer_ratio": least["peer"] / least["step"],
        }
    return found


def peak_gib() -> float:
    """The process's largest resident size so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def measure_memory(case: Case, peer: str | None) -> dict[str, Any]:
    """Peak memory of a process that does three steps and nothing else.

    `state_gib` is what training cannot do without: weights, their gradients and AdamW's two
    moments, and the target's embeddings and head.
    """
    torch.manual_seed(SEED)
    batch = make_batch(case)
    libraries = peak_gib()
    if peer is not None:
        step = load_peer(peer, case, batch)
        found = {}
    else:
        head = make_head(case)
        draft = make_draft(case, head)
        step = make_step(case, draft, head, batch)
        trained = sum(weight.numel() for weight in draft.parameters())
        frozen = sum(weight.numel() for weight in head.parameters())
        found = {"state_gib": 4 * (4 * trained + frozen) / 2**30}
    for _ in range(3):
        step()
    prefix = "" if peer is None else "peer_"
    measured = {"peak_gib": peak_gib(), "libraries_gib": libraries}
    return found | {prefix + name: value for name, value in measured.items()}


# Cases, each in fresh processes.


def in_fresh_process(case: Case, what: dict[str, Any]) -> dict[str, Any]:
    """Runs this file as a child on the case's number of threads."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(case.threads),
        "MKL_NUM_THREADS": str(case.threads),
    }
    order = json.dumps({"case": asdict(case)} | what)
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--child", order]
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(answer.stdout)


def run_child(order: dict[str, Any]) -> dict[str, Any]:
    """The child's half of `in_fresh_process`."""
    case = Case(**order["case"])
    torch.set_num_threads(case.threads)
    if order["measure"] == "memory":
        return measure_memory(case, order.get("peer"))
    return measure_times(case, order["repeats"], order.get("peer"))


def run_case(case: Case, repeats: int, peer: str | None) -> dict[str, Any]:
    """One row of the report."""
    row: dict[str, Any] = {
        "case": case.name,
        "method": case.method,
        "threads": case.threads,
        "dtype": case.dtype,
        "supervised": case.supervised,
        "steps": case.steps,
        "vocab": case.vocab,
        "draft_vocab": case.draft_vocab,
        "checkpoint_steps": case.checkpoint_steps,
        "layers": case.layers,
        "blocks": case.anchors,
        "block_slots": case.block,
        "tokens": case.batch * case.seq,
    }
    row |= in_fresh_process(case, {"measure": "memory"})
    if case.memory_only:
        return row
    if peer is not None:
        row |= in_fresh_process(case, {"measure": "memory", "peer": peer})
    return row | in_fresh_process(case, {"measure": "times", "repeats": repeats, "peer": peer})


def has_fast_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware; where Linux does not say so, no."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text(encoding="utf-8") if info.exists() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags


def choose_cases(wanted: str | None) -> list[Case]:
    """Those whose name contains one of the parts, split by semicolons; None: all.

    Raises:
        ValueError: no case has such a name.
    """
    parts = [part.strip() for part in (wanted or "").split(";") if part.strip()]
    cases = [case for case in CASES if not parts or any(part in case.name for part in parts)]
    if not cases:
        names = "\n  ".join(case.name for case in CASES)
        raise ValueError(f"--cases {wanted!r} fits none of\n  {names}")
    return [case for case in cases if case.dtype == "float32" or has_fast_bfloat16()]


def show(row: dict[str, Any]) -> None:
    """Prints one row."""
    working = row["peak_gib"] - row["libraries_gib"] - row["state_gib"]
    text = f"{row['case']:42} peak {row['peak_gib']:.2f} GiB ({working:.2f} of it working memory)"
    if "cpu_s_min" in row:
        text += (
            f"  CPU s {row['cpu_s_min']:.2f} min {row['cpu_s_median']:.2f} median"
            f"  wall {row['wall_s_median']:.2f}"
            f"  floor {row['floor_s']:.2f} x {row['ratio_to_floor']:.3f}"
            f"  (needed {row['floor_needed_s']:.2f} x {row['ratio_to_needed_floor']:.3f})"
        )
    if "peer" in row:
        text += f"  peer {row['peer_cpu_s_min']:.3f} min, {row['peer_peak_gib']:.2f} GiB"
    print(text, flush=True)  # noqa: T201 (a script)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="where to write one JSON line per case")
    parser.add_argument("--cases", help="parts of case names, split by semicolons")
    parser.add_argument("--repeats", type=int, default=7, help="rounds that are counted")
    parser.add_argument("--peer", help="MODULE:FUNCTION that makes another step to time in turn")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.child:
        print(json.dumps(run_child(json.loads(settings.child))))  # noqa: T201 (for the parent)
        return
    try:
        cases = choose_cases(settings.cases)
    except ValueError as error:
        parser.error(str(error))
    sizes = cases[0]
    print(  # noqa: T201 (a script)
        f"{sizes.batch} x {sizes.seq} tokens, hidden {sizes.hidden}, {sizes.heads} heads of "
        f"{sizes.head_dim}, {sizes.kv_heads} key/value heads, MLP {sizes.intermediate}; "
        f"torch {torch.__version__}, {settings.repeats} repeats"
    )
    rows = []
    for case in cases:
        rows.append(run_case(case, settings.repeats, settings.peer))
        show(rows[-1])
    if settings.json:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        settings.json.write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
