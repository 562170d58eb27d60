"""plan: the fastest way to keep a step within a budget, and among the fastest the most faithful."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from slimgrad.errors import BudgetError
from slimgrad.planner.bounds import Bound, Budget, Tolerance, bound_of
from slimgrad.planner.calibration import Calibration, Progress
from slimgrad.planner.choices import Choices
from slimgrad.planner.offers import Item
from slimgrad.planner.plan import FUSING, KEEP, Action, Plan, wording
from slimgrad.planner.problem import Problem, Solution
from slimgrad.planner.sensitivity import Sensitivity, lead_of
from slimgrad.planner.settings import Settings, check_kind
from slimgrad.planner.solve import evaluate, smallest, solve, usage
from slimgrad.planner.timing import calibrated_for
from slimgrad.report.human import human_bytes
from slimgrad.spec import Need, Profile

OBSTACLES = 3
"""That an error names."""

Least = Literal["peak", "kept"]


def plan(
    profile: Profile,
    budget: Budget,
    *,
    max_slowdown: float | None = None,
    max_error: float | None = None,
    allow: str | Collection[str] | None = None,
    reserve: str | int = 0,
    sensitivity: Sensitivity | None = None,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
    min_bytes: int | None = None,
    outside: bool = False,
) -> Plan:
    """What becomes of each storage so that a step stays within `budget`, at the least cost in time.

    `budget` is the most that the device may hold in a step, parameters, gradients and batch included: bytes, or text
    such as "12GiB". A ratio such as 0.25, or "4x", is of what is kept at the end of forward. `reserve` is what else
    must fit, such as the optimizer's state. `max_slowdown=1.1` bounds the time of a step, `max_error` the relative
    error of its gradient, as it is estimated (by default that of four bits everywhere), and `allow` what may be done:
    "exact", or names such as "derive" and "quant". What codecs do to gradients is taken from `sensitivity`, if that was
    measured. Without a `calibration`, this device is measured once; it takes seconds and is remembered. What a loss
    outside of the model saves is kept, because `apply` does not reach it; `outside=True` is for loops that compute it
    under `with run:`.
    """
    check_kind("profile", profile, Profile)
    bound, tolerance = bound_of(budget, profile.kept_bytes), Tolerance.of(max_slowdown, max_error)
    given = Settings.of(allow, reserve, min_bytes, sensitivity, calibration, tolerance)
    speeds = calibration or calibrated_for(profile, progress)
    choices = Choices.of(profile, given.names, speeds, given.reserve, given.min_bytes, sensitivity, outside=outside)
    return Draft(choices).plan(bound, tolerance)


@dataclass(frozen=True)
class Draft:
    """Plans for one profile, under any budget."""

    choices: Choices

    @property
    def profile(self) -> Profile:
        return self.choices.profile

    @property
    def fixed(self) -> int:
        """Bytes that are there before the step."""
        return self.choices.fixed

    def plan(self, bound: Bound, tolerance: Tolerance, *, thorough: bool = True) -> Plan:
        return self.traced(bound, tolerance, thorough=thorough)[0]

    def traced(self, bound: Bound, tolerance: Tolerance, *, thorough: bool = True) -> tuple[Plan, tuple[int, ...]]:
        """The plan, and its bytes at each event, with what is there before the step. Unless `thorough`, it may be a few
        per cent slower than the best, where that would take long to find.
        """
        self._check_profile(bound, tolerance)
        problem = self.choices.problem(bound, tolerance)
        with _in_time(bound):
            solution = self._without_a_higher_peak(problem, thorough) or solve(problem, thorough=thorough)
            if solution is None:
                raise self._infeasible(problem, bound)
        solution = evaluate(problem, self.choices.needed(solution.choice))
        events = usage(problem, solution.choice)
        return self._told(solution, bound), tuple(self.fixed + int(size) for size in events)

    def meets(self, bound: Bound, tolerance: Tolerance) -> bool:
        """Whether there is a plan."""
        self._check_profile(bound, tolerance)
        with _in_time(bound):
            return solve(self.choices.problem(bound, tolerance), thorough=False) is not None

    def _check_profile(self, bound: Bound, tolerance: Tolerance) -> None:
        """Whether it tells what this asks for."""
        unknown = self.profile.meta.get("unknown")
        if unknown:
            raise BudgetError(
                f"what is kept is not known of {unknown}, a workspace whose size only a real step tells; plan from a "
                "profile with fake=False"
            )
        if self.profile.timeline is not None:
            return
        why = self.profile.meta.get("no_timeline", "it was made with timeline=False")
        if bound.peak is not None:
            raise BudgetError(
                f"a budget in bytes needs the profile's timeline, and there is none: {why}. A ratio, such as '4x', "
                "works all the same"
            )
        if tolerance.max_slowdown is not None:
            raise BudgetError(
                f"max_slowdown needs the profile's timeline, and there is none: {why}. Leave it out: how long an "
                "untouched step takes is not known"
            )

    def _without_a_higher_peak(self, problem: Problem, thorough: bool) -> Solution | None:
        """Where only what is kept is bounded: packing takes room for a moment, which no plan should have above what a
        step takes untouched, if there is one.
        """
        timeline = self.profile.timeline
        if problem.most_peak is not None or timeline is None:
            return None
        lower = replace(problem, most_peak=max(self.choices.untouched, default=0))
        return solve(lower, thorough=thorough)

    def smallest(self, of: Least, tolerance: Tolerance) -> Plan:
        """The plan that reaches least."""
        bound = Bound(f"the least {of}")
        problem = self.choices.problem(bound, tolerance)
        with _in_time(bound):
            solution = evaluate(problem, self.choices.needed(smallest(problem, of).choice))
        return self._told(solution, bound)

    # --- what cannot be ---

    def _infeasible(self, problem: Problem, bound: Bound) -> BudgetError:
        of: Least = "peak" if bound.peak is not None else "kept"
        least = smallest(replace(problem, most_peak=None, most_kept=None), of)
        reached = self.fixed + least.peak if of == "peak" else self.choices.kept_beside + least.kept
        heavy = sorted(self._weights(problem, least, of), reverse=True)[:OBSTACLES]
        names = ", ".join(f"{name} with {human_bytes(size)}" for size, name in heavy if size > 0)
        return BudgetError(
            f"no plan meets {bound.text}: the smallest reachable {of} is {human_bytes(reached)}. What weighs most "
            f"there: {names}. More would fit with a larger max_error or max_slowdown, with allow= more, or with a "
            "smaller batch (sg.max_batch finds the largest)",
            smallest=reached,
        )

    def _weights(self, problem: Problem, solution: Solution, of: Least) -> list[tuple[int, str]]:
        """What holds how many bytes where it is tightest."""
        chosen = [(item, problem.groups[item.number][solution.choice[item.number]]) for item in self.choices.items]
        names = [(option, lead_of(self.profile, item).name) for item, option in chosen]
        if of == "kept":
            beyond = "what is saved outside of the model, by the loss (plan(outside=True) is for `with run:` around it)"
            return [*((option.kept, name) for option, name in names), (self.choices.left_outside, beyond)]
        event = int(usage(problem, solution.choice).argmax())
        held = [(sum(span.bytes for span in o.spans if span.start <= event < span.stop), name) for o, name in names]
        there = "parameters, buffers, the batch and what is reserved"
        moment = "temporaries, outputs and gradients of that moment"
        return [*held, (self.fixed, there), (problem.floor[event], moment)]

    # --- what is told ---

    def _told(self, solution: Solution, bound: Bound) -> Plan:
        choices, profile, timeline = self.choices, self.profile, self.profile.timeline
        again = choices.again(solution.choice)
        actions = [self._action(item, solution.choice) for item in choices.items]
        actions += [_held(path, size) for path, size in choices.held(solution.choice)]
        return Plan(
            model=str(profile.meta.get("model", "")),
            device=str(profile.meta.get("device", "")),
            budget=bound.text,
            actions=tuple(sorted(actions, key=lambda action: -action.before)),
            recompute=tuple(choices.running.regions[place].path for place in again),
            fused=tuple((path, wording((op,))) for path, op in choices.fused(solution.choice)),
            boundaries=tuple(found for place in again for found in self._boundary(place, solution)),
            kept_before=profile.kept_bytes,
            kept_bytes=choices.kept_beside + solution.kept,
            peak_before=None if timeline is None else self.fixed + max(choices.untouched, default=0),
            peak_bytes=None if timeline is None else self.fixed + solution.peak,
            fixed_bytes=self.fixed,
            seconds=solution.seconds,
            step_seconds=choices.costs.step_seconds,
            error=math.sqrt(max(0.0, solution.error)),
            least=choices.least,
        )

    def _boundary(self, place: int, solution: Solution) -> list[tuple[str, str]]:
        """What becomes of the largest tensor that a module which runs again is given."""
        given = [item for item in self.choices.items if place in self.choices.running.given_to(item)]
        if not given:
            return []
        lead = max(given, key=self.choices.bytes_of)
        return [(self.choices.running.regions[place].path, self._action(lead, solution.choice).what)]

    def _action(self, item: Item, choice: Sequence[int]) -> Action:
        sites = [self.profile.sites[number] for number in item.sites]
        lead, offers = lead_of(self.profile, item), self.choices.offers[item.number]
        option = self.choices.groups[item.number][choice[item.number]]
        what = [*map(wording, (offer.codecs for offer in offers)), *self.choices.beyond(item)][choice[item.number]]
        return Action(
            site=lead.name,
            path=lead.path,
            module=lead.module,
            need=str(lead.need),
            keys=tuple(site.key for site in sites),
            what=what,
            before=self.choices.bytes_of(item),
            after=option.kept + (self.choices.held_in(item, choice) if what == FUSING else 0),
            seconds=option.seconds,
            error=option.error,
        )


@contextmanager
def _in_time(bound: Bound) -> Iterator[None]:
    """What the solver has not found by then is an error of ours."""
    try:
        yield
    except TimeoutError as error:
        raise BudgetError(
            f"no plan for {bound.text} was found in time, nor was it shown that there is none; try again when this "
            "machine has less to do, with another budget, or with less in allow="
        ) from error


def _held(path: str, size: int) -> Action:
    """What is kept for nobody but a module that runs again."""
    need = str(Need.EXACT)
    return Action(site=f"{path}:input", path=path, module="", need=need, keys=(), what=KEEP, before=0, after=size)
