"""Which option of each group: the fewest seconds within all bounds, and among those the least error.

NOTE [Rows only where they bind]
The peak is bounded at every event, but a few events decide. HiGHS is given those alone: what it answers is checked
against all, the worst are added, and it is asked again, some 2 to 6 times for 20 to 80 rows out of 9000 events.

NOTE [Two steps]
Up to EXACT options all is found in one go, and the answer is the best there is. Beyond, the groups that many others
need are settled first, with the rest allowed to be mixed; and then the rest. What the first step finds is a bound on
how good any choice can be, so it is known what the second one loses: of 300 problems 0.9 % at most, and 0.1 % in most.
Where it loses more than WITHIN, all is looked for in one go after all. Where half of the time is not enough for the
first step, the mixture that it began with settles the groups: it is a bound, too, if not as good a one.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Literal

import numpy as np

from slimgrad.planner.problem import Problem, Solution
from slimgrad.planner.program import ROUNDING, Answer, Ask, Limit, Program
from slimgrad.planner.usage import Floats, Ints, Sheet, evaluate, usage

__all__ = ["evaluate", "smallest", "solve", "usage"]

EXACT = 200
"""Options up to which the best choice is found, not one near it; it takes a fraction of a second."""
GAP = 3e-3
"""Beyond: how far from the best each of the two steps may stop, as a share of what is made small."""
WITHIN = 9e-3
"""And both together; with ALIKE that is less than 1 %."""
ALIKE = 5e-4
"""Choices whose seconds differ by less count as equally fast, and the error decides."""
ERROR_GAP = 5e-2
"""How far from the least the error may be, then."""
WORK = 20_000
"""Branches that the second step and the one for the error may try, times options; most need one."""
PATIENCE = 8
"""Choices that are forbidden one by one, before all bounds are made a little tighter instead."""
MARGIN = 1e-3
"""By how much at first, in units of the program's rows: 1e-7 of the largest number in them."""
NEIGHBOURS = 100
"""Rows that are added together are farther apart than this part of the step."""


def solve(problem: Problem, *, seconds_limit: float = 30.0, thorough: bool = True) -> Solution | None:
    """The fastest choice within all bounds, and of the fastest the one with the least error; None if there is none.

    Up to EXACT options it is the best there is. Beyond, its seconds are within 1 % of the best, `bound` says how near
    it is known to be, and a larger budget makes it slower by no more than that. After `seconds_limit`, and at once
    unless `thorough`, what was found is returned, though the best may be farther away; TimeoutError if that is nothing.
    """
    if not problem.groups:
        alone = evaluate(problem, ())
        return alone if _is_within(problem, alone) else None
    return Search(problem, seconds_limit, thorough).fastest()


def smallest(problem: Problem, of: Literal["peak", "kept"], *, seconds_limit: float = 30.0) -> Solution:
    """The choice with the smallest peak or the fewest bytes kept, and of those a fast one.

    The bounds on peak and on what is kept do not hold here, the others do; ValueError if nothing meets them. Up to
    EXACT options it is the smallest there is; beyond, within 1 % of it.
    """
    free = replace(problem, most_peak=None, most_kept=None)
    least = Search(free, seconds_limit).smallest(of) if problem.groups else evaluate(problem, ())
    if least is None:
        raise ValueError("no choice meets the bounds on seconds, error and the link")
    most = replace(free, most_peak=least.peak) if of == "peak" else replace(free, most_kept=least.kept)
    try:
        return solve(most, seconds_limit=seconds_limit, thorough=False) or least
    except TimeoutError:
        return least


