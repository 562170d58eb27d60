from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimgrad.cli.main import app


def shown(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["table", *words])
    return result.exit_code, result.output


def test_tables_are_printed_and_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "gelu.png"
    code, text = shown("gelu", "--bits", "1", "-b", "2", "--plot", str(picture))
    assert code == 0, text
    assert "in 1 bit on [-10, 10]" in text and "error 0.0405625" in text
    assert picture.stat().st_size > 10_000


def test_parameters_are_given_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIMGRAD_CACHE", str(tmp_path))
    code, text = shown("softplus", "-b", "1", "--set", "beta=2.0")
    assert code == 0 and text.startswith("softplus(beta=2.0, threshold=20.0) in 1 bit")


MISTAKES = [(["gelo"], "known are gelu"), (["elu", "--set", "alpha"], "NAME=VALUE")]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_mistakes_are_said_in_one_line(words: list[str], message: str) -> None:
    code, text = shown(*words)
    assert code == 2 and message in text and "Traceback" not in text
