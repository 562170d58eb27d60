"""Files that a command writes at its end: whether that can be done is said at its beginning."""

from __future__ import annotations

import os
from pathlib import Path

from slimgrad.errors import SlimgradError


def check_targets(**targets: Path | None) -> None:
    """Refuse what could not be written, by the name of its option; nothing is made yet."""
    for name, path in targets.items():
        if path is not None and (why := _obstacle(path)):
            raise SlimgradError(f"--{name} cannot write {path}: {why}")


def check_folder(name: str, path: Path) -> None:
    """The same for a folder that files are written into."""
    check_targets(**{name: path / "file"})


def check_figure(name: str, path: Path | None) -> None:
    """The same for a figure, whose suffix says what it is."""
    from slimgrad.report.plots import check_suffix

    check_targets(**{name: path})
    if path is not None:
        check_suffix(path)


def _obstacle(path: Path) -> str | None:
    if os.path.isdir(path):
        return "it is a folder"
    if os.path.exists(path):
        return None if os.access(path, os.W_OK) else "it may not be written"
    there = next(folder for folder in path.absolute().parents if os.path.exists(folder))
    if not os.path.isdir(there):
        return f"{there} is a file, not a folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"nothing may be written in {there}"


def write(path: Path, text: str) -> None:
    """The text and a newline, in a folder that is made if it is not there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise SlimgradError(f"cannot write {path}: {error.strerror}") from error
