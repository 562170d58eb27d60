"""Frontiers as text, as a figure, and as what their page shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimgrad.report.frontier_page import FrontierData, PlanRow, StorageRow
from slimgrad.report.human import UNITS, human_bytes, human_seconds, plural
from slimgrad.report.plots import AFTER, BEFORE, FAINT, REST, drawn, new_figure
from slimgrad.report.text import plain_table, rendered

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from slimgrad.planner.frontier import Frontier
    from slimgrad.planner.plan import Action, Plan

KEEP = "keep"

# --- text ---


def frontier_table(frontier: Frontier) -> str:
    """The untouched step in words, then one line for each plan."""
    table = plain_table("budget", "kept", "peak", "step", "error", "run again", right=COLUMNS)
    for plan in frontier.plans:
        peak = "-" if plan.peak_bytes is None else human_bytes(plan.peak_bytes)
        table.add_row(
            plan.budget, human_bytes(plan.kept_bytes), peak, step(plan), error(plan), str(len(plan.recompute) or "-")
        )
    parts = ["\n".join(headline(frontier)), rendered(table)]
    if frontier.unmet:
        parts.append(f"no plan meets {', '.join(frontier.unmet)}")
    return "\n\n".join(part.rstrip("\n") for part in parts)


COLUMNS = ("budget", "kept", "peak", "step", "error", "run again")


def headline(frontier: Frontier) -> list[str]:
    of = "the peak" if frontier.of == "peak" else "what is kept"
    lines = [
        f"{plural(len(frontier.plans), 'plan')} for {frontier.model or 'the model'} on "
        f"{frontier.device or 'this device'}, by budget for {of}",
        f"untouched it keeps {human_bytes(frontier.kept_before)}",
    ]
    if frontier.peak_before is not None:
        lines[-1] += (
            f" and peaks at {human_bytes(frontier.peak_before)}, of which {human_bytes(frontier.fixed_bytes)} are "
            "there before the step"
        )
    return lines


def step(plan: Plan) -> str:
    """Beside the untouched step, or, where that is unknown, what is added to it."""
    return f"{plan.slowdown:.3f}x" if plan.step_seconds else f"+{human_seconds(plan.seconds)}"


def error(plan: Plan) -> str:
    return "exact" if plan.error == 0 else f"{100 * plan.error:.2g} %"


# --- the page ---


def page_data(frontier: Frontier, chosen: int | None = None) -> FrontierData:
    """What `frontier_page` shows."""
    data: FrontierData = {
        "title": frontier.model or "the model",
        "of": frontier.of,
        "device": frontier.device,
        "torch": frontier.torch,
        "untouched": {
            "kept": frontier.kept_before,
            "peak": frontier.peak_before,
            "seconds": None,  # what a calibration says of a whole step is good for ratios
        },
        "storages": [
            StorageRow(path=b.path, module=b.module, need=b.need, bytes=b.bytes, count=b.count, savers=list(b.savers))
            for b in frontier.blocks
        ],
        "backward": frontier.backward,
        "timeline": list(frontier.timeline),
        "plans": [plan_row(frontier, number) for number in range(len(frontier.plans))],
        "unmet": list(frontier.unmet),
    }
    if chosen is not None:
        data["chosen"] = chosen
    return data


def plan_row(frontier: Frontier, number: int) -> PlanRow:
    plan = frontier.plans[number]
    actions, held = fates(frontier, plan)
    return {
        "budget": frontier.budgets[number] if frontier.of == "peak" else plan.budget,
        "label": plan.budget,
        "kept": plan.kept_bytes,
        "peak": plan.peak_bytes,
        "seconds": None,
        "slowdown": plan.slowdown if plan.step_seconds else None,
        "added": plan.seconds,
        "error": plan.error,
        "timeline": list(frontier.timelines[number]),
        "actions": actions,
        "held": held,
    }


def fates(frontier: Frontier, plan: Plan) -> tuple[list[str], list[int]]:
    """Of each block, what is done to it and the bytes that are held: of copies of one tensor, at the first of them."""
    by_key: dict[object, Action] = {key: action for action in plan.actions for key in action.keys}
    left = {action.keys: action.after for action in plan.actions}
    actions, held = [], []
    for block in frontier.blocks:
        action = by_key.get(block.key)
        actions.append(KEEP if action is None else action.what)
        if action is None:
            held.append(block.bytes)
            continue
        held.append(min(block.bytes, left[action.keys]))
        left[action.keys] -= held[-1]
    return actions, held


# --- the figure ---


def frontier_plot(frontier: Frontier, path: Path) -> Path:
    """Draw what memory costs in time and, unless all plans are exact, in the gradient's error."""
    return drawn(path, lambda: frontier_figure(frontier))


def frontier_figure(frontier: Frontier) -> Figure:
    lossy = any(plan.error for plan in frontier.plans)
    figure = new_figure(
        f"{frontier.model or 'The model'} on {frontier.device or 'this device'}", 8, 6 if lossy else 4.4
    )
    panels: list[Axes] = list(
        figure.subplots(1 + lossy, 1, sharex=True, squeeze=False, height_ratios=(2.4, 1) if lossy else None)[:, 0]
    )
    unit, divisor = unit_of(memory(frontier, None))
    x = [memory(frontier, plan) / divisor for plan in frontier.plans]
    untouched = memory(frontier, None) / divisor
    timed = frontier.step_seconds > 0
    y = [plan.slowdown if timed else 1000 * plan.seconds for plan in frontier.plans]
    draw_points(panels[0], x, y, (untouched, 1.0 if timed else 0.0))
    time = "time of a step, the untouched one's being 1" if timed else "milliseconds added to a step"
    panels[0].set_title(time, **TITLE)
    panels[0].legend(frameon=False, loc="best")
    if lossy:
        draw_points(panels[1], x, [100 * plan.error for plan in frontier.plans], (untouched, 0.0))
        panels[1].set_title("relative error of the gradient, %", **TITLE)
    name = "peak memory" if frontier.of == "peak" else "kept at the end of forward"
    panels[-1].set_xlabel(f"{name}, {unit}")
    return figure


TITLE: Any = {"loc": "left", "fontsize": 10, "color": FAINT, "pad": 8}


def memory(frontier: Frontier, plan: Plan | None) -> int:
    """What is bounded, of a plan or of the untouched step."""
    if frontier.of != "peak":
        return frontier.kept_before if plan is None else plan.kept_bytes
    return (frontier.peak_before if plan is None else plan.peak_bytes) or 0


def unit_of(size: int) -> tuple[str, int]:
    """In which human_bytes tells it, and how many bytes that is."""
    unit = human_bytes(size).split()[1]
    return unit, 1024 ** ("B", *UNITS).index(unit)


def draw_points(axes: Axes, x: Sequence[float], y: Sequence[float], untouched: tuple[float, float]) -> None:
    """The plans as dots on a line, and the untouched step as a ring."""
    axes.grid(color=REST, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.plot(x, y, color=AFTER, linewidth=1.2, marker="o", markersize=5, label="plans", clip_on=False)
    axes.plot(
        *([value] for value in untouched),
        color=BEFORE,
        linestyle="",
        marker="o",
        markersize=8,
        markerfacecolor="none",
        markeredgewidth=1.6,
        label="untouched",
        clip_on=False,
    )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=min(0.0, *y) if untouched[1] == 0 else None)
