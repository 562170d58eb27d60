"""Timing: a model's own operators, each kind run by itself on this device, for what it takes in time and in workspace.

Rates of copies and products tell a step's time to a factor of 1.3 to 3.6 on an H200: convolutions reach a tenth of what
large products do, norms and broadcasts half of what copies do. What a step takes is what all else is compared with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from slimgrad.planner.calibration import (
    SPARE_BYTES,
    Calibration,
    OperatorCost,
    Progress,
    place_of,
    seconds_of,
    speeds_of,
    usable,
)
from slimgrad.planner.costs import Costs
from slimgrad.profiler.meter import measured_step
from slimgrad.profiler.operators import runner
from slimgrad.runtime.frame import storage_of
from slimgrad.runtime.graph import tensors_in
from slimgrad.spec import Profile, Value
from slimgrad.tables.store import remembered

SHARE = 5e-4
"""Of a step's time, as far as rates tell it: kinds that take less are not worth timing."""
MOST_SECONDS = 40.0
"""For all of them; those left are told by rates. The largest come first."""
EACH_SECONDS = 0.02
"""For one, unless five runs take longer."""


@dataclass(frozen=True, kw_only=True, repr=False)
class OperatorCosts(Value):
    """By the operators' texts."""

    costs: Mapping[str, OperatorCost] = field(default_factory=dict)


def calibrate(
    device: torch.device | str | None = None, *, profile: Profile | None = None, progress: Progress | None = None
) -> Calibration:
    """The speeds of `device`, measured in seconds and then remembered for this device and version of torch. With a
    `profile` made there, those of its model's own operators too.
    """
    tell: Progress = progress or (lambda *_: None)
    place = usable(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):  # what is timed is random
        speeds = speeds_of(place, tell)
        if profile is None:
            return speeds
        texts = worth_timing(profile, speeds)
        key = f"operators 1: {place_of(place)}: {' '.join(texts)}"
        found = remembered(key, OperatorCosts, lambda: operator_costs(texts, place, tell))
    return replace(speeds, operators=found.costs)


def calibrated_for(profile: Profile, progress: Progress | None = None) -> Calibration:
    """The speeds of the profile's device with its model's operators, if that is here. Otherwise this one's: plans then
    go by these, and bring their own `calibration` if they should not.
    """
    device = torch.device(profile.device)
    is_here = device.type != "cuda" or torch.cuda.is_available()
    return calibrate(device, profile=profile, progress=progress) if is_here else calibrate("cpu", progress=progress)


def worth_timing(profile: Profile, speeds: Calibration) -> list[str]:
    """The operators that make up a step, those first that take most of it."""
    timeline = profile.timeline
    if timeline is None:
        return []
    totals = dict.fromkeys(timeline.operators, 0.0)
    for kind, seconds in zip(timeline.kinds, Costs(profile, speeds).events, strict=True):
        totals[timeline.operators[kind]] += seconds
    whole = sum(totals.values())
    found = [text for text, seconds in totals.items() if text and seconds >= SHARE * whole]
    return sorted(found, key=lambda text: -totals[text])


def operator_costs(texts: list[str], device: torch.device, progress: Progress) -> OperatorCosts:
    """What each of them takes; those that cannot run by themselves are left out."""
    found: dict[str, OperatorCost] = {}
    end = time.monotonic() + MOST_SECONDS
    for number, text in enumerate(texts):
        progress(number, len(texts), "operators of the model")
        if time.monotonic() > end:
            break
        cost = _cost(text, device)
        if cost is not None:
            found[text] = cost
    progress(len(texts), len(texts), "done")
    return OperatorCosts(costs=found)


def _cost(text: str, device: torch.device) -> OperatorCost | None:
    try:
        run = runner(text, device)
        with torch.no_grad():
            seconds = seconds_of(run, device, budget=EACH_SECONDS)
            return OperatorCost(seconds=seconds, scratch=_scratch(run, device))
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):  # too large by itself, or not made for that
        return None


def _scratch(run: Callable[[], Any], device: torch.device) -> int:
    """Bytes alive while it runs, beyond what it returns."""
    made: list[int] = []

    def step() -> None:
        storages = map(storage_of, tensors_in(run()))
        made.append(sum({s._cdata: s.nbytes() for s in storages if s is not None}.values()))

    peak = measured_step(step, device).peak
    return max(0, peak - made[0] - SPARE_BYTES)
