"""The picture of a distillation: acceptance on held-out answers over minutes and over tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ..head.plots import COLOURS, HEIGHT, WIDTH, Plot, frame, legend, line
from .shards import ANSWER_TEMPERATURES
from .training import Point


def acceptance_svg(curve: Sequence[Point]) -> str:
    """One self-contained SVG with two plots: minutes of training, and millions of tokens seen."""
    minutes = [point.seconds / 60 for point in curve]
    tokens = [point.tokens / 1e6 for point in curve]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#1f2933" role="img">',
        "<title>Training of a draft: acceptance on held-out answers</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    highest = max((value for point in curve for value in point.acceptance if value is not None), default=1.0)
    for left, places, label in ((72, minutes, "minutes of training"), (528, tokens, "million tokens seen")):
        plot = Plot(left, 360, (0, max([*places, 1e-3])), (0, max(0.1, 1.05 * highest)))
        parts += frame(plot, "Acceptance on held-out answers", label, "share of drafted tokens")
        names = [f"temperature {temperature:g}" for temperature in ANSWER_TEMPERATURES]
        for index, (name, colour) in enumerate(zip(names, COLOURS, strict=True)):
            values = [(place, point.acceptance[index]) for place, point in zip(places, curve, strict=True)]
            shown = [plot.at(place, value) for place, value in values if value is not None]
            parts.append(line(shown, colour, name))
        parts += legend(plot.left + 220, names, COLOURS)
    return "\n".join([*parts, "</svg>"]) + "\n"
