"""The picture of a training: loss curve and reliability diagram, as one self-contained SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from .calibration import Bin

WIDTH, HEIGHT = 920, 400
TOP, SIDE = 56, 280  # upper edge and height of both plots
COLOURS = ("#9aa5b1", "#d97706", "#1d4ed8")
TICKS = 4
SMOOTHED = 60  # number of points of a smoothed curve
Curve = Sequence[tuple[float, float]]


class Plot(NamedTuple):
    """A rectangle of the picture and the data range it shows."""

    left: float
    width: float
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Convert data coordinates to pixels."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + across * self.width, TOP + (1 - up) * SIDE


def training_svg(curves: Mapping[str, Curve], reliability: Mapping[str, Sequence[Bin]]) -> str:
    """The picture. curves: (step, loss) by name. reliability: bins by name. Both use the same order of colours."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#1f2933" role="img">',
        "<title>Training of an acceptance head: loss and reliability</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        *loss_plot(curves),
        *reliability_plot(reliability),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def loss_plot(curves: Mapping[str, Curve]) -> list[str]:
    """Weighted loss over steps."""
    shown = {name: smooth(curve) for name, curve in curves.items()}
    points = [point for curve in shown.values() for point in curve]
    losses = [loss for _, loss in points]
    margin = 0.05 * (max(losses) - min(losses)) or 0.05
    plot = Plot(72, 440, (0, max(1.0, *(step for step, _ in points))), (min(losses) - margin, max(losses) + margin))
    parts = frame(plot, "Loss", "step", "weighted cross-entropy (nats)")
    for (name, curve), colour in zip(shown.items(), (COLOURS[0], COLOURS[2]), strict=True):
        parts.append(line([plot.at(*point) for point in curve], colour, name))
    return parts + legend(plot.left + plot.width - 96, list(curves), (COLOURS[0], COLOURS[2]))


def reliability_plot(reliability: Mapping[str, Sequence[Bin]]) -> list[str]:
    """Predicted against observed acceptance; a dot's area is its bin's share of the tokens."""
    plot = Plot(600, SIDE, (0, 1), (0, 1))
    parts = frame(plot, "Reliability on held-out prompts", "predicted acceptance", "observed acceptance")
    (x1, y1), (x2, y2) = plot.at(0, 0), plot.at(1, 1)
    parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#9aa5b1" stroke-dasharray="4 4"/>')
    for (name, bins), colour in zip(reliability.items(), COLOURS, strict=True):
        total = sum(each.tokens for each in bins)
        parts.append(line([plot.at(each.predicted, each.observed) for each in bins], colour, name))
        for each in bins:
            x, y = plot.at(each.predicted, each.observed)
            radius = 1.5 + 10 * (each.tokens / total) ** 0.5
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour}" fill-opacity="0.35"/>')
    return parts + legend(plot.left + 12, list(reliability), COLOURS)


def frame(plot: Plot, title: str, x_label: str, y_label: str) -> list[str]:
    """Grid, ticks, labels."""
    bottom, middle = TOP + SIDE, plot.left + plot.width / 2
    parts = [f'<text x="{plot.left}" y="{TOP - 18}" font-size="15" font-weight="600">{escape(title)}</text>']
    for tick in range(TICKS + 1):
        share = tick / TICKS
        x_value, y_value = (low + share * (high - low) for low, high in (plot.x, plot.y))
        x, y = plot.at(x_value, y_value)
        parts += [
            f'<line x1="{plot.left}" y1="{y:.1f}" x2="{plot.left + plot.width}" y2="{y:.1f}" stroke="#e4e7eb"/>',
            f'<line x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 4}" stroke="#7b8794"/>',
            f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick_label(x_value)}</text>',
            f'<text x="{plot.left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick_label(y_value)}</text>',
        ]
    parts += [
        f'<path d="M{plot.left} {TOP}V{bottom}H{plot.left + plot.width}" fill="none" stroke="#7b8794"/>',
        f'<text x="{middle}" y="{bottom + 40}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate({plot.left - 48} {TOP + SIDE / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>",
    ]
    return parts


def tick_label(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.4g}"


def legend(left: float, names: Sequence[str], colours: Sequence[str]) -> list[str]:
    parts = []
    for row, (name, colour) in enumerate(zip(names, colours, strict=True)):
        y = TOP + 14 + 18 * row
        parts.append(f'<line x1="{left}" y1="{y}" x2="{left + 18}" y2="{y}" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{left + 24}" y="{y + 4}">{escape(name)}</text>')
    return parts


def line(points: Sequence[tuple[float, float]], colour: str, name: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = f'fill="none" stroke="{colour}" stroke-width="2"'
    return f'<polyline points="{path}" {style}><title>{escape(name)}</title></polyline>'


def smooth(curve: Curve) -> list[tuple[float, float]]:
    """The means of equal intervals, so that the noise of single steps does not hide the curve."""
    size = -(-len(curve) // SMOOTHED)
    chunks = [curve[first : first + size] for first in range(0, len(curve), size)]
    return [(sum(x for x, _ in chunk) / len(chunk), sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]
