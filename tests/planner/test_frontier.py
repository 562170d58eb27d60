"""Frontiers: budgets from the untouched step to the smallest that can be reached, and what they are shown as."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import slimgrad as sg
from slimgrad.errors import BudgetError, SpecError
from slimgrad.planner.bounds import Bound, Tolerance
from slimgrad.planner.choices import Choices
from slimgrad.planner.frontier import Block, coarse
from slimgrad.planner.offers import ALLOWED
from slimgrad.planner.planning import Draft
from slimgrad.report.frontier_page import check, frontier_page
from slimgrad.report.frontiers import page_data
from slimgrad.report.human import NEEDS, human_bytes
from tests.planner.models import SPEEDS, made

MIB = 2**20


@pytest.fixture(scope="module")
def profile() -> sg.Profile:
    model, batch = made("gpt2")
    return sg.profile(model, batch, fake=True)


@pytest.fixture(scope="module")
def swept(profile: sg.Profile) -> sg.Frontier:
    return sg.frontier(profile, calibration=SPEEDS)


@pytest.fixture(scope="module")
def without_timeline(profile: sg.Profile) -> sg.Frontier:
    return sg.frontier(replace(profile, timeline=None), calibration=SPEEDS)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four budgets where sixteen would be swept."""
    monkeypatch.setattr(sys.modules["slimgrad.planner.frontier"], "BUDGETS", 4)


def untouched(profile: sg.Profile) -> int:
    assert profile.timeline is not None
    return profile.meta["model_bytes"] + profile.meta["batch_bytes"] + max(profile.timeline.untouched(profile))


# --- plans ---


def test_every_plan_is_within_its_budget_by_its_own_promise(swept: sg.Frontier) -> None:
    assert len(swept.plans) > 8
    assert all(plan.peak_bytes <= budget for plan, budget in zip(swept.plans, swept.budgets, strict=True))


def test_more_budget_never_makes_a_step_slower(swept: sg.Frontier, without_timeline: sg.Frontier) -> None:
    for found in (swept, without_timeline):
        assert all(more > less for more, less in pairwise(found.budgets))
        assert all(more.seconds <= less.seconds for more, less in pairwise(found.plans))


def test_it_leads_from_the_untouched_step_to_the_smallest_that_can_be_reached(
    profile: sg.Profile, swept: sg.Frontier
) -> None:
    first, last = swept.plans[0], swept.plans[-1]
    assert swept.peak_before == untouched(profile)
    assert first.seconds == 0 and all(action.what == "keep" for action in first.actions)
    least = Draft(Choices.of(profile, ALLOWED, SPEEDS, 0)).smallest("peak", Tolerance()).peak_bytes
    assert last.peak_bytes <= 1.01 * least  # the budget is rounded up to three digits
    with pytest.raises(BudgetError):
        sg.plan(profile, int(0.99 * least), calibration=SPEEDS)


def test_budgets_can_be_typed_again(profile: sg.Profile, swept: sg.Frontier) -> None:
    for plan in (swept.plans[1], swept.plans[-1]):
        assert re.fullmatch(r"[\d.]{2,5} MiB", plan.budget)
        assert sg.plan(profile, plan.budget, calibration=SPEEDS).seconds == pytest.approx(plan.seconds, rel=1e-2)


def test_no_two_plans_do_the_same(swept: sg.Frontier) -> None:
    assert len({plan.actions for plan in swept.plans}) == len(swept.plans)


def test_without_a_timeline_budgets_are_of_what_is_kept(
    profile: sg.Profile, without_timeline: sg.Frontier, tmp_path: Path
) -> None:
    found = without_timeline
    assert found.of == "kept" and found.peak_before is None
    assert found.plans[0].budget == "1x less kept" and found.plans[0].kept_bytes == profile.kept_bytes
    assert found.plans[-1].kept_bytes < profile.kept_bytes / 4
    assert all(plan.kept_bytes <= budget for plan, budget in zip(found.plans, found.budgets, strict=True))
    assert found.plot(tmp_path / "kept.png").exists()
    data = page_data(found)
    check(data)
    assert data["of"] == "kept" and data["untouched"]["peak"] is None and data["timeline"] == []
    assert all(row["slowdown"] is None and row["peak"] is None for row in data["plans"])  # nobody knows
    assert [row["added"] for row in data["plans"]] == [plan.seconds for plan in found.plans]
    assert found.save(tmp_path / "page.html").exists()


