"""Where COMET's bounds go while a model is trained, as a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slimgrad.errors import SpecError
from slimgrad.report.human import plural, shorten
from slimgrad.report.plots import drawn, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Refresh = tuple[int, Mapping[str, float]]
"""A step, and the bounds from then on."""

MOST_NAMES = 60
NAME_WIDTH = 32


def bounds_plot(refreshes: Sequence[Refresh], path: str | Path) -> Path:
    """A row for each layer, the first at the top, and a column from each refresh to the next."""
    if not refreshes:
        raise SpecError("no bounds were found yet; run a training step first")
    return drawn(Path(path), lambda: bounds_figure(refreshes))


def bounds_figure(refreshes: Sequence[Refresh]) -> Figure:
    layers = list(dict.fromkeys(layer for _, bounds in refreshes for layer in bounds))
    cells = [[math.log2(bounds.get(layer, math.nan)) for _, bounds in refreshes] for layer in layers]
    steps = [step for step, _ in refreshes]
    edges = [*steps, steps[-1] + max(1, steps[-1] - steps[-2] if len(steps) > 1 else 1)]
    title = f"bounds of {plural(len(layers), 'layer')}, found anew at {plural(len(refreshes), 'step')}"
    figure = new_figure(title, 11, 2 + 0.2 * min(len(layers), MOST_NAMES))
    axes = figure.subplots()
    mesh = axes.pcolormesh(edges, range(len(layers) + 1), cells, cmap="viridis")
    named = range(0, len(layers), -(-len(layers) // MOST_NAMES))
    axes.set_yticks([place + 0.5 for place in named], [shorten(layers[p] or "(model)", NAME_WIDTH) for p in named])
    axes.tick_params(axis="y", labelsize=7, length=0)
    axes.invert_yaxis()
    axes.set_xlabel("step")
    figure.colorbar(mesh, ax=axes, label="bound", format=lambda power, _: f"{2**power:.2g}", pad=0.02)
    return figure
