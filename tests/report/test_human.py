from __future__ import annotations

import pytest

from slimgrad.report.human import NEEDS, bar, human_bytes, human_ratio, shorten
from slimgrad.spec import Need


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1572864, "1.5 MiB"),
        (1048575, "1.0 MiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**60, "1024.0 PiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_bytes_are_said_in_binary_units(size: int, said: str) -> None:
    assert human_bytes(size) == said


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (120, 40, "3.0x less"),
        (100, 120, "1.2x more"),
        (100, 98, "1.02x less"),
        (7, 7, "the same"),
        (7, 0, "all of it less"),
        (0, 7, "from nothing"),
    ],
)
def test_a_ratio_says_its_direction(before: int, after: int, said: str) -> None:
    assert human_ratio(before, after) == said


def test_the_needs_are_in_the_order_of_the_spec() -> None:
    assert tuple(need.name for need in Need) == NEEDS


def test_a_bar_fills_its_width_only_for_the_whole() -> None:
    assert bar(1, 1, width=10) == "█" * 10
    assert bar(1, 2, width=10) == "█" * 5
    assert bar(0, 1, width=10) == bar(0, 0, width=10) == ""


@pytest.mark.parametrize("width", [0, 1, 2, 5, 12, 30])
def test_shortening_never_exceeds_the_width(width: int) -> None:
    assert len(shorten("model.layers.12.self_attn.q_proj", width)) <= width


def test_shortening_keeps_both_ends() -> None:
    short = shorten("model.layers.12.self_attn.q_proj", 20)
    assert short.startswith("model")
    assert short.endswith("attn.q_proj")
    assert "…" in short
