"""Training losses step by step, one panel per task, all seeds thin and their mean thick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from plots import COLOURS, GREY, saved

SMOOTHED = 20
"""Steps that a point is the mean of."""

Losses = Mapping[tuple[str, str, int], Sequence[float]]
"""Task, configuration and seed -> the loss of every step."""


def plotted(losses: Losses, path: Path) -> Path:
    tasks = list(dict.fromkeys(task for task, _, _ in losses))
    configs = list(dict.fromkeys(config for _, config, _ in losses))
    figure = Figure(figsize=(1 + 5 * len(tasks), 4), layout="constrained")
    for panel, task in zip(figure.subplots(1, len(tasks), squeeze=False).flat, tasks, strict=True):
        for config, colour in zip(configs, (GREY, *COLOURS * len(configs)), strict=False):
            curves = [smoothed(found) for (t, c, _), found in losses.items() if (t, c) == (task, config)]
            if not curves:
                continue  # not trained for this task
            for curve in curves:
                panel.plot(curve, color=colour, linewidth=0.6, alpha=0.35)
            mean = [sum(points) / len(points) for points in zip(*curves, strict=True)]
            panel.plot(mean, color=colour, linewidth=1.6, label=config)
        panel.set_title(task, loc="left")
        panel.set_xlabel("step")
    figure.axes[0].set_ylabel(f"training loss, mean of {SMOOTHED} steps")
    return saved(figure, path)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Each with those before it."""
    firsts = [max(0, last - SMOOTHED) for last in range(1, len(losses) + 1)]
    return [sum(losses[first:last]) / (last - first) for last, first in enumerate(firsts, 1)]
