"""An Explanation as one self-contained HTML page: inline style, one SVG per round, no script, no external files."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any, NamedTuple

from ..speculation.graph.token_graph import ROOT
from .explain import NOT_SENT, DraftedNode, ExplainedRound, Explanation
from .explain_style import STYLE

WIDTH, HEIGHT = 112, 36  # of a node
COLUMN, ROW = 156, 43  # distance between nodes
MARGIN = 10
BAR = 90  # width of a round's milliseconds
SHOWN = 13  # characters of a token; the tooltip has the whole text
OPEN_ROUNDS = 24  # rounds that are shown open; later ones are collapsed
VISIBLE = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}
TOTALS = (
    ("num_tokens", "tokens", "{:d}"),
    ("target_passes", "target passes", "{:d}"),
    ("mean_acceptance_length", "mean acceptance length", "{:.2f}"),
    ("num_draft_tokens", "tokens drafted", "{:d}"),
    ("acceptance_rate", "of them accepted", "{:.0%}"),
    ("tokens_per_second", "tokens/s", "{:.0f}"),
    ("draft_seconds", "s in the draft", "{:.3f}"),
    ("target_seconds", "s in the target", "{:.3f}"),
    ("host_seconds", "s outside of both", "{:.3f}"),
)

LEGEND = (
    '<p class="legend"><span class="key accepted">accepted</span><span class="key rejected">rejected</span>'
    '<span class="key not-sent">drafted, not sent to the target</span>'
    '<span class="key own">the target’s own token</span>'
    '<span class="key merge">merge edge</span><span><i class="bar q"></i>draft probability q</span>'
    '<span><i class="bar p"></i>target probability p</span><span>· space&ensp;⏎ new line&ensp;⇥ tab</span></p>'
)


class Place(NamedTuple):
    """Upper left corner of a node."""

    x: float
    y: float


class GraphLayout(NamedTuple):
    """The places of every node of a round and of the target's own token, and the size of the picture."""

    nodes: dict[int, Place]
    own: Place
    width: float
    height: float


def lay_out(round: ExplainedRound) -> GraphLayout:
    """Place nodes from left to right by depth. A node is level with its first child, and each further child gets a new
    line. The target's own token is the last child of the last accepted node."""
    children: dict[int, list[int]] = {node.node: [] for node in round.nodes}
    for drafted in round.nodes[1:]:
        children[drafted.parent].append(drafted.node)
    depth = {node.node: node.depth for node in round.nodes}
    own, last = -1, round.path[-1] if round.path else ROOT
    children[last].append(own)
    children[own], depth[own] = [], depth[last] + 1
    places: dict[int, Place] = {}
    line, stack = -1, [(ROOT, True)]
    while stack:  # depth first, so that lines never cross; no recursion, because a chain may be long
        node, starts_line = stack.pop()
        line += starts_line
        places[node] = Place(MARGIN + COLUMN * depth[node], MARGIN + ROW * line)
        stack += reversed([(child, index > 0) for index, child in enumerate(children[node])])
    width = max(place.x for place in places.values()) + WIDTH + MARGIN
    return GraphLayout(
        {node: place for node, place in places.items() if node != own}, places[own], width, MARGIN + ROW * (line + 1)
    )


def to_html(explanation: Explanation) -> str:
    return "".join(parts(explanation))


def parts(explanation: Explanation) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield '<meta name="color-scheme" content="light dark">'
    yield f"<title>draftwood: {len(explanation.rounds)} rounds</title><style>{STYLE}</style></head><body>\n"
    yield "<header><h1>How this text was written</h1>"
    yield '<p class="text"><span class="prompt">' + escape(explanation.prompt) + "</span>"
    for number, round in enumerate(explanation.rounds, start=1):
        for text, drafted in round.texts:
            kind = "drafted" if drafted else "own"
            yield f'<a href="#round-{number}" class="{kind}" title="round {number}">{escape(text)}</a>'
    yield "</p>"
    yield '<dl class="totals">'
    for name, caption, form in TOTALS:
        if name in explanation.totals:
            yield f"<div><dt>{caption}</dt><dd>{form.format(explanation.totals[name])}</dd></div>"
    yield '</dl><p class="settings">'
    yield " ".join(
        f"<code>{escape(f'{name}={shown_value(value)}')}</code>" for name, value in explanation.settings.items()
    )
    yield "</p>" + overview(explanation.rounds) + LEGEND + "</header>\n<main>"
    for number, round in enumerate(explanation.rounds, start=1):
        yield section(number, round)
    yield "</main></body></html>\n"


