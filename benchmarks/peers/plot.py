"""The comparison as a picture, with quartiles: one bar per peer and method, or a panel for every setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.peers.figures import MethodRow
from benchmarks.peers.protocol import PLAIN
from benchmarks.tools.svg import new_figure, save_svg

BAR = 0.24  # inches
COLUMN = 2.9


def draw(rows: Sequence[MethodRow], picture: Path) -> None:
    """Write an SVG. Draftwood is green, other peers are blue, plain decoding is pale. A star marks a method whose text
    differs from the same peer's plain decoding.

    A run of one setting has a bar for every method. A run of several has a column for every precision and a row for
    every setting, in which each peer has its plain decoding and the fastest of its other methods.
    """
    settings = list(dict.fromkeys(row.setting for row in rows))
    canvas = draw_methods(rows) if len(settings) == 1 else draw_settings(rows, settings)
    save_svg(canvas, picture)


def draw_methods(rows: Sequence[MethodRow]) -> Figure:
    groups = {
        precision: sorted((row for row in rows if row.precision == precision), key=lambda row: row.tokens_per_second)
        for precision in dict.fromkeys(row.precision for row in rows)
    }
    sizes = [len(group) for group in groups.values()]
    canvas = new_figure(7.5, BAR * sum(sizes) + 0.7 * len(sizes))
    axes = canvas.subplots(len(groups), 1, sharex=True, squeeze=False, height_ratios=sizes)[:, 0]
    for axis, (precision, group) in zip(axes, groups.items(), strict=True):
        draw_bars(axis, group)
        axis.set_title(precision, loc="left")
    axes[-1].set_xlabel("tokens per second, median and quartiles")
    return canvas


def draw_settings(rows: Sequence[MethodRow], settings: Sequence[str]) -> Figure:
    precisions = list(dict.fromkeys(row.precision for row in rows))
    panels = {
        (setting, precision): choose_bars([row for row in rows if (row.setting, row.precision) == (setting, precision)])
        for setting in settings
        for precision in precisions
    }
    sizes = [max(len(panels[setting, precision]) for precision in precisions) for setting in settings]
    canvas = new_figure(COLUMN * len(precisions), BAR * sum(sizes) + 0.6 * len(sizes))
    axes = canvas.subplots(len(settings), len(precisions), squeeze=False, height_ratios=sizes)
    for axis, ((setting, precision), panel) in zip(axes.flat, panels.items(), strict=True):
        draw_bars(axis, panel)
        axis.set_title(f"{setting}, {precision}", loc="left")
        axis.set_visible(bool(panel))
    for axis in axes[-1]:
        axis.set_xlabel("tokens per second")
    return canvas


def choose_bars(rows: Sequence[MethodRow]) -> list[MethodRow]:
    """Each peer's plain decoding, and the fastest of its other methods; the fastest bar comes last."""
    chosen = []
    for peer in dict.fromkeys(row.peer for row in rows):
        own = [row for row in rows if row.peer == peer]
        others = [row for row in own if row.method != PLAIN]
        chosen += [row for row in own if row.method == PLAIN]
        chosen += [max(others, key=lambda row: row.tokens_per_second)] if others else []
    return sorted(chosen, key=lambda row: row.tokens_per_second)


def draw_bars(axis: Axes, group: Sequence[MethodRow]) -> None:
    """One bar per row, the first one at the bottom."""
    names = [f"{row.peer} {row.method}{'' if row.same_as_plain == 1 else ' *'}" for row in group]
    speeds = [row.tokens_per_second for row in group]
    spread = [
        [row.tokens_per_second - row.low for row in group],
        [row.high - row.tokens_per_second for row in group],
    ]
    bars = axis.barh(range(len(group)), speeds, xerr=spread, error_kw={"lw": 0.8, "ecolor": "0.3"})
    for bar, row in zip(bars, group, strict=True):
        bar.set_color("tab:green" if row.ours else "tab:blue")
        bar.set_alpha(0.4 if row.method == PLAIN else 0.9)
    axis.set_yticks(range(len(group)), names)
    axis.margins(y=0.01)
