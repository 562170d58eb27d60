"""The solver beside brute force: as good, never outside the bounds, and honest about how near it is known to be."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slimgrad.planner import solve as solving
from slimgrad.planner.problem import Option, Problem, Solution, Span
from slimgrad.planner.program import Answer, Ask, Program
from slimgrad.planner.solve import evaluate, smallest, solve

BEST = 1e-9
"""Sums of seconds in another order."""
NEAR = 0.01
"""What is promised of problems that are too large for the best."""


def within(problem: Problem, found: Solution) -> bool:
    bounds = (
        (found.peak, problem.most_peak),
        (found.kept, problem.most_kept),
        (found.seconds, problem.most_seconds),
        (found.error, problem.most_error),
        (found.link, problem.most_link),
    )
    return all(most is None or value <= most for value, most in bounds)


def allowed(problem: Problem, choice: tuple[int, ...]) -> bool:
    options = [group[number] for group, number in zip(problem.groups, choice, strict=True)]
    return all(choice[of] in enough for option in options for of, enough in option.needs)


def brute_force(problem: Problem) -> list[Solution]:
    choices = itertools.product(*(range(len(group)) for group in problem.groups))
    found = (evaluate(problem, choice) for choice in choices if allowed(problem, choice))
    return [solution for solution in found if within(problem, solution)]


@st.composite
def problems(draw: st.DrawFn, *, bounded: bool = True) -> Problem:
    """Up to five groups of up to four options, with negative spans, links and bounds somewhere between the extremes."""
    events = draw(st.integers(1, 12))
    count = draw(st.integers(1, 5))
    sizes = [draw(st.integers(1, 4)) for _ in range(count)]
    groups = []
    for place, size in enumerate(sizes):
        options = []
        for number in range(size):
            spans = draw(st.lists(st.builds(Span, *[st.integers(0, 12)] * 2, st.integers(-500, 2000)), max_size=3))
            needs: tuple[tuple[int, frozenset[int]], ...] = ()
            if place and number and draw(st.booleans()):
                of = draw(st.integers(0, place - 1))
                needs = ((of, frozenset(draw(st.sets(st.integers(0, sizes[of] - 1), min_size=1)))),)
            seconds, error = (draw(st.sampled_from([0.0, 1e-6, 3e-4, 1e-3, 0.02])) for _ in range(2))
            link = draw(st.sampled_from([0.0, 0.0, 1e-4, 2e-3, -1e-3]))
            options.append(Option(seconds, error, draw(st.integers(0, 10**6)), tuple(spans), needs, link))
        groups.append(tuple(options))
    problem = Problem(tuple(draw(st.lists(st.integers(0, 3000), min_size=events, max_size=events))), tuple(groups))
    return draw(bounds_of(problem)) if bounded else problem


@st.composite
def bounds_of(draw: st.DrawFn, problem: Problem) -> Problem:
    """Bounds at what some choice comes to, exactly, where rounding would show; or a little below."""
    found = brute_force(problem)
    if not found:
        return problem
    names = {"most_peak": "peak", "most_kept": "kept", "most_seconds": "seconds", "most_error": "error"}
    names["most_link"] = "link"
    chosen = draw(st.sets(st.sampled_from(sorted(names))))
    values = {name: getattr(draw(st.sampled_from(found)), names[name]) for name in sorted(chosen)}
    if "most_peak" in values and draw(st.booleans()):
        values["most_peak"] -= 1
    return replace(problem, **values)


FAST = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@FAST
@given(problems())
def test_a_small_problem_is_solved_as_well_as_brute_force_does(problem: Problem) -> None:
    every, found = brute_force(problem), solve(problem)
    assert (found is None) == (not every)
    if found is None:
        return
    assert within(problem, found) and allowed(problem, found.choice)
    best = min(solution.seconds for solution in every)
    assert found.seconds <= best + BEST
    assert found.bound <= best + BEST
    as_fast = [solution for solution in every if solution.seconds <= found.seconds + BEST]
    assert found.error <= min(solution.error for solution in as_fast) + BEST


@FAST
@given(problems(), st.sampled_from(["peak", "kept"]))
def test_the_smallest_that_can_be_reached_is_what_brute_force_finds(problem: Problem, of: str) -> None:
    free = replace(problem, most_peak=None, most_kept=None)
    every = brute_force(free)
    if not every:
        with pytest.raises(ValueError, match="no choice"):
            smallest(problem, of)  # type: ignore[arg-type]
        return
    found = smallest(problem, of)  # type: ignore[arg-type]
    assert within(free, found) and allowed(problem, found.choice)
    assert getattr(found, of) == min(getattr(solution, of) for solution in every)


@FAST
@given(problems(), st.integers(0, 5000))
def test_more_budget_never_means_a_slower_choice(problem: Problem, more: int) -> None:
    found = solve(problem)
    if found is None or problem.most_peak is None:
        return
    richer = solve(replace(problem, most_peak=problem.most_peak + more))
    assert richer is not None and richer.seconds <= found.seconds + BEST


@settings(FAST, max_examples=60)
@given(problems())
def test_the_way_of_large_problems_is_within_a_hundredth_on_small_ones(problem: Problem) -> None:
    """EXACT is set to 0, so that it takes the two steps of which only a large problem needs both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solving, "EXACT", 0)
        every, found = brute_force(problem), solve(problem)
    assert (found is None) == (not every)
    if found is not None:
        assert within(problem, found) and allowed(problem, found.choice)
        best = min(solution.seconds for solution in every)
        assert found.seconds <= best * (1 + NEAR) + BEST
        assert found.bound <= best + BEST


