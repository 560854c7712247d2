"""Draw the pictures of docs/concepts.md: a round, a tree, a graph, a pass.

python docs/pictures/draw.py            writes the pictures beside this file
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

WIDTH, HEIGHT = 74, 30  # of a token's box
COLORS = {
    "text": ("#eceff1", "#78909c"),
    "drafted": ("#fff", "#90a4ae"),
    "accepted": ("#dff4e7", "#1a7f4b"),
    "own": ("#fdf0dc", "#8a4b00"),
    "read": ("#cfd8dc", "#fff"),
    "seen": ("#1a7f4b", "#fff"),
    "hidden": ("#fff", "#e0e0e0"),
}


class Token(NamedTuple):
    """A box with a token's text. x, y: its centre. kind: a key of COLORS."""

    text: str
    x: float
    y: float
    kind: str


def box(token: Token) -> str:
    fill, line = COLORS[token.kind]
    return (
        f'<rect x="{token.x - WIDTH / 2:g}" y="{token.y - HEIGHT / 2:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" '
        f'fill="{fill}" stroke="{line}" stroke-width="1.5"/>'
        + words(token.text, token.x, token.y + 4.5, "middle", mono=True)
    )


def words(text: str, x: float, y: float, anchor: str = "start", mono: bool = False, size: int = 13) -> str:
    font = "ui-monospace,Menlo,Consolas,monospace" if mono else "system-ui,sans-serif"
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-family="{font}" font-size="{size}" fill="#1c2024">'
        f"{escape(text)}</text>"
    )


def edge(start: Token, end: Token, kind: str = "drafted", dashed: bool = False) -> str:
    """A line from the right side of a box to the left side of another one."""
    x0, x1, bend = start.x + WIDTH / 2, end.x - WIDTH / 2, (end.x - start.x - WIDTH) / 2
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    width = 2.5 if kind == "accepted" else 1.5
    return (
        f'<path d="M{x0:g} {start.y:g}C{x0 + bend:g} {start.y:g} {x1 - bend:g} {end.y:g} {x1:g} {end.y:g}" fill="none" '
        f'stroke="{COLORS[kind][1]}" stroke-width="{width}"{dash}/>'
    )


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}"><rect width="{width}" height="{height}" fill="#fff" rx="8"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def drawn(
    tokens: Mapping[str, Token], edges: Iterable[tuple[str, str]], dashed: Iterable[tuple[str, str]]
) -> list[str]:
    """Boxes with their edges. An edge between accepted tokens is part of the accepted path."""
    lines = []
    for pairs, is_dashed in ((edges, False), (dashed, True)):
        for start, end in pairs:
            kind = tokens[end].kind if tokens[end].kind in ("accepted", "own") else "drafted"
            lines.append(edge(tokens[start], tokens[end], kind, is_dashed))
    return [*lines, *map(box, tokens.values())]


def a_round() -> str:
    """Three lines: what the draft proposes, what the target says, what the text becomes."""
    lines: Sequence[tuple[str, str, Sequence[tuple[str, str]]]] = (
        ("1  The draft proposes four tokens,", "one small pass for each.", (
            ("import", "text"), ("sys", "drafted"), ("⏎", "drafted"), ("⏎", "drafted"), ("def", "drafted"))),
        ("2  The target scores all of them", "in one pass: what follows each?", (
            ("sys", "own"), ("⏎", "own"), ("import", "own"), ("⏎", "own"), ("main", "own"))),
        ("3  The verifier accepts two tokens", "and adds the target’s own.", (
            ("import", "text"), ("sys", "accepted"), ("⏎", "accepted"), ("import", "own"))),
    )  # fmt: skip
    parts = []
    for index, (first, second, tokens) in enumerate(lines):
        y = 40 + 74 * index
        parts += [words(first, 20, y - 4), words(second, 38, y + 14)]
        parts += [box(Token(text, 310 + 88 * place, y, kind)) for place, (text, kind) in enumerate(tokens)]
    return picture(720, 230, "one round of speculative decoding", parts)