def overview(rounds: list[ExplainedRound]) -> str:
    """A strip with one bar per round, which shows its drafted and accepted tokens and links to the round."""
    step, height = 10, 40
    most = max((max(round.num_drafted, 1) for round in rounds), default=1)
    bars = []
    for number, round in enumerate(rounds, start=1):
        x = step * (number - 1)
        tooltip = f"round {number}: {len(round.path)} of {round.num_drafted} accepted"
        tall, filled = (height * count / most for count in (round.num_drafted, len(round.path)))
        bars.append(
            f'<a href="#round-{number}"><title>{tooltip}</title>'
            f'<rect class="hit" x="{x}" y="0" width="{step}" height="{height}"/>'
            f'<rect class="drafted" x="{x}" y="{height - tall:.1f}" width="8" height="{tall:.1f}"/>'
            f'<rect class="accepted" x="{x}" y="{height - filled:.1f}" width="8" height="{filled:.1f}"/></a>'
        )
    width = step * len(rounds)
    return (
        f'<div class="scroll"><svg class="overview" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="drafted and accepted tokens per round">{"".join(bars)}</svg></div>'
    )


def section(number: int, round: ExplainedRound) -> str:
    """One round: a line of facts, the bar of its milliseconds, and its graph."""
    emitted = "".join(
        f'<b class="{"drafted" if drafted else "own"}">{label(text)}</b>' for text, drafted in round.texts
    )
    facts = f"{len(round.path)} of {round.num_drafted} accepted"
    if round.merge_edges:
        facts += f", {len(round.merge_edges)} merged"
    facts += f"; growth ended: {round.growth_end}"
    if round.finish_reason is not None:
        facts += f"; text ended: {round.finish_reason}"
    times = (("draft", round.draft_ms), ("target", round.target_ms), ("host", round.host_ms))
    total = sum(value for _, value in times) or 1.0
    widths = [BAR * max(0.0, value) / total for _, value in times]
    bars = "".join(  # attributes, because servers forbid inline styles
        f'<rect class="{name}" x="{sum(widths[:index]):.1f}" width="{width:.1f}" height="7"/>'
        for index, ((name, _), width) in enumerate(zip(times, widths, strict=True))
    )
    numbers = ", ".join(f"{name} {value:.2f} ms" for name, value in times)
    return (
        f'<details id="round-{number}"{" open" if number <= OPEN_ROUNDS else ""}>'
        f'<summary><span class="number">{number}</span>'
        f'<span class="emitted">{emitted}</span><span class="facts">{escape(facts)}</span>'
        f'<span class="times">{numbers}<svg class="stack" width="{BAR}" height="7">{bars}</svg></span></summary>'
        f'<div class="scroll">{drawing(round)}</div></details>\n'
    )


