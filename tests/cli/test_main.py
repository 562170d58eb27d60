from __future__ import annotations

import subprocess
import sys

from typer.testing import CliRunner

from slimgrad.cli.main import app


def test_help_lists_every_command() -> None:
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0
    assert all(name in shown.output for name in ("demo", "profile", "info"))


def test_version_is_one_line() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert shown.exit_code == 0
    assert shown.output.startswith("slimgrad ")
    assert len(shown.output.splitlines()) == 1


ABSENT = """
import sys
import slimgrad.cli.main
print(sorted({"matplotlib", "sklearn", "slimgrad.cli.digits"} & set(sys.modules)))
"""


def test_the_command_line_starts_without_what_only_a_command_needs() -> None:
    done = subprocess.run([sys.executable, "-c", ABSENT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_itself_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "slimgrad", "--help"], capture_output=True, text=True, check=True)
    assert "Usage: slimgrad " in done.stdout and "profile" in done.stdout


def test_an_unknown_command_is_an_error_with_code_two() -> None:
    assert CliRunner().invoke(app, ["dance"]).exit_code == 2
