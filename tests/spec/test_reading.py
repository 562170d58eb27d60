"""JSON that was edited by hand: what is wrong with it is said when it is read, not when it is used."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slimgrad as sg
from slimgrad.rules import At, Operands
from slimgrad.rules.rule import AnyOf
from slimgrad.spec import Value
from tests.planner.models import SPEEDS

Data = dict[str, Any]
Edit = Callable[[Data], object]


@pytest.fixture(scope="module")
def values() -> dict[str, Value]:
    """One of each kind."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.ReLU())
    profile = sg.profile(model, torch.randn(512, 64), lambda output: output.square().mean(), fake=True)
    found = (
        profile,
        sg.plan(profile, "2x", calibration=SPEEDS),
        sg.frontier(profile, ["1x", "2x"], calibration=SPEEDS),
        sg.Sensitivity(model="Sequential", errors={"Linear": 0.5}),
        SPEEDS,
    )
    return {type(value).__name__: value for value in found}


def put(name: str, item: object) -> Edit:
    return lambda data: data.__setitem__(name, item)


def within(name: str, edit: Edit) -> Edit:
    """The edit, in the first of a list."""
    return lambda data: edit(data[name][0])


def action(name: str, item: object) -> Edit:
    return within("actions", put(name, item))


MISTAKES: list[tuple[str, Edit, str]] = [
    ("Plan", put("actions", None), "Plan.actions: expected a list, found null"),
    ("Plan", put("actions", {}), "Plan.actions: expected a list, found {}"),
    ("Plan", put("actions", ["a"]), "Plan.actions: number 1: expected a JSON object of type 'Action', found 'a'"),
    ("Plan", lambda data: data.pop("actions"), "Plan: the JSON lacks actions"),
    ("Plan", lambda data: data.pop("kept_before"), "Plan: the JSON lacks kept_before"),
    ("Plan", put("foo", 1), "Plan: there is no field foo; there are model, device,"),
    ("Plan", put("recompute", None), "Plan.recompute: expected a list, found null"),
    ("Plan", put("recompute", "0.1"), "Plan.recompute: expected a list, found '0.1'"),
    ("Plan", put("recompute", [5]), "Plan.recompute: number 1: expected text, found 5"),
    ("Plan", put("fused", None), "Plan.fused: expected a list, found null"),
    ("Plan", put("fused", ["1"]), "Plan.fused: number 1: expected a list, found '1'"),
    ("Plan", put("fused", [["1", "magic()"]]), "Plan: cannot read 'magic()': unknown codec"),
    ("Plan", put("boundaries", [["a"]]), "Plan.boundaries: number 1: expected a list of 2, found"),
    ("Plan", put("boundaries", [["a", None]]), "expected text, found null"),
    ("Plan", put("boundaries", [["a", "magic()"]]), "Plan: cannot read 'magic()': unknown codec"),
    ("Plan", put("kept_bytes", "12"), "Plan.kept_bytes: expected a whole number, found '12'"),
    ("Plan", put("kept_bytes", 1.5), "Plan.kept_bytes: expected a whole number, found 1.5"),
    ("Plan", put("kept_bytes", True), "Plan.kept_bytes: expected a whole number, found True"),
    ("Plan", put("fixed_bytes", None), "Plan.fixed_bytes: expected a whole number, found null"),
    ("Plan", put("seconds", "x"), "Plan.seconds: expected a number, found 'x'"),
    ("Plan", put("error", math.nan), "Plan.error: expected a number, found nan"),
    ("Plan", put("budget", 5), "Plan.budget: expected text, found 5"),
    ("Plan", put("least", "x"), "Plan.least: expected a whole number, found 'x'"),
    ("Plan", put("least", -1), "Plan: least must be a number of bytes, 0 or more; found -1"),
    ("Plan", action("what", None), "Plan.actions: number 1: Action.what: expected text, found null"),
    ("Plan", action("what", 4), "Action.what: expected text, found 4"),
    ("Plan", action("what", "magic()"), "Plan.actions: number 1: Action: cannot read 'magic()'"),
    ("Plan", action("what", "head: quant(bits=4)"), "expected codecs alone, as 'quant(bits=4); lossless()'"),
    ("Plan", action("keys", None), "Action.keys: expected a list, found null"),
    ("Plan", action("keys", "abc"), "Action.keys: expected a list, found 'abc'"),
    ("Plan", action("keys", [["a", 0]]), "Action.keys: number 1: expected a list of 3, found"),
    ("Plan", action("keys", [["a", "b", 0]]), "Action.keys: number 1: number 2: expected a whole number, found 'b'"),
    ("Plan", action("before", "12"), "Action.before: expected a whole number, found '12'"),
    ("Plan", action("foo", 1), "Plan.actions: number 1: Action: there is no field foo"),
    ("Plan", within("actions", lambda data: data.pop("what")), "Action: the JSON lacks what"),
    ("Profile", put("sites", [1]), "Profile.sites: number 1: expected a JSON object of type 'Site', found 1"),
    ("Profile", put("meta", None), "Profile.meta: expected an object, found null"),
    ("Profile", put("timeline", 1), "Profile.timeline: expected a JSON object of type 'Timeline', found 1"),
    ("Profile", within("sites", put("need", "greed")), "Site.need: expected one of 'nothing', 'weight', "),
    ("Profile", within("sites", put("shape", "12")), "Site.shape: expected a list, found '12'"),
    ("Profile", within("storages", put("savers", [None])), "Storage.savers: number 1: expected a whole number"),
    ("Frontier", put("plans", [1]), "Frontier.plans: number 1: expected a JSON object of type 'Plan', found 1"),
    ("Frontier", put("timelines", [["a"], []]), "Frontier.timelines: number 1: number 1: expected a whole number"),
    ("Frontier", within("plans", put("recompute", "ab")), "Plan.recompute: expected a list, found 'ab'"),
    ("Frontier", lambda data: data.update(plans=[], budgets=[], timelines=[]), "Frontier: expected plans, found none"),
    ("Calibration", lambda data: data.pop("rates"), "Calibration: the JSON lacks rates"),
    ("Calibration", put("rates", {"fused": 1}), "Calibration.rates: 'fused': expected a JSON object of type 'Rate'"),
    ("Calibration", put("copy", "fast"), "Calibration.copy: expected a number, found 'fast'"),
    ("Sensitivity", put("errors", {"Linear": math.nan}), "Sensitivity.errors: 'Linear': expected a number, found nan"),
    ("Sensitivity", put("errors", [0.5]), "Sensitivity.errors: expected an object, found [0.5]"),
]