def test_budgets_may_be_given(profile: sg.Profile) -> None:
    found = sg.frontier(profile, ["20MiB", 24 * MIB, "1MiB"], calibration=SPEEDS)
    assert found.budgets == (24 * MIB, 20 * MIB)
    assert found.unmet == ("1MiB",)
    assert "no plan meets 1MiB" in str(found)
    assert [plan.seconds for plan in found.plans] == [
        pytest.approx(sg.plan(profile, budget, calibration=SPEEDS).seconds, rel=1e-2) for budget in found.budgets
    ]


def test_a_budget_beside_the_default_ones_is_swept_too(profile: sg.Profile, few: None) -> None:
    found = sg.frontier(profile, also="3x", calibration=SPEEDS)
    place = found.within("3x")
    assert found.of == "kept" and found.plans[place].budget == "3x less kept"
    assert found.budgets[place] == profile.kept_bytes // 3
    assert found.within(0.3) == place + 1


def test_a_budget_below_all_plans_has_none(swept: sg.Frontier) -> None:
    assert swept.within(swept.budgets[-1]) == len(swept.plans) - 1
    with pytest.raises(BudgetError, match="no plan of this frontier meets 1KiB"):
        swept.within("1KiB")


def test_the_settings_are_those_of_a_plan(profile: sg.Profile, swept: sg.Frontier, few: None) -> None:
    found = sg.frontier(profile, ["28MiB"], allow="exact", reserve="2MiB", calibration=SPEEDS)
    (plan,) = found.plans
    assert plan.error == 0 and found.fixed_bytes == swept.fixed_bytes + 2 * MIB
    assert all(plan.error <= 0.03 for plan in sg.frontier(profile, max_error=0.03, calibration=SPEEDS).plans)


