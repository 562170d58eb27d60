"""`slimgrad table gelu --bits 3`: the best few-bit derivative of a function, printed and drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from slimgrad.cli.files import check_figure
from slimgrad.errors import SpecError

FUNCTION = typer.Argument(help="gelu, silu, softplus, ...; an unknown name lists them all.")
BITS = typer.Option([3], "--bits", "-b", help="1 to 8; give it again for another table beside it.")
INTERVAL = typer.Option((-10.0, 10.0), help="Where the error is counted.")
WEIGHT = typer.Option("uniform", help="uniform or normal: which x matter.")
SET = typer.Option([], "--set", metavar="NAME=VALUE", help="A parameter of the function, such as beta=2.0.")
PLOT = typer.Option(None, help="Draw f' and its steps to this file (.png, .pdf, .svg).")


def table(
    function: str = FUNCTION,
    bits: list[int] = BITS,
    interval: tuple[float, float] = INTERVAL,
    weight: str = WEIGHT,
    set_: list[str] = SET,
    plot: Path | None = PLOT,
) -> None:
    """Solve for the best few-bit derivative of a pointwise function."""
    from slimgrad.report.steps import draw_steps
    from slimgrad.tables import fewbit_table

    check_figure("plot", plot)
    parameters = dict(parameter(text) for text in set_)
    tables = [fewbit_table(function, count, interval, weight, **parameters) for count in bits]
    typer.echo("\n\n".join(map(str, tables)))
    if plot is not None:
        typer.echo(f"drawn to {draw_steps([found.steps() for found in tables], plot)}")


def parameter(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SpecError(f"--set expects NAME=VALUE, such as beta=2.0, found {text!r}")
    try:
        return name, float(value)
    except ValueError:
        return name, value
