"""Numbers and names as people read them."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slimgrad.spec import Site

NEEDS = ("NOTHING", "WEIGHT", "INDEX", "MASK", "DERIVATIVE", "OPERAND", "VALUES", "EXACT")
"""The needs from the least to the most demanding, by name."""

UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
ELLIPSIS = "…"
WIDTH = 120
"""Columns of every text."""


def human_bytes(n: float) -> str:
    """Bytes in binary units: `human_bytes(1572864)` is '1.5 MiB'."""
    sign, size = ("-" if n < 0 else ""), abs(n)
    if size < 1024:
        return f"{sign}{size:.0f} B"
    for unit in UNITS:
        size /= 1024
        if round(size, 1) < 1024 or unit == UNITS[-1]:
            break
    return f"{sign}{size:.1f} {unit}"


def human_seconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def human_ratio(before: float, after: float) -> str:
    """How much less `after` is than `before`: '3.0x less', '1.2x more' or 'the same'."""
    if before == after:
        return "the same"
    small, large, word = (after, before, "less") if after < before else (before, after, "more")
    if small == 0:
        return "all of it less" if word == "less" else "from nothing"
    ratio = large / small
    return f"{ratio:.2f}x {word}" if ratio < 1.1 else f"{ratio:.1f}x {word}"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def bar(part: float, whole: float, width: int = 20) -> str:
    """A share as a bar of eighths of a block."""
    eighths = round(8 * width * part / whole) if whole else 0
    full, rest = divmod(eighths, 8)
    return "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")


def plural(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def path_name(path: str) -> str:
    """A module path for reading; the model itself has the empty path."""
    return path or "(model)"


def short_node(node: str | None) -> str:
    """A backward node without what all their names share: 'AddmmBackward0' is 'Addmm'."""
    return (node or "-").removesuffix("Backward0")


def short_slot(site: Site) -> str:
    return f"{short_node(site.node)}.{site.slot}"


def tensor_name(shape: tuple[int, ...], dtype: str) -> str:
    """Type and shape in one word: 'float32[64,3,32,32]'."""
    return f"{dtype.removeprefix('torch.')}[{','.join(map(str, shape))}]"


def shorten(text: str, width: int) -> str:
    """At most `width` characters, cut in the middle: both ends of a module path tell more than its middle."""
    if len(text) <= width:
        return text
    if width <= 2:
        return ELLIPSIS[: max(width, 0)]
    tail = (width - 1) * 2 // 3
    return text[: width - 1 - tail].rstrip(".") + ELLIPSIS + text[-tail:].lstrip(".")


def need_name(need: Any) -> str:
    """The name of a need, however it came: an enum member or a plain string."""
    return str(getattr(need, "name", need)).upper()


def wrapped(sentence: str, indent: str = "", hanging: str = "") -> str:
    """A sentence on as many lines as it takes; words such as paths are never broken."""
    return textwrap.fill(
        sentence,
        width=WIDTH,
        initial_indent=indent,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
