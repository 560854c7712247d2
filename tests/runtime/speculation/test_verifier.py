"""Verifiers against each other, and proposals that look harmless and bias the output: the enumeration must see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from enumeration import PROMPT, decoded, outcomes, pair, total_variation

from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.engines.base import ForwardOutput
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import RandomStream, RandomStreams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import Rules, SpeculativeConfig
from draftwood.runtime.speculation.graph.token_graph import Edge, TokenGraph
from draftwood.runtime.speculation.growers.baseline import StaticTree, chain, k_ary
from draftwood.runtime.speculation.growers.draft_vocabulary import NodeSampler
from draftwood.runtime.speculation.growers.dyspec import DySpecThreshold
from draftwood.runtime.speculation.growers.gsd import UnexpandedMerger
from draftwood.runtime.speculation.verifier import Verifier, recursive_rejection, traversal_verification

PARAMS = SamplingParams(max_tokens=3)


def expected_length(config: SpeculativeConfig, seed: int) -> float:
    """Expected accepted tokens of the first round, exactly."""
    target, draft = pair(seed, 3)

    def run(streams: RandomStreams) -> tuple[int, ...]:
        stats = SpecDecodeStats()
        sampler = Sampler(SamplingParams(max_tokens=8), PROMPT, (), 3)
        next(SpeculativeDecoder(target, draft, config, 4096, ()).generate(PROMPT, sampler, streams, stats))
        return (stats.num_accepted_tokens,)

    return sum(probability * accepted for (accepted,), probability in outcomes(run))


@pytest.mark.parametrize("seed", range(4))
def test_block_is_never_worse_than_rejection_and_equals_traversal_on_chains(seed: int) -> None:
    """I14."""
    lengths = {
        verify: expected_length(SpeculativeConfig("chain", verify=verify, max_draft_len=3), seed)
        for verify in ("rejection", "block", "traversal")
    }
    assert lengths["block"] >= lengths["rejection"] - 1e-12
    assert lengths["traversal"] == pytest.approx(lengths["block"], abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_traversal_accepts_at_least_as_much_on_these_trees(seed: int) -> None:
    shape: dict[str, Any] = {"grow": "k-ary", "branching": (2, 1)}
    traversal, rejection = (
        expected_length(SpeculativeConfig(**shape, verify=verify), seed) for verify in ("traversal", "rejection")
    )
    assert traversal >= rejection - 1e-12


class Tampered(StaticTree, ABC):
    """Changes the edges below a node once they are drawn."""

    def expand(
        self, graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput, sampler: NodeSampler, stream: RandomStream
    ) -> None:
        super().expand(graph, nodes, output, sampler, stream)
        for node in nodes:
            graph.edges[node] = self.tampered(graph, graph.edges[node])

    @abstractmethod
    def tampered(self, graph: TokenGraph, edges: Sequence[Edge]) -> list[Edge]: ...


class OwnScore(Tampered):
    """Ranks drawn tokens by their own probability: pruning then looks at what was drawn."""

    def tampered(self, graph: TokenGraph, edges: Sequence[Edge]) -> list[Edge]:
        ranked = sorted(edges, key=lambda edge: -graph.probability(edge.child))
        return [edge._replace(gain=graph.probability(edge.child) - 1) for edge in ranked]


class DropsDoubtful(Tampered):
    """Takes back a token the draft was not sure of."""

    def tampered(self, graph: TokenGraph, edges: Sequence[Edge]) -> list[Edge]:
        return [edge for edge in edges if graph.probability(edge.child) > 0.4]


class WrongOrder(Tampered):
    """Stores siblings in another order than they were drawn in (I4)."""

    def tampered(self, graph: TokenGraph, edges: Sequence[Edge]) -> list[Edge]:
        return [edge._replace(gain=-0.1 * graph.tokens[edge.child]) for edge in edges]


class GreedyDraws(StaticTree):
    """Takes the most probable token and pretends that it was drawn."""

    def expand(
        self, graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput, sampler: NodeSampler, stream: RandomStream
    ) -> None:
        class ArgMax:
            def categorical(self, probabilities: Any) -> int:
                return int(probabilities.argmax())

            def bernoulli(self, probability: float) -> bool:
                return False

        super().expand(graph, nodes, output, sampler, ArgMax())


@dataclass(frozen=True)
class Biased(SpeculativeConfig):
    """A configuration the real one would refuse."""

    grown: Any = None
    judge: Verifier = recursive_rejection
    limit: int = 99

    @property
    def max_tokens(self) -> int:
        return self.limit

    def rules(self, greedy: bool) -> Rules:
        return super().rules(greedy)._replace(grower=lambda max_depth, estimate: self.grown())

    def chooses(self, greedy: bool) -> bool:
        return False

    def verifier(self, greedy: bool) -> Verifier:
        return self.judge


def merged() -> DySpecThreshold:
    return DySpecThreshold(0.05, 6, depth=3, width=3, merger=UnexpandedMerger(0))


CONTROLS = {
    "pruned by the drawn token's own probability": Biased(grown=lambda: OwnScore(k_ary((2, 1))), limit=2),
    "doubtful tokens dropped": Biased(grown=lambda: DropsDoubtful(chain(2))),
    "arg-max passed off as a draw": Biased(grown=lambda: GreedyDraws(chain(2))),
    "siblings in another order": Biased(grown=lambda: WrongOrder(k_ary((3,)))),
}
MERGED_CONTROLS = {  # copies are deep: two tokens and longer texts show them
    "a merged graph judged by traversal": Biased(grown=merged, judge=traversal_verification),
    "a merged graph cut after it was drawn": Biased(grown=merged, limit=4),
}


def biases(config: SpeculativeConfig, vocab_size: int, params: SamplingParams) -> Iterator[float]:
    """Distances to plain decoding's distribution, of one pair of models after the other."""
    for seed in range(6):
        target, draft = pair(seed, vocab_size)
        yield total_variation(decoded(target, draft, config, params), decoded(target, None, None, params))


@pytest.mark.parametrize("name", CONTROLS)
def test_negative_controls_are_seen(name: str) -> None:
    """I2: each variant that docs/papers.md calls biased is measured as biased by the same enumeration."""
    assert any(bias > 1e-4 for bias in biases(CONTROLS[name], 3, PARAMS))


@pytest.mark.parametrize("name", MERGED_CONTROLS)
def test_negative_controls_of_merged_graphs_are_seen(name: str) -> None:
    assert any(bias > 1e-4 for bias in biases(MERGED_CONTROLS[name], 2, SamplingParams(max_tokens=4)))


def test_the_same_graph_is_exact_whole_and_judged_by_rejection() -> None:
    assert max(biases(Biased(grown=merged), 2, SamplingParams(max_tokens=4))) < 1e-12


def test_the_same_machinery_finds_an_honest_tree_exact() -> None:
    """The controls fail because of what they do, not because of how they are built."""
    target, draft = pair(0, 3)
    for judge in (recursive_rejection, traversal_verification):
        honest = Biased(grown=lambda: StaticTree(k_ary((2, 1))), judge=judge)
        found = decoded(target, draft, honest, PARAMS)
        assert total_variation(found, decoded(target, None, None, PARAMS)) < 1e-12
