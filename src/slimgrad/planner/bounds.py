"""Bounds: what a plan must stay within, understood and checked before anything is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slimgrad.errors import SpecError
from slimgrad.report.human import human_bytes
from slimgrad.spec.budgets import MOST, as_number, bytes_of

Budget = str | int | float

DEFAULT_ERROR = 0.35
"""What `max_error` is where it is not given: that of four bits everywhere, which trained to the untouched accuracy on
six real trainings (docs/accuracy.md)."""


MISTYPED = 2**20
"""Below, a number that is not whole was surely meant for a ratio; above, it is bytes that were computed."""


ROUNDING = 2**-50
"""So that a ratio of bytes is those bytes."""


@dataclass(frozen=True)
class Bound:
    """A budget, understood: of the peak in bytes, or of what is kept."""

    text: str
    peak: int | None = None
    kept: int | None = None


def bound_of(budget: Budget, kept_before: int) -> Bound:
    """Bytes as a number or as text bound the peak; a ratio such as 0.25, or "4x" less, bounds what is kept."""
    if isinstance(budget, str) and not budget.strip().lower().endswith("x"):
        return Bound(budget, peak=_read(budget))
    number = as_number(_times_less(budget) if isinstance(budget, str) else budget)
    if number is None or not 0 < number < math.inf:
        raise _no_budget(budget)
    if number <= 1:
        return Bound(f"{1 / number:g}x less kept", kept=math.floor(number * kept_before * (1 + ROUNDING)))
    if number % 1 and number < MISTYPED:
        raise SpecError(
            f"budget: {budget!r} is neither a ratio, which is 1 or less (0.25, or '4x' for four times less), nor a "
            "whole number of bytes"
        )
    return Bound(human_bytes(number), peak=int(min(number, MOST)))


def _read(budget: str) -> int:
    try:
        return bytes_of(budget)
    except SpecError as error:
        raise _no_budget(budget) from error


def _no_budget(budget: object) -> SpecError:
    return SpecError(
        f"budget: expected bytes such as '12GiB', or a ratio such as 0.25 or '4x' (1x and more); found {budget!r}"
    )


def _times_less(text: str) -> float:
    """0.25 of "4x"; 0, which is no ratio, of what is none, or of less than once."""
    try:
        times = float(text.strip()[:-1])
    except ValueError:
        return 0.0
    return 1 / times if times >= 1 else 0.0


@dataclass(frozen=True)
class Tolerance:
    """What else a plan must stay within: time and error."""

    max_slowdown: float | None = None
    max_error: float = DEFAULT_ERROR

    @classmethod
    def of(cls, max_slowdown: float | None, max_error: float | None) -> Tolerance:
        slowdown, error = as_number(max_slowdown), as_number(DEFAULT_ERROR if max_error is None else max_error)
        if max_slowdown is not None and (slowdown is None or not 1 <= slowdown < math.inf):
            raise SpecError(f"max_slowdown: expected 1.1 for 10 % more time, 1 or more; found {max_slowdown!r}")
        if error is None or error < 0:
            raise SpecError(f"max_error: expected a relative error of the gradient, 0 or more; found {max_error!r}")
        return cls(slowdown, error)
