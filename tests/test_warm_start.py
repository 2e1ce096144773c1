"""Starting from another draft: ours or another program's, with the same or a new vocabulary."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.models.load import load_draft
from draftsmith.models.vocabulary_map import draft_to_target

sys.path.append(str(Path(__file__).parent))
import train_support as support

METHOD = {
    "_target_": "draftsmith.models.eagle3.Eagle3Method",
    "aux_layer_ids": [0, 1, 2],
    "draft_vocab_size": 40,
    "num_steps": 2,
}
STEP = ("train.max_steps=1", "schedule=constant", "train.lr=1e-9", "schedule.warmup_steps=0")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> support.Inputs:
    return support.make_inputs(tmp_path_factory.mktemp("inputs"), tiny)


@pytest.fixture(scope="module")
def finished(inputs: support.Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps over forty tokens."""
    run_dir = tmp_path_factory.mktemp("run") / "first"
    settings = support.compose(inputs, "train.max_steps=6", "schedule=constant", method=METHOD)
    support.run_in_process(settings, run_dir)
    return run_dir


def start(inputs: support.Inputs, run_dir: Path, init_from: Path, *more: str, **method: Any) -> Any:
    """The draft after one step that changes nothing (lr 1e-9)."""
    settings = support.compose(
        inputs, *STEP, f"init_from={init_from}", *more, method=METHOD | method
    )
    support.run_in_process(settings, run_dir)
    return load_draft(run_dir / "draft")


def rows_by_token(draft: Any) -> dict[int, Tensor]:
    ids = draft_to_target(draft)
    assert ids is not None
    return dict(zip(ids.tolist(), draft.lm_head.weight, strict=True))


