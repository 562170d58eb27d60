"""Bytes as people write them: "2MiB", "12 GB"; and numbers as they compute them."""

from __future__ import annotations

import re
from numbers import Integral, Real
from typing import Any

from slimgrad.errors import SpecError

DECIMAL = {unit: 1000**power for power, unit in enumerate(("", "k", "m", "g", "t"))}
BINARY = {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", 1)}
UNITS = DECIMAL | BINARY

MOST = 2**60
"""What is more than any device has, and counts as this much."""


def bytes_of(text: str) -> int:
    """`bytes_of("1.5 MiB")` is 1572864."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]i?|)b\s*", text, re.IGNORECASE)
    if found is None:
        raise SpecError(f"expected bytes such as '512KiB', '2MiB' or '12GB', found {text!r}")
    return int(min(float(found[1]) * UNITS[found[2].lower()], MOST))


def as_bytes(size: str | float, name: str = "") -> int:
    """A number of bytes, or text that says one; `name` is what they are for."""
    where = f"{name}: " if name else ""
    try:
        found = as_number(bytes_of(size) if isinstance(size, str) else size)
    except SpecError as error:
        raise SpecError(f"{where}{error}") from error
    if found is None or found < 0 or found % 1:
        raise SpecError(f"{where}expected bytes, 0 or more, such as 2**30 or '1GiB'; found {size!r}")
    return int(min(found, MOST))


def as_number(value: Any) -> int | float | None:
    """A number, numpy's too, as Python's own; None for what is none, such as True or NaN."""
    if isinstance(value, bool) or not isinstance(value, Real) or value != value:
        return None
    return int(value) if isinstance(value, Integral) else float(value)