@pytest.mark.parametrize(("name", "edit", "message"), MISTAKES, ids=[f"{n}-{m}" for n, _, m in MISTAKES])
def test_what_was_edited_wrongly_is_refused_when_it_is_read(
    values: dict[str, Value], name: str, edit: Edit, message: str
) -> None:
    data = json.loads(values[name].to_json())
    edit(data)
    with pytest.raises(sg.SpecError) as found:
        type(values[name]).from_json(json.dumps(data))
    assert message in str(found.value)


def test_what_was_not_edited_is_read_as_it_was(values: dict[str, Value]) -> None:
    for value in values.values():
        assert type(value).from_json(value.to_json()) == value


def test_fields_that_may_be_left_out_may(values: dict[str, Value]) -> None:
    data = json.loads(values["Plan"].to_json())
    for name in ("recompute", "fused", "boundaries", "peak_bytes", "seconds"):
        data.pop(name)
    found = sg.Plan.from_json(json.dumps({**data, "peak_before": None, "error": 0}))
    assert found.recompute == found.fused == () and found.peak_before is None


@pytest.mark.parametrize("text", ["", "\x00", None, 5, b"\xff", Path("plan.json")])
def test_what_is_no_json_text_is_refused(text: Any) -> None:
    with pytest.raises(sg.SpecError, match="this is not JSON"):
        sg.Plan.from_json(text)


@pytest.mark.parametrize("data", [None, [], "Plan", 3])
def test_what_is_no_object_is_refused(data: Any) -> None:
    with pytest.raises(sg.SpecError, match="expected a JSON object of type 'Plan', found"):
        sg.Plan.from_dict(data)


def test_measured_gradients_may_be_nan() -> None:
    """A training that fell apart is told as it is."""
    row = sg.ParameterError(name="weight", exact=math.nan, error=math.inf, cosine=0.0)
    found = sg.GradError.from_json(sg.GradError(what="quant()", parameters=(row,)).to_json())
    assert math.isnan(found.parameters[0].exact)


@pytest.mark.parametrize(
    "selector", [Operands(("head",), 8), AnyOf((sg.Need.MASK,)), At(frozenset({("a", 0, 1), ("b", 0, 2)}))]
)
def test_what_selects_sites_is_read_by_its_types(selector: Value) -> None:
    assert type(selector).from_dict(json.loads(json.dumps(selector.to_dict()))) == selector
    with pytest.raises(sg.SpecError, match="there is no field foo"):
        type(selector).from_dict({**selector.to_dict(), "foo": 1})
