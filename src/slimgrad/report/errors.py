"""Errors of gradients as a table and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slimgrad.report.human import shorten
from slimgrad.report.plots import AFTER, FAINT, drawn, new_figure
from slimgrad.report.text import plain_table, rendered

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from slimgrad.spec import GradError

MOST_ROWS = 40
NAME_WIDTH = 60


def grad_error_table(found: GradError) -> str:
    """All gradients as one vector, then each parameter whose gradient is not exact."""
    off = [parameter for parameter in found.parameters if parameter.error]
    count = len(found.parameters)
    head = f"{found.what}: gradients are off by {found.relative:.2%} in all; {count - len(off)} of {count} are exact"
    if not off:
        return head
    table = plain_table("error", "cosine", "norm", "parameter", right=("error", "cosine", "norm"))
    for parameter in off[:MOST_ROWS]:
        numbers = (f"{parameter.relative:.2%}", f"{parameter.cosine:.5f}", f"{parameter.exact:.3g}")
        table.add_row(*numbers, shorten(parameter.name, NAME_WIDTH))
    rest = f"and {len(off) - MOST_ROWS} more" if len(off) > MOST_ROWS else ""
    return f"{head}\n\n{rendered(table, rest)}".rstrip("\n")


def grad_error_plot(found: GradError, path: Path) -> Path:
    return drawn(path, lambda: grad_error_figure(found))


def grad_error_figure(found: GradError) -> Figure:
    off = [parameter for parameter in found.parameters if parameter.error]
    rows = off if len(found.parameters) > MOST_ROWS else list(found.parameters)
    rows = sorted(rows, key=lambda row: -row.relative)[:MOST_ROWS] if len(rows) > MOST_ROWS else rows
    figure = new_figure(f"{found.what}: relative error of each gradient", 11, 1.4 + 0.24 * len(rows))
    axes = figure.subplots()
    places = range(len(rows))
    axes.barh(places, [100 * row.relative for row in rows], color=AFTER, height=0.7)
    for place, row in zip(places, rows, strict=True):
        said = "exact" if not row.error else f" {row.relative:.2%}, cosine {row.cosine:.4f}"
        axes.text(100 * row.relative, place, f" {said.strip()}", va="center", fontsize=8, color=FAINT)
    axes.set_yticks(places, [shorten(row.name, NAME_WIDTH) for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel("%")
    return figure
