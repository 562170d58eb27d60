"""The best approximation of f' by a few constants: which intervals, and which constant on each.

Minimise the integral of (f'(x) - q(x))^2 w(x) over piecewise constant q. The constant of a piece is the mean of f' on
it, and with prefix sums of the integrals of w, w f' and w f'^2 the error of any piece takes O(1). So dynamic
programming over a fine grid finds the best borders on the grid; then each border moves to where f' is halfway between
its levels.

All pairs of a border and the one before are tried: f' is not monotone, so the shortcuts for clustering sorted numbers
do not apply. The errors of all pieces (4096^2) are computed once, block by block below the diagonal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CELLS = 4096
BLOCK = 64
"""Borders treated at a time, so that what is compared stays in the processor's cache."""

# Gauss and Legendre's five points on [-1, 1]: exact up to the ninth power.
POINTS = (-0.9061798459386640, -0.5384693101056831, 0.0, 0.5384693101056831, 0.9061798459386640)
WEIGHTS = (0.2369268850561891, 0.4786286704993665, 0.5688888888888889, 0.4786286704993665, 0.2369268850561891)

REFINEMENTS = 30
HALVINGS = 50

Slope = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """f', the density it is weighed with, and where: all in float64."""

    slope: Slope
    density: Slope
    low: float
    high: float
    breaks: tuple[float, ...]
    """Where f' or the density jumps, strictly between low and high."""
    walls: tuple[float, ...] = ()
    """Breaks that no piece may reach across."""

    def grid(self) -> Tensor:
        even = torch.linspace(self.low, self.high, CELLS + 1, dtype=torch.float64)
        nodes: Tensor = torch.cat([even, torch.tensor(self.breaks, dtype=torch.float64)]).unique()
        return nodes

    def integrals(self, nodes: Tensor) -> Tensor:
        """[3, len(nodes)]: the integrals of w, w f' and w f'^2 from `low` up to each node; nodes include all breaks."""
        half = (nodes[1:] - nodes[:-1]) / 2
        at = (nodes[1:] + nodes[:-1])[:, None] / 2 + half[:, None] * torch.tensor(POINTS, dtype=torch.float64)
        weight = self.density(at) * torch.tensor(WEIGHTS, dtype=torch.float64) * half[:, None]
        slope = self.slope(at)
        cells = torch.stack([weight, weight * slope, weight * slope * slope]).sum(2)
        return torch.cat([cells.new_zeros(3, 1), cells.cumsum(1)], dim=1)


@dataclass(frozen=True)
class Solution:
    borders: Tensor
    """Between the pieces."""
    levels: Tensor
    error: float
    """The integral that was minimised."""


def solved(problem: Problem, pieces: int) -> Solution:
    nodes = problem.grid()
    errors = piece_errors(problem.integrals(nodes))
    for wall in problem.walls:
        place = int(torch.searchsorted(nodes, wall))
        errors[:place, place + 1 :] = torch.inf
    return refined(problem, nodes[best_borders(errors, pieces)])


def best_borders(errors: Tensor, pieces: int) -> Tensor:
    """Indices of the nodes between the pieces of least error."""
    count = len(errors)
    best = errors[0].clone()  # of one piece from the first node to each
    choices = []
    for _ in range(pieces - 1):
        following, choice = torch.full_like(best, torch.inf), torch.zeros(count, dtype=torch.long)
        for first in range(0, count, BLOCK):
            last = min(first + BLOCK, count)
            following[first:last], choice[first:last] = (best[:last, None] + errors[:last, first:last]).min(0)
        best = following
        choices.append(choice)
    borders, node = [], count - 1
    for choice in reversed(choices):
        node = int(choice[node])
        borders.append(node)
    return torch.tensor(borders[::-1], dtype=torch.long)