def test_rebuilding_the_vocabulary_moves_the_heads_rows_with_their_tokens(
    inputs: support.Inputs, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = load_draft(finished / "draft")
    with pytest.raises(ValueError, match=r"another draft vocabulary .*init_vocabulary=rebuild"):
        start(inputs, tmp_path / "refused", finished, draft_vocab_size=60)
    capsys.readouterr()
    after = start(
        inputs, tmp_path / "rebuilt", finished, "init_vocabulary=rebuild", draft_vocab_size=60
    )
    assert after.config.draft_vocab_size == 60
    assert "40 of its 60 tokens are known to the checkpoint" in capsys.readouterr().out
    old, new = rows_by_token(before), rows_by_token(after)
    assert set(old) < set(new)
    for token, row in old.items():
        torch.testing.assert_close(new[token], row, rtol=0, atol=1e-6)
    torch.testing.assert_close(after.fc.weight, before.fc.weight, rtol=0, atol=1e-6)
    smaller = start(
        inputs, tmp_path / "smaller", finished, "init_vocabulary=rebuild", draft_vocab_size=20
    )
    for token, row in rows_by_token(smaller).items():
        torch.testing.assert_close(row, old[token], rtol=0, atol=1e-6)
    whole = start(
        inputs, tmp_path / "whole", finished, "init_vocabulary=rebuild", draft_vocab_size=None
    )
    for token, row in old.items():
        torch.testing.assert_close(whole.lm_head.weight[token], row, rtol=0, atol=1e-6)


def test_keeping_the_vocabulary_takes_the_checkpoints(
    inputs: support.Inputs, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = start(inputs, tmp_path / "kept", finished, "init_vocabulary=keep", draft_vocab_size=60)
    before = load_draft(finished / "draft")
    assert torch.equal(kept.d2t, before.d2t)
    assert torch.equal(kept.t2d, before.t2d)
    assert "Draft vocabulary: 40 of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "value"), [("norm_output", True), ("num_hidden_layers", 2), ("qk_norm", True)]
)
def test_another_layout_is_refused_even_where_the_shapes_agree(
    inputs: support.Inputs, finished: Path, tmp_path: Path, setting: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=rf"was trained with {setting}=.*something else"):
        start(inputs, tmp_path / "run", finished, **{setting: value})


@pytest.mark.parametrize("format", ["vllm", "sglang"])
def test_another_programs_checkpoint_starts_a_run(
    inputs: support.Inputs, finished: Path, tmp_path: Path, format: str
) -> None:
    from draftsmith.conf.schema import ExportConfig, TargetConfig
    from draftsmith.models.export import run

    run(
        ExportConfig(
            draft=str(finished),
            format=format,
            output=str(tmp_path / "foreign"),
            target=TargetConfig(name_or_path=str(inputs.target)),
        )
    )
    before, after = (
        load_draft(finished / "draft"),
        start(inputs, tmp_path / "run", tmp_path / "foreign"),
    )
    for name, weight in before.named_parameters():
        torch.testing.assert_close(after.get_parameter(name), weight, rtol=0, atol=1e-6)
    assert torch.equal(after.d2t, before.d2t)


def test_layers_that_a_checkpoint_does_not_name_are_said_to_be_this_runs(
    inputs: support.Inputs, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from draftsmith.conf.schema import ExportConfig, TargetConfig
    from draftsmith.models.export import run

    folder = tmp_path / "foreign"
    target = TargetConfig(name_or_path=str(inputs.target))
    run(ExportConfig(draft=str(finished), format="vllm", output=str(folder), target=target))
    config = json.loads((folder / "config.json").read_text())
    for node in (config, config.get("eagle_config", {})):
        node.pop("eagle_aux_hidden_state_layer_ids", None)
    (folder / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    start(inputs, tmp_path / "run", folder)
    said = capsys.readouterr().out
    assert "does not say which target layers it reads" in said
    assert "[0, 1, 2] (0-based outputs)" in said


def test_a_vocabulary_choice_without_a_checkpoint_is_refused(inputs: support.Inputs) -> None:
    with pytest.raises(ValueError, match="has no effect without init_from"):
        support.compose(inputs, "init_vocabulary=keep", method=METHOD)


def test_a_run_that_started_from_a_draft_goes_on_from_its_own_checkpoint(
    inputs: support.Inputs, finished: Path, tmp_path: Path
) -> None:
    """The same command line plus resume=auto, with the vocabulary that was kept."""
    words = ["schedule=constant", "train.save_every=1", f"init_from={finished}"]
    words += ["init_vocabulary=keep", f"run_dir={tmp_path / 'run'}", "resume=auto"]
    method = METHOD | {"draft_vocab_size": 60}
    whole = support.compose(inputs, *words, "train.max_steps=4", method=method)
    expected = support.losses(support.run_in_process(whole, tmp_path / "whole"))
    part = support.compose(inputs, *words, "train.max_steps=2", method=method)
    support.run_in_process(part, tmp_path / "run")
    rows = support.run_in_process(whole, tmp_path / "run")
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert [losses[step] for step in (1, 2, 3, 4)] == pytest.approx(expected, rel=1e-6)
    before, after = load_draft(finished / "draft"), load_draft(tmp_path / "run" / "draft")
    assert torch.equal(after.d2t, before.d2t)


def test_a_draft_vocabulary_that_misses_the_targets_choices_is_warned_about(
    inputs: support.Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows were not written by the random target: nearly all of its choices lie outside."""
    settings = support.compose(inputs, *STEP, method=METHOD | {"draft_vocab_size": 14})
    row = support.run_in_process(settings, tmp_path / "run")[0]
    assert row["in_draft_vocabulary"] < 0.5
    assert "of the target's own choices are in the draft vocabulary" in capsys.readouterr().err


def test_one_method_does_not_start_from_another(
    inputs: support.Inputs, finished: Path, tmp_path: Path
) -> None:
    settings = support.compose(
        inputs,
        *STEP,
        f"init_from={finished}",
        method={"_target_": "draftsmith.models.eagle.EagleMethod"},
    )
    with pytest.raises(ValueError, match=r"model_type='draftsmith_eagle3'"):
        support.run_in_process(settings, tmp_path / "run")
