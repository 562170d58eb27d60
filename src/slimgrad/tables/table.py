"""A solved table: which intervals of x share one value of f', and what that value is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimgrad.errors import SpecError
from slimgrad.report.human import plural
from slimgrad.report.steps import Steps, draw_steps
from slimgrad.spec.values import Value
from slimgrad.tables import store
from slimgrad.tables.functions import FAMILIES, function_of, named
from slimgrad.tables.question import Histogram, Question, asked
from slimgrad.tables.solver import representatives, solved

CURVE = 801
"""Points at which f' is drawn."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Table(Value):
    """The best 2**bits constants for f', and the intervals on which each stands for it."""

    function: str
    parameters: tuple[tuple[str, Any], ...] = ()
    bits: int
    interval: tuple[float, float]
    weight: str
    even: bool
    """Whether the borders are those of |x|."""
    continuous: bool
    borders: tuple[float, ...]
    """2**bits - 1 of them. x belongs to the first interval whose border is not below it."""
    levels: tuple[float, ...]
    representatives: tuple[float, ...]
    """An x of each interval with f'(x) = level."""
    error: float
    """The integral of (f' - level)^2, weighted, over the whole interval."""

    def codes(self, x: Tensor) -> Tensor:
        """The number of each element's interval."""
        at = (x.abs() if self.even else x).contiguous()
        return torch.bucketize(at, torch.tensor(self.borders, dtype=x.dtype, device=x.device))

    def slope(self, x: Tensor) -> Tensor:
        """What stands for f'(x)."""
        return torch.tensor(self.levels, dtype=x.dtype, device=x.device)[self.codes(x)]

    def __str__(self) -> str:
        shown = ", ".join(f"{key}={value}" for key, value in self.parameters)
        low, high = self.interval
        head = (
            f"{self.function}({shown}) in {plural(self.bits, 'bit')} on [{low:g}, {high:g}], weight {self.weight}: "
            f"error {self.error:.6g}"
        )
        ends = (0.0 if self.even else -math.inf, *self.borders, math.inf)
        x = "|x|" if self.even else "x"
        rows = [f"{a:>12.6f} < {x} <= {b:>12.6f}   f' = {level:>9.6f}" for a, b, level in self._rows(ends)]
        return "\n".join([head, *rows])

    def _rows(self, ends: Sequence[float]) -> list[tuple[float, float, float]]:
        return list(zip(ends[:-1], ends[1:], self.levels, strict=True))

    def plot(self, path: str | Path, f: Callable[[Tensor], Tensor] | None = None) -> Path:
        """f' and its steps. A function without a name must be given again."""
        return draw_steps([self.steps(f)], path)

    def steps(self, f: Callable[[Tensor], Tensor] | None = None) -> Steps:
        """What a figure shows of this table."""
        if f is None and self.function not in FAMILIES:
            raise SpecError(f"Table.plot: {self.function} has no name slimgrad knows; give it as f=")
        function = named(self.function, dict(self.parameters)) if f is None else function_of(f, {})
        x = torch.linspace(*self.interval, CURVE, dtype=torch.float64)
        title = f"{self.function}, {plural(self.bits, 'bit')}: error {self.error:.4f}"
        return Steps(title, x.tolist(), function.slope(x).tolist(), self.slope(x).tolist())


def fewbit_table(
    f: str | Callable[[Tensor], Tensor],
    bits: int,
    interval: tuple[float, float] = (-10.0, 10.0),
    weight: str | Histogram = "uniform",
    even: bool | None = None,
    *,
    continuous: bool = False,
    **parameters: Any,
) -> Table:
    """The best approximation of f' by 2**bits constants; solved in less than a second, then remembered on disk.

    `f` is a name ("gelu", "softplus" with beta=2.0, ...), a torch function, a module, or any callable on tensors.
    `weight` says which x matter: all of the interval alike, as a standard normal variable has them, or as a histogram
    (edges, counts) of your own data has them. `even` takes intervals of |x|, which gains a bit where f' is even; by
    default that is found out. With `continuous` no interval reaches across a jump of f', which costs a little error;
    each level is then a value of f' inside its interval.
    """
    question = asked(f, bits, interval, weight, even, continuous, parameters)
    return store.remembered(question.key(), Table, lambda: answered(question))


def answered(question: Question) -> Table:
    """Solved, whether or not it was before."""
    function, problem = question.function, question.problem()
    found = solved(problem, 2**question.bits)
    ends = torch.tensor([problem.low, *found.borders.tolist(), problem.high], dtype=torch.float64)
    mirrored = (
        question.even and question.weight_name != "histogram"
    )  # a histogram is folded, the others are cut in half
    return Table(
        function=function.name,
        parameters=function.parameters,
        bits=question.bits,
        interval=question.interval,
        weight=question.weight_name,
        even=question.even,
        continuous=question.continuous or not question.jumps,
        borders=tuple(found.borders.tolist()),
        levels=tuple(found.levels.tolist()),
        representatives=tuple(representatives(function.slope, ends, found.levels).tolist()),
        error=found.error * (2 if mirrored else 1),
    )