class Search:
    """The same problem, asked about again and again; rows that were needed once stay."""

    def __init__(self, problem: Problem, seconds_limit: float, thorough: bool = True) -> None:
        self._problem = problem
        self._thorough = thorough
        self._sheet = Sheet.of(problem)
        self._program = Program(problem, self._sheet)
        self._half = time.monotonic() + seconds_limit / 2
        self._deadline = self._half + seconds_limit / 2
        self._exact = len(self._sheet.owners) <= EXACT
        self._nodes = max(1, WORK // max(1, len(self._sheet.owners)))
        self._rows = np.flatnonzero(self._sheet.floor == self._sheet.floor.max(initial=0))[:1]

    # --- what is asked ---

    def fastest(self) -> Solution | None:
        ask = Ask(self._sheet.seconds, self._limits(), self._problem.most_peak)
        found = self._least(ask)
        if found is None:
            return None
        solution = self._solution(self._most_faithful(ask, found))
        return replace(solution, bound=min(found.bound, solution.seconds))

    def smallest(self, of: Literal["peak", "kept"]) -> Solution | None:
        found = self._least(Ask(None if of == "peak" else self._sheet.kept.astype(np.float64), self._limits()))
        return None if found is None else self._solution(found)

    def _limits(self) -> tuple[Limit, ...]:
        problem, sheet = self._problem, self._sheet
        bounds = (
            (sheet.kept, problem.most_kept),
            (sheet.seconds, problem.most_seconds),
            (sheet.error, problem.most_error),
            (sheet.link, problem.most_link),
        )
        return tuple(Limit(values.astype(np.float64), float(most)) for values, most in bounds if most is not None)

    def _solution(self, found: Answer) -> Solution:
        return evaluate(self._problem, (self._taken(found.weights) - self._sheet.firsts).tolist())

    # --- in which steps ---

    def _least(self, ask: Ask) -> Answer | None:
        """The choice that costs least, or near it; see NOTE [Two steps]. None if there is none."""
        if self._exact:
            return self._cut(ask)
        relaxed = self._cut(replace(ask, whole="nothing"))
        counted = relaxed and self._counted(ask, relaxed)
        if counted is None:
            return None
        settled = self._taken(counted.weights)[self._program.deciding]
        found = self._tried(replace(ask, gap=GAP, nodes=self._nodes, fixed=settled))
        is_near = found is not None and found.value <= counted.bound + WITHIN * abs(counted.bound)
        if found is None or not (is_near or not self._thorough):
            return self._in_one_go(replace(ask, gap=WITHIN), found, counted.bound)
        return found if not len(settled) else replace(found, bound=counted.bound)

    def _counted(self, ask: Ask, relaxed: Answer) -> Answer | None:
        """The first of two steps."""
        try:
            return self._cut(replace(ask, whole="counts", gap=GAP), until=self._half)
        except TimeoutError:
            return relaxed

    def _in_one_go(self, ask: Ask, found: Answer | None, bound: float) -> Answer | None:
        """Or what was found, if that is better after all."""
        again = self._cut(ask) if found is None else self._tried(ask)
        if again is None:
            return found and replace(found, bound=bound)
        bound = max(bound, again.bound)
        return replace(again if found is None or again.value <= found.value else found, bound=bound)

    def _most_faithful(self, ask: Ask, fastest: Answer) -> Answer:
        """Of the choices as fast as this one, that with the least error."""
        sheet, taken = self._sheet, self._taken(fastest.weights)
        seconds = math.fsum(sheet.seconds[taken])
        spare = ROUNDING * math.fsum(abs(sheet.seconds[taken])) if self._exact else ALIKE * abs(seconds)
        ask = replace(ask, cost=sheet.error, limits=(*ask.limits, Limit(sheet.seconds, seconds + spare)))
        if not self._exact:
            ask = replace(ask, gap=ERROR_GAP, nodes=self._nodes, fixed=taken[self._program.deciding])
        found = self._tried(ask)
        if found is None or math.fsum(sheet.error[self._taken(found.weights)]) > math.fsum(sheet.error[taken]):
            return fastest
        return found

    def _tried(self, ask: Ask) -> Answer | None:
        """None too where nothing was found before time or nodes ran out."""
        try:
            return self._cut(ask)
        except TimeoutError:
            return None

    # --- one of them ---

    def _cut(self, ask: Ask, until: float | None = None) -> Answer | None:
        """Ask, add the rows that the answer breaks, and ask again until it breaks none; see NOTE [Rows ...]."""
        forbidden = 0
        while True:
            found = self._program.answer(ask, self._rows, (until or self._deadline) - time.monotonic())
            if found is None:
                return None
            if ask.whole == "all":
                found = replace(found, weights=self._program.weights(self._taken(found.weights)))
            broken = self._broken(found, ask)
            if len(broken):
                self._rows = np.union1d(self._rows, broken)
            elif ask.whole != "all" or self._holds(ask, found.weights):
                return found
            else:  # HiGHS, which rounds, took it for within the bounds
                forbidden += 1
                margin = MARGIN * 4.0 ** (forbidden - PATIENCE) if forbidden > PATIENCE else 0.0
                excluded = Limit(found.weights, len(self._sheet.firsts) - 1)
                ask = replace(ask, limits=(*ask.limits, excluded), margin=margin)

    def _taken(self, weights: Floats) -> Ints:
        """Of each group the option with the most weight."""
        order: Ints = np.lexsort((-weights, self._sheet.owners))
        return order[self._sheet.firsts]

    def _holds(self, ask: Ask, weights: Floats) -> bool:
        peak = self._sheet.totals(weights).max(initial=0)
        within = ask.most_peak is None or peak <= ask.most_peak
        return bool(within) and all(limit.holds(weights > 0) for limit in ask.limits)

    def _broken(self, found: Answer, ask: Ask) -> Ints:
        """Segments above the bound that are not yet rows: the highest of each neighbourhood."""
        most = ask.most_peak if ask.cost is not None else found.value
        if most is None:
            return np.zeros(0, dtype=np.int64)
        above = self._sheet.totals(found.weights) - most
        new = above > self._program.unit * (1e-3 if ask.whole != "all" else 1e-5 if ask.cost is None else 0.0)
        new[self._rows] = False
        beside = np.concatenate([[-np.inf], above, [-np.inf]])
        tops = np.flatnonzero(new & (above >= beside[:-2]) & (above >= beside[2:]))
        if not len(tops) and new.any():
            tops = np.array([np.where(new, above, -np.inf).argmax()])
        return _apart(tops[np.argsort(-above[tops], kind="stable")], len(above) // NEIGHBOURS)


def _apart(places: Ints, distance: int) -> Ints:
    """The first, and each later one that is farther from all that are taken."""
    taken: list[int] = []
    for place in places.tolist():
        if all(abs(place - other) > distance for other in taken):
            taken.append(place)
    return np.array(taken, dtype=np.int64)


def _is_within(problem: Problem, found: Solution) -> bool:
    pairs = (
        (found.peak, problem.most_peak),
        (found.kept, problem.most_kept),
        (found.seconds, problem.most_seconds),
        (found.error, problem.most_error),
        (found.link, problem.most_link),
    )
    return all(most is None or value <= most for value, most in pairs)
