from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import Result
from torch import nn
from typer.testing import CliRunner

import slimgrad as sg
from slimgrad.cli.main import app
from slimgrad.spec import Value
from tests.planner.models import SPEEDS


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Value]]:
    """One value of each kind, in files."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.ReLU())
    batch = torch.randn(512, 64)
    profile = sg.profile(model, batch, lambda output: output.square().mean())
    plans = [sg.plan(profile, budget, calibration=SPEEDS) for budget in ("1x", "2x")]
    run = sg.apply(model, "lossless")
    model(batch).square().mean().backward()
    values: dict[str, Value] = {
        "plan": plans[0],
        "smaller": plans[1],
        "profile": profile,
        "report": run.report(),
        "frontier": sg.frontier(profile, ["1x", "2x"], calibration=SPEEDS),
        "error": sg.GradError(what="quant()", parameters=()),
    }
    run.remove()
    folder = tmp_path_factory.mktemp("saved")
    for name, value in values.items():
        (folder / f"{name}.json").write_text(value.to_json())
    return {name: (folder / f"{name}.json", value) for name, value in values.items()}


def slimgrad(*args: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, args)])


@pytest.mark.parametrize("name", ["plan", "profile", "report", "frontier", "error"])
def test_what_was_saved_is_printed(saved: dict[str, tuple[Path, Value]], name: str) -> None:
    path, value = saved[name]
    shown = slimgrad(path)
    assert shown.exit_code == 0, shown.output
    assert shown.output == f"{value}\n"


def test_a_plan_is_explained_in_words(saved: dict[str, tuple[Path, Value]]) -> None:
    path, plan = saved["smaller"]
    assert isinstance(plan, sg.Plan)
    assert slimgrad(path, "--explain").output == f"{plan.explain()}\n"


def test_two_plans_are_told_apart(saved: dict[str, tuple[Path, Value]]) -> None:
    shown = slimgrad(saved["plan"][0], "--against", saved["smaller"][0])
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("budget 1x less kept -> 2x less kept\n")
    same = slimgrad(saved["plan"][0], "--against", saved["plan"][0])
    assert "all actions are the same" in same.output


def test_only_plans_are_compared_and_explained(saved: dict[str, tuple[Path, Value]]) -> None:
    plan, profile = saved["plan"][0], saved["profile"][0]
    for words in ((plan, "--against", profile), (profile, "--against", plan), (profile, "--explain")):
        refused(slimgrad(*words), "profile.json is a Profile")


def test_a_file_that_is_not_there_is_an_error_in_one_line(tmp_path: Path) -> None:
    refused(slimgrad(tmp_path / "nowhere.json"), "nowhere.json: No such file or directory")


MISTAKES = [
    ("no json", "this is not JSON"),
    ("[]", "expected a JSON object"),
    ('{"type": "Poem"}', "expected JSON of type Plan, Frontier, Profile, Report, GradError; found 'Poem'"),
    ('{"type": "Plan", "version": 99}', "this slimgrad reads version 1, the text has 99"),
    ('{"type": "Plan", "version": 1, "actions": []}', "this is not a whole Plan"),
    ('{"type": "Report", "version": 1}', "this is not a whole Report"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_a_file_of_something_else_is_an_error_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(text)
    refused(slimgrad(path), message)


def test_a_file_of_bytes_is_an_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "odd.png").write_bytes(b"\x89PNG\xff\xfe")
    refused(slimgrad(tmp_path / "odd.png"), "it is not text")


def test_a_value_that_was_edited_is_read_as_it_is(saved: dict[str, tuple[Path, Value]], tmp_path: Path) -> None:
    data = json.loads(saved["plan"][0].read_text())
    data["budget"] = "my own"
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(data))
    assert "budget my own" in slimgrad(path).output


EDITS = [
    ("plan", "recompute", "0.1", "Plan.recompute: expected a list, found '0.1'"),
    ("plan", "kept_bytes", "12", "Plan.kept_bytes: expected a whole number, found '12'"),
    ("profile", "storages", None, "Profile.storages: expected a list, found null"),
    ("report", "notes", "none", "Report.notes: expected a list, found 'none'"),
    ("frontier", "budgets", ["much", 1], "Frontier.budgets: number 1: expected a whole number, found 'much'"),
    ("error", "parameters", [3], "GradError.parameters: number 1: expected a JSON object"),
]


@pytest.mark.parametrize(("name", "field", "item", "message"), EDITS)
def test_a_field_of_another_type_is_an_error_in_one_line(
    saved: dict[str, tuple[Path, Value]], tmp_path: Path, name: str, field: str, item: object, message: str
) -> None:
    path = tmp_path / "edited.json"
    path.write_text(json.dumps({**json.loads(saved[name][0].read_text()), field: item}))
    refused(slimgrad(path), message)


def refused(shown: Result, message: str) -> None:
    assert shown.exit_code == 2, shown.output
    assert message in shown.stderr
    assert len(shown.stderr.splitlines()) == 1
    assert "Traceback" not in shown.output
