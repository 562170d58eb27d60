"""What the curves of accuracy.py and convergence.py share: colours, and a file."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

GREY = "#8A8A8A"
"""For the untouched model."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def saved(figure: Figure, path: Path) -> Path:
    """Without frames on top and at the right; with a legend in the panel that shows most, or the first such."""
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
    max(figure.axes, key=lambda panel: len(panel.get_legend_handles_labels()[0])).legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
