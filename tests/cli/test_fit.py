from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import slimgrad as sg
from slimgrad.cli.main import app
from slimgrad.planner import timing
from tests.planner.models import SPEEDS, made


def factory() -> tuple[Any, ...]:
    return made("gpt2")


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "speeds_of", lambda *args: SPEEDS)
    monkeypatch.setattr(timing, "worth_timing", lambda *args: [])


def ran(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["fit", "tests.cli.test_fit:factory", *arguments])


def test_a_real_step_is_run_and_told(tmp_path: Path) -> None:
    result = ran("--budget", "12MiB", "--json", str(tmp_path / "plan.json"))
    assert result.exit_code == 0, result.output
    assert "A real step held" in result.output
    assert sg.Plan.from_json((tmp_path / "plan.json").read_text()).budget == "12MiB"


def test_the_largest_batch_is_found() -> None:
    result = ran("--budget", "8MiB", "--max-batch", "--allow", "derive,lossless")
    assert result.exit_code == 0, result.output
    assert "the largest batch is" in result.output


def test_what_does_not_fit_is_one_line_and_exit_code_2() -> None:
    result = ran("--budget", "1MiB")
    assert result.exit_code == 2
    assert "smallest reachable peak" in result.output and "Traceback" not in result.output


def test_a_wrong_budget_is_said_before_anything_runs() -> None:
    result = ran("--budget", "12 parsecs")
    assert result.exit_code == 2 and "budget: expected bytes" in result.output