TREE_EDGES = (
    ("root", "a"), ("root", "b"), ("a", "aa"), ("a", "ab"), ("aa", "aaa"), ("b", "ba"), ("ba", "baa"), ("baa", "own"),
)  # fmt: skip


def a_tree() -> str:
    """A tree with one accepted path."""
    tokens = {
        "root": Token("return", 70, 110, "text"),
        "a": Token("the", 190, 60, "drafted"),
        "b": Token("a", 190, 160, "accepted"),
        "aa": Token("first", 310, 35, "drafted"),
        "ab": Token("list", 310, 85, "drafted"),
        "aaa": Token("item", 430, 35, "drafted"),
        "ba": Token("list", 310, 160, "accepted"),
        "baa": Token("of", 430, 160, "accepted"),
        "own": Token("all", 550, 160, "own"),
    }
    return picture(640, 210, "a token tree with its accepted path", drawn(tokens, TREE_EDGES, ()))


def a_graph() -> str:
    """Left: the sequence "list of" occurs twice, so the second occurrence is an edge. Right: the unrolled tree."""
    graph = {
        "root": Token("return", 50, 100, "text"),
        "a": Token("the", 150, 50, "drafted"),
        "b": Token("a", 150, 150, "accepted"),
        "ab": Token("list", 250, 50, "drafted"),
        "ba": Token("list", 250, 150, "accepted"),
        "of": Token("of", 350, 100, "accepted"),
        "them": Token("items", 450, 100, "accepted"),
    }
    edges = (("root", "a"), ("root", "b"), ("a", "ab"), ("b", "ba"), ("ab", "of"), ("of", "them"))
    moved = 540
    tree = {
        **{name: token._replace(x=token.x + moved) for name, token in graph.items() if name not in ("of", "them")},
        "of": Token("of", 350 + moved, 50, "drafted"),
        "them": Token("items", 450 + moved, 50, "drafted"),
        "of2": Token("of", 350 + moved, 150, "accepted"),
        "them2": Token("items", 450 + moved, 150, "accepted"),
    }
    copies = (("root", "a"), ("root", "b"), ("a", "ab"), ("b", "ba"), ("ab", "of"), ("of", "them"), ("ba", "of2"))
    parts = [
        *drawn(graph, edges, (("ba", "of"),)),
        words("the draft’s graph: 6 nodes", 20, 22),
        *drawn(tree, (*copies, ("of2", "them2")), ()),
        words("what the target scores: one row per path", 20 + moved, 22),
    ]
    return picture(1050, 200, "a token graph and the tree into which it is unrolled", parts)


def a_pass() -> str:
    """The rows of a tree's pass against the slots that each of them attends to."""
    rows = (("return", ()), ("the", (0,)), ("a", (0,)), ("list", (0, 2)), ("of", (0, 2, 3)))
    size, left, top, committed = 30, 110, 60, 6
    parts = [
        words("text so far (KV cache)", left + 8, 22),
        words("rows of this pass", left + committed * size + 14, 22),
    ]
    for index, (text, _) in enumerate(rows):
        parts.append(words(text, left + committed * size + 27 + index * size, 46, "middle", mono=True, size=10))
    for index, (text, ancestors) in enumerate(rows):
        y = top + index * size
        parts.append(words(text, left - 12, y + 20, "end", mono=True))
        for slot in range(committed + len(rows)):
            own = slot - committed
            kind = "read" if own < 0 else "seen" if own in (*ancestors, index) else "hidden"
            fill, line = COLORS[kind]
            x = left + slot * size + (12 if own >= 0 else 0)
            parts.append(f'<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="{fill}" stroke="{line}"/>')
    notes = (
        "Each row attends to the whole text,",
        "to its ancestors in the tree, and to itself.",
        "White: hidden from it.",
    )
    parts += [words(note, left + 11 * size + 40, top + 30 + 22 * index) for index, note in enumerate(notes)]
    return picture(790, 230, "the tree mask of a pass", parts)


PICTURES = {"round.svg": a_round, "tree.svg": a_tree, "graph.svg": a_graph, "pass.svg": a_pass}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(__file__).with_name(name).write_text(draw(), encoding="utf-8")
