"""What cannot be written is said before a command begins its work."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimgrad.cli.files import check_targets, write
from slimgrad.cli.main import app
from slimgrad.errors import SlimgradError

SOURCE = """
def loud():
    raise AssertionError("the work began")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "loud_models.py").write_text(SOURCE)
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("loud_models", None)


COMMANDS = [
    ("plan", "loud_models:loud", "--budget", "2x", "--json"),
    ("plan", "loud_models:loud", "--budget", "2x", "--html"),
    ("fit", "loud_models:loud", "--budget", "2x", "--json"),
    ("profile", "loud_models:loud", "--json"),
    ("profile", "loud_models:loud", "--plot"),
    ("table", "gelu", "--plot"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=[" ".join((c[0], c[-1])) for c in COMMANDS])
@pytest.mark.parametrize(
    ("target", "why"),
    [("there", "it is a folder"), ("file/plan.png", "file is a file, not a folder"), (".", "a folder")],
)
def test_a_target_that_cannot_be_written_is_refused_before_the_work(
    folder: Path, command: tuple[str, ...], target: str, why: str
) -> None:
    refused(command, target, f"{command[-1]} cannot write {target}: ", why)
    assert sorted(os.listdir(folder)) == ["file", "loud_models.py", "there"]


def refused(command: tuple[str, ...], target: str, *messages: str) -> None:
    shown = CliRunner().invoke(app, [*command, target])
    assert shown.exit_code == 2, shown.output
    assert all(message in shown.stderr for message in messages), shown.stderr
    assert len(shown.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", [command for command in COMMANDS if command[-1] == "--plot"])
def test_a_figure_of_no_known_kind_is_refused_before_the_work(folder: Path, command: tuple[str, ...]) -> None:
    refused(command, "figure.xyz", "the suffix must be one of .png")


def test_the_folder_of_a_demo_must_be_one(folder: Path) -> None:
    refused(("demo", "--out"), "file", "--out cannot write", "file is a file, not a folder")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="everything may be written")
def test_what_may_not_be_written_is_refused(folder: Path) -> None:
    (folder / "there").chmod(0o555)
    (folder / "file").chmod(0o444)
    for path, why in (
        (folder / "there" / "deep" / "plan.json", "nothing may be written in"),
        (folder / "file", "may not"),
    ):
        with pytest.raises(SlimgradError, match=why):
            check_targets(json=path)


def test_a_new_file_may_be_in_folders_that_are_yet_to_be_made(folder: Path) -> None:
    path = folder / "new" / "deeper" / "plan.json"
    check_targets(json=path, html=None, plot=folder / "file")
    assert not path.parent.exists()
    write(path, "{}")
    assert path.read_text() == "{}\n"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder in which nothing can be made")
def test_what_turns_out_to_be_unwritable_is_one_line_too(folder: Path) -> None:
    result = CliRunner().invoke(app, ["table", "gelu", "--bits", "1", "--plot", "/proc/new/table.png"])
    assert result.exit_code == 2
    assert result.stderr == "slimgrad: /proc/new: No such file or directory\n"


def test_what_cannot_be_written_after_all_is_an_error_of_ours(folder: Path) -> None:
    with pytest.raises(SlimgradError, match=r"cannot write .*file/plan.json: "):
        write(folder / "file" / "plan.json", "{}")