def test_a_slower_plan_for_more_budget_is_replaced(profile: sg.Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the solver had stopped early at a larger budget."""
    traced = Draft.traced

    def early(draft: Draft, bound: Bound, tolerance: Tolerance, **how: bool) -> Any:
        plan, events = traced(draft, bound, tolerance, **how)
        return (replace(plan, seconds=1e3), events) if bound.text == "30MiB" else (plan, events)

    monkeypatch.setattr(Draft, "traced", early)
    found = sg.frontier(profile, ["30MiB", "24MiB", "20MiB"], calibration=SPEEDS)
    assert [plan.budget for plan in found.plans] == ["24MiB", "20MiB"]


MISTAKES = [([], "found none"), (["20MiB", "4x"], "all in bytes"), (["much"], "expected bytes such as")]


@pytest.mark.parametrize(("budgets", "message"), MISTAKES)
def test_budgets_that_do_not_go_together_are_refused(profile: sg.Profile, budgets: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        sg.frontier(profile, budgets, calibration=SPEEDS)


def test_budgets_that_nothing_meets_are_an_error(profile: sg.Profile) -> None:
    with pytest.raises(BudgetError, match="no plan meets 2KiB"):
        sg.frontier(profile, ["1KiB", "2KiB"], calibration=SPEEDS)


def test_a_model_that_keeps_next_to_nothing_has_one_plan() -> None:
    model = nn.Linear(2, 2)
    found = sg.frontier(sg.profile(model, model.weight.new_ones(1, 2), fake=True), calibration=SPEEDS)
    assert len(found.plans) == 1 and found.plans[0].actions == ()
    frontier_page(page_data(found))


def test_progress_is_told_budget_by_budget(profile: sg.Profile) -> None:
    told: list[tuple[int, int, str]] = []
    sg.frontier(profile, ["30MiB", "24MiB"], calibration=SPEEDS, progress=lambda *step: told.append(step))
    assert told[-3:] == [(0, 2, "budget 24MiB"), (1, 2, "budget 30MiB"), (2, 2, "done")]


# --- a value ---


def test_a_frontier_comes_back_from_json_as_it_was(swept: sg.Frontier, without_timeline: sg.Frontier) -> None:
    for found in (swept, without_timeline):
        text = found.to_json()
        assert json.loads(text)["type"] == "Frontier"
        assert sg.Frontier.from_json(text) == found


def test_json_that_lacks_a_plan_is_refused(swept: sg.Frontier) -> None:
    data = swept.to_dict()
    with pytest.raises(SpecError, match="a budget and a timeline for each plan"):
        sg.Frontier.from_dict({**data, "plans": data["plans"][1:]})
    with pytest.raises(SpecError, match="model"):
        sg.Frontier.from_dict({name: item for name, item in data.items() if name != "model"})


def test_the_table_has_a_line_for_each_plan(swept: sg.Frontier) -> None:
    text = str(swept)
    lines = text.splitlines()
    assert lines[0] == f"{len(swept.plans)} plans for GPT2LMHeadModel on cpu, by budget for the peak"
    assert f"peaks at {human_bytes(swept.peak_before)}" in lines[1]
    rows = [line for line in lines if "x " in line and "MiB" in line]
    assert len(rows) == len(swept.plans)
    assert rows[0].split() == f"{swept.plans[0].budget} 32.7 MiB 34.5 MiB 1.000x exact -".split()
    assert max(map(len, lines)) <= 120


def test_it_is_drawn_to_the_path_given(swept: sg.Frontier, tmp_path: Path) -> None:
    assert swept.plot(tmp_path / "new" / "frontier.svg").stat().st_size > 1000


# --- the page ---


def test_the_page_gets_data_that_go_together(swept: sg.Frontier) -> None:
    data = page_data(swept)
    check(data)
    assert json.loads(json.dumps(data)) == data
    assert 0 < data["backward"] < 1
    assert len(data["timeline"]) <= 600
    assert {row["need"] for row in data["storages"]} <= set(NEEDS)


def test_the_peaks_of_the_timelines_are_those_of_the_plans(swept: sg.Frontier) -> None:
    data = page_data(swept)
    assert max(data["timeline"]) == data["untouched"]["peak"] == swept.peak_before
    for row, plan in zip(data["plans"], swept.plans, strict=True):
        assert max(row["timeline"]) == row["peak"] == plan.peak_bytes
        assert row["budget"] >= row["peak"]


def test_what_is_held_adds_up_to_what_is_kept(swept: sg.Frontier) -> None:
    data = page_data(swept)
    left_out = swept.kept_before - sum(row["bytes"] for row in data["storages"])
    assert 0 <= left_out <= 1e-3 * swept.kept_before
    for row, plan in zip(data["plans"], swept.plans, strict=True):
        for_regions = sum(action.after for action in plan.actions if not action.keys)
        assert sum(row["held"]) + left_out + for_regions == row["kept"]


def test_copies_that_are_decided_together_are_held_at_the_first() -> None:
    def block(path: str, size: int, key: tuple[str, int, int] | None) -> Block:
        return Block(path=path, module="Linear", need="VALUES", bytes=size, key=key)

    keys = (("a", 0, 0), ("b", 0, 0))
    action = sg.Action(
        site="a:x", path="a", module="Linear", need="VALUES", keys=keys, what="quant()", before=200, after=30
    )
    told = {"model": "", "device": "", "kept_before": 207, "kept_bytes": 37, "peak_before": 300, "peak_bytes": 90}
    found = sg.Frontier(
        model="",
        device="",
        torch="",
        of="peak",
        kept_before=207,
        peak_before=300,
        timeline=(300,),
        blocks=(block("a", 100, keys[0]), block("b", 100, keys[1]), block("c", 7, None)),
        plans=(sg.Plan(budget="100 B", actions=(action,), **told),),  # type: ignore[arg-type]
        budgets=(100,),
        timelines=((90,),),
    )
    (row,) = page_data(found)["plans"]
    assert row["actions"] == ["quant()", "quant()", "keep"]
    assert row["held"] == [30, 0, 7]


def test_small_storages_share_a_row_if_they_are_enough_to_show(profile: sg.Profile) -> None:
    found = sg.frontier(profile, ["32MiB"], min_bytes=MIB, calibration=SPEEDS)
    rows = [block for block in found.blocks if block.key is None]
    assert {block.path for block in rows} <= {"", "transformer", "lm_head"}
    assert any("small storages" in block.savers[0] for block in rows)
    assert sum(block.bytes for block in found.blocks) == profile.kept_bytes


def test_a_long_timeline_is_shortened_and_keeps_its_peaks() -> None:
    events = [(number * 7919) % 1009 for number in range(2270)]
    events[1234] = 5000
    short = coarse(events)
    assert len(short) == 600 and max(short) == 5000 and short[1234 * 600 // 2270] == 5000
    assert coarse(events[:5]) == tuple(events[:5]) and coarse([]) == ()


def test_the_page_is_written_with_the_plan_it_begins_with(swept: sg.Frontier, tmp_path: Path) -> None:
    path = swept.save(tmp_path / "new" / "frontier.html", chosen=3)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and '"chosen":3' in text
    assert "GPT2LMHeadModel" in text and "src=" not in text
