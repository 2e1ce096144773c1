"""draftsmith-calibrate: the fit against loops and known temperatures, the verb from end to end."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

import block_support as support

from draftsmith.conf.entry import compose_settings
from draftsmith.eval import calibrate as verb
from draftsmith.eval.calibrate_fit import (
    GRID,
    Observations,
    ObservedRound,
    few_observations,
    fit_temperatures,
    judge,
)
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.simulate import read_rounds
from draftsmith.models.dspark import DSparkConfig, DSparkMethod
from draftsmith.models.load import load_drafter
from draftsmith.models.protocols import Draft
from draftsmith.models.target import TargetModel
from draftsmith.train.checkpoint import save_draft

SCHEMA = "draftsmith.conf.schema_calibrate:CalibrateConfig"


def drawn_rounds(
    count: int, truth: Sequence[float], *, seed: int = 0, shortest: int | None = None
) -> list[ObservedRound]:
    """Rounds whose token k stays with exactly the chance sigmoid(logit / truth[k])."""
    draw = torch.Generator().manual_seed(seed)
    logits = 2.5 * torch.randn(count, len(truth), generator=draw, dtype=torch.float64) + 1.0
    chances = (logits / torch.tensor(truth, dtype=torch.float64)).sigmoid()
    stays = torch.rand(chances.shape, generator=draw, dtype=torch.float64) < chances
    accepted = stays.long().cumprod(1).sum(1).tolist()
    rounds = []
    for row, (one, kept) in enumerate(zip(logits.tolist(), accepted, strict=True)):
        length = len(truth) if shortest is None else shortest + row % (len(truth) - shortest + 1)
        rounds.append(ObservedRound(tuple(one[:length]), min(kept, length)))
    return rounds


# --- the fit --------------------------------------------------------------------------------------


def test_known_temperatures_are_found_and_calibrate_other_rounds() -> None:
    truth = [2.0, 0.5, 3.0]
    fitted = fit_temperatures(Observations(drawn_rounds(12_000, truth), 3))
    assert [math.log(a / b) for a, b in zip(fitted, truth, strict=True)] == pytest.approx(
        [0.0] * 3, abs=0.15
    )
    *positions, overall = judge(Observations(drawn_rounds(12_000, truth, seed=1), 3), fitted)
    for one in [*positions, overall]:
        assert one.after.cumulative_error is not None
        assert one.before.cumulative_error is not None
        assert one.after.cumulative_error < 0.02 < one.before.cumulative_error
        assert one.after.brier < one.before.brier
    assert [one.temperature for one in positions] == fitted


def error_in_loops(rounds: list[ObservedRound], temperatures: list[float], num_bins: int) -> float:
    """Of the product up to the last of the temperatures, from the definition."""
    step = len(temperatures) - 1
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(num_bins)]
    judged = [one for one in rounds if len(one.logits) > step]
    for one in judged:
        product = 1.0
        for logit, temperature in zip(one.logits, temperatures, strict=False):
            product /= 1.0 + math.exp(-logit / temperature)
        bins[min(int(product * num_bins), num_bins - 1)].append((product, one.accepted > step))
    return sum(
        abs(sum(said for said, _ in rows) - sum(held for _, held in rows)) for rows in bins
    ) / len(judged)


def test_the_fit_is_the_search_of_the_paper_position_by_position() -> None:
    rounds = drawn_rounds(60, [1.5, 0.7, 2.0, 1.0], shortest=2)
    assert {len(one.logits) for one in rounds} == {2, 3, 4}
    found = fit_temperatures(Observations(rounds, 4), num_bins=5)
    fixed: list[float] = []
    for temperature in found:
        tried = {t: error_in_loops(rounds, [*fixed, t], 5) for t in GRID.tolist()}
        own = error_in_loops(rounds, [*fixed, temperature], 5)
        assert own == pytest.approx(min(tried.values()), abs=1e-6)
        fixed.append(temperature)


def test_equal_errors_take_the_temperature_nearest_to_one() -> None:
    """A logit of 0 is 1/2 at any temperature."""
    rounds = [ObservedRound((0.0, 0.0), 1), ObservedRound((0.0, 0.0), 0)]
    assert fit_temperatures(Observations(rounds, 2)) == [1.0, 1.0]


def test_the_order_of_a_positions_scores_does_not_change() -> None:
    rounds = drawn_rounds(500, [2.0, 0.3, 5.0])
    found = Observations(rounds, 3)
    temperatures = fit_temperatures(found)
    assert all(abs(one - 1.0) > 0.1 for one in temperatures)
    *positions, _ = judge(found, temperatures)
    for one in positions:
        assert one.before.auc == one.after.auc
        assert one.before.auc is not None
        assert one.before.auc > 0.6
        assert one.before.error != one.after.error


def test_each_position_is_judged_where_it_was_reached() -> None:
    rounds = [
        ObservedRound((1.0, 2.0, 3.0), 2),
        ObservedRound((1.0, 2.0), 2),
        ObservedRound((1.0, 2.0, 3.0), 0),
    ]
    found = Observations(rounds, 3)
    positions = list(judge(found, [1.0] * 3))
    assert [one.num_rounds for one in positions] == [3, 3, 2, 8]
    assert [one.num_reached for one in positions] == [3, 2, 1, 6]
    assert [one.num_held for one in positions] == [2, 2, 0, 4]
    assert few_observations(found, 2) == [(3, 1)]
    # sigmoid(2) of the two that got there, both stayed.
    assert positions[1].before.error == pytest.approx(1 - 1 / (1 + math.exp(-2)))
    assert positions[1].before.auc is None
    product = 1 / (1 + math.exp(-1)) / (1 + math.exp(-2))
    assert positions[1].before.cumulative_error == pytest.approx(abs(product - 2 / 3))


def test_positions_without_enough_rounds_take_the_temperature_before() -> None:
    rounds = drawn_rounds(400, [2.0, 1.0, 3.0])
    all_fitted = fit_temperatures(Observations(rounds, 3))
    assert fit_temperatures(Observations(rounds, 3), fitted_steps=2) == [
        *all_fitted[:2],
        all_fitted[1],
    ]


# --- rounds and halves ----------------------------------------------------------------------------


def test_what_lies_behind_a_drafted_end_of_text_does_not_count() -> None:
    def draft(*tokens: int) -> Draft:
        return Draft(
            torch.tensor(tokens, dtype=torch.long),
            confidence_logits=torch.arange(float(len(tokens))),
        )

    drafts = [draft(5, 6, 7), draft(), draft(5, 3, 7), draft(5, 3, 7), draft(3, 8)]
    accepted = [2, 0, 0, 3, 2]
    rounds = [
        SimpleNamespace(proposed=len(one.tokens), accepted=count)
        for one, count in zip(drafts, accepted, strict=True)
    ]
    found = verb.observed_rounds(drafts, SimpleNamespace(rounds=rounds), [3])  # type: ignore[arg-type]
    assert [(len(one.logits), one.accepted) for one in found] == [(3, 2), (2, 0), (2, 2), (1, 1)]
    rounds[0].proposed = 2
    with pytest.raises(AssertionError, match="every drafted token is verified"):
        verb.observed_rounds(drafts, SimpleNamespace(rounds=rounds), [3])  # type: ignore[arg-type]


def test_every_category_is_in_both_halves() -> None:
    prompts = [Prompt(f"{i}", "ab"[i % 3 == 0], ("hi",)) for i in range(7)]
    fit, report = verb.split_prompts(prompts)
    assert (fit, report) == ([0, 1, 4, 6], [2, 3, 5])
    with pytest.raises(ValueError, match=r"2 prompt\(s\) in 2 categories cannot be halved"):
        verb.split_prompts(prompts[:2])


def test_too_few_observations_are_told_by_position_and_half() -> None:
    config = compose_settings("calibrate", SCHEMA, ["target.name_or_path=t", "draft=d", "output=o"])
    rounds = [ObservedRound((0.0, 0.0, 0.0), accepted) for accepted in [0] * 30 + [1] * 5 + [2]]
    enough = Observations([ObservedRound((0.0, 0.0, 0.0), 3)] * 30, 3)
    halves = [enough, Observations(rounds, 3)]
    assert verb.enough_observations(halves, config) == 1, "decoding for long is not lost"
    config.short_positions = "error"
    wanted = (
        r"\(report half, 36 rounds: position 2 was reached 6 times, position 3 was reached 1 "
        r"times\); expected at least 20"
    )
    with pytest.raises(ValueError, match=wanted):
        verb.enough_observations(halves, config)
    config.short_positions = "previous"
    assert verb.enough_observations(halves, config) == 1
    assert verb.enough_observations([enough, enough], config) == 3
    config.min_observations = 37
    with pytest.raises(ValueError, match="position 1 was reached 36 times"):
        verb.enough_observations(halves, config)


# --- the checkpoint -------------------------------------------------------------------------------


def test_wrong_temperatures_are_refused(tiny_target: Callable[..., Any]) -> None:
    draft = support.make_draft(DSparkMethod, tiny_target("llama"), block_size=3, markov_rank=4)
    for wrong, text in (
        ([1.0, 1.0], "expected 3 numbers above 0, one per token"),
        ([1.0, 0.0, 1.0], "expected 3 numbers above 0"),
        ([1.0, float("nan"), 1.0], "finite"),
    ):
        settings = draft.config.to_dict() | {"confidence_temperatures": wrong}
        with pytest.raises(ValueError, match=text):
            DSparkConfig(**settings).check_block()
    settings = draft.config.to_dict() | {"confidence_temperatures": [1.0] * 3}
    with pytest.raises(ValueError, match="no confidence head"):
        DSparkConfig(**(settings | {"confidence_head": False})).check_block()


def markov_target(tiny: Any, folder: Path) -> TargetModel:
    """A target whose next token depends on the last one alone."""
    model = tiny.make_tiny_model("llama", seed=3, vocab_size=tiny.PADDED_VOCAB_SIZE)
    for layer in model.get_decoder().layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.save_pretrained(folder)
    tiny.make_tiny_tokenizer().save_pretrained(folder)
    return TargetModel.load(str(folder), dtype="float32")


def near_copy(target: TargetModel, folder: Path, *, noise: float = 0.3) -> Path:
    """A saved draft whose sequential head alone says nearly what the target says."""
    draft = support.make_draft(
        DSparkMethod, target, num_hidden_layers=1, block_size=3, markov_rank=32
    )
    draft.norm.weight.data.zero_()
    decoder = target.model.get_decoder()
    states = decoder.norm(decoder.embed_tokens.weight).detach()
    draft.markov_head.markov_w1.weight.data.copy_(states + noise * torch.randn_like(states))
    draft.markov_head.markov_w2.weight.data.copy_(target.head().weight)
    draft.confidence_head.proj.weight.data.normal_(std=0.5)
    draft.config.target_fingerprint = asdict(target.fingerprint)
    save_draft(draft, draft.state_dict(), folder, dtype=torch.float32)
    return folder


@pytest.fixture(scope="module")
def made(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A target, a draft for it, and prompts."""
    folder = tmp_path_factory.mktemp("calibrate")
    target = markov_target(tiny, folder / "target")
    near_copy(target, folder / "run" / "draft")
    words = ("the cat", "a dog sat", "count one two", "user asks", "the door", "mat")
    rows = [
        {"id": f"{kind}{number}", "category": kind, "turns": [f"{kind} {word}", "and then"]}
        for kind in ("chat", "code")
        for number, word in enumerate(words)
    ]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return SimpleNamespace(folder=folder, target=target, prompts=prompts)


