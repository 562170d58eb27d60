"""The planner's question as numbers: one option for each group, under budgets."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Span:
    """Bytes held from one event of the step until before another."""

    start: int
    stop: int
    bytes: int


Link = tuple[int, frozenset[int]]
"""(group, options of it): the group must take one of those."""


@dataclass(frozen=True)
class Option:
    """One thing that can be done to a group (a storage, or a region that may be recomputed)."""

    seconds: float
    """What it adds to the step; negative where it is faster than doing nothing."""
    error: float
    """What it adds to the squared relative error of the gradient."""
    kept: int
    """Bytes held at the end of forward."""
    spans: tuple[Span, ...] = ()
    """What it adds to the bytes of each event; what a span takes away is negative."""
    needs: tuple[Link, ...] = ()
    """Without which this one may not be chosen."""
    link: float = 0.0
    """Seconds for which it keeps the link to the host busy; negative where the device waits for the link meanwhile."""


@dataclass(frozen=True)
class Problem:
    """Choose one option per group: the fewest seconds within all bounds, and among those the least error."""

    floor: tuple[int, ...]
    """Bytes of each event that no choice changes."""
    groups: tuple[tuple[Option, ...], ...]
    most_peak: int | None = None
    """Bounds; None is no bound."""
    most_kept: int | None = None
    most_seconds: float | None = None
    most_error: float | None = None
    most_link: float | None = None


@dataclass(frozen=True)
class Solution:
    """The option of each group, and what they come to together."""

    choice: tuple[int, ...]
    seconds: float
    error: float
    kept: int
    peak: int
    link: float = 0.0
    bound: float = field(default=-math.inf, compare=False)
    """No choice within the same bounds takes fewer seconds, as far as the search has shown."""
