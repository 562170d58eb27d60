"""Where COMET's bounds go while a model is trained, as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slimgrad.errors import SpecError
from slimgrad.report.human import plural, shorten
from slimgrad.report.plots import FAINT, drawn, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Refresh = tuple[int, Mapping[str, float]]
"""A step, and the bounds from then on."""

MOST_NAMES = 24
NAME_WIDTH = 32


def bounds_plot(refreshes: Sequence[Refresh], path: str | Path) -> Path:
    """One line for each layer, from the first in the darkest to the last in the lightest colour."""
    if not refreshes:
        raise SpecError("no bounds were found yet; run a training step first")
    return drawn(Path(path), lambda: bounds_figure(refreshes))


def bounds_figure(refreshes: Sequence[Refresh]) -> Figure:
    from matplotlib import colormaps

    layers = list(dict.fromkeys(layer for _, bounds in refreshes for layer in bounds))
    title = f"bounds of {plural(len(layers), 'layer')}, found anew at {plural(len(refreshes), 'step')}"
    figure = new_figure(title, 11, 5.5)
    axes = figure.subplots()
    colours = colormaps["viridis"]
    for number, layer in enumerate(layers):
        steps, bounds = zip(*((step, found[layer]) for step, found in refreshes if layer in found), strict=True)
        name = shorten(layer or "the model", NAME_WIDTH) if number < MOST_NAMES else None
        colour = colours(0.92 * number / max(1, len(layers) - 1))
        axes.plot(steps, bounds, color=colour, drawstyle="steps-post", linewidth=1.2, label=name)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("step")
    axes.set_ylabel("bound")
    axes.grid(axis="y", color=FAINT, linewidth=0.3)
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return figure
