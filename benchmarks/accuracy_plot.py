"""Accuracy over one setting of a configuration, as differences to the untouched model, one line per task."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from plots import COLOURS, GREY, saved
from tasks import TASKS
from tasks.base import ACCURACY
from tasks.table import Row


def setting(config: str, pattern: str) -> float | None:
    """The number that stands in `config` where `pattern` has a star; None if it is another configuration."""
    before, _, after = pattern.partition("*")
    found = re.fullmatch(f"{re.escape(before)}([0-9.]+){re.escape(after)}", config)
    return None if found is None else float(found[1])


def plotted(rows: Sequence[Row], patterns: Sequence[str], path: Path) -> Path:
    """One panel for each pattern. Bars are two standard errors of the difference, paired by seed."""
    curves = {pattern: curves_of(rows, pattern) for pattern in patterns}
    tasks = list(dict.fromkeys(task for found in curves.values() for task in found))
    colours = dict(zip(tasks, COLOURS * len(tasks), strict=False))
    figure = Figure(figsize=(3 + 5 * len(curves), 4.5), layout="constrained")
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False).flat
    for axes, (pattern, found) in zip(panels, curves.items(), strict=True):
        axes.axhline(0, color=GREY, linewidth=1, label="untouched")
        for task, points in found.items():
            at, means, errors = zip(*points, strict=True)
            axes.errorbar(at, means, errors, color=colours[task], marker="o", capsize=3, linewidth=1.6, label=task)
        axes.set_xscale("log")
        ticks = sorted({at for points in found.values() for at, _, _ in points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel(f"* in {pattern}")
    figure.axes[0].set_ylabel("accuracy minus untouched, points, ± 2 s.e.")
    return saved(figure, path)


def curves_of(rows: Sequence[Row], pattern: str) -> dict[str, list[tuple[float, float, float]]]:
    """Setting, difference and bar, by task: of those that are measured by accuracy, and have more than one point."""
    points: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        task, at = TASKS[row.task], setting(row.config, pattern)
        if task.metric is ACCURACY and at is not None and row.comparison is not None:
            mean, error = row.comparison.mean * ACCURACY.scale, (row.comparison.error or 0.0) * ACCURACY.scale
            points.setdefault(f"{task.model} on {row.source}", []).append((at, mean, 2 * error))
    curves = {task: sorted(found) for task, found in points.items() if len(found) > 1}
    if not curves:
        raise SystemExit(f"--curve: no task has two configurations like {pattern!r} beside an untouched model")
    return curves
