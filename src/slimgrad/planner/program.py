"""A problem as HiGHS takes it: one binary variable per option, and rows for what bounds them.

NOTE [Running totals]
A storage that is held for half of the step has an entry in half of the rows. As most of what is held at one event is
held at the next, a row says only what changes: `total = total before + what began - what ended`. Each span then has two
entries, and HiGHS is 2 to 5 times as fast.

NOTE [Counts of regions]
Recomputing 2.6 of 24 equal layers is what HiGHS would like to do, and it takes long to see that no choice of
layers does as well: whichever it forbids, another takes its place. So what is made whole first is how many of the first
1, 2, ... of them are recomputed. That says the same, but one of these counts, the last, settles that it is 2 or 3.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import scipy.sparse as sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from slimgrad.planner.problem import Problem
from slimgrad.planner.usage import Bools, Floats, Ints, Sheet

SCALE = 1e4
"""What the largest number in a row becomes. HiGHS keeps rows to 1e-6 of one, which is a byte in 10 GB."""
LARGEST = 1e6
"""What the largest cost becomes: HiGHS stops at a gap of 1e-6, and costs may differ a millionfold."""
ROUNDING = 1e-12
"""What sums may be off by, as a share of their parts, for being added in another order."""
MANY = 3
"""Groups that a group must decide for, so that it is settled before them."""

Whole = Literal["nothing", "counts", "all"]


@dataclass(frozen=True)
class Limit:
    """What the options taken may come to at most."""

    values: Floats
    most: float

    def holds(self, taken: Bools) -> bool:
        return math.fsum(self.values[taken]) <= self.most


@dataclass(frozen=True)
class Ask:
    """What HiGHS is asked to make small, and within what."""

    cost: Floats | None
    """Of each option; None is the peak itself."""
    limits: tuple[Limit, ...] = ()
    most_peak: int | None = None
    whole: Whole = "all"
    """What may not be mixed."""
    fixed: Ints | None = None
    """Options that are taken."""
    gap: float = 0.0
    nodes: int | None = None
    margin: float = 0.0
    """By how much all bounds are tighter, in units of their rows."""


@dataclass(frozen=True)
class Answer:
    weights: Floats
    """Of each option."""
    value: float
    """What was made small."""
    bound: float
    """No choice has less."""


@dataclass(frozen=True)
class Program:
    """A problem as HiGHS takes it. Columns: options, counts, running totals, and the peak above the highest floor."""

    problem: Problem
    sheet: Sheet

    @cached_property
    def unit(self) -> float:
        return float(np.abs(self.sheet.bytes).max(initial=1)) / SCALE

    @cached_property
    def base(self) -> int:
        return int(self.sheet.floor.max(initial=0))

    @cached_property
    def once(self) -> Any:
        """One option of each group."""
        count = len(self.sheet.owners)
        return sparse.csr_array((np.ones(count), (self.sheet.owners, np.arange(count))))

    @cached_property
    def links(self) -> Any:
        """Those of a group's options that need no more than some of another's, are taken only as often as these."""
        entries = [
            (row, column, sign)
            for row, (takers, givers) in enumerate(self._pairs())
            for sign, columns in ((1.0, takers), (-1.0, givers))
            for column in columns
        ]
        rows, columns, signs = zip(*entries, strict=True) if entries else ((), (), ())
        height = max(rows, default=-1) + 1
        return sparse.coo_array((signs, (rows, columns)), shape=(height, len(self.sheet.owners))).tocsr()

    def _pairs(self) -> Iterator[tuple[list[int], list[int]]]:
        firsts = self.sheet.firsts.tolist()
        for first, group in zip(firsts, self.problem.groups, strict=True):
            needs = [(number, of, enough) for number, option in enumerate(group) for of, enough in option.needs]
            for of, enough in sorted({need[1:] for need in needs}, key=lambda need: (need[0], sorted(need[1]))):
                takers = {first + number for number, other, less in needs if other == of and less <= enough}
                yield sorted(takers), [firsts[of] + number for number in sorted(enough)]

    @cached_property
    def deciding(self) -> Ints:
        """Groups that many others need."""
        needed: Counter[int] = Counter()
        for group in self.problem.groups:
            needed.update({of for option in group for of, _ in option.needs})
        return np.array(sorted(of for of, times in needed.items() if times >= MANY), dtype=np.int64)

    @cached_property
    def chains(self) -> list[list[int]]:
        """Options that are the same but in other groups, in their order: those of which the first few are counted."""
        found: dict[Any, list[int]] = {}
        for of in self.deciding.tolist():
            group = self.problem.groups[of]
            kind = tuple((option.seconds, option.kept) for option in group)
            for number in range(1, len(group)):
                found.setdefault((kind, number), []).append(int(self.sheet.firsts[of]) + number)
        return list(found.values())

    @cached_property
    def counts(self) -> tuple[Any, Any]:
        """Matrices of options and of counts: how much each count is above the one before."""
        heads = [0, *accumulate(map(len, self.chains))][:-1]
        columns = np.array([option for chain in self.chains for option in chain], dtype=np.int64)
        size = len(columns)
        taken = sparse.csr_array((np.ones(size), (np.arange(size), columns)), shape=(size, len(self.sheet.owners)))
        return taken, _steps(size, heads)

    @cached_property
    def most_counts(self) -> Floats:
        return np.concatenate([np.zeros(0), *(np.arange(1.0, len(chain) + 1) for chain in self.chains)])

    def changes(self, rows: Ints) -> Any:
        """What each option adds to the total of each row, above the total of the row before."""
        sheet = self.sheet
        begin, end = np.searchsorted(rows, sheet.starts), np.searchsorted(rows, sheet.stops)
        held = begin < end
        ends = held & (end < len(rows))
        places = np.concatenate([begin[held], end[ends]])
        values = np.concatenate([sheet.bytes[held], -sheet.bytes[ends]]) / self.unit
        options = np.concatenate([sheet.options[held], sheet.options[ends]])
        return sparse.coo_array((values, (places, options)), shape=(len(rows), len(sheet.owners))).tocsr()

    def weights(self, taken: Ints) -> Floats:
        """Of these options 1 and of the others 0."""
        weights = np.zeros(len(self.sheet.owners))
        weights[taken] = 1.0
        return weights

    def open(self, ask: Ask) -> Bools:
        """Options that some choice within the bounds may take, as far as can be told from each bound by itself."""
        sheet = self.sheet
        found = np.ones(len(sheet.owners), dtype=bool) if ask.most_peak is None else sheet.fits(ask.most_peak)
        for limit in ask.limits:
            spare = ROUNDING * max(abs(limit.most), np.abs(limit.values).max())
            found &= sheet.excess(limit.values) <= limit.most - sheet.least(limit.values) + spare
        if ask.fixed is not None:
            found[np.isin(sheet.owners, sheet.owners[ask.fixed])] = False
            found[ask.fixed] = True
        return found

    def answer(self, ask: Ask, rows: Ints, seconds: float) -> Answer | None:
        """None: no choice is within the bounds."""
        open_options = self.open(ask)
        if not np.isin(np.arange(len(self.sheet.firsts)), self.sheet.owners[open_options]).all():
            return None
        cost, scale = self._cost(ask, open_options)
        lower, upper = self._ranges(ask, rows, open_options)
        cost = np.concatenate([cost, np.zeros(len(lower) - len(cost) - 1), [float(ask.cost is None)]])
        # Presolving takes longer than it saves here, and where it comes back with a choice that is a little off, HiGHS
        # says so on the standard output, whatever it is told.
        how = {"presolve": False, "mip_rel_gap": ask.gap, "node_limit": ask.nodes, "time_limit": max(seconds, 0.01)}
        found = milp(
            cost,
            integrality=self._integrality(ask, rows),
            bounds=Bounds(lower, upper),
            constraints=self._constraints(ask, rows),
            options={name: value for name, value in how.items() if value is not None},
        )
        if found.x is None and found.status == 2:
            return None
        if found.x is None:
            raise TimeoutError(f"no choice was found in time, nor was it shown that there is none: {found.message}")
        bound = found.fun if found.mip_dual_bound is None else found.mip_dual_bound
        offset = self.base if ask.cost is None else 0
        return Answer(found.x[: len(self.sheet.owners)], found.fun / scale + offset, bound / scale + offset)

    def _cost(self, ask: Ask, open_options: Bools) -> tuple[Floats, float]:
        """Of each option, and what it was multiplied with."""
        if ask.cost is None:
            return np.zeros(len(self.sheet.owners)), 1 / self.unit
        cost = np.where(open_options, ask.cost, 0.0)
        largest = np.abs(cost).max(initial=0.0)
        scale = LARGEST / largest if largest else 1.0
        return cost * scale, scale

    def _ranges(self, ask: Ask, rows: Ints, open_options: Bools) -> tuple[Floats, Floats]:
        least_peak = -SCALE * (len(self.sheet.bytes) + 1)
        most_peak = np.inf if ask.most_peak is None else (ask.most_peak + 0.5 - self.base) / self.unit - ask.margin
        counts = self.most_counts if ask.whole != "all" else np.zeros(0)
        lower = np.concatenate([np.zeros(len(open_options) + len(counts)), np.full(len(rows), -np.inf), [least_peak]])
        upper = np.concatenate([open_options.astype(float), counts, np.full(len(rows), np.inf), [most_peak]])
        if ask.fixed is not None:
            lower[ask.fixed] = 1.0
        return lower, upper

    def _integrality(self, ask: Ask, rows: Ints) -> Ints:
        options, counts = len(self.sheet.owners), len(self.most_counts) if ask.whole != "all" else 0
        whole = np.array([ask.whole == "all", ask.whole == "counts", False], dtype=np.int64)
        return np.repeat(whole, [options, counts, len(rows) + 1])

    def _constraints(self, ask: Ask, rows: Ints) -> LinearConstraint:
        taken, steps = self.counts if ask.whole != "all" else (self.counts[0][:0], _steps(0))
        changes, (limits, mosts) = self.changes(rows), self._limits(ask)
        totals, peak = sparse.eye_array(len(rows)), -sparse.csr_array(np.ones((len(rows), 1)))
        room = (self.base - self.sheet.floor[rows]) / self.unit
        parts = (
            ([self.once, None, None, None], 1.0, 1.0),
            ([self.links, None, None, None], -np.inf, 0.0),
            ([taken, -steps, None, None], 0.0, 0.0),
            ([changes, None, -_steps(len(rows)), None], 0.0, 0.0),
            ([None, None, totals, peak], -np.inf, room),
            ([limits, None, None, None], -np.inf, mosts),
        )
        heights = [next(block.shape[0] for block in blocks if block is not None) for blocks, _, _ in parts]
        lower = [np.full(height, low) for height, (_, low, _) in zip(heights, parts, strict=True)]
        upper = [np.full(height, high) for height, (_, _, high) in zip(heights, parts, strict=True)]
        matrix = sparse.block_array([blocks for blocks, _, _ in parts], format="csr")
        return LinearConstraint(matrix, np.concatenate(lower), np.concatenate(upper))

    def _limits(self, ask: Ask) -> tuple[Any, Floats]:
        """Rows from 0 to SCALE: above the least that there is, in units of the room that is left."""
        rows, mosts = [np.zeros((0, len(self.sheet.owners)))], [np.zeros(0)]
        for limit in ask.limits:
            room = limit.most - self.sheet.least(limit.values)
            if room > 0:  # otherwise only the least are open
                excess = self.sheet.excess(limit.values)
                rows.append(np.where(excess <= 2 * room, excess * (SCALE / room), 0.0)[None])
                mosts.append(np.array([SCALE - ask.margin]))
        return sparse.csr_array(np.concatenate(rows)), np.concatenate(mosts)


def _steps(size: int, heads: Sequence[int] = (0,)) -> Any:
    """Takes numbers to how much each is above the one before; those at `heads` have none before."""
    places = np.arange(size)
    later = np.setdiff1d(places, heads)
    values = np.concatenate([np.ones(size), -np.ones(len(later))])
    rows, columns = np.concatenate([places, later]), np.concatenate([places, later - 1])
    return sparse.coo_array((values, (rows, columns)), shape=(size, size)).tocsr()
