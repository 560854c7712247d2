"""Draw a load: throughput and both latencies against concurrency, one line per server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.load.serving.figures import ServerRow
from benchmarks.load.serving.servers import OURS
from benchmarks.peers.protocol import PLAIN
from benchmarks.tools.svg import new_figure, save_svg

LATENCIES = {"first_ms": "first token, ms (p99 dotted)", "per_token_ms": "per token, ms (p99 dotted)"}


def draw(rows: Sequence[ServerRow], picture: Path) -> None:
    """Write an SVG. Draftwood is green, other peers are blue, plain decoding is pale."""
    canvas = new_figure(10, 3.4)
    axes = canvas.subplots(1, 1 + len(LATENCIES))
    concurrencies = sorted({row.concurrency for row in rows})
    for peer, method in dict.fromkeys((row.peer, row.method) for row in rows):
        own = [row for row in rows if (row.peer, row.method) == (peer, method)]
        x = [row.concurrency for row in own]
        colour, alpha = "tab:green" if peer == OURS else "tab:blue", 0.4 if method == PLAIN else 0.9
        speeds = [row.tokens_per_second for row in own]
        axes[0].plot(x, speeds, color=colour, alpha=alpha, marker=".", label=f"{peer} {method}")
        for axis, name in zip(axes[1:], LATENCIES, strict=True):
            for percentile, line in (("p50", "-"), ("p99", ":")):
                values = [getattr(row, f"{name}_{percentile}") for row in own]
                axis.plot(x, values, line, color=colour, alpha=alpha, marker=".")
    for axis, label in zip(axes, ("tokens per second", *LATENCIES.values()), strict=True):
        axis.set_ylabel(label)
        axis.set_xlabel("requests at a time")
        axis.set_xscale("log", base=2)
        axis.set_xticks(concurrencies, [str(concurrency) for concurrency in concurrencies])
    for axis in axes[1:]:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
    canvas.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save_svg(canvas, picture)
