"""The loop: normalisation, rows, validation, features, records; with a draft unknown to it."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent))

import train_support as support
from linear_draft import LinearDraft

from draftsmith.data.cache import HiddenStateCache
from draftsmith.data.prepare import load_prepared
from draftsmith.models.load import load_draft
from draftsmith.models.protocols import TrainBatch, TrainOutput
from draftsmith.train.batch_plan import BatchPlan, hash_prompt, hold_out
from draftsmith.train.config import ScheduleConfig
from draftsmith.train.features import CachedFeatures, LiveFeatures, read_ahead
from draftsmith.train.loop import count_steps, planned_windows
from draftsmith.train.schedules import share
from draftsmith.train.sums import Sums, accepted_length, as_metrics, conditional


@pytest.fixture(scope="module")
def inputs(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> support.Inputs:
    return support.make_inputs(tmp_path_factory.mktemp("inputs"), tiny)


# --- the whole loop -------------------------------------------------------------------------------


def test_training_lowers_the_loss_and_leaves_a_complete_run_folder(
    inputs: support.Inputs, tmp_path: Path
) -> None:
    settings = support.compose(inputs, "train.epochs=6", "train.eval_every=20")
    rows = support.run_in_process(settings, tmp_path)
    found = support.losses(rows)
    # A random target is hard to predict: what can be learnt from 38 rows is a few per cent.
    assert sum(found[-8:]) < 0.97 * sum(found[:8])
    lengths = [row["simulated_accepted_length_greedy"] for row in rows if "loss" in row]
    assert sum(lengths[-8:]) > sum(lengths[:8]) + 0.5
    for name in ("config.yaml", "versions.json", "metrics.jsonl", "draft/config.json"):
        assert (tmp_path / name).is_file()
    versions = json.loads((tmp_path / "versions.json").read_text())
    assert torch.__version__.startswith(versions["packages"]["torch"].split("+")[0])
    validations = [row for row in rows if "validation_loss" in row]
    assert len(validations) >= 3
    last = [row for row in rows if "loss" in row][-1]
    assert last["tokens"] == sum_of_tokens(inputs) * 6
    assert len(last["acceptance_greedy"]) == 2
    draft = LinearDraft.from_pretrained(tmp_path / "draft")
    assert draft.config.target_fingerprint["weights"]
    assert draft.config.eos_token_id == [3]
    assert draft.config.training["method"]["_target_"] == "linear_draft.LinearMethod"


def sum_of_tokens(inputs: support.Inputs) -> int:
    """Tokens of the rows that are not held out by the default share."""
    features = CachedFeatures(HiddenStateCache.open(inputs.cache), max_length=2048)
    training, _ = hold_out(features.prompt_hashes(), 0.05)
    return int(features.lengths[list(training)].sum())


def test_one_batch_and_four_accumulated_micro_batches_take_the_same_steps(
    inputs: support.Inputs, tmp_path: Path
) -> None:
    # T01: rows of very different numbers of supervised tokens, split by row or all in one.
    one = support.compose(inputs, "train.batch_tokens=100000", "train.max_steps=3")
    whole = support.run_in_process(one, tmp_path / "whole")
    split = support.compose(
        inputs, "train.micro_batch_size=1", "train.gradient_accumulation=100", "train.max_steps=3"
    )
    by_row = support.run_in_process(split, tmp_path / "by_row")
    assert support.losses(whole) == pytest.approx(support.losses(by_row), abs=1e-5)
    for key in ("grad_norm", "supervised_tokens", "simulated_accepted_length_sampled"):
        first = [row[key] for row in whole if "loss" in row]
        second = [row[key] for row in by_row if "loss" in row]
        assert first == pytest.approx(second, rel=1e-4)


def test_the_optimizer_holds_the_trainable_draft_parameters_and_nothing_else(
    inputs: support.Inputs, tmp_path: Path
) -> None:
    # T03
    support.run_in_process(support.compose(inputs, "train.max_steps=1"), tmp_path)
    state = torch.load(
        tmp_path / "checkpoints" / "step-000001" / "state" / "optimizer.bin", weights_only=True
    )
    counted = sum(entry["exp_avg"].numel() for entry in state["state"].values())
    draft = LinearDraft.from_pretrained(tmp_path / "draft")
    assert counted == sum(parameter.numel() for parameter in draft.parameters())


def test_bf16_keeps_float32_masters_and_saves_a_bfloat16_draft(
    inputs: support.Inputs, tmp_path: Path
) -> None:
    settings = support.compose(inputs, "train.precision=bf16", "train.max_steps=4")
    found = support.losses(support.run_in_process(settings, tmp_path))
    assert all(math.isfinite(loss) for loss in found)
    checkpoint = tmp_path / "checkpoints" / "step-000004"
    from safetensors.torch import load_file

    masters = load_file(checkpoint / "state" / "model.safetensors")
    saved = load_file(tmp_path / "draft" / "model.safetensors")
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["dtype"] == "bfloat16"


def test_live_features_train_with_the_numbers_of_cached_ones(
    inputs: support.Inputs, tmp_path: Path
) -> None:
    cached = support.run_in_process(
        support.compose(inputs, "train.max_steps=3"), tmp_path / "cached"
    )
    live = support.run_in_process(
        support.compose(
            inputs,
            "features=live",
            "features.cache=null",
            f"data.prepared={inputs.prepared}",
            "train.max_steps=3",
        ),
        tmp_path / "live",
    )
    assert support.losses(cached) == pytest.approx(support.losses(live), abs=1e-5)
    assert [row.get("validation_loss") for row in cached] == pytest.approx(
        [row.get("validation_loss") for row in live], abs=1e-5
    )


def test_a_gradient_that_is_not_finite_stops_the_run_before_anything_is_saved(
    inputs: support.Inputs, tmp_path: Path
) -> None:
    settings = support.compose(inputs, "train.lr=1e30", "train.max_steps=6", "train.log_every=6")
    with pytest.raises(FloatingPointError, match="not finite"):
        support.run_in_process(settings, tmp_path)
    assert not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "draft").exists()


def test_a_draft_vocabulary_is_built_from_the_counts_and_always_holds_the_end_token(
    inputs: support.Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    method = support.LINEAR | {"draft_vocab_size": 40}
    settings = support.compose(inputs, "train.max_steps=1", method=method)
    support.run_in_process(settings, tmp_path)
    draft = LinearDraft.from_pretrained(tmp_path / "draft")
    assert draft.lm_head.weight.shape[0] == 40
    assert 3 in draft.draft_to_target.tolist()
    assert "Draft vocabulary: 40 of 320 tokens" in capsys.readouterr().out


def test_rows_longer_than_max_length_are_cut_and_counted(
    inputs: support.Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = support.compose(inputs, "train.max_length=40", "train.max_steps=1")
    support.run_in_process(settings, tmp_path)
    lengths = HiddenStateCache.open(inputs.cache).lengths
    expected = int((lengths > 40).sum())
    assert f"{expected} rows are longer than train.max_length=40" in capsys.readouterr().out


def test_a_row_that_fits_into_no_micro_batch_is_refused(
    inputs: support.Inputs, tmp_path: Path
) -> None:
    settings = support.compose(inputs, "train.batch_tokens=16")
    with pytest.raises(ValueError, match=r"train\.batch_tokens=16.*train\.max_length"):
        support.run_in_process(settings, tmp_path)


def test_the_thread_count_is_put_back_after_the_run(inputs: support.Inputs, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    settings = support.compose(inputs, "train.num_threads=1", "train.max_steps=1")
    support.run_in_process(settings, tmp_path)
    assert torch.get_num_threads() == before


def test_the_choice_of_attention_is_said_in_the_log(inputs: support.Inputs, tmp_path: Path) -> None:
    """In a process of its own: a choice is logged once."""
    command = support.train_command(
        tmp_path, inputs, "method=eagle3", "method.aux_layer_ids=[0,1,2]",
        "method.draft_vocab_size=100", "train.max_steps=1", f"run_dir={tmp_path / 'run'}",
    )  # fmt: skip
    done = support.run_command(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Training-time test uses fused attention on cpu." in done.stderr


def test_eagle3_trains_and_starts_from_the_weights_of_another_run(
    inputs: support.Inputs, tmp_path: Path
) -> None:
    method = {
        "_target_": "draftsmith.models.eagle3.Eagle3Method",
        "aux_layer_ids": [0, 1, 2],
        "draft_vocab_size": 100,
        "num_steps": 2,
    }
    long = support.compose(inputs, "train.max_steps=6", "schedule=constant", method=method)
    rows = support.run_in_process(long, tmp_path / "first")
    assert len(rows[0]["acceptance_greedy"]) == 2
    assert load_draft(tmp_path / "first" / "draft").config.target_fingerprint["weights"]
    warm = support.compose(
        inputs, "train.max_steps=1", f"init_from={tmp_path / 'first' / 'draft'}", method=method
    )
    cold = support.compose(inputs, "train.max_steps=1", method=method)
    first = support.losses(support.run_in_process(warm, tmp_path / "warm"))[0]
    assert first < support.losses(support.run_in_process(cold, tmp_path / "cold"))[0] - 0.2
    other = support.compose(
        inputs, f"init_from={tmp_path / 'first' / 'draft'}", method=method | {"num_steps": 1}
    )
    support.run_in_process(other, tmp_path / "other")  # the same tensors, fewer steps: fine
    other.method = method | {"draft_vocab_size": 90}
    with pytest.raises(ValueError, match=r"another draft vocabulary \(100 tokens; .* give 90\)"):
        support.run_in_process(other, tmp_path / "misfit")


# --- loggers --------------------------------------------------------------------------------------


def test_wandb_takes_the_metrics_without_a_network(
    inputs: support.Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = support.compose(
        inputs, "train.max_steps=3", "logger=wandb", "logger.mode=offline", "logger.project=tests"
    )
    support.run_in_process(settings, tmp_path)
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = written.read_bytes()
    for name in (b"simulated_accepted_length_greedy", b"acceptance_sampled/2", b"validation_loss"):
        assert name in content
    assert (tmp_path / "wandb_id.txt").read_text() in written.name


def test_tensorboard_gets_one_curve_per_number(inputs: support.Inputs, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = support.compose(inputs, "train.max_steps=3", "logger=tensorboard")
    rows = support.run_in_process(settings, tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"loss", "acceptance_greedy/1", "acceptance_greedy/2"} <= set(events.Tags()["scalars"])
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    expected = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [value for _, value in found] == pytest.approx([value for _, value in expected])


# --- rows -----------------------------------------------------------------------------------------


def make_plan(
    lengths: list[int], *, world_size: int = 1, accumulation: int = 1, batch_tokens: int = 64
) -> BatchPlan:
    return BatchPlan(
        lengths=torch.tensor(lengths),
        row_ids=tuple(range(len(lengths))),
        batch_tokens=batch_tokens,
        max_rows=None,
        seed=3,
        world_size=world_size,
        accumulation=accumulation,
    )


LENGTHS = [5 + (row * 7) % 50 for row in range(101)]


def test_an_epoch_holds_every_row_once_and_no_batch_is_too_large() -> None:
    plan = make_plan(LENGTHS)
    batches = plan.epoch(0)
    assert sorted(row for batch in batches for row in batch) == list(range(101))
    assert all(max(LENGTHS[row] for row in batch) * len(batch) <= 64 for batch in batches)
    assert plan.epoch(0) == batches
    assert plan.epoch(1) != batches


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 4), (2, 2), (4, 1)])
def test_a_step_sees_the_same_rows_however_it_is_split(world_size: int, accumulation: int) -> None:
    plan = make_plan(LENGTHS, world_size=world_size, accumulation=accumulation)
    reference = make_plan(LENGTHS, world_size=1, accumulation=4)
    batches = plan.epoch(0)
    for step in range(plan.steps_in(len(batches))):
        seen = Counter(
            micro.rows
            for rank in range(world_size)
            for micro in plan.step_batches(batches, step, rank)
            if micro.counted
        )
        assert seen == Counter(m.rows for m in reference.step_batches(batches, step, 0))


def test_all_ranks_get_equally_many_batches_and_count_each_row_once() -> None:
    # T29: five rows, two ranks, one row per batch.
    plan = make_plan([60] * 5, world_size=2)
    batches = plan.epoch(0)
    counted: list[int] = []
    for step in range(plan.steps_in(len(batches))):
        by_rank = [plan.step_batches(batches, step, rank) for rank in range(2)]
        assert len(by_rank[0]) == len(by_rank[1])
        counted += [
            r for micros in by_rank for micro in micros if micro.counted for r in micro.rows
        ]
    assert sorted(counted) == [0, 1, 2, 3, 4]


def test_windows_that_start_later_are_the_tail_of_those_from_the_start() -> None:
    plan = make_plan(LENGTHS, accumulation=3)
    total = count_steps(plan, epochs=3, max_steps=None)
    whole = list(planned_windows(plan, rank=0, first_step=0, end_step=total))
    assert len(whole) == total
    for first in (1, total // 3, total // 2, total - 1):
        assert (
            list(planned_windows(plan, rank=0, first_step=first, end_step=total)) == whole[first:]
        )


def test_max_steps_goes_on_through_as_many_epochs_as_it_takes() -> None:
    plan = make_plan([60] * 4)
    assert count_steps(plan, epochs=1, max_steps=10) == 10
    assert len(list(planned_windows(plan, rank=0, first_step=0, end_step=10))) == 10


def test_all_answers_to_a_prompt_are_held_out_together() -> None:
    prompts = [torch.arange(n) for n in (3, 4, 5, 6, 7, 8, 9, 10)]
    answers = [torch.arange(4), torch.arange(20, 26)]
    hashes = [
        hash_prompt(
            torch.cat([prompt, answer]), torch.arange(len(prompt) + len(answer)) >= len(prompt)
        )
        for answer in answers
        for prompt in prompts
    ]
    assert len(set(hashes)) == len(prompts)
    training, held_out = hold_out(hashes, 0.25)
    assert set(training) | set(held_out) == set(range(16))
    assert {row % 8 for row in training}.isdisjoint({row % 8 for row in held_out})
    assert len(held_out) >= 4


def test_plain_text_is_held_out_by_its_whole_text() -> None:
    rows = [torch.arange(5), torch.arange(6)]
    hashes = {hash_prompt(row, torch.ones(len(row), dtype=torch.bool)) for row in rows}
    assert len(hashes) == 2


def test_holding_out_everything_is_refused() -> None:
    with pytest.raises(ValueError, match="no row to train on"):
        hold_out([b"a"], 0.5)


def test_cached_and_live_batches_are_equal_in_every_tensor(
    inputs: support.Inputs,
) -> None:
    from draftsmith.models.target import TargetModel

    cache = HiddenStateCache.open(inputs.cache)
    prepared = load_prepared(inputs.prepared)
    target = TargetModel.load(str(inputs.target), dtype="float32")
    cached = CachedFeatures(cache, max_length=50)
    live = LiveFeatures(
        prepared.dataset, cache.lengths, target, aux_layer_ids=(0, 1, 2), max_length=50
    )
    assert cached.prompt_hashes() == live.prompt_hashes()
    rows = [0, 7, 3]
    first = cached.complete(cached.read(rows))
    second = live.complete(live.read(rows))
    for name, tensor in vars(first).items():
        other: Tensor = getattr(second, name)
        assert tensor.shape == other.shape, name
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, other, atol=1e-5, rtol=1e-4)
        else:
            assert torch.equal(tensor, other), name


def test_rounded_live_states_are_those_of_a_cache_of_that_dtype(inputs: support.Inputs) -> None:
    from draftsmith.models.target import TargetModel

    target = TargetModel.load(str(inputs.target), dtype="float32")
    dataset = load_prepared(inputs.prepared).dataset
    lengths = HiddenStateCache.open(inputs.cache).lengths

    def states(dtype: torch.dtype | None) -> Tensor:
        live = LiveFeatures(
            dataset, lengths, target, aux_layer_ids=(0,), max_length=50, dtype=dtype
        )
        return live.complete(live.read([0])).final_hidden_states

    assert torch.equal(states(torch.bfloat16), states(None).bfloat16())


def test_reading_ahead_keeps_the_order_and_raises_at_the_right_place() -> None:
    def read(item: int) -> int:
        if item == 3:
            raise ValueError("row 3 is broken")
        return item * item

    reader = read_ahead(range(10), read)
    assert [next(reader), next(reader), next(reader)] == [0, 1, 4]
    with pytest.raises(ValueError, match="row 3 is broken"):
        next(reader)


def test_closing_a_reader_ends_its_thread() -> None:
    before = threading.active_count()
    reader = read_ahead(range(1000), lambda item: item)
    assert next(reader) == 0
    assert threading.active_count() == before + 1
    reader.close()
    assert threading.active_count() == before


# --- schedules ------------------------------------------------------------------------------------


def test_schedules_have_their_shapes() -> None:
    def shares(name: str, **settings: float) -> list[float]:
        schedule = ScheduleConfig(name=name, warmup_steps=2, **settings)
        return [share(schedule, step, 10) for step in range(10)]

    assert shares("constant") == [0.5, 1.0] + [1.0] * 8
    assert shares("linear") == pytest.approx([0.5, 1.0] + [1 - k / 8 for k in range(8)])
    cosine = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(8)]
    assert shares("cosine", min_share=0.1) == pytest.approx([0.5, 1.0, *cosine])
    wsd = [1.0] * 6 + [1.0, 0.75, 0.5, 0.25]
    assert shares("wsd", decay_share=0.4) == pytest.approx([0.5, *wsd[1:]])


def test_warmup_by_share_never_starts_at_zero() -> None:
    schedule = ScheduleConfig(name="cosine", warmup_share=0.1)
    assert share(schedule, 0, 1000) == pytest.approx(1 / 100)
    assert share(schedule, 99, 1000) == 1.0


# --- statistics -----------------------------------------------------------------------------------


def test_simulated_accepted_length_of_the_textbook_chain() -> None:
    # E07: .8, .6, .5 conditional gives 1 + .8 + .48 + .24.
    chains = torch.tensor(100.0, dtype=torch.float64)
    joint = torch.tensor([80.0, 48.0, 24.0], dtype=torch.float64)
    assert accepted_length(joint, chains) == pytest.approx(2.52)
    assert conditional(joint, chains) == pytest.approx([0.8, 0.6, 0.5])


def output_of(correct: float, chains: float, *, loss: float = 1.0) -> TrainOutput:
    steps = torch.tensor([correct], dtype=torch.float64)
    sums = dict.fromkeys(("correct", "acceptance", "greedy_joint", "sampled_joint"), steps)
    count = torch.tensor([chains], dtype=torch.float64)
    sums |= {"supervised": count, "in_vocabulary": count, "loss": steps, "chains": count[0]}
    return TrainOutput(torch.tensor(loss), sums)


def empty_batch() -> TrainBatch:
    mask = torch.ones(1, 4, dtype=torch.bool)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    return TrainBatch(ids, mask, mask, ids, torch.zeros(1, 4, 2), torch.zeros(1, 4, 2))


class OneProcess:
    num_processes = 1


def test_sums_are_added_before_anything_is_divided() -> None:
    # E07: 9 of 10 and 1 of 90 make 10 of 100, not the mean of 0.9 and 0.011.
    sums = Sums()
    for correct, chains in ((9.0, 10.0), (1.0, 90.0)):
        normaliser = torch.tensor(chains, dtype=torch.float64)
        sums.add(output_of(correct, chains), empty_batch(), normaliser, counted=True)
    sums.add(output_of(50.0, 50.0), empty_batch(), torch.tensor(50.0), counted=False)
    row = as_metrics(sums.reduced(OneProcess()))  # type: ignore[arg-type]
    assert row["simulated_accepted_length_greedy"] == pytest.approx(1.10)
    assert row["accuracy"] == pytest.approx([0.10])
    assert row["loss"] == pytest.approx(2.0 / 100.0)
