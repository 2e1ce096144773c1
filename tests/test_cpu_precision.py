"""Where bfloat16 is only emulated, someone hears of it before hours are spent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rich.console import Console

from draftsmith.eval import quickstart
from draftsmith.models import cpu_precision

CPU = torch.device("cpu")


@pytest.fixture
def slowdown(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_to(value: float) -> None:
        monkeypatch.setattr(cpu_precision, "bfloat16_slowdown", lambda: value)
        quickstart.precision.cache_clear()

    yield set_to
    quickstart.precision.cache_clear()


def test_the_measurement_is_a_ratio() -> None:
    assert cpu_precision.bfloat16_slowdown() > 0.0


def test_only_slow_bfloat16_on_a_cpu_is_worth_a_word(slowdown: Any) -> None:
    slowdown(46.0)
    said = cpu_precision.slow_bfloat16(CPU, torch.bfloat16)
    assert said is not None
    assert "46.0 times" in said
    assert cpu_precision.slow_bfloat16(CPU, torch.float32) is None
    assert cpu_precision.slow_bfloat16(torch.device("cuda"), torch.bfloat16) is None
    slowdown(0.5)
    assert cpu_precision.slow_bfloat16(CPU, torch.bfloat16) is None


@pytest.mark.parametrize(
    ("ratio", "asked", "expected"),
    [
        (46.0, "bfloat16", ("float32", "fp32")),
        (46.0, "float32", ("float32", "fp32")),
        (0.5, "bfloat16", ("bfloat16", "bf16")),
        (0.5, "float32", ("float32", "bf16")),
    ],
)
def test_the_quickstart_takes_the_faster_precision_and_says_why(
    slowdown: Any, ratio: float, asked: str, expected: tuple[str, str]
) -> None:
    slowdown(ratio)
    console = Console(record=True, width=200)
    assert quickstart.precision(asked, "cpu", console) == expected
    assert ("float32" in console.export_text()) == (ratio > 1.0)
