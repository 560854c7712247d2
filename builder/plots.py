"""Pictures of trainings: two plots side by side, as one self-contained SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from .head.calibration import Bin

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

    def frame(self, title: str, x_label: str, y_label: str) -> list[str]:
        bottom, middle = TOP + SIDE, self.left + self.width / 2
        parts = [f'<text x="{self.left}" y="{TOP - 18}" font-size="15" font-weight="600">{escape(title)}</text>']
        for tick in range(TICKS + 1):
            x_value, y_value = (low + tick / TICKS * (high - low) for low, high in (self.x, self.y))
            x, y = self.at(x_value, y_value)
            parts += [
                f'<line x1="{self.left}" y1="{y:.1f}" x2="{self.left + self.width}" y2="{y:.1f}" stroke="#e4e7eb"/>',
                f'<line x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 4}" stroke="#7b8794"/>',
                f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick_label(x_value)}</text>',
                f'<text x="{self.left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick_label(y_value)}</text>',
            ]
        return [
            *parts,
            f'<path d="M{self.left} {TOP}V{bottom}H{self.left + self.width}" fill="none" stroke="#7b8794"/>',
            f'<text x="{middle}" y="{bottom + 40}" text-anchor="middle">{escape(x_label)}</text>',
            f'<text transform="translate({self.left - 54} {TOP + SIDE / 2}) rotate(-90)" text-anchor="middle">'
            f"{escape(y_label)}</text>",
        ]

    def lines(self, curves: Mapping[str, Curve], colours: Sequence[str], x: float, y: float = TOP) -> list[str]:
        """Curves in data coordinates, and their names from the pixel (`x`, `y`) on."""
        parts = []
        for row, ((name, curve), colour) in enumerate(zip(curves.items(), colours, strict=True)):
            path = " ".join("{:.1f},{:.1f}".format(*self.at(*point)) for point in curve)
            style, line = f'fill="none" stroke="{colour}" stroke-width="2"', y + 14 + 18 * row
            parts += [
                f'<polyline points="{path}" {style}><title>{escape(name)}</title></polyline>',
                f'<line x1="{x}" y1="{line}" x2="{x + 18}" y2="{line}" stroke="{colour}" stroke-width="3"/>',
                f'<text x="{x + 24}" y="{line + 4}">{escape(name)}</text>',
            ]
        return parts


def acceptance_svg(minutes: Mapping[str, Curve], tokens: Mapping[str, Curve]) -> str:
    """The picture of a distillation: acceptance over minutes of training, and over millions of tokens seen, by name."""
    parts = []
    for left, curves, label in ((72, minutes, "minutes of training"), (528, tokens, "million tokens seen")):
        points = [point for curve in curves.values() for point in curve]
        far, high = max((x for x, _ in points), default=0), max((y for _, y in points), default=1.0)
        plot = Plot(left, 360, (0, max(far, 1e-3)), (0, max(0.1, 1.05 * high)))
        parts += plot.frame("Acceptance on held-out answers", label, "share of drafted tokens")
        # Curves rise, so that the corner below them is free.
        parts += plot.lines(curves, COLOURS, plot.left + 220, TOP + SIDE - 18 * len(curves) - 8)
    return svg("Training of a draft: acceptance on held-out answers", parts)


def training_svg(curves: Mapping[str, Curve], reliability: Mapping[str, Sequence[Bin]]) -> str:
    """The picture of a head's training. curves: (step, loss) by name. reliability: bins by name."""
    parts = [*loss_plot(curves), *reliability_plot(reliability)]
    return svg("Training of an acceptance head: loss and reliability", parts)


def loss_plot(curves: Mapping[str, Curve]) -> list[str]:
    shown = {name: smooth(curve) for name, curve in curves.items()}
    points = [point for curve in shown.values() for point in curve]
    losses = [loss for _, loss in points]
    margin = 0.05 * (max(losses) - min(losses)) or 0.05
    plot = Plot(72, 440, (0, max(1.0, *(step for step, _ in points))), (min(losses) - margin, max(losses) + margin))
    parts = plot.frame("Loss", "step", "weighted cross-entropy (nats)")
    return parts + plot.lines(shown, (COLOURS[0], COLOURS[2]), plot.left + plot.width - 96)


def reliability_plot(reliability: Mapping[str, Sequence[Bin]]) -> list[str]:
    """Predicted against observed acceptance; a dot's area is its bin's share of the tokens."""
    plot = Plot(600, SIDE, (0, 1), (0, 1))
    parts = plot.frame("Reliability on held-out prompts", "predicted acceptance", "observed acceptance")
    (x1, y1), (x2, y2) = plot.at(0, 0), plot.at(1, 1)
    parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#9aa5b1" stroke-dasharray="4 4"/>')
    for bins, colour in zip(reliability.values(), COLOURS, strict=True):
        total = sum(each.tokens for each in bins)
        for each in bins:
            x, y = plot.at(each.predicted, each.observed)
            radius = 1.5 + 10 * (each.tokens / total) ** 0.5
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour}" fill-opacity="0.35"/>')
    points = {name: [(each.predicted, each.observed) for each in bins] for name, bins in reliability.items()}
    return parts + plot.lines(points, COLOURS, plot.left + 12)


def svg(title: str, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            'font-family="system-ui, sans-serif" font-size="12" fill="#1f2933" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def tick_label(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def smooth(curve: Curve) -> list[tuple[float, float]]:
    """The means of equal intervals, so that the noise of single steps does not hide the curve."""
    size = -(-len(curve) // SMOOTHED)
    chunks = [curve[first : first + size] for first in range(0, len(curve), size)]
    return [(sum(x for x, _ in chunk) / len(chunk), sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]
