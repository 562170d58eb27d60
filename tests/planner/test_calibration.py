"""Calibration: measured once, quickly, remembered, and of the right order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import slimgrad as sg
from slimgrad.planner import calibration
from slimgrad.planner.calibration import CHAINED, FUSED, GROUPED, LINK, Rate, cases_for, measure, rate_key
from slimgrad.spec import Need


@pytest.fixture(scope="module")
def speeds() -> sg.Calibration:
    """With one timed call each: what it is worth is not asked here."""
    told: list[tuple[int, int, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "SIZES", {"cpu": (2**10, 2**14), "cuda": (2**10, 2**14)})
        found = measure(torch.device("cpu"), lambda *step: told.append(step))
    steps = len(cases_for(torch.device("cpu"))) + 5
    assert [done for done, _, _ in told] == list(range(steps + 1)) and {said for _, said, _ in told} == {steps}
    return found


def test_speeds_are_positive_and_every_case_has_its_rate(speeds: sg.Calibration) -> None:
    assert speeds.copy > 1e7 and speeds.launch > 0 and all(flops > 1e7 for flops in speeds.flops.values())
    keys = [rate_key(case.codec, case.demand.need) for case in cases_for(torch.device("cpu"))]
    assert set(speeds.rates) == {*keys, FUSED, GROUPED, CHAINED}
    for rate in speeds.rates.values():
        assert min(rate.call, rate.pack, rate.unpack, rate.pack_scratch, rate.unpack_scratch) >= 0
        assert rate.seconds(2**20, 1) > 0


def test_calibrations_survive_json(speeds: sg.Calibration) -> None:
    assert sg.Calibration.from_json(speeds.to_json()) == speeds


def test_more_readers_and_more_bytes_take_longer() -> None:
    rate = Rate(call=1e-5, pack=1e-9, unpack=2e-9)
    assert rate.seconds(1000, 1) == pytest.approx(2e-5 + 3e-6)
    assert rate.seconds(1000, 3) - rate.seconds(1000, 1) == pytest.approx(2 * (1e-5 + 2e-6))


def test_what_was_not_measured_is_taken_for_a_few_passes(speeds: sg.Calibration) -> None:
    assert speeds.rate(sg.Blocks(), Need.OPERAND).seconds(10**9, 1) > 10**9 / speeds.copy
    assert speeds.rate(sg.Offload(), Need.VALUES).seconds(10**9, 1) > 2 * 10**9 / LINK


def test_an_op_takes_what_limits_it() -> None:
    speeds = sg.Calibration(device="test", torch="", copy=1e9, flops={"float32": 1e10}, launch=1e-6, rates={})
    assert speeds.op_seconds(0, 10, "float32") == 1e-6
    assert speeds.op_seconds(10**10, 10, "float32") == 1.0
    assert speeds.op_seconds(10, 10**9, "bfloat16") == 1.0  # not measured in bfloat16: float32's speed


def test_a_device_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, speeds: sg.Calibration) -> None:
    monkeypatch.setenv("SLIMGRAD_CACHE", str(tmp_path))
    calls = []
    monkeypatch.setattr(calibration, "measure", lambda *args: calls.append(1) or speeds)
    assert sg.calibrate("cpu") == sg.calibrate("cpu") == speeds
    assert len(calls) == 1


def test_what_is_measured_leaves_random_state_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIMGRAD_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "SIZES", {"cpu": (2**10, 2**14), "cuda": (2**10, 2**14)})
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    profile, before = sg.profile(model, torch.randn(4, 8), torch.sum, fake=True), torch.get_rng_state()
    assert sg.calibrate("cpu", profile=profile).operators
    assert torch.equal(before, torch.get_rng_state())


def test_the_pool_indices_that_are_timed_are_those_of_windows() -> None:
    case = next(case for case in cases_for(torch.device("cpu")) if case.demand.need is Need.INDEX)
    indices = case.make(2**10, torch.device("cpu"))
    packed = case.codec.pack(indices, case.demand)
    assert packed.nbytes == indices.numel() and torch.equal(case.codec.unpack(packed), indices)


def test_a_device_that_runs_behind_the_host_is_waited_for_after_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a step. By a made-up clock: a call takes 5 us, and to wait for the device takes 10."""
    now, done = [0.0], []

    def passes(seconds: float, what: str) -> None:
        now[0] += seconds
        done.append(what)

    monkeypatch.setattr(calibration, "_wait", lambda device: passes(1e-5, "wait"))
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: now[0])
    seconds = calibration.seconds_of(lambda: passes(5e-6, "run"), torch.device("cuda"))
    assert seconds == pytest.approx(5e-6 + 1e-5 / calibration.MOST_TOGETHER)
    assert calibration.seconds_of(lambda: passes(5e-6, "run"), torch.device("cpu")) == pytest.approx(1.5e-5)
    assert calibration.seconds_of(lambda: passes(1.0, "run"), torch.device("cuda")) == pytest.approx(1.0, rel=1e-4)
