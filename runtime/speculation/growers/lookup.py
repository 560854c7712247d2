"""Prompt lookup: what followed the last occurrence of the text's final n-gram is a proposal without a draft pass."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.token_graph import ROOT, TokenGraph


class PromptLookup:
    """Index of one request's text by n-gram; each token is entered once, each lookup is one dictionary access."""

    def __init__(self, ngram: int, length: int) -> None:
        self._ngram, self._length = ngram, length
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> position behind its last occurrence but the final one

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that became part of the text."""
        for token in tokens:
            if len(self._text) >= self._ngram:
                self._ends[tuple(self._text[-self._ngram :])] = len(self._text)
            self._text.append(token)

    def propose(self) -> list[int]:
        """Up to `length` tokens, empty when the final n-gram is new."""
        end = self._ends.get(tuple(self._text[-self._ngram :]))
        return [] if end is None else self._text[end : end + self._length]


def graft_given(graph: TokenGraph, tokens: Sequence[int]) -> None:
    """A hypothesis beside drawn ones, before anything is drawn: a child of its own, given with probability one. A draw
    of the same token stays a child too; merging them away would be biased."""
    node = ROOT
    for token in tokens:
        node = graph.add(node, token, gain=0.0, share=1.0, certain=True)


def graft_chosen(graph: TokenGraph, tokens: Sequence[int]) -> None:
    """A hypothesis among chosen ones: it follows the nodes that exist and adds what is missing."""
    node = ROOT
    for token in tokens:
        known = next((edge.child for edge in graph.edges[node] if graph.tokens[edge.child] == token), None)
        node = graph.add(node, token, gain=0.0, share=1.0, certain=True) if known is None else known
