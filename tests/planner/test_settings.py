"""What the planner is given: wrong things are refused before anything is measured or run."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import slimgrad as sg
from slimgrad.planner import fitting, largest, timing
from slimgrad.planner.bounds import bound_of
from slimgrad.planner.offers import ALLOWED, EXACT, allowed
from slimgrad.planner.sensitivity import kind_of
from slimgrad.spec.budgets import MOST, as_bytes, as_number, bytes_of
from tests.models import hook_count
from tests.planner.models import FAST_OPS, SPEEDS

LOSS = nn.functional.cross_entropy


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))


def batch(size: int = 256) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 64), torch.randint(0, 8, (size,))


@pytest.fixture(scope="module")
def profile() -> sg.Profile:
    return sg.profile(network(), batch(), LOSS, fake=True)


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured, nor profiled for a plan, unless it is given SPEEDS."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("this was to be refused before")

    monkeypatch.setattr(timing, "speeds_of", refuse)


# --- numbers ---


@pytest.mark.parametrize("budget", [10**30, "99999999999TiB", 1e300, f"{'9' * 400}B"])
def test_a_budget_beyond_all_devices_bounds_nothing(profile: sg.Profile, budget: Any) -> None:
    assert bound_of(budget, 1).peak == MOST
    plan = sg.plan(profile, budget, calibration=SPEEDS)
    assert plan.peak_bytes == sg.plan(profile, "1TiB", calibration=SPEEDS).peak_bytes


@pytest.mark.parametrize("budget", [1.5, 2.5, np.float64(4.1), np.float32(1.25)])
def test_a_number_between_ratios_and_bytes_is_refused(profile: sg.Profile, budget: Any) -> None:
    with pytest.raises(sg.SpecError, match=r"budget: .* is neither a ratio, which is 1 or less \(0.25, or '4x'"):
        sg.plan(profile, budget)


@pytest.mark.parametrize("budget", ["12", "0.25", "", "25%", "12G", "nan", "-5GiB", math.nan, [1], np.bool_(True)])
def test_what_is_no_budget_is_told_how_budgets_are_written(profile: sg.Profile, budget: Any) -> None:
    message = r"budget: expected bytes such as '12GiB', or a ratio such as 0.25 or '4x'"
    for ask in (lambda: sg.plan(profile, budget), lambda: sg.fit(network(), batch(), budget, LOSS)):
        with pytest.raises(sg.SpecError, match=message):
            ask()


def test_numbers_of_numpy_are_numbers(profile: sg.Profile) -> None:
    settings = {"reserve": np.int32(4096), "min_bytes": np.int64(8192), "max_error": np.float32(0.25)}
    found = sg.plan(profile, np.int64(2**20), max_slowdown=np.float64(3), calibration=SPEEDS, **settings)
    plain = sg.plan(profile, 2**20, max_slowdown=3, reserve=4096, min_bytes=8192, max_error=0.25, calibration=SPEEDS)
    assert found == plain == sg.Plan.from_json(found.to_json())
    assert bound_of(np.float32(0.25), 1000).kept == 250


def test_sizes_are_bytes_as_text_or_whole_numbers() -> None:
    assert as_bytes("1KiB") == as_bytes(1024) == as_bytes(1024.0) == as_bytes(np.int16(1024)) == 1024
    assert as_bytes(10**30) == bytes_of("99999999999TiB") == MOST
    assert as_number(True) is as_number("1") is as_number(math.nan) is as_number(None) is None
    for wrong in (-1, 1.5, True, None, "much", torch.tensor(1)):
        with pytest.raises(sg.SpecError, match="reserve: expected bytes"):
            as_bytes(wrong, "reserve")


# --- names ---


def test_all_that_is_exact_may_be_one_of_several_names() -> None:
    assert allowed("exact") == allowed(["exact"]) == EXACT
    assert allowed(["exact", "quant"]) == (*EXACT, "quant")
    assert allowed(("quant", "derive", "exact", "quant")) == ("quant", "derive", "lossless", "recompute")
    assert allowed(None) == ALLOWED


@pytest.mark.parametrize("allow", [[], (), set()])
def test_to_allow_nothing_is_refused(profile: sg.Profile, allow: Any) -> None:
    with pytest.raises(sg.SpecError, match="leave it out for the default, or say allow='exact'"):
        sg.plan(profile, "2x", allow=allow)


# --- settings ---

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"allow": 5}, "allow: expected 'exact' or a list of names such as .*; found 5"),
    ({"allow": ""}, "allow: expected 'exact' or some of lossless, .*; found ''"),
    ({"allow": [None]}, "found None"),
    ({"allow": [["quant"]]}, r"found \['quant'\]"),
    ({"max_error": "x"}, "max_error: expected a relative error of the gradient, 0 or more; found 'x'"),
    ({"max_error": True}, "max_error: .* found True"),
    ({"reserve": "x"}, "reserve: expected bytes such as '512KiB', '2MiB' or '12GB', found 'x'"),
    ({"reserve": None}, "reserve: expected bytes, 0 or more, .* found None"),
    ({"min_bytes": "x"}, "min_bytes: expected bytes"),
    ({"min_bytes": -1}, "min_bytes: expected bytes, 0 or more, .* found -1"),
    ({"calibration": 3}, r"calibration: expected what sg.calibrate\(\) returns, or None; found int"),
    ({"sensitivity": 3}, r"sensitivity: expected what sg.sensitivity\(model, batch\) returns, or None; found int"),
]
SLOW: list[tuple[dict[str, Any], str]] = [
    ({"max_slowdown": slow}, "max_slowdown: expected 1.1 for 10 % more time, 1 or more; found")
    for slow in ("x", 0.5, True, math.nan, [])
]


@pytest.mark.parametrize(("settings", "message"), [*WRONG, *SLOW])
def test_a_wrong_setting_is_refused_before_anything_runs(
    profile: sg.Profile, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    for module in (fitting, largest):
        monkeypatch.setattr(module, "profile", None)
    asks: list[Callable[[], Any]] = [
        lambda: sg.plan(profile, "2x", **settings),
        lambda: sg.fit(network(), batch(), "2x", LOSS, **settings),
        lambda: sg.max_batch(network(), batch(), "1MiB", LOSS, **settings),
    ]
    if "max_slowdown" not in settings:
        asks.append(lambda: sg.frontier(profile, ["2x"], **settings))
    for ask in asks:
        with pytest.raises(sg.SpecError, match=message):
            ask()


@pytest.mark.parametrize("given", [network(), None, "profile.json"])
def test_a_plan_is_made_of_a_profile(given: Any) -> None:
    for ask in (lambda: sg.plan(given, "2x"), lambda: sg.frontier(given)):
        with pytest.raises(sg.SpecError, match=r"profile: expected what sg.profile\(model, batch\) returns; found"):
            ask()


@pytest.mark.parametrize("budgets", [3, "4x", 0.5])
def test_a_frontier_takes_a_list_of_budgets(profile: sg.Profile, budgets: Any) -> None:
    with pytest.raises(sg.SpecError, match="frontier: expected a list of budgets, such as"):
        sg.frontier(profile, budgets)


def test_plans_differ_from_plans_alone(profile: sg.Profile) -> None:
    with pytest.raises(sg.SpecError, match="diff: expected another plan, found int"):
        sg.plan(profile, "1x", calibration=SPEEDS).diff(3)


# --- models, batches and optimizers ---


def test_what_is_no_model_is_refused() -> None:
    for ask in (sg.fit, sg.max_batch):
        with pytest.raises(sg.UnsupportedModelError, match=r"expected an nn.Module, found function"):
            ask(lambda x: x, batch(), "1MiB", LOSS)


def test_what_is_no_optimizer_is_refused() -> None:
    for ask in (sg.fit, sg.max_batch):
        with pytest.raises(sg.UnsupportedModelError, match=r"must be a torch.optim.Optimizer, found str"):
            ask(network(), batch(), "1MiB", LOSS, optimizer="adam")


def test_a_model_with_nothing_to_train_is_refused() -> None:
    model = network().requires_grad_(False)
    for ask in (sg.fit, sg.max_batch):
        with pytest.raises(sg.BatchError, match="all parameters of the model are frozen, and no tensor of the batch"):
            ask(model, batch(), "1MiB", LOSS)


def test_what_goes_into_a_frozen_model_may_be_what_is_trained() -> None:
    x, target = batch()
    fitted = sg.fit(
        network().requires_grad_(False), (x.requires_grad_(), target), "1x", LOSS, calibration=SPEEDS, min_bytes=0
    )
    fitted.run.remove()


def test_a_loss_without_a_gradient_is_an_error_that_leaves_the_model_as_it_was() -> None:
    model = network()
    with pytest.raises(sg.BatchError, match="the loss does not depend on anything that requires a gradient"):
        sg.fit(model, batch(), "1x", lambda output, target: output.detach().sum(), calibration=SPEEDS)
    assert hook_count(model) == 0 and all(p.grad is None for p in model.parameters())


def test_a_batch_may_be_a_named_tuple() -> None:
    pair = namedtuple("pair", ("x", "target"))
    found = sg.max_batch(network(), pair(*batch()), "1MiB", LOSS, calibration=SPEEDS)
    assert found.size == sg.max_batch(network(), batch(), "1MiB", LOSS, calibration=SPEEDS).size > 0


def test_an_empty_batch_cannot_be_made_larger() -> None:
    with pytest.raises(sg.BatchError, match="max_batch: the batch is empty"):
        sg.max_batch(network(), batch(0), "1MiB", LOSS)


@pytest.mark.parametrize("most", [0, -1, "many", None, True])
def test_the_largest_batch_has_an_example_at_the_least(most: Any) -> None:
    with pytest.raises(sg.SpecError, match="max_batch: most is a number of examples, 1 or more; found"):
        sg.max_batch(network(), batch(), "1MiB", LOSS, most=most)


def test_no_state_is_reserved_for_what_is_frozen() -> None:
    model = network()
    model[0].requires_grad_(False)
    fitted = sg.fit(model, batch(), "4MiB", LOSS, optimizer=torch.optim.AdamW(model.parameters()), calibration=SPEEDS)
    there = sum(t.nbytes for t in (*model.parameters(), *batch()))
    assert fitted.plan.fixed_bytes - there == 2 * sum(p.nbytes for p in model[2].parameters())
    fitted.run.remove()


# --- devices ---


@pytest.mark.parametrize("device", ["foo", "cpu:x", "meta", 3.5])
def test_a_device_that_is_none_is_not_measured(device: Any) -> None:
    with pytest.raises(sg.SpecError, match=r"calibrate: .* 'cpu' or 'cuda:0'"):
        sg.calibrate(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_a_device_that_is_not_here_is_not_measured() -> None:
    with pytest.raises(sg.SpecError, match=r"expected a device that is here, .* found 'cuda' \("):
        sg.calibrate("cuda")


def test_sensitivity_is_measured_of_storages_of_some_bytes() -> None:
    with pytest.raises(sg.SpecError, match="least: expected bytes, 0 or more"):
        sg.sensitivity(network(), batch(), LOSS, least=-1)


EVERYTHING = ["lossless", "derive", "recompute", "fewbit", "quant", "quant-low", "topk", "bounded", "blocks"]


@pytest.mark.parametrize("budget", ["1x", "1.5x"])
def test_where_no_error_is_borne_nothing_lossy_is_done_even_where_none_is_expected(budget: str) -> None:
    """What comes before all products spoils the gradient of none of them."""
    model = nn.Sequential(nn.Embedding(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64))
    profile = sg.profile(model, torch.randint(0, 64, (64, 64)), lambda y: y.sum(), fake=True)
    calm = sg.Sensitivity(model="", errors={kind_of(site): 0.0 for site in profile.sites})
    for sensitivity in (None, calm):
        how: dict[str, Any] = {"allow": EVERYTHING, "sensitivity": sensitivity, "calibration": FAST_OPS}
        plan = sg.plan(profile, budget, max_error=0, **how)
        assert not plan.fused and not any(codec.lossy for action in plan.actions for codec in action.codecs)
        lossy = sg.plan(profile, "3x", max_error=1, **how)
        assert lossy.error > 0 or sensitivity is not None


def test_the_smallest_that_an_error_names_is_a_ratio_that_can_be_met(profile: sg.Profile) -> None:
    with pytest.raises(sg.BudgetError) as caught:
        sg.plan(profile, "1000x", allow="exact", calibration=SPEEDS)
    smallest = caught.value.smallest
    assert smallest is not None
    assert sg.plan(profile, smallest / profile.kept_bytes, allow="exact", calibration=SPEEDS).kept_bytes == smallest
    assert all(bound_of(bytes_ / 12345678, 12345678).kept == bytes_ for bytes_ in range(1234567, 12345678, 9876))