def piece_errors(sums: Tensor) -> Tensor:
    """[i, j]: the error of the piece from node i to node j; infinite unless i < j."""
    count = sums.shape[1]
    errors = torch.full((count, count), torch.inf, dtype=torch.float64)
    for first in range(0, count, BLOCK):
        last = min(first + BLOCK, count)
        weight, mean, square = (sums[:, None, first:last] - sums[:, :last, None]).unbind(0)
        error = square - mean * mean / weight.clamp_min(torch.finfo(torch.float64).tiny)
        error.clamp_min_(0.0)
        rows = torch.arange(last)[:, None] >= torch.arange(first, last)[None]
        errors[:last, first:last] = error.masked_fill_(rows, torch.inf)
    return errors


def refined(problem: Problem, borders: Tensor) -> Solution:
    """Move each border, within a cell of the grid, to where f' is halfway between the levels beside it.

    Those on a jump stay. Levels follow the borders and borders the levels; the best round counts.
    """
    reach = (problem.high - problem.low) / CELLS
    on_break = torch.isin(borders, torch.tensor(problem.breaks, dtype=torch.float64))
    best = evaluated(problem, borders)
    for _ in range(REFINEMENTS):
        middle = (best.levels[1:] + best.levels[:-1]) / 2
        moved = crossing(problem.slope, best.borders, middle, reach)
        moved = torch.where(on_break, best.borders, moved).clamp(problem.low, problem.high).sort().values
        found = evaluated(problem, moved)
        if not found.error < best.error * (1 - 1e-9):
            break
        best = found
    return best


def crossing(slope: Slope, x: Tensor, value: Tensor, reach: float) -> Tensor:
    """Where f' takes the value near x, by halving; x itself where it does not."""
    low, high = x - reach, x + reach
    at_low = slope(low) - value
    crosses = at_low * (slope(high) - value) <= 0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        same = at_low * (slope(middle) - value) > 0
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    return torch.where(crosses, (low + high) / 2, x)


def evaluated(problem: Problem, borders: Tensor) -> Solution:
    """Levels and error of these borders."""
    ends = torch.cat([borders.new_tensor([problem.low]), borders, borders.new_tensor([problem.high])])
    nodes = torch.cat([problem.grid(), borders]).unique()
    sums = problem.integrals(nodes)[:, torch.searchsorted(nodes, ends)].diff(dim=1)
    weight, mean, square = sums.unbind(0)
    empty = weight <= 0
    levels = torch.where(empty, problem.slope((ends[1:] + ends[:-1]) / 2), mean / torch.where(empty, 1.0, weight))
    error = square - torch.where(empty, 0.0, mean * levels)
    return Solution(borders, levels, float(error.clamp_min(0.0).sum()))


def representatives(slope: Slope, ends: Tensor, levels: Tensor) -> Tensor:
    """For each piece an x in it with f'(x) = level: f' is continuous there, so it takes its mean value somewhere.

    Of several the one where rounding x would matter least, far from the borders. Where a jump inside the piece leaves
    out the level, the x with the nearest f'.
    """
    found = []
    for low, high, level in zip(ends[:-1], ends[1:], levels, strict=True):
        x = torch.linspace(float(low), float(high), 2049, dtype=torch.float64)[1:-1]
        value = slope(x)
        off = value - level
        off = torch.where(off.abs() < 1e-9, 0.0, off)  # a flat piece is off its own mean by rounding
        steep = (value[1:] - value[:-1]).abs() * x[1:].abs()
        crosses = off[:-1] * off[1:] <= 0
        if not crosses.any():
            found.append(x[off.abs().argmin()])
            continue
        calmest = crosses & (steep <= steep[crosses].min() + 1e-12)
        place = int(torch.where(calmest, (x[1:] - (low + high) / 2).abs(), torch.inf).argmin())
        exact = x[place : place + 2][off[place : place + 2] == 0]
        middle, reach = (x[place] + x[place + 1]) / 2, float(x[place + 1] - x[place]) / 2
        found.append(exact[0] if len(exact) else crossing(slope, middle[None], level[None], reach)[0])
    return torch.stack(found)
