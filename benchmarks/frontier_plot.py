"""The frontier as a picture: kept bytes against step time, one small panel per workload, lower left is better."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from frontier_rows import PEERS, UNTOUCHED, Row, by_workload, compared
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter, NullFormatter
from matplotlib.transforms import Bbox

INK, FAINT, PEER, OURS = "#222222", "#8A8A8A", "#D55E00", "#0072B2"
STYLE = {"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 9.0, "text.color": INK}
MARKERS = {"checkpoint": "s", "save_on_cpu": "v", "naive_int8": "P", "compile": "D", "compile(budget=0.5)": "^"}

FASTEST, SLOWEST = 0.9, 1.5
"""The time axis shows at least this much,"""
EDGE = 2.0
"""and no more than this: slower points are drawn at the edge, with their time in words."""
FINE, COARSE = (0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 1.75, 2.0), (0.1, 0.15, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)
"""Ticks of the time axis: coarse where compiled code stretches it."""

COLUMNS = 4
SIDES = ((1, 0), (1, 1), (1, -1), (0, 1), (0, -1), (-1, 0), (-1, 1), (-1, -1))
NEAR = [(reach * x, reach * y) for reach in (7, 13, 20, 28, 38, 50) for x, y in SIDES]
"""Where a label may stand, in points from its marker, the best first."""


@dataclass(frozen=True)
class Point:
    """One marker and the words beside it."""

    system: str
    time: float
    kept: float

    @property
    def peer(self) -> bool:
        return self.system in PEERS

    @property
    def at(self) -> tuple[float, float]:
        return min(self.time, EDGE), self.kept

    @property
    def label(self) -> str:
        words = self.system if self.peer else shortened(self.system)
        return words if self.time <= EDGE else f"{words}, {self.time:.1f}×"


def shortened(system: str) -> str:
    """Of each codec its name and its first setting: "dropit(keep=0.1, rest=Quant(bits=4))" is "dropit 0.1 + quant 4",
    and "plan(4x)" is "plan 4x".

    Whatever is lossy leaves the rest to `lossless()`, which is named only where it stands alone.
    """
    calls = re.findall(r"(\w+)\((?:(?:\w+=)?([\d.]+x?|checkpoint))?", system)
    words = [f"{name.lower()} {value}".strip() for name, value in calls]
    return " + ".join(word for word in words if word != "lossless" or len(words) == 1) or system


def plotted(rows: Sequence[Row], path: Path) -> Path:
    """Draw the measured rows to `path`."""
    panels = {name: found for name, group in by_workload(rows).items() if (found := points(group))}
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):
        drawn(panels).savefig(path, dpi=150, facecolor="white")
    return path


def points(group: Sequence[Row]) -> list[Point]:
    """The rows of a workload that have both figures."""
    beside = [(row, compared(row, group).kept_share) for row in group]
    return [Point(row.system, row.time_ratio, share) for row, share in beside if share is not None and row.time_ratio]


def drawn(panels: dict[str, list[Point]]) -> Figure:
    columns = min(COLUMNS, max(1, len(panels)))
    lines = max(1, -(-len(panels) // columns))
    width, height = 1.0 + 3.6 * columns, 1.5 + 2.9 * lines
    figure = Figure(figsize=(width, height))
    canvas = FigureCanvasAgg(figure)
    axes = list(figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flat)
    top = 1 - 0.95 / height
    figure.subplots_adjust(0.75 / width, 0.6 / height, 1 - 0.2 / width, top, wspace=0.1, hspace=0.2)
    heading(figure, height)
    every = [point for found in panels.values() for point in found]
    span, most = time_span([point.time for point in every]), max([1.1, *(point.kept for point in every)])
    for panel, (name, found) in zip(axes, panels.items(), strict=False):
        draw_panel(panel, name, found, span, most)
        place_labels(panel, found, canvas)
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    for panel in axes[max(0, len(panels) - columns) : len(panels)]:  # the lowest of each column
        panel.tick_params(labelbottom=True)
    figure.supxlabel("step time, × untouched", y=0.1 / height, fontsize=9.5)
    figure.supylabel("kept for backward, % of untouched", x=0.12 / width, fontsize=9.5)
    return figure


def heading(figure: Figure, height: float) -> None:
    figure.suptitle(
        "Kept bytes and step time: lower left is better",
        x=0.012,
        y=1 - 0.12 / height,
        ha="left",
        fontsize=13,
        weight="bold",
    )
    entries = [
        Line2D([], [], marker="o", linestyle="-", linewidth=1, color=OURS, label="slimgrad"),
        Line2D([], [], marker="s", linestyle="", markerfacecolor="white", color=PEER, label="without slimgrad"),
        Line2D([], [], marker="x", linestyle="", color=INK, label="untouched"),
    ]
    place = {"loc": "upper right", "bbox_to_anchor": (0.99, 1 - 0.08 / height), "borderaxespad": 0}
    figure.legend(handles=entries, ncols=3, frameon=False, fontsize=9, **place)


def time_span(times: Iterable[float]) -> tuple[float, float]:
    """The time axis of all panels, so that they can be compared."""
    known = [min(time, EDGE) for time in times]
    return min([FASTEST, *(time * 0.93 for time in known)]), max([SLOWEST, *(time * 1.06 for time in known)])


def draw_panel(panel: Axes, name: str, found: Sequence[Point], span: tuple[float, float], most: float) -> None:
    panel.set_title(name, loc="left", fontsize=9.5)
    panel.set_xscale("log")
    panel.set_xlim(*span)
    panel.set_ylim(-0.06, most + 0.04)
    panel.set_xticks([tick for tick in (FINE if span[0] > 0.7 else COARSE) if span[0] <= tick <= span[1]])
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f}"))
    panel.tick_params(which="both", length=0, labelsize=7.5, labelcolor=FAINT)
    panel.grid(which="major", color="#EDEDED", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.axvline(1.0, color=FAINT, linewidth=0.8, linestyle=":")
    panel.spines[:].set_visible(False)
    best = frontier([point for point in found if not point.peer])
    panel.plot([point.at[0] for point in best], [point.kept for point in best], color=OURS, linewidth=1, alpha=0.5)
    for point in found:
        panel.plot(*point.at, linestyle="", clip_on=False, **look(point))


def frontier(ours: Iterable[Point]) -> list[Point]:
    """The points that no other beats in both time and bytes, the fastest first."""
    best: list[Point] = []
    for point in sorted(ours, key=lambda point: (point.time, point.kept)):
        if not best or point.kept < best[-1].kept:
            best.append(point)
    return best


def look(point: Point) -> dict[str, object]:
    if point.system == UNTOUCHED:
        return {"marker": "x", "color": INK, "markersize": 7}
    if point.peer:
        return {"marker": MARKERS[point.system], "color": PEER, "markerfacecolor": "white", "markersize": 6.5}
    return {"marker": "o", "color": OURS, "markersize": 6.5}


def place_labels(panel: Axes, found: Sequence[Point], canvas: FigureCanvasAgg) -> None:
    """Each label at the nearest place where it covers no marker and no other label, and stays in its panel."""
    renderer, room = canvas.get_renderer(), panel.get_window_extent()
    taken = [marker_box(panel, point) for point in found]
    for point in found:
        if point.system == UNTOUCHED:
            continue
        best, least = NEAR[0], float("inf")
        text = panel.annotate(point.label, point.at, NEAR[0], textcoords="offset points", fontsize=7.5, va="center")
        text.set_color(PEER if point.peer else OURS)
        for offset in NEAR:
            put(text, offset)
            cost = covered(text.get_window_extent(renderer), taken, room)
            if cost < least:
                best, least = offset, cost
        put(text, best)
        taken.append(text.get_window_extent(renderer))


def put(text: Annotation, offset: tuple[float, float]) -> None:
    text.set_position(offset)
    text.set_horizontalalignment("left" if offset[0] > 0 else "right" if offset[0] < 0 else "center")


def marker_box(panel: Axes, point: Point) -> Bbox:
    x, y = panel.transData.transform(point.at)
    reach = 4 * panel.figure.dpi / 72
    return Bbox.from_extents(x - reach, y - reach, x + reach, y + reach)


def covered(label: Bbox, taken: Iterable[Bbox], room: Bbox) -> float:
    """How much of a label lies over others or outside its panel, in pixels squared."""
    inside = Bbox.intersection(label, room)
    outside = label.width * label.height - (inside.width * inside.height if inside else 0)
    overlaps = [Bbox.intersection(label, other) for other in taken]
    return outside + sum(overlap.width * overlap.height for overlap in overlaps if overlap)
