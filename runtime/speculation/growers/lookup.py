"""Prompt lookup: proposes what followed the last earlier occurrence of the text's final n-gram, without a draft."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.token_graph import ROOT, TokenGraph
from ..planning.lookups import NO_MATCH, Match

LENGTHS = (8, 6, 4, 3, 2)  # n-grams of a lookup that looks for long ones first
MOST_ENTERED = 2048  # tokens at a lookup, about 10 ms: other texts wait meanwhile


class PromptLookup:
    """Index of a request's text by n-grams, entered at a lookup, which is one dictionary access for each length."""

    def __init__(self, ngrams: Sequence[int], length: int) -> None:
        """ngrams: lengths, those first that a lookup prefers. length: most tokens of a lookup."""
        self.length = length
        self._indexed = 0
        # For every length: n-gram -> position after its last earlier occurrence
        self._ends: dict[int, dict[tuple[int, ...], int]] = {ngram: {} for ngram in ngrams}

    def propose(self, text: Sequence[int]) -> Match:
        """Up to `length` tokens that followed the final n-gram. text: all tokens; it may only grow.
        What is not yet entered of a long one is not found."""
        entered = min(len(text), self._indexed + MOST_ENTERED)
        for end in range(self._indexed, entered):
            for ngram, ends in self._ends.items():
                if end >= ngram:
                    ends[tuple(text[end - ngram : end])] = end
        self._indexed = entered
        for ngram, ends in self._ends.items():
            found = ends.get(tuple(text[-ngram:]))
            if found is not None:
                return Match(ngram, list(text[found : found + self.length]))
        return NO_MATCH


def path_of(root: int, tokens: Sequence[int]) -> TokenGraph:
    """The tokens of a lookup, one after the other."""
    graph, node = TokenGraph(root), ROOT
    for token in tokens:
        node = graph.add(node, token, gain=0.0, share=1.0, looked_up=True)
    return graph
