"""What a real draft proposed before every token of real texts, and how much of it the target accepted.

`smollm2_trace.json` was recorded at temperature 0, `smollm2_trace_drawn.json` at 0.7 (SmolLM2-135M-Instruct with the
demo's draft, 96 tokens a text, November 2026), and `qwen_trace.json` at 0 (Qwen2.5-Coder-1.5B with the 0.5B model in
int4 and 32,768 tokens, 64 tokens a text). At temperature 0 the text does not depend on the proposals. So the
draft's greatest tree before each token, and the tokens that followed, say how many tokens of any smaller proposal would
have been accepted: `replay.py` needs no engine.

At temperature 0.7 the text is one that the target has drawn. Before each of its tokens a chain and a tree of each of
`DEPTHS` were drawn and verified, the trees by recursive rejection: it tests the children of a node in their order, so a
tree that lacks the last ones would have accepted the same path as far as it goes.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.planning.estimate import VerifierChoice

LIMITS = SpeculativeConfig()  # of depth, size and width
FIRST = ord("0")  # the character of row 0
BETWEEN = "|"  # trees of a place
DEPTHS = (1, 2, 3, 4, LIMITS.max_draft_len)  # of trees that are drawn: each draws other tokens


class Verified(NamedTuple):
    """What a round would have shown: the accepted rows of a proposal, and the verifier's choices along them."""

    rows: list[int]
    choices: list[VerifierChoice]


class Place(NamedTuple):
    """Before one token of a text."""

    # Of every node of the draft's greatest tree, in order of value; node i is row i + 1, and the root is row 0.
    parents: tuple[int, ...]
    # The rows of the tokens that followed, as far as the tree has them.
    path: tuple[int, ...]
    # Accepted tokens of the longest chain.
    chained: int

    def verify(self, depth: int, size: int, chain: bool) -> Verified:
        """A proposal of these limits."""
        if chain:
            right = min(self.chained, depth)
            choices = [VerifierChoice(0, 1)] * right + [VerifierChoice(None, 1)] * (right < depth)
            return Verified(list(range(1, right + 1)), choices)
        depths, rows, offered = [0], {0: 0}, {0: 0}  # rows: of this tree, by those of the greatest
        ranks: dict[int, int] = {}
        for node, parent in enumerate(self.parents, start=1):
            depths.append(depths[parent] + 1)
            if depths[node] > depth or len(rows) > size or parent not in rows:
                continue
            rows[node], offered[node] = len(rows), 0
            ranks[node] = offered[parent]
            offered[parent] += 1
        taken = [node for node in self.path if node in rows]
        choices = [VerifierChoice(ranks[node], offered[above]) for above, node in zip((0, *taken), taken, strict=False)]
        last = taken[-1] if taken else 0
        if offered[last]:
            choices.append(VerifierChoice(None, offered[last]))
        return Verified([rows[node] for node in taken], choices)

    @classmethod
    def decode(cls, text: str) -> Place:
        parents, path = ([ord(each) - FIRST for each in part] for part in text.split(" "))
        return cls(tuple(parents), tuple(path[:-1]), path[-1])


class DrawnPlace(NamedTuple):
    """Before one token of a drawn text: the tree of each of DEPTHS."""

    trees: tuple[Place, ...]

    def verify(self, depth: int, size: int, chain: bool) -> Verified:
        """A proposal of these limits."""
        return self.trees[bisect_left(DEPTHS, depth)].verify(depth, size, chain)


class Trace(NamedTuple):
    """One text, and the tokens of its prompt. places: before each token of the text."""

    prompt: int
    places: Sequence[Place | DrawnPlace]


def read_traces(file: Path) -> list[Trace]:
    texts = json.loads(file.read_text(encoding="utf-8"))["texts"]
    return [Trace(text["prompt"], list(map(decode_place, text["places"]))) for text in texts]


def decode_place(text: str) -> Place | DrawnPlace:
    """A place of either kind."""
    trees = tuple(map(Place.decode, text.split(BETWEEN)))
    return trees[0] if len(trees) == 1 else DrawnPlace(trees)
