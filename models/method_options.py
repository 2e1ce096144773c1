"""Type and range checks for the options of a method, with errors that say what to write."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import Any


def check_integer(name: str, value: Any, *, least: int = 1, optional: bool = False) -> None:
    """Raises ValueError unless `value` is an int >= `least` (or None where optional)."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        expected = f"an integer >= {least}" + (" or null" if optional else "")
        raise ValueError(f"{name} is {value!r}, expected {expected}.")


def check_number(name: str, value: Any, *, above: float, most: float) -> None:
    """Raises ValueError unless above < value <= most."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= most:
        raise ValueError(f"{name} is {value!r}, expected a number > {above} and <= {most}.")


def check_flag(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, expected true or false.")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises ValueError, naming the choices, unless `value` is one of them."""
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(choices)}.{hint}")


def check_list(name: str, values: Any, kind: type[int] | type[float]) -> None:
    """Raises ValueError unless `values` is a non-empty list of `kind` (an int passes as float)."""
    allowed: tuple[type, ...] = (int,) if kind is int else (int, float)
    if (
        not isinstance(values, list | tuple)
        or not values
        or any(isinstance(value, bool) or not isinstance(value, allowed) for value in values)
        or not all(math.isfinite(value) for value in values)
    ):
        what = "integers" if kind is int else "finite numbers"
        raise ValueError(f"{name} is {values!r}, expected a list of {what}, or null.")


def check_objective(value: Any) -> None:
    """Raises ValueError unless `value` is a mapping that names an objective."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError(
            f"method.objective is {value!r}, expected a mapping with a name, for example "
            "{name: kl}."
        )
