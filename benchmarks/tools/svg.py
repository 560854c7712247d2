"""Figures of matplotlib as SVG files that are the same for the same data."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    matplotlib.rcParams.update({"svg.fonttype": "none", "font.size": 9, "svg.hashsalt": "draftwood"})
    return Figure(figsize=(width, height), layout="constrained")


def save_svg(figure: Figure, file: Path) -> None:
    """Write the figure without the date that matplotlib would add."""
    figure.savefig(file, metadata={"Date": None})
