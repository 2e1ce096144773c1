"""The training benchmark: its floor is the step's own products, its rows hold what they should."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from draftsmith.models import lean_norms

SCRIPT = Path(__file__).resolve().parent.parent / "bench" / "train_step.py"
TINY: dict[str, Any] = {
    "name": "tiny", "steps": 2, "vocab": 48, "draft_vocab": 48, "batch": 2, "seq": 12, "hidden": 16,
    "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 24,
}  # fmt: skip
NUMBERS = (
    "cpu_s_min", "cpu_s_median", "wall_s_median", "floor_s", "floor_needed_s", "ratio_to_floor",
)  # fmt: skip


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("draftsmith_bench_train_step", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Its dataclasses look themselves up there.
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def planned(bench: ModuleType, case: Any) -> tuple[Any, Any, Any, Any]:
    """Head, batch, draft model and slots of a case."""
    head, batch = bench.make_head(case), bench.make_batch(case)
    draft = bench.make_draft(case, head)
    return head, batch, draft, bench.make_plan(case, draft, batch)


def volume(left: Any, right: Any) -> int:
    """Multiplications of [rows, inputs] x [inputs, outputs], by their shapes."""
    return left[0] * left[1] * right[1]


def matrix_flops(step: Callable[[], None]) -> int:
    """Of all products of two matrices; those of an attention are batched ones."""
    in_place = {torch.ops.aten.addmm_: lambda _total, left, right, **_: 2 * volume(left, right)}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        step()
    counts = counter.get_flop_counts()["Global"]
    return sum(count for op, count in counts.items() if str(op).startswith(("aten.mm", "aten.add")))


@pytest.fixture
def plain_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms as elementwise work: their products of a vector and a matrix are none of the floor."""
    monkeypatch.setattr(lean_norms, "_norm_backward", slow_norm_backward)


@pytest.mark.usefixtures("plain_norms")
@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_the_floor_of_blocks_multiplies_what_their_step_multiplies(
    bench: ModuleType, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = bench.Case(**TINY | {"method": method, "layers": 2, "anchors": 9, "block": 4, "rank": 5})
    head, batch, draft, plan = planned(bench, case)
    monkeypatch.setattr(draft, "choose_anchors", lambda _batch: plan.anchors)
    found = matrix_flops(bench.make_step(case, draft, head, batch))
    expected = sum(product.flops for product in bench.products_of(case, plan)["linear"])
    # The floor multiplies all slots in the first layer, the draft all masks as one row.
    width, kv_width = case.heads * case.head_dim, case.kv_heads * case.head_dim
    repeated = 9 * case.block - (9 + 1)
    expected -= 3 * 2 * repeated * case.hidden * (width + 2 * kv_width)
    assert found == expected


def slow_norm_backward(
    gradient: Tensor, states: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """`lean_norms._norm_backward` without products of matrices."""
    d_weight = (gradient * states * scale).sum(0)
    projection = (gradient * states * weight).sum(-1, keepdim=True)
    share = projection * scale**3 / states.shape[-1]
    return gradient * weight * scale - states * share, d_weight


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_the_attention_of_blocks_counts_what_a_slot_sees(bench: ModuleType, method: str) -> None:
    case = bench.Case(**TINY | {"method": method, "layers": 2, "anchors": 9, "block": 4})
    *_, plan = planned(bench, case)
    products = bench.products_of(case, plan)
    per_score = 2 * 2 * 3 * case.head_dim * case.heads * case.block * case.layers
    seen = int(plan.positions.sum()) + 9 * case.block
    assert sum(product.flops for product in products["needed"]) == per_score * seen
    plain = sum(product.flops for product in products["plain"])
    assert plain > 2 * per_score * seen


@pytest.mark.usefixtures("plain_norms")
@pytest.mark.parametrize("supervised", [1.0, 0.5])
@pytest.mark.parametrize(
    ("method", "steps"), [("eagle3", 1), ("eagle3", 3), ("eagle1", 1), ("eagle1", 2)]
)
def test_the_floor_multiplies_what_the_step_multiplies(
    bench: ModuleType, method: str, steps: int, supervised: float
) -> None:
    case = bench.Case(**TINY | {"method": method, "steps": steps, "supervised": supervised})
    head, batch, draft, plan = planned(bench, case)
    found = matrix_flops(bench.make_step(case, draft, head, batch))
    expected = sum(product.flops for product in bench.products_of(case, plan)["linear"])
    if method == "eagle3":
        # The floor multiplies the tokens at every step, the draft model once per text.
        width, kv_width = case.heads * case.head_dim, 2 * case.kv_heads * case.head_dim
        tokens, active, pairs = case.batch * case.seq, len(plan.active), len(plan.pairs)
        repeated = steps * active * width + (pairs + (steps - 1) * active) * kv_width
        expected += 3 * 2 * case.hidden * (tokens * (width + kv_width) - repeated)
    assert found == expected


def test_the_attention_is_counted_whole_and_as_causality_leaves_it(bench: ModuleType) -> None:
    case = bench.Case(**TINY | {"steps": 1})
    *_, plan = planned(bench, case)
    queries = len(plan.active) // 2

    floor = sys.modules["step_floor"]

    def flops(piece: int | None) -> int:
        return sum(one.flops for one in floor.chain_attention(case, plan, piece=piece))

    per_score = 2 * 2 * 3 * case.head_dim * case.batch * case.heads  # Twice, thrice, per pair.
    assert flops(None) == per_score * queries * case.seq
    assert flops(1) == per_score * sum(range(case.seq - queries + 1, case.seq + 1))
    own = floor.chain_attention(bench.Case(**TINY | {"steps": 3}), plan, piece=None)[6:]
    entries = sum(product.flops for product in own)
    assert entries == 2 * 2 * 3 * case.head_dim * len(plan.active) * case.heads * (1 + 2)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bfloat16"},
        {"supervised": 0.5, "draft_vocab": 24},
        {"method": "eagle1", "checkpoint_steps": True},
        {"method": "dflash", "layers": 2, "anchors": 9, "block": 4},
        {"method": "dspark", "layers": 1, "anchors": 9, "block": 3, "rank": 5},
    ],
)
def test_a_child_measures_step_floor_and_memory(
    bench: ModuleType, settings: dict[str, Any]
) -> None:
    case = TINY | settings
    times = bench.run_child({"case": case, "measure": "times", "repeats": 1})
    assert all(times[name] > 0 for name in NUMBERS)
    assert times["ratio_to_floor"] == pytest.approx(times["cpu_s_min"] / times["floor_s"])
    memory = bench.run_child({"case": case, "measure": "memory"})
    assert memory["peak_gib"] >= memory["libraries_gib"] > memory["state_gib"] > 0


