"""Static shapes, the best-first tree, Sequoia's dynamic program and prompt lookup."""

from __future__ import annotations

from itertools import product

import numpy as np
from fakes import random_model
from growth import PROMPT, grow
from hypothesis import given
from hypothesis import strategies as st

from draftwood.runtime.engines.base import ForwardOutput
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.graph.token_graph import TokenGraph
from draftwood.runtime.speculation.graph.token_tree import unroll
from draftwood.runtime.speculation.growers.baseline import (
    BestFirst,
    RankedStaticTree,
    chain,
    depths_of,
    k_ary,
    rank_children,
    shallow,
)
from draftwood.runtime.speculation.growers.gsd import NoMerger
from draftwood.runtime.speculation.growers.lookup import PromptLookup
from draftwood.runtime.speculation.planning.lookups import NO_MATCH, Match


def test_shapes() -> None:
    assert chain(3) == (0, 1, 2)
    assert k_ary((2, 2)) == (0, 0, 1, 1, 2, 2)
    assert depths_of(k_ary((3, 1, 1))) == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert shallow(k_ary((2, 2, 2)), 2) == k_ary((2, 2))


def test_a_ranked_shape_takes_the_most_probable_tokens() -> None:
    predict = random_model(1, 8)
    graph, passes = grow(RankedStaticTree(k_ary((2, 2))), predict, seeded_streams(0).draft)
    assert passes == 2
    for node in (0, 1, 2):
        best = np.argsort(-predict((*PROMPT, *graph.path(node))))[:2].tolist()
        assert [graph.tokens[edge.child] for edge in graph.edges[node]] == best


def test_best_first_keeps_the_most_probable_paths() -> None:
    """Against every path of a small vocabulary."""
    predict = random_model(2, 4)
    graph, _ = grow(BestFirst(10, depth=3, width=64, merger=NoMerger()), predict, seeded_streams(0).draft)
    tree = unroll(graph, 10, 99)
    paths = [path for length in (1, 2, 3) for path in product(range(4), repeat=length)]

    def probability(path: tuple[int, ...]) -> float:
        value = 1.0
        for index, token in enumerate(path):
            value *= predict((*PROMPT, *path[:index]))[token]
        return value

    best = sorted(paths, key=probability, reverse=True)[:10]
    assert {tuple(graph.path(node)) for node in tree.nodes[1:]} == set(best)


def test_the_ranking_of_the_graph_is_used_only_when_it_is_the_requests_own() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.2]], np.float32))
    shown = ForwardOutput(logits, np.array([[2, 1]]), np.array([[-1.0, -2.0]], np.float32))
    graph = TokenGraph(0)
    free = Sampler(SamplingParams(), [0], (), 3)
    penalised = Sampler(SamplingParams(presence_penalty=1.0), [0], (), 3)
    assert rank_children(graph, [0], shown, free, 2)[0] == [[2, 1]]
    assert rank_children(graph, [0], shown, penalised, 2)[0] == [[0, 1]]
    assert rank_children(graph, [0], shown, free, 3)[0] == [[0, 1, 2]]  # more than the graph ranks


@given(text=st.lists(st.integers(0, 3), max_size=40), ngram=st.integers(1, 3), length=st.integers(1, 4))
def test_lookup_finds_the_last_earlier_occurrence(text: list[int], ngram: int, length: int) -> None:
    lookup = PromptLookup((ngram,), length)
    for end in range(len(text)):
        lookup.propose(text[:end])
    ends = [end for end in range(ngram, len(text)) if text[end - ngram : end] == text[len(text) - ngram :]]
    found = ends and len(text) >= ngram
    assert lookup.propose(text) == (Match(ngram, text[ends[-1] : ends[-1] + length]) if found else NO_MATCH)


def test_a_long_prompt_is_entered_in_parts() -> None:
    lookup, text = PromptLookup((2,), 2), [*range(5000), 4000, 4001]
    assert [lookup.propose(text) for _ in range(2)] == [NO_MATCH, Match(2, [4002, 4003])]
