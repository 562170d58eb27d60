"""`slimgrad report plan.json`: what was saved, printed; or how two plans differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from slimgrad.errors import SlimgradError, SpecError

if TYPE_CHECKING:
    from slimgrad.planner import Plan
    from slimgrad.spec import Value


def report(
    path: Path = typer.Argument(..., help="A plan, frontier, profile or report that was saved as JSON."),
    against: Path | None = typer.Option(None, "--against", help="Say what this other plan does differently."),
    explain: bool = typer.Option(False, "--explain", help="Say in words why each storage of a plan gets its action."),
) -> None:
    """Print what was saved as JSON, or the difference of two plans.

    slimgrad report plan.json --explain

    slimgrad report plan.json --against smaller.json
    """
    value = read(path)
    if against is not None:
        typer.echo(as_plan(value, path).diff(as_plan(read(against), against)))
    else:
        typer.echo(as_plan(value, path).explain() if explain else value)


def read(path: Path) -> Value:
    """The value in a file, whatever its type."""
    from slimgrad.planner import Frontier, Plan
    from slimgrad.spec import GradError, Profile, Report
    from slimgrad.spec.values import parsed

    kinds: dict[str, type[Value]] = {kind.__name__: kind for kind in (Plan, Frontier, Profile, Report, GradError)}
    try:
        data = parsed(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SlimgradError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not text'}") from error
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from error
    kind = kinds.get(str(data.get("type")))
    if kind is None:
        raise SpecError(f"{path}: expected JSON of type {', '.join(kinds)}; found {data.get('type')!r}")
    try:
        return kind.from_dict(data)
    except SpecError as error:  # the file may have been edited
        raise SpecError(f"{path}: this is not a whole {kind.__name__} ({error})") from error


def as_plan(value: Value, path: Path) -> Plan:
    from slimgrad.planner import Plan

    if not isinstance(value, Plan):
        raise SlimgradError(f"--against and --explain are for plans; {path} is a {type(value).__name__}")
    return value