def layered(layers: int, per_layer: int, seed: int = 0) -> Problem:
    """As a transformer looks: layers alike, storages held from forward to backward, a region for each layer."""
    events = 2 * layers * per_layer
    groups: list[tuple[Option, ...]] = []
    first_region = layers * per_layer
    for layer in range(layers):
        for place in range(per_layer):
            start = layer * per_layer + place
            stop, size = events - start, 10**6 * (1 + (place * 7 + seed) % 5)
            here, again = (first_region + layer, frozenset([0])), (first_region + layer, frozenset([1]))
            kept = [(0.0, 0.0, 1.0), (2e-5 * (1 + place % 3), 1e-5, 0.5), (3e-5, 1e-2, 0.28)]
            options = [
                Option(seconds, error, int(size * part), (Span(start, stop, int(size * part)),), (here,))
                for seconds, error, part in kept
            ]
            back = events // 2 + (layers - 1 - layer) * per_layer
            groups.append((*options, Option(0.0, 0.0, 0, (Span(back, stop, size),), (again,))))
    groups += [(Option(0.0, 0.0, 0), Option(4e-4, 0.0, 0)) for _ in range(layers)]
    return Problem((10**6,) * events, tuple(groups))


@pytest.mark.parametrize("part", [0.7, 0.4, 0.2])
def test_a_large_problem_stays_within_its_bounds_and_says_how_near_the_best_it_is(part: float) -> None:
    problem = layered(layers=24, per_layer=12)
    untouched = evaluate(problem, (0,) * len(problem.groups))
    problem = replace(problem, most_peak=int(untouched.peak * part), most_error=0.5)
    found = solve(problem)
    assert found is not None and within(problem, found) and allowed(problem, found.choice)
    assert math.isfinite(found.bound) and found.seconds <= found.bound * (1 + NEAR) + BEST


def test_where_the_first_step_takes_too_long_the_second_goes_on_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(program: Program, ask: Ask, *rest: Any) -> Answer | None:
        if ask.whole == "counts":
            raise TimeoutError
        return asked(program, ask, *rest)

    asked = Program.answer
    problem = layered(layers=24, per_layer=12)
    best = smallest(problem, "peak")
    bounded = replace(problem, most_peak=2 * best.peak, most_error=0.5)
    fast = solve(bounded)
    monkeypatch.setattr(Program, "answer", answer)
    found, least = solve(bounded), smallest(problem, "peak")
    assert found is not None and fast is not None and within(bounded, found) and allowed(bounded, found.choice)
    assert found.seconds <= found.bound * (1 + NEAR) + BEST and found.bound <= fast.seconds + BEST
    assert least.peak <= best.peak * (1 + NEAR)


def test_what_cannot_be_met_is_none_and_no_groups_are_no_choice() -> None:
    group = (Option(0.0, 0.0, 100, (Span(0, 2, 100),)), Option(1.0, 0.0, 50, (Span(0, 2, 50),)))
    problem = Problem((10, 10), (group,))
    assert solve(replace(problem, most_peak=59)) is None
    assert solve(replace(problem, most_peak=60)) == evaluate(problem, (1,))
    assert solve(replace(problem, most_peak=110)) == evaluate(problem, (0,))
    assert solve(replace(problem, most_kept=49)) is None
    assert solve(Problem((10,), (), most_peak=9)) is None
    assert solve(Problem((10,), (), most_peak=10)) == evaluate(Problem((10,), ()), ())
