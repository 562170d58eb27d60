"""Bytes as people write them: "2MiB", "12 GB"."""

from __future__ import annotations

import re

from slimgrad.errors import SpecError

DECIMAL = {unit: 1000**power for power, unit in enumerate(("", "k", "m", "g", "t"))}
BINARY = {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", 1)}
UNITS = DECIMAL | BINARY


def bytes_of(text: str) -> int:
    """`bytes_of("1.5 MiB")` is 1572864."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]i?|)b\s*", text, re.IGNORECASE)
    if found is None:
        raise SpecError(f"expected bytes such as '512KiB', '2MiB' or '12GB', found {text!r}")
    return int(float(found[1]) * UNITS[found[2].lower()])


def as_bytes(size: str | int) -> int:
    """A number of bytes, or text that says one."""
    found = bytes_of(size) if isinstance(size, str) else size
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise SpecError(f"expected bytes, 0 or more, such as 2**30 or '1GiB'; found {size!r}")
    return found
