"""Every preset in conf/ composes, validates and says what it is for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import draftsmith.conf
from draftsmith.conf.entry import compose_settings
from draftsmith.eval.settings import policy_from_config
from draftsmith.train.config import TrainConfig, build_method

SCHEMA = "draftsmith.train.config:TrainConfig"
EVALUATE = "draftsmith.conf.schema:EvaluateConfig"
CONF = Path(draftsmith.conf.__file__).parent
FILES = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))
GROUPS = sorted({path.parts[0] for path in FILES if len(path.parts) == 2} - {"hydra_quiet"})
RECIPES = sorted(path.stem for path in FILES if path.parts[0] == "recipe")
TARGET_RECIPES = [n for n in RECIPES if not n.endswith(("_quickstart", "_from_scratch"))]
BASE = ("target.name_or_path=some/target", "features.cache=cache")


def compose(*overrides: str) -> TrainConfig:
    return compose_settings("train", SCHEMA, overrides)


def test_the_walk_finds_the_groups_and_recipes_there_should_be() -> None:
    assert len(FILES) > 30
    for group in ("recipe", "method", "target", "features", "launch", "schedule", "debug", "sweep"):
        assert group in GROUPS
    assert len(RECIPES) >= 7


@pytest.mark.parametrize(
    "path", [path for path in FILES if len(path.parts) == 2 and path.parts[0] in GROUPS], ids=str
)
def test_every_preset_composes_and_validates(path: Path) -> None:
    group, name = path.parts[0], path.stem
    extra = [f"{group}={name}"]
    if group == "drafting":
        settings = compose_settings("evaluate", EVALUATE, [*BASE[:1], "output=out", *extra])
        assert policy_from_config(settings.drafting).name.startswith(name.replace("_", " "))
        return
    if group == "features" and name in ("live", "tokens"):
        extra.append("data.prepared=data")
    if group == "target" and name != "local":
        settings = compose(*extra, "features.cache=cache")
        assert settings.target.name_or_path
    elif group == "recipe":
        settings = compose(*extra)
    else:
        settings = compose(*BASE, *extra)
    build_method(settings.method)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("debug", ["tiny", "overfit"])
def test_debug_presets_win_over_every_recipe(name: str, debug: str) -> None:
    settings = compose(f"recipe={name}", f"debug={debug}")
    assert settings.train.max_steps == {"tiny": 2, "overfit": 300}[debug]


@pytest.mark.parametrize("name", RECIPES)
def test_the_command_line_wins_over_every_recipe(name: str) -> None:
    settings = compose(f"recipe={name}", "launch=zero2", "launch.num_processes=2", "train.lr=0.5")
    assert (settings.launch.name, settings.launch.num_processes) == ("zero2", 2)
    assert settings.train.lr == 0.5


@pytest.mark.parametrize("name", TARGET_RECIPES)
def test_recipes_name_their_target_by_its_hub_id(name: str) -> None:
    settings = compose(f"recipe={name}")
    assert re.fullmatch(r"[\w-]+/[\w.-]+", settings.target.name_or_path)
    assert settings.launch.name == "ddp"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_every_file_says_in_its_header_what_it_is_for(path: Path) -> None:
    lines = (CONF / path).read_text().splitlines()
    header = [line for line in lines[:6] if line.startswith("#") and "@package" not in line]
    assert header, f"{path} starts with no comment"
    if path.parts[0] in ("recipe", "debug", "sweep"):
        text = " ".join(header)
        assert lines[0] == "# @package _global_"
        assert re.search(r"[Hh]ardware", text), path
        assert re.search(r"[Aa]ccepted length", text), path
        command = re.search(r"draftsmith-train (.+)$", text)
        assert command, f"{path} shows no command"
        assert f"{path.parts[0]}={path.stem}" in command.group(1)


@pytest.mark.parametrize("path", [p for p in FILES if p.parts[0] == "recipe"], ids=str)
def test_the_command_in_a_recipe_header_composes(path: Path) -> None:
    text = (CONF / path).read_text()
    words = re.search(r"^# draftsmith-train (.+)$", text, re.MULTILINE)
    assert words
    compose(*words.group(1).split())


@pytest.mark.parametrize("path", FILES, ids=str)
def test_overrides_in_presets_are_absolute(path: Path) -> None:
    # Without the slash Hydra looks for the group below the preset's own folder.
    content = yaml.safe_load((CONF / path).read_text()) or {}
    for entry in content.get("defaults", []):
        if path.parts[0] in ("recipe", "debug", "sweep"):
            assert all(key.startswith("override /") for key in entry), entry


def test_sweep_presets_ask_for_a_multirun() -> None:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    compose("recipe=eagle3_quickstart")  # registers the schema
    with initialize_config_module(config_module="draftsmith.conf", version_base="1.3"):
        config = hydra_compose(
            "train", overrides=["recipe=eagle3_quickstart", "sweep=lr"], return_hydra_config=True
        )
    assert config.hydra.mode.name == "MULTIRUN"
    assert "train.lr" in config.hydra.sweeper.params
