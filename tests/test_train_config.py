"""Training settings: what is refused before a weight is loaded, and how settings travel."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

sys.path.append(str(Path(__file__).parent))

import train_support as support

from draftsmith.conf.entry import compose_settings
from draftsmith.train.config import (
    TrainConfig,
    build_method,
    changed_settings,
    method_name,
    read_config,
    write_config,
)
from draftsmith.train.preflight import check_before_start


@pytest.fixture(scope="module")
def inputs(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> support.Inputs:
    return support.make_inputs(tmp_path_factory.mktemp("inputs"), tiny, rows=12)


def compose(*overrides: str) -> TrainConfig:
    return compose_settings(
        "train",
        support.SCHEMA,
        ["target.name_or_path=somewhere", "features.cache=cache", *overrides],
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.precision=fp16"], r"train\.precision is 'fp16'; choose one of bf16, fp32"),
        (["train.lr=-1"], r"train\.lr is -1\.0; it must be above 0"),
        (["train.epochs=0"], r"train\.epochs is 0; it must be at least 1"),
        (["train.keep_last=0"], r"train\.keep_last"),
        (["schedule.name=cosin"], r"choose one of constant, linear, cosine, wsd"),
        (["schedule.min_share=2"], r"schedule\.min_share is 2\.0"),
        (["data.validation_share=1.5"], r"data\.validation_share is 1\.5"),
        (["optimizer.beta2=1"], r"optimizer\.beta2"),
        (["launch.num_processes=2"], r"launch=single runs one.*launch=ddp"),
        (["launch.offload_optimizer=true"], r"set launch=zero2"),
        (["logger=wandb", "logger.mode=off"], r"online, offline"),
        (["features.cache=null"], r"features\.cache=FOLDER"),
        (["features=live"], r"data\.prepared=FOLDER"),
        (["features.dtype=float32"], r"set features=live"),
        (["resume=auto"], r"run_dir is null"),
        (["resume=runs/a", "init_from=runs/b"], r"only one of them"),
        (["train.eval_every=5", "data.validation_share=0"], r"nothing is held out"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_a_way_out(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compose(*overrides)


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("train.learning_rte=1e-3", "train.lr"),
        ("+train.lrr=1", "train.lr"),
        ("train.gradient_acumulation=2", "train.gradient_accumulation"),
        ("features.cahe=x", "features.cache"),
    ],
)
def test_a_misspelt_key_is_refused_with_a_suggestion(override: str, suggestion: str) -> None:
    # T28
    with pytest.raises(ValueError, match=suggestion.replace(".", r"\.")):
        compose(override)


def test_lr_is_where_sweeps_expect_it() -> None:
    assert compose("train.lr=3e-4").train.lr == 3e-4


def test_a_quoted_path_is_taken_literally() -> None:
    # T26
    settings = compose('data.prepared="dir/a=b,c {1}.jsonl"')
    assert settings.data.prepared == "dir/a=b,c {1}.jsonl"


def test_settings_come_back_from_the_file_as_they_were_written(tmp_path: Path) -> None:
    settings = compose("method.num_steps=3", "train.max_steps=7", "target.revision=main")
    write_config(settings, tmp_path)
    assert read_config(tmp_path) == settings
    with pytest.raises(FileExistsError):
        write_config(settings, tmp_path)


def test_a_hand_edited_file_is_checked_like_a_command_line(tmp_path: Path) -> None:
    write_config(compose(), tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(path.read_text().replace("  epochs: 1", "  epoch: 1"))
    with pytest.raises(ValueError, match=r"train\.epoch is not a setting.*train\.epochs"):
        read_config(tmp_path)
    path.write_text(path.read_text().replace("  epoch: 1", "  epochs: many"))
    with pytest.raises(ValueError, match="many"):
        read_config(tmp_path)


def test_a_folder_without_a_config_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a run folder"):
        read_config(tmp_path)


def test_changes_are_listed_by_key() -> None:
    old, new = compose("train.lr=1e-3"), compose("train.lr=2e-3", "run_dir=x")
    assert changed_settings(old, new) == {"train.lr": (1e-3, 2e-3)}


def test_method_settings_are_checked_by_the_methods_own_class() -> None:
    with pytest.raises(ValueError, match=r"method\.num_stpes.*Did you mean num_steps"):
        build_method({"_target_": "draftsmith.models.eagle3.Eagle3Method", "num_stpes": 3})
    with pytest.raises(ValueError, match=r"method\.num_steps is 'two'"):
        build_method({"_target_": "draftsmith.models.eagle3.Eagle3Method", "num_steps": "two"})
    with pytest.raises(ValueError, match=r"Did you mean Eagle3Method"):
        build_method({"_target_": "draftsmith.models.eagle3.Eagle3Metod"})
    with pytest.raises(ValueError, match=r"no module 'draftsmith\.models\.eagle33'"):
        build_method({"_target_": "draftsmith.models.eagle33.Eagle3Method"})
    with pytest.raises(ValueError, match="has no _target_"):
        build_method({"num_steps": 3})


def test_a_method_preset_builds_the_method_it_names() -> None:
    settings = compose("method.num_steps=3", "method.aux_layer_ids=[1,2]")
    method = build_method(settings.method)
    assert (method.num_steps, method.aux_layer_ids) == (3, [1, 2])  # type: ignore[attr-defined]
    assert method_name(settings.method) == "eagle3"


def test_composing_and_help_import_no_torch() -> None:
    script = (
        "import sys; from draftsmith.train.__main__ import main; import draftsmith.train.config; "
        "from draftsmith.conf.entry import compose_settings; "
        f"compose_settings('train', {support.SCHEMA!r}, ['recipe=eagle3_quickstart']); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# --- before a weight is loaded --------------------------------------------------------------------


def test_the_checks_know_target_layers_and_end_tokens_without_weights(
    inputs: support.Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    def no_weights(*_: object, **__: object) -> None:
        raise AssertionError("a weight was loaded")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", no_weights)
    found = check_before_start(support.compose(inputs))
    assert found.aux_layer_ids == (0, 1, 2)
    assert found.eos_token_ids == (3,)
    assert (found.vocab_size, found.tokenizer_size) == (320, 312)


def test_a_cache_of_another_target_is_refused(
    inputs: support.Inputs, tiny: ModuleType, tmp_path: Path
) -> None:
    other = tiny.save_tiny_target(tmp_path / "other", "llama", seed=1)
    settings = support.compose(inputs, f"target.name_or_path={other}")
    with pytest.raises(ValueError, match="made with another target"):
        check_before_start(settings)


def test_layers_that_the_cache_lacks_are_refused(inputs: support.Inputs) -> None:
    settings = support.compose(inputs, method=support.LINEAR | {"aux_layer_ids": [-1, 1]})
    with pytest.raises(ValueError, match="has no layer -1"):
        check_before_start(settings)


def test_the_last_layer_is_refused(inputs: support.Inputs) -> None:
    settings = support.compose(inputs, method=support.LINEAR | {"aux_layer_ids": [1, 3]})
    with pytest.raises(ValueError, match="the last layer"):
        check_before_start(settings)


def test_a_draft_vocabulary_larger_than_the_targets_is_refused(inputs: support.Inputs) -> None:
    settings = support.compose(inputs, method=support.LINEAR | {"draft_vocab_size": 321})
    with pytest.raises(ValueError, match="320"):
        check_before_start(settings)


def test_an_unknown_objective_is_refused(inputs: support.Inputs) -> None:
    settings = support.compose(inputs, method=support.LINEAR | {"objective": {"name": "klx"}})
    with pytest.raises(ValueError, match="kl"):
        check_before_start(settings)


def test_a_missing_cache_is_refused_before_the_target_is_looked_at(
    inputs: support.Inputs, tmp_path: Path
) -> None:
    settings = support.compose(
        inputs, f"features.cache={tmp_path}", "target.name_or_path=/nowhere/at/all"
    )
    with pytest.raises(ValueError, match="is not a cache"):
        check_before_start(settings)


def test_prepared_data_of_another_template_is_refused(
    inputs: support.Inputs, tiny: ModuleType, tmp_path: Path
) -> None:
    other = tiny.save_tiny_target(
        tmp_path / "other", "llama", chat_template=tiny.CHAT_TEMPLATE_WITH_GENERATION_TAGS
    )
    settings = support.compose(
        inputs,
        f"target.name_or_path={other}",
        "features=live",
        f"data.prepared={inputs.prepared}",
    )
    with pytest.raises(ValueError, match="another chat template"):
        check_before_start(settings)


def test_a_cache_is_checked_against_the_prepared_data_named_with_it(
    inputs: support.Inputs, tiny: ModuleType, tmp_path: Path
) -> None:
    check_before_start(support.compose(inputs, f"data.prepared={inputs.prepared}"))
    other = support.make_inputs(tmp_path, tiny, rows=5)
    with pytest.raises(ValueError, match="was not made from the rows"):
        check_before_start(support.compose(inputs, f"data.prepared={other.prepared}"))


def test_validating_on_the_training_folder_is_refused(inputs: support.Inputs) -> None:
    with pytest.raises(ValueError, match="the folder that is trained on"):
        check_before_start(support.compose(inputs, f"data.validation={inputs.cache}"))


def test_written_settings_hold_every_default(tmp_path: Path) -> None:
    write_config(compose(), tmp_path)
    from omegaconf import OmegaConf

    assert OmegaConf.to_container(OmegaConf.load(tmp_path / "config.yaml")) == asdict(compose())
