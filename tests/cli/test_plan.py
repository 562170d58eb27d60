from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import slimgrad as sg
from slimgrad.cli import plan as command
from slimgrad.cli.main import app
from slimgrad.planner import timing
from tests.planner.models import SPEEDS

SOURCE = """
import torch
from torch import nn


def make():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.ReLU()), torch.randn(512, 64)


def loud():
    raise AssertionError("the factory was called")
"""


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The device as if it had been measured; what is asked for is told."""
    calls: list[int] = []

    def speeds_of(device: Any, progress: Any) -> sg.Calibration:
        calls.append(1)
        progress(0, 2, "copying")
        return SPEEDS

    monkeypatch.setattr(timing, "speeds_of", speeds_of)
    monkeypatch.setattr(timing, "worth_timing", lambda *args: [])
    return calls


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "planned_models.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield "planned_models"
    sys.path[:] = path
    sys.modules.pop("planned_models", None)


def slimgrad(*args: str) -> Result:
    return CliRunner().invoke(app, ["plan", *args])


def test_the_plan_is_printed_with_what_it_promises(module: str) -> None:
    shown = slimgrad(f"{module}:make", "--budget", "2x")
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("plan for Sequential on cpu, budget 2x less kept\n")
    assert "of the untouched time" in shown.output


@pytest.mark.parametrize("budget", ["2.5MiB", "2621440", "0.5", "2x"])
def test_budgets_are_bytes_or_ratios(module: str, tmp_path: Path, budget: str) -> None:
    shown = slimgrad(f"{module}:make", "-b", budget, "--json", "new/plan.json")
    assert shown.exit_code == 0, shown.output
    assert "wrote new/plan.json" in shown.output
    plan = sg.Plan.from_json((tmp_path / "new" / "plan.json").read_text())
    assert plan.peak_bytes is not None
    if "x" in budget or budget == "0.5":
        assert plan.kept_bytes <= plan.kept_before / 2
    else:
        assert plan.peak_bytes <= 2.5 * 2**20


def test_settings_are_passed_on(module: str, tmp_path: Path) -> None:
    settings = ["--allow", "derive, lossless", "--reserve", "2MiB", "--max-slowdown", "5", "--max-error", "0.1"]
    shown = slimgrad(f"{module}:make", "--budget", "2x", *settings, "--json", "plan.json")
    assert shown.exit_code == 0, shown.output
    plan = sg.Plan.from_json((tmp_path / "plan.json").read_text())
    assert plan.fixed_bytes > 2 * 2**20
    assert plan.error == 0 and plan.recompute == () and plan.slowdown <= 5
    assert "derive" in shown.output and "quant" not in shown.output


def test_all_that_is_exact_is_one_word(module: str) -> None:
    shown = slimgrad(f"{module}:make", "--budget", "2x", "--allow", "exact")
    assert shown.exit_code == 0, shown.output
    assert "gradient error none: all of it is exact" in shown.output


@pytest.mark.parametrize(("reserve", "size"), [("3000000", 3_000_000), ("1KiB", 1024), ("0", 0)])
def test_a_reserve_is_bytes_with_a_unit_or_without(module: str, tmp_path: Path, reserve: str, size: int) -> None:
    fixed = []
    for words in ([], ["--reserve", reserve]):
        shown = slimgrad(f"{module}:make", "--budget", "2x", *words, "--json", "plan.json")
        assert shown.exit_code == 0, shown.output
        fixed.append(sg.Plan.from_json((tmp_path / "plan.json").read_text()).fixed_bytes)
    assert fixed[1] - fixed[0] == size


def test_a_list_may_have_all_that_is_exact_in_it(module: str) -> None:
    shown = slimgrad(f"{module}:make", "--budget", "2x", "--allow", "exact,quant")
    assert shown.exit_code == 0, shown.output


def test_a_plan_is_explained_in_words(module: str) -> None:
    shown = slimgrad(f"{module}:make", "--budget", "2x", "--explain", "--limit", "1")
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("\n- ") == 1


@pytest.mark.parametrize("budget", ["2.5MiB", "2x"])
def test_the_page_begins_with_the_plan_that_was_asked_for(module: str, tmp_path: Path, budget: str) -> None:
    shown = slimgrad(f"{module}:make", "--budget", budget, "--html", "new/frontier.html")
    assert shown.exit_code == 0, shown.output
    assert "wrote new/frontier.html" in shown.output
    text = (tmp_path / "new" / "frontier.html").read_text()
    assert '"chosen":' in text and "Sequential" in text


def test_a_real_step_is_profiled_where_it_is_asked_for(module: str) -> None:
    shown = slimgrad(f"{module}:make", "--budget", "2x", "--real", "--device", "cpu")
    assert shown.exit_code == 0, shown.output


def test_autocast_makes_what_is_kept_smaller(module: str, tmp_path: Path) -> None:
    for name, more in (("wide", []), ("narrow", ["--autocast", "bf16"])):
        assert slimgrad(f"{module}:make", "--budget", "1x", *more, "--json", name).exit_code == 0
    wide, narrow = (sg.Plan.from_json((tmp_path / name).read_text()) for name in ("wide", "narrow"))
    assert narrow.kept_before < wide.kept_before


def test_a_budget_that_nothing_meets_is_an_error_in_one_line(module: str) -> None:
    refused(slimgrad(f"{module}:make", "--budget", "64KiB"), "no plan meets 64KiB: the smallest reachable peak is")


MISTAKES = [
    (["--budget", "much"], "budget: expected bytes such as '12GiB', or a ratio such as 0.25 or '4x'"),
    (["--budget", "fourx"], "found 'fourx'"),
    (["--budget", "inf"], "budget: expected bytes such as '12GiB', or a ratio such as 0.25 or '4x'"),
    (["--budget", "nan"], "found nan"),
    (["--budget", "1.5"], "budget: 1.5 is neither a ratio, which is 1 or less"),
    (["--budget", "-3"], "found -3.0"),
    (["--budget", "2x", "--allow", "magic"], "found 'magic'"),
    (["--budget", "2x", "--allow", ""], "allow: expected names, found none"),
    (["--budget", "2x", "--reserve", "2 spoons"], "--reserve: expected bytes such as '512KiB', '2MiB' or '12GB'"),
    (["--budget", "2x", "--device", "abacus"], "'abacus' is not a device"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_mistakes_are_said_before_anything_is_made_or_measured(
    module: str, measured: list[int], words: list[str], message: str
) -> None:
    refused(slimgrad(f"{module}:loud", *words), message)
    assert not measured


def test_a_budget_must_be_given(module: str) -> None:
    shown = slimgrad(f"{module}:make")
    assert shown.exit_code == 2 and "--budget" in shown.stderr


def test_help_has_units_and_examples() -> None:
    shown = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert all(text in shown.output for text in ("12GiB", "4x", "0.35", "--budget 12GiB --reserve 2GiB", "exact"))


def test_progress_is_shown_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with command.progress_bar() as quiet:
        quiet(1, 2, "copying")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with command.progress_bar() as loud:
        loud(1, 2, "copying")
    shown = capsys.readouterr()
    assert shown.out == "" and "copying" in shown.err


def refused(shown: Result, message: str) -> None:
    assert shown.exit_code == 2, shown.output
    assert message in shown.stderr
    assert len(shown.stderr.splitlines()) == 1
    assert "Traceback" not in shown.output
