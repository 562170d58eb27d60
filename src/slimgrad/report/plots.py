"""Profiles and demo results as figures. Matplotlib is imported only when something is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slimgrad.errors import SlimgradError, SpecError
from slimgrad.report.groups import Group, grouped
from slimgrad.report.human import (
    NEEDS,
    human_bytes,
    human_ratio,
    need_name,
    percent,
    plural,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from slimgrad.spec import Profile

COLOURS = {
    "NOTHING": "#009E73",
    "WEIGHT": "#CC79A7",
    "INDEX": "#F0E442",
    "MASK": "#E69F00",
    "DERIVATIVE": "#56B4E9",
    "OPERAND": "#0072B2",
    "VALUES": "#D55E00",
    "EXACT": "#4D4D4D",
}
"""One fixed colour per need, from Okabe and Ito's palette, which colour-blind readers can tell apart."""

INK, FAINT, REST = "#222222", "#8A8A8A", "#D5D5D5"
BEFORE, AFTER = "#B0B7BF", "#0072B2"
TOP = 15
LABEL_WIDTH = 60
SUFFIXES = (".png", ".pdf", ".svg", ".jpg")
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.spines.bottom": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": FAINT,
    "ytick.color": INK,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
    "text.parse_math": False,  # a module may have any name
}


@dataclass(frozen=True)
class Bar:
    """One horizontal bar: what it stands for, its bytes, its colour, and what is written beside it."""

    label: str
    bytes: int
    colour: str
    beside: str


class DemoRow(Protocol):
    """What `demo_plot` draws of one trained configuration."""

    @property
    def workload(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def kept_bytes(self) -> int: ...
    @property
    def accuracy(self) -> float: ...
    @property
    def step_ms(self) -> float: ...


def profile_plot(profile: Profile, path: Path) -> Path:
    """Draw the storages that weigh most, coloured by need, beside the totals by need."""
    return drawn(Path(path), lambda: profile_figure(profile))


def demo_plot(rows: Sequence[DemoRow], path: Path) -> Path:
    """Draw the kept bytes of each configuration, with its accuracy and step time beside the bar."""
    if not rows:
        raise SpecError("demo_plot needs at least one row")
    return drawn(Path(path), lambda: demo_figure(rows))


def drawn(path: Path, figure: Callable[[], Figure]) -> Path:
    """Write the figure to `path` under our own style, which ends with the call."""
    check_suffix(path)
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise SlimgradError("drawing needs matplotlib: pip install matplotlib") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure().savefig(path, dpi=160, bbox_inches="tight", pad_inches=0.25)
    return path


def check_suffix(path: Path) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise SpecError(f"cannot draw to {str(path)!r}: the suffix must be one of {', '.join(SUFFIXES)}")


def profile_figure(profile: Profile) -> Figure:
    bars, needs = storage_bars(profile), need_bars(profile)
    rows = max(len(bars), len(needs), 3)
    figure = new_figure(profile_title(profile), 14, 1.4 + 0.34 * rows)
    left, right = figure.subplots(1, 2, width_ratios=(1.9, 1))
    draw_bars(left, bars, rows=rows, room=1.32)
    draw_bars(right, needs, rows=rows, room=1.62)
    for axes, title in ((left, "largest first"), (right, "by the strongest need of each storage")):
        axes.set_title(title, loc="left", fontsize=10, color=FAINT, pad=8)
    return figure


def new_figure(title: str, width: float, height: float) -> Figure:
    """An empty figure of our own: pyplot and its state are never touched."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.14))
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
    return figure


def profile_title(profile: Profile) -> str:
    count = sum(storage.counted for storage in profile.storages)
    model = profile.meta.get("model", "the model")
    return f"{model}: {human_bytes(profile.kept_bytes)} kept for backward, in {plural(count, 'storage')}"


def storage_bars(profile: Profile) -> list[Bar]:
    """The largest storages, one bar each or one per repeated layer, and the rest as a last bar."""
    groups, whole = grouped(profile, TOP), profile.kept_bytes
    bars = [storage_bar(group, whole) for group in groups[:TOP]]
    if rest := groups[TOP:]:
        size, count = sum(group.bytes for group in rest), sum(group.count for group in rest)
        bars.append(Bar(plural(count, "smaller storage"), size, REST, beside(size, whole)))
    return bars


def storage_bar(group: Group, whole: int) -> Bar:
    colour = COLOURS[need_name(group.lead.need)]
    return Bar(group.place(LABEL_WIDTH, times=True), group.bytes, colour, beside(group.bytes, whole))


def need_bars(profile: Profile) -> list[Bar]:
    totals = {need_name(need): size for need, size in profile.by_need().items()}
    ordered = sorted(totals, key=lambda need: (-totals[need], NEEDS.index(need)))
    return [Bar(need, totals[need], COLOURS[need], beside(totals[need], profile.kept_bytes)) for need in ordered]


def beside(size: int, whole: int) -> str:
    return f"{human_bytes(size)}  {percent(size, whole)}"


def draw_bars(axes: Axes, bars: Sequence[Bar], *, rows: int, room: float) -> None:
    """Horizontal bars from the top down, each with its figures behind its end; `room` is for these."""
    widest = max((bar.bytes for bar in bars), default=0) or 1
    axes.barh(range(len(bars)), [bar.bytes for bar in bars], color=[bar.colour for bar in bars], height=0.72)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_xlim(0, widest * room)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0, pad=6)
    axes.plot([0, 0], [-0.5, len(bars) - 0.5], color=FAINT, linewidth=1, clip_on=False)
    for i, bar in enumerate(bars):
        end = (bar.bytes, i)
        axes.annotate(bar.beside, end, (5, 0), textcoords="offset points", va="center_baseline", fontsize=8.5)


def demo_figure(rows: Sequence[DemoRow]) -> Figure:
    workloads = {row.workload: [r for r in rows if r.workload == row.workload] for row in rows}
    heights = [len(group) + 0.9 for group in workloads.values()]
    figure = new_figure("Kept for backward, per training step", 11, 1.0 + 0.55 * sum(heights))
    panels = figure.subplots(len(workloads), 1, squeeze=False, height_ratios=heights)
    for panel, (title, group) in zip(panels[:, 0], workloads.items(), strict=True):
        draw_bars(panel, demo_bars(group), rows=len(group), room=1.55)
        panel.set_title(title, loc="left", fontsize=10.5, pad=6)
    return figure


def demo_bars(rows: Sequence[DemoRow]) -> list[Bar]:
    first = rows[0]
    bars = []
    for row in rows:
        change = "" if row is first else f" ({human_ratio(first.kept_bytes, row.kept_bytes)})"
        quality = f"accuracy {100 * row.accuracy:.1f}%   {row.step_ms:.1f} ms/step"
        figures = f"{human_bytes(row.kept_bytes)}{change}   {quality}"
        bars.append(Bar(row.name, row.kept_bytes, BEFORE if row is first else AFTER, figures))
    return bars
