"""conf/entry.py: near matches, refused keys, readable failures."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from omegaconf import MISSING, OmegaConf

from draftsmith.conf import entry


@dataclass
class Inner:
    rate: float = 0.1
    """A number."""


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    count: int = 3
    name: str = MISSING


def test_known_keys_reach_into_nested_settings() -> None:
    assert entry.known_keys(Outer) == ["inner", "inner.rate", "count", "name"]


def test_near_matches_compare_with_and_without_the_prefix() -> None:
    assert entry.near_matches("inner.rte", entry.known_keys(Outer))[0] == "inner.rate"
    assert entry.near_matches("rat", entry.known_keys(Outer)) == ["inner.rate"]
    assert entry.near_matches("zzz", entry.known_keys(Outer)) == []


def test_an_added_key_is_refused_even_where_hydra_lets_it_pass() -> None:
    config = OmegaConf.create({"inner": {"rate": 0.2, "rte": 0.3}, "name": "a"})
    with pytest.raises(ValueError, match=r"inner\.rte is not a setting of Inner.*inner\.rate"):
        entry.refuse_added_keys(config, Outer)


def test_a_missing_value_is_named_with_the_way_to_give_it() -> None:
    with pytest.raises(ValueError, match=r"No value for name.*name=\.\.\."):
        entry.to_settings(OmegaConf.structured(Outer), Outer)


def test_settings_are_plain_dataclasses() -> None:
    config = OmegaConf.merge(OmegaConf.structured(Outer), {"name": "a", "inner": {"rate": 0.2}})
    settings = entry.to_settings(config, Outer)
    assert settings == Outer(inner=Inner(rate=0.2), count=3, name="a")
    assert type(settings) is Outer
    assert type(settings.inner) is Inner


def test_fail_prints_one_line_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.fail("the message")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "draftsmith: the message\n"


def run_train(*words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-P", "-m", "draftsmith.train", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | extra,
    )


def test_a_mistake_is_one_message_and_exit_code_2_without_a_trace() -> None:
    done = run_train("recipe=eagle3_quickstart", "train.precision=fp8")
    assert done.returncode == 2
    assert "train.precision is 'fp8'; choose one of bf16, fp32" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_trace_is_shown_when_asked_for() -> None:
    done = run_train("recipe=eagle3_quickstart", "train.precision=fp8", DRAFTSMITH_TRACEBACK="1")
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_help_and_the_composed_settings_are_printed_without_running() -> None:
    assert run_train("--help").returncode == 0
    done = run_train("recipe=eagle3_quickstart", "--cfg", "job")
    assert done.returncode == 0
    assert "draft_vocab_size: 8192" in done.stdout
