"""Prompt lookup: the tokens after the last earlier occurrence of the text's final n-gram are proposed, without a draft
pass."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.token_graph import ROOT, TokenGraph


class PromptLookup:
    """Index of one request's text by n-gram. Each token is entered once; each lookup is one dictionary access."""

    def __init__(self, ngram: int, length: int) -> None:
        self._ngram, self._length = ngram, length
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> position after its last earlier occurrence

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens of the text to the index."""
        for token in tokens:
            if len(self._text) >= self._ngram:
                self._ends[tuple(self._text[-self._ngram :])] = len(self._text)
            self._text.append(token)

    def propose(self) -> list[int]:
        """Up to `length` tokens; empty if the final n-gram has no earlier occurrence."""
        end = self._ends.get(tuple(self._text[-self._ngram :]))
        return [] if end is None else self._text[end : end + self._length]


def graft_given(graph: TokenGraph, tokens: Sequence[int]) -> None:
    """Add a path of given tokens below the root, before anything is drawn. Its tokens have probability one. A later
    draw of the same token becomes a child of its own, because merging the two would be biased."""
    node = ROOT
    for token in tokens:
        node = graph.add(node, token, gain=0.0, share=1.0, certain=True)


def graft_chosen(graph: TokenGraph, tokens: Sequence[int]) -> None:
    """Add a path of chosen tokens below the root. Existing nodes are reused, missing nodes are added."""
    node = ROOT
    for token in tokens:
        known = next((edge.child for edge in graph.edges[node] if graph.tokens[edge.child] == token), None)
        node = graph.add(node, token, gain=0.0, share=1.0, certain=True) if known is None else known