def settings_for(made: Any, *more: str) -> Any:
    return compose_settings(
        "calibrate",
        SCHEMA,
        [
            f"target.name_or_path={made.folder / 'target'}",
            "target.dtype=float32",
            f"draft={made.folder / 'run'}",
            f"output={made.folder / 'out'}",
            f"prompts={made.prompts}",
            "temperature=1",
            "max_new_tokens=24",
            "min_observations=5",
            *more,
        ],
    )


def test_the_verb_stores_what_it_found_and_starts_from_raw_logits_again(made: Any) -> None:
    file = made.folder / "run" / "draft" / "config.json"
    before = json.loads(file.read_text())
    verb.run(settings_for(made))
    after = json.loads(file.read_text())
    report = json.loads((made.folder / "out" / "calibration.json").read_text())
    temperatures = after["confidence_temperatures"]
    assert len(temperatures) == 3
    assert temperatures == report["temperatures"]
    assert {**after, "confidence_temperatures": None} == before
    assert not list(file.parent.glob("*.tmp"))
    assert report["previous"] is None
    assert report["stored_in"] == str(file)
    assert (report["num_fit_prompts"], report["num_report_prompts"]) == (6, 6)
    assert report["fit_prompt_ids"][:3] == ["chat0", "chat2", "chat4"]
    assert [one["position"] for one in report["positions"]] == [1, 2, 3]
    overall = report["overall"]
    assert 0 < overall["num_held"] < overall["num_reached"] < overall["num_rounds"]
    for one in report["positions"]:
        assert one["before"]["auc"] == one["after"]["auc"]
        assert one["after"]["cumulative_error"] < one["before"]["cumulative_error"]
    # Once more: the same raw logits, so the same temperatures.
    verb.run(settings_for(made))
    again = json.loads((made.folder / "out" / "calibration.json").read_text())
    assert again["previous"] == temperatures
    assert again["temperatures"] == temperatures
    assert again["positions"] == report["positions"]
    rounds = read_rounds(made.folder / "out" / "rounds.jsonl")
    assert len(rounds) == report["num_report_rounds"]
    page = (made.folder / "out" / "calibration.html").read_text()
    assert page.count("<figure") == 2 + 2 * 4
    assert "<script" not in page
    text = (made.folder / "out" / "calibration.txt").read_text()
    assert "stored as confidence_temperatures" in text
    assert "greedy" not in text
    # And back.
    verb.store_temperatures(file.parent, None)
    assert json.loads(file.read_text()) == before


