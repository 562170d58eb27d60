"""A function's derivative and the steps that stand for it, as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from slimgrad.report.plots import AFTER, FAINT, INK, drawn

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Steps(NamedTuple):
    """One panel."""

    title: str
    x: Sequence[float]
    slope: Sequence[float]
    steps: Sequence[float]


SHOWN = 5.0
"""Beyond, most derivatives are flat."""


def draw_steps(panels: Sequence[Steps], path: str | Path) -> Path:
    """One panel beside the other."""
    return drawn(Path(path), lambda: steps_figure(panels))


def steps_figure(panels: Sequence[Steps]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(panels) + 0.8, 3.0), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        axis.axhline(0.0, color=FAINT, linewidth=0.6)
        axis.plot(panel.x, panel.slope, color=INK, linewidth=1.0, label="f'")
        axis.step(panel.x, panel.steps, where="mid", color=AFTER, linewidth=1.6, label="what stands for it")
        axis.set_title(panel.title, loc="left")
        axis.set_xlim(max(-SHOWN, panel.x[0]), min(SHOWN, panel.x[-1]))
        axis.set_xlabel("x")
    axes[0].legend(frameon=False, loc="upper left")
    return figure