@pytest.mark.usefixtures("threads")
def test_a_peer_is_called_with_the_sizes_and_then_with_the_batch(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def make_step(sizes: dict[str, Any]) -> Any:
        seen.append(sizes)
        return lambda batch: seen.append(sorted(batch))

    monkeypatch.setitem(sys.modules, "a_peer", ModuleType("a_peer"))
    monkeypatch.setattr(sys.modules["a_peer"], "make_step", make_step, raising=False)
    order = {"case": TINY, "measure": "times", "repeats": 2, "peer": "a_peer:make_step"}
    times = bench.run_child(order)
    assert seen[0]["draft_vocab"] == 48
    assert len(seen) == 1 + 2 + 2  # Two rounds of warming up.
    assert {"input_ids", "supervised_mask", "final_hidden_states"} <= set(seen[1])
    assert times["peer_cpu_s_min"] >= 0
    memory = bench.run_child({"case": TINY, "measure": "memory", "peer": "a_peer:make_step"})
    assert sorted(memory) == ["peer_libraries_gib", "peer_peak_gib"]
    with pytest.raises(ValueError, match="expected MODULE:FUNCTION"):
        bench.run_child(order | {"peer": "a_peer.make_step"})


def test_cases_are_chosen_by_parts_of_their_names(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [case.name for case in bench.CASES]
    assert len(set(names)) == len(names)
    chosen = bench.choose_cases("half; eagle1")
    assert [case.name for case in chosen] == [n for n in names if "half" in n or "eagle1" in n]
    with pytest.raises(ValueError, match="fits none of"):
        bench.choose_cases("medusa")
    for supported in (False, True):
        monkeypatch.setattr(bench, "has_fast_bfloat16", lambda supported=supported: supported)
        assert any(case.dtype == "bfloat16" for case in bench.choose_cases(None)) == supported


@pytest.mark.slow
def test_the_script_writes_one_line_per_case(tmp_path: Path) -> None:
    (tmp_path / "idle_peer.py").write_text(
        "def make_step(sizes):\n    return lambda batch: sum(range(sizes['seq'] * 1000))\n",
        encoding="utf-8",
    )
    file = tmp_path / "rows.json"
    command = [
        sys.executable, str(SCRIPT), "--cases", "eagle1, all;memory: 3 steps", "--repeats", "1",
        "--json", str(file), "--peer", "idle_peer:make_step",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run(command, check=True, env=environment)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [row["method"] for row in rows] == ["eagle1", "eagle3"]
    timed, memory = rows
    assert all(timed[name] > 0 for name in (*NUMBERS, "peak_gib", "peer_cpu_s_min", "tokens"))
    assert timed["threads"] == 1
    assert timed["peer_peak_gib"] < timed["peak_gib"]
    assert memory["peak_gib"] > 0
    assert "cpu_s_min" not in memory