def test_a_calibrated_draft_says_the_calibrated_confidences(made: Any) -> None:
    """And drafts the same tokens, batched or alone, and keeps the raw logits."""
    folder = made.folder / "run" / "draft"
    batch = support.make_batch(made.target, (20,))
    (context,) = support.contexts_of(batch, 0, [9])
    found = []
    for temperatures in (None, [2.0, 0.5, 4.0]):
        verb.store_temperatures(folder, temperatures)
        draft = load_drafter(folder, made.target)
        assert draft.config.confidence_temperatures == temperatures
        found.append(support.propose_once(draft, context, draft.start(30), 3))
        short = support.propose_once(draft, context, draft.start(30), 2)
        torch.testing.assert_close(short.confidences, found[-1].confidences[:2])
    verb.store_temperatures(folder, None)
    raw, calibrated = found
    assert torch.equal(raw.tokens, calibrated.tokens)
    assert torch.equal(raw.confidence_logits, calibrated.confidence_logits)
    torch.testing.assert_close(raw.confidences, raw.confidence_logits.sigmoid())
    wanted = (raw.confidence_logits / torch.tensor([2.0, 0.5, 4.0])).sigmoid()
    torch.testing.assert_close(calibrated.confidences, wanted)


def test_without_storing_the_draft_is_left_alone(made: Any) -> None:
    file = made.folder / "run" / "draft" / "config.json"
    before = file.read_bytes()
    verb.run(settings_for(made, "store=false", "limit_per_category=2", "min_observations=1"))
    assert file.read_bytes() == before
    assert "not stored" in (made.folder / "out" / "calibration.txt").read_text()


def test_a_draft_of_another_target_is_refused(made: Any, tiny_llama_folder: Path) -> None:
    config = settings_for(made)
    other = replace(config.target, name_or_path=str(tiny_llama_folder))
    with pytest.raises(ValueError, match="trained for another target"):
        verb.run(replace(config, target=other))


def test_a_draft_without_a_confidence_head_is_refused(made: Any, tmp_path: Path) -> None:
    draft = support.make_draft(DSparkMethod, made.target, confidence_head=False)
    save_draft(draft, draft.state_dict(), tmp_path / "draft", dtype=torch.float32)
    with pytest.raises(ValueError, match="is a DSparkDraft without a confidence head"):
        verb.run(settings_for(made, f"draft={tmp_path / 'draft'}"))


def test_a_training_checkpoint_is_not_written_into(made: Any, tmp_path: Path) -> None:
    (tmp_path / "COMPLETE").write_text("{}")
    near_copy(made.target, tmp_path / "draft")
    with pytest.raises(ValueError, match="is part of a training checkpoint"):
        verb.run(settings_for(made, f"draft={tmp_path / 'draft'}"))
