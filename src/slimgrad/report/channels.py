"""Which channels were trained in which epoch, as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slimgrad.errors import SpecError
from slimgrad.report.human import shorten
from slimgrad.report.plots import AFTER, FAINT, INK, drawn, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_NAMES = 40
NAME_WIDTH = 32


class Choice(Protocol):
    """What one draw chose."""

    @property
    def channels(self) -> Mapping[str, tuple[int, ...]]: ...


def channels_plot(choices: Sequence[Choice], layers: Mapping[str, int], path: str | Path) -> Path:
    """One column for each draw, one row for each channel of these layers (path -> channels)."""
    if not choices:
        raise SpecError("no channels were drawn yet; run a training step first")
    return drawn(Path(path), lambda: channels_figure(choices, layers))


def channels_figure(choices: Sequence[Choice], layers: Mapping[str, int]) -> Figure:
    ever = [layer for layer in layers if any(layer in choice.channels for choice in choices)]
    starts: dict[str, int] = {}
    rows = 0
    for layer in ever:
        starts[layer] = rows
        rows += layers[layer]
    title = f"channels trained in each of {len(choices)} epochs: {rows} channels of {len(ever)} layers"
    figure = new_figure(title, 11, 7)
    raster, curve = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    for number, choice in enumerate(choices):
        places = [starts[layer] + c for layer, found in choice.channels.items() for c in found]
        raster.scatter([number] * len(places), places, marker="_", s=240 / len(choices) ** 0.5, c=AFTER, linewidths=0.8)
    for start in starts.values():
        raster.axhline(start - 0.5, color=FAINT, linewidth=0.3)
    named = _apart({layer: starts[layer] + layers[layer] / 2 for layer in ever}, rows / MOST_NAMES)
    raster.set_yticks(list(named.values()), [shorten(name, NAME_WIDTH) for name in named])
    raster.tick_params(axis="y", labelsize=6, length=0)
    raster.set_ylim(rows, -1)
    shares = _covered(choices, rows, starts)
    curve.plot(range(len(choices)), [100 * share for share in shares], color=INK, marker=".")
    curve.set_ylim(0, 105)
    curve.set_ylabel("trained so far, %")
    curve.set_xlabel("epoch")
    curve.grid(axis="y", color=FAINT, linewidth=0.3)
    return figure


def _apart(places: Mapping[str, float], least: float) -> dict[str, float]:
    """Those that have room for a name."""
    found: dict[str, float] = {}
    for name, place in places.items():
        if not found or place - list(found.values())[-1] >= least:
            found[name] = place
    return found


def _covered(choices: Sequence[Choice], rows: int, starts: Mapping[str, int]) -> list[float]:
    seen: set[int] = set()
    found = []
    for choice in choices:
        seen.update(starts[layer] + c for layer, indices in choice.channels.items() for c in indices)
        found.append(len(seen) / rows)
    return found
