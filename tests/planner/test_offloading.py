"""Plans that move storages to the host: as many as the link carries while the device computes, or the device waits."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import slimgrad as sg
from slimgrad.codecs import offload
from slimgrad.kernels.transfer import Lane
from slimgrad.planner.calibration import Rate
from slimgrad.planner.choices import CARRIED
from slimgrad.runtime.run import Run
from tests.planner.models import SPEEDS, Case, made
from tests.simulated import SimulatedCuda


@pytest.fixture(scope="module")
def case() -> Case:
    return made("gpt2")


@pytest.fixture(scope="module")
def profile(case: Case) -> sg.Profile:
    """As if the step had run on a GPU."""
    found = sg.profile(*case, fake=True)
    return replace(found, meta={**found.meta, "device": "cuda:0"})


def link(bytes_per_second: float) -> sg.Calibration:
    rate = Rate(call=1e-6, pack=1 / bytes_per_second, unpack=1 / bytes_per_second)
    return replace(SPEEDS, rates={"Offload": rate})


def moved(plan: sg.Plan) -> int:
    return sum(action.before for action in plan.actions if action.what.startswith("offload"))


def planned(profile: sg.Profile, budget: str, speeds: sg.Calibration, **settings: float) -> sg.Plan:
    return sg.plan(profile, budget, allow=["offload", "lossless"], calibration=speeds, min_bytes=4096, **settings)


def test_a_link_that_carries_everything_costs_next_to_nothing(profile: sg.Profile) -> None:
    plan = planned(profile, "8x", link(1e12))
    assert plan.kept_bytes <= plan.kept_before / 8 and plan.error == 0
    assert 1 < plan.slowdown < 1.05
    assert "copied there and back while the device computes" in plan.explain()


def test_what_the_link_cannot_carry_in_time_the_device_waits_for(profile: sg.Profile) -> None:
    timeline = profile.timeline
    assert timeline is not None
    forward = planned(profile, "1.5x", link(1e12)).step_seconds / 3
    slow = profile.kept_bytes / forward / 4  # bytes per second: a quarter of what is kept, in one forward
    plans = [planned(profile, budget, link(slow)) for budget in ("1.1x", "2x", "4x", "8x")]
    waits = [plan.seconds for plan in plans]
    assert waits == sorted(waits) and plans[0].slowdown < 1.05
    for plan in plans[1:]:
        late = moved(plan) / slow - CARRIED * plan.step_seconds  # forward is shorter than the step
        assert plan.seconds >= late
    assert plans[-1].slowdown > 1.2
    with pytest.raises(sg.BudgetError, match="no plan meets 8x"):
        planned(profile, "8x", link(slow), max_slowdown=1.05)


def test_on_a_cpu_no_plan_moves_anything(case: Case) -> None:
    found = sg.profile(*case, fake=True)
    plan = sg.plan(found, "2x", allow=["offload", "derive", "quant", "lossless"], calibration=SPEEDS)
    assert moved(plan) == 0


@pytest.mark.parametrize("speed", ["slow", "fast"])
def test_what_a_plan_promises_is_what_stays(case: Case, speed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane(torch.device("cpu"), SimulatedCuda(speed))  # type: ignore[arg-type]
    monkeypatch.setattr(offload, "lane_of", lambda device: lane)
    monkeypatch.setattr(sg.Offload, "device_wanted", "cpu")
    model, batch = case
    plan = planned(sg.profile(model, batch, fake=True), "4x", link(1e12))
    plain = copy.deepcopy(model)
    run: Run = sg.apply(model, sg.Plan.from_json(plan.to_json()))
    for _ in range(3):
        for one in (model, plain):
            one.zero_grad(set_to_none=True)
            torch.manual_seed(0)
            one(**batch).loss.backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    assert run.report().kept_after == pytest.approx(plan.kept_bytes, rel=0.02)
    run.remove()
