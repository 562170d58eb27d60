"""All that a table depends on, checked and complete: the question that the solver answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimgrad.errors import SpecError
from slimgrad.tables import store
from slimgrad.tables.functions import Function, function_of
from slimgrad.tables.solver import Problem

WEIGHTS = ("uniform", "normal")
Histogram = tuple[Tensor | Sequence[float], Tensor | Sequence[float]]
"""Edges, and how much lies between each two: what `torch.histogram` returns, the other way round."""


@dataclass(frozen=True)
class Question:
    """What is asked for."""

    function: Function
    bits: int
    interval: tuple[float, float]
    weight: str | Histogram
    weight_name: str
    even: bool
    continuous: bool
    jumps: tuple[float, ...]

    def key(self) -> str:
        """As text, with the values themselves where there is no name for them."""
        low, high = self.interval
        flags = f"even={self.even}, continuous={self.continuous}"
        text = f"{self.function}, bits={self.bits}, [{low!r}, {high!r}], {self.weight_name}, {flags}"
        if not self.function.named:
            samples = self.function.slope(torch.linspace(low, high, 1025, dtype=torch.float64))
            text += f", f'={store.digest(samples)}"
        if self.weight_name == "histogram":
            text += f", histogram={store.digest(*_histogram(self.weight))}"  # type: ignore[arg-type]
        return text

    @property
    def start(self) -> float:
        """Where the intervals begin."""
        return 0.0 if self.even else self.interval[0]

    def problem(self) -> Problem:
        density, edges = self._density()
        high = self.interval[1]
        breaks = tuple(sorted({*self.jumps, *(x for x in edges if self.start < x < high)}))
        walls = self.jumps if self.continuous else ()
        return Problem(self.function.slope, density, self.start, high, breaks, walls)

    def _density(self) -> tuple[Callable[[Tensor], Tensor], tuple[float, ...]]:
        if self.weight_name == "uniform":
            return torch.ones_like, ()
        if self.weight_name == "normal":
            return lambda x: torch.exp(-x * x / 2) / math.sqrt(2 * math.pi), ()
        edges, counts = _histogram(self.weight)  # type: ignore[arg-type]
        height = torch.nn.functional.pad(counts / counts.sum() / edges.diff(), (1, 1))

        def density(x: Tensor) -> Tensor:
            return height[torch.bucketize(x, edges)]

        if not self.even:
            return density, tuple(edges.tolist())
        return lambda x: density(x) + density(-x), tuple(edges.abs().unique().tolist())


def asked(
    f: str | Callable[[Tensor], Tensor],
    bits: int,
    interval: tuple[float, float],
    weight: str | Histogram,
    even: bool | None,
    continuous: bool,
    parameters: dict[str, Any],
) -> Question:
    """The question, or a clear error."""
    function = function_of(f, parameters)
    low, high, name = _checked(bits, interval, weight)
    even = _is_even(function, low, high) if even is None else even
    if even and low != -high:
        raise SpecError(f"fewbit_table: intervals of |x| need one like (-a, a), found ({low:g}, {high:g})")
    jumps = _jumps(function, 0.0 if even else low, high)
    if continuous and len(jumps) >= 2**bits:
        raise SpecError(
            f"fewbit_table: {function} has {len(jumps)} jumps in [{low:g}, {high:g}], so {2**bits} intervals cannot "
            "keep apart what they separate; take more bits, or continuous=False"
        )
    return Question(function, bits, (low, high), weight, name, even, continuous and bool(jumps), jumps)


def check_bits(who: str, bits: Any) -> None:
    if type(bits) is not int or not 1 <= bits <= 8:
        raise SpecError(f"{who}: bits must be an integer from 1 to 8, found {bits!r}")


def checked_interval(who: str, interval: Any) -> tuple[float, float]:
    try:
        low, high = map(float, interval)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not -math.inf < low < high < math.inf:
        raise SpecError(f"{who}: interval must be (low, high) with low < high, both finite, found {interval!r}")
    return low, high


def _checked(bits: int, interval: Sequence[float], weight: str | Histogram) -> tuple[float, float, str]:
    check_bits("fewbit_table", bits)
    low, high = checked_interval("fewbit_table", interval)
    if isinstance(weight, str):
        if weight not in WEIGHTS:
            choices = ", ".join(WEIGHTS)
            raise SpecError(f"fewbit_table: weight must be one of {choices} or a histogram, found {weight!r}")
        return low, high, weight
    edges, counts = _histogram(weight)
    inside = (edges[1:] > low) & (edges[:-1] < high)
    if len(edges) != len(counts) + 1 or not (edges.diff() > 0).all() or not (counts >= 0).all():
        raise SpecError(
            "fewbit_table: a histogram is (edges, counts) with rising edges, one more than counts, and no count below "
            f"0; found {len(edges)} edges and {len(counts)} counts"
        )
    if not (counts[inside] > 0).any():
        raise SpecError(f"fewbit_table: the histogram has nothing in [{low:g}, {high:g}]")
    return low, high, "histogram"


def _histogram(weight: Histogram) -> tuple[Tensor, Tensor]:
    try:
        edges, counts = (torch.as_tensor(part, dtype=torch.float64, device="cpu").flatten() for part in weight)
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"fewbit_table: a histogram is (edges, counts), two lists of numbers; found {weight!r}"
        ) from error
    return edges, counts


def _is_even(function: Function, low: float, high: float) -> bool:
    if low != -high:
        return False
    if function.even is not None:
        return function.even
    x = torch.linspace(0.0, high, 513, dtype=torch.float64)[1:]
    return bool(torch.allclose(function.slope(x), function.slope(-x), rtol=1e-9, atol=1e-12))


def _jumps(function: Function, low: float, high: float) -> tuple[float, ...]:
    """Where f' jumps, strictly inside; looked for if nobody has said."""
    found = _found_jumps(function, low, high) if function.jumps is None else function.jumps
    return tuple(x for x in found if low < x < high)


def _found_jumps(function: Function, low: float, high: float) -> list[float]:
    """Halve every cell over which f' changes much, towards the half that changes more: at a jump it stays much."""
    x = torch.linspace(low, high, 8193, dtype=torch.float64)
    slope = function.slope(x)
    change = slope.diff().abs()
    suspects = (change > 1e-3 * (slope.max() - slope.min())).nonzero().flatten()
    left, right = x[suspects], x[suspects + 1]
    for _ in range(48):
        middle = (left + right) / 2
        at_left, at_middle, at_right = function.slope(left), function.slope(middle), function.slope(right)
        on_left = (at_middle - at_left).abs() >= (at_right - at_middle).abs()
        left, right = torch.where(on_left, left, middle), torch.where(on_left, middle, right)
    stays = (function.slope(right) - function.slope(left)).abs() > 0.5 * change[suspects]
    return [round(float(x), 12) for x in right[stays]]
