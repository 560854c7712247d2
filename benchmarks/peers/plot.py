"""The comparison as a picture: one bar per peer and method, grouped by precision, with quartiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.figures import MethodRow
from benchmarks.peers.protocol import PLAIN
from benchmarks.tools.svg import new_figure, save_svg

BAR = 0.24  # inches


def draw(rows: Sequence[MethodRow], picture: Path) -> None:
    """Write an SVG. Draftwood is green, other peers are blue, plain decoding is pale. A star marks a method whose text
    differs from the same peer's plain decoding."""
    groups = {
        precision: sorted((row for row in rows if row.precision == precision), key=lambda row: row.tokens_per_second)
        for precision in dict.fromkeys(row.precision for row in rows)
    }
    sizes = [len(group) for group in groups.values()]
    canvas = new_figure(7.5, BAR * sum(sizes) + 0.7 * len(sizes))
    axes = canvas.subplots(len(groups), 1, sharex=True, squeeze=False, height_ratios=sizes)[:, 0]
    for axis, (precision, group) in zip(axes, groups.items(), strict=True):
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
        axis.set_title(precision, loc="left")
        axis.margins(y=0.01)
    axes[-1].set_xlabel("tokens per second, median and quartiles")
    save_svg(canvas, picture)
