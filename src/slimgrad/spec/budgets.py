"""Bytes as people write them: "2MiB", "12 GB"."""

from __future__ import annotations

import re

from slimgrad.errors import SpecError

UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3}


def bytes_of(text: str) -> int:
    """`bytes_of("1.5 MiB")` is 1572864."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kmg]i?|)b\s*", text, re.IGNORECASE)
    if found is None:
        raise SpecError(f"expected bytes such as '512KiB', '2MiB' or '12GB', found {text!r}")
    return int(float(found[1]) * UNITS[found[2].lower()])


def as_bytes(size: str | int) -> int:
    """A number of bytes, or text that says one."""
    return bytes_of(size) if isinstance(size, str) else size