def drawing(round: ExplainedRound) -> str:
    layout = lay_out(round)
    path = {ROOT, *round.path}
    steps = set(zip([ROOT, *round.path], round.path, strict=False))  # accepted edges
    pieces = []
    for node in round.nodes[1:]:
        kind = "accepted" if (node.parent, node.node) in steps else node.status.replace(" ", "-")
        if kind == "accepted" and (node.parent, node.node) not in steps:
            kind = "rejected"  # the accepted path leads to this node over a merge edge
        pieces.append(curve(layout.nodes[node.parent], layout.nodes[node.node], kind))
    for edge in round.merge_edges:
        text = f"merged: q {exact(edge.draft_prob)}, p {exact(edge.target_prob)} in this context"
        kind = "merge accepted" if edge.accepted else "merge"
        pieces.append(curve(layout.nodes[edge.parent], layout.nodes[edge.child], kind, text))
    pieces.append(curve(layout.nodes[round.path[-1] if round.path else ROOT], layout.own, "own"))
    for node in round.nodes:
        kind = "root" if node.node == ROOT else "accepted" if node.node in path else node.status.replace(" ", "-")
        pieces.append(
            box(
                layout.nodes[node.node],
                kind,
                f"n{node.node}",
                node.text,
                node.draft_prob,
                node.target_prob,
                about(node),
            )
        )
    own = f"token {round.own_token_id}, the target’s own, p {round.own_prob:.4f}"
    pieces.append(box(layout.own, "own", "own", round.own_text, None, round.own_prob, own))
    return (
        f'<svg class="graph" width="{layout.width:g}" height="{layout.height:g}" viewBox="0 0 {layout.width:g} '
        f'{layout.height:g}" role="img" aria-label="token graph">{"".join(pieces)}</svg>'
    )


def box(place: Place, kind: str, name: str, text: str, q: float | None, p: float | None, tooltip: str) -> str:
    """One node: its text, its probabilities, and a bar for each."""
    x, y = place
    full = WIDTH - 12
    bars = "".join(
        f'<rect class="bar {letter}" x="{x + 6:g}" y="{y + offset:g}" width="{full * value:.1f}" height="2"/>'
        for letter, value, offset in (("q", q, HEIGHT - 7), ("p", p, HEIGHT - 4))
        if value is not None
    )
    numbers = f'<text class="probs" x="{x + 6:g}" y="{y + 26:g}">{probabilities(q, p)}</text>' if kind != "root" else ""
    return (
        f'<g class="node {kind}" data-node="{name}"><title>{label(text, limit=400)} ({escape(tooltip)})</title>'
        f'<rect class="box" x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        f'<text class="token" x="{x + 6:g}" y="{y + 15:g}">{label(text)}</text>{numbers}{bars}</g>'
    )


def curve(start: Place, end: Place, kind: str, tooltip: str = "") -> str:
    """An edge, from a node's right side to another one's left. A merge may lead backwards."""
    x0, y0, x1, y1 = start.x + WIDTH, start.y + HEIGHT / 2, end.x, end.y + HEIGHT / 2
    bend = max(22.0, abs(x1 - x0) / 2)
    title = f"<title>{escape(tooltip)}</title>" if tooltip else ""
    line = f"M{x0:g} {y0:g}C{x0 + bend:g} {y0:g} {x1 - bend:g} {y1:g} {x1:g} {y1:g}"
    return f'<path class="edge {kind}" d="{line}">{title}</path>'


def about(node: DraftedNode) -> str:
    if node.node == ROOT:
        return f"token {node.token_id}, the last of the text so far"
    source = "looked up in the text" if node.given else f"q {exact(node.draft_prob)}"
    target = "not sent to the target" if node.status == NOT_SENT else f"p {exact(node.target_prob)}, {node.status}"
    return f"token {node.token_id}, {source}, {target}"


def label(text: str, limit: int = SHOWN) -> str:
    """A token's text as safe markup: visible white space, control characters as escapes, long texts truncated."""
    shown = "".join(VISIBLE.get(char, char if char.isprintable() else f"\\u{ord(char):04x}") for char in text)
    return escape(shown if len(shown) <= limit else shown[: limit - 1] + "…")


def probabilities(q: float | None, p: float | None) -> str:
    """The known ones of both probabilities, as markup."""
    return "&ensp;".join(
        f"{name}&nbsp;{escape(short(value))}" for name, value in (("q", q), ("p", p)) if value is not None
    )


def short(value: float) -> str:
    """A probability with two digits: .42, 1, or <.01."""
    if value >= 0.995:
        return "1"
    return f"{value:.2f}".lstrip("0") if value >= 0.005 else "<.01"


def exact(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"


def shown_value(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
