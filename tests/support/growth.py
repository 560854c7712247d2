"""One proposal by the real DraftProposer over a fake draft, for tests that examine the graph."""

from __future__ import annotations

from fakes import Accept, FakeEngine, Predict

from draftwood.runtime.engines.passes import run
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import RandomStream
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.graph.token_graph import TokenGraph
from draftwood.runtime.speculation.growers.baseline import Grower
from draftwood.runtime.speculation.growers.specdecpp import Fixed, Stopper
from draftwood.runtime.speculation.proposer import DraftProposer

PROMPT = (0, 1)


def grow(
    grower: Grower,
    predict: Predict,
    stream: RandomStream,
    stopper: Stopper | None = None,
    accept: Accept | None = None,
    params: SamplingParams | None = None,
) -> tuple[TokenGraph, int]:
    """The graph below PROMPT, and the draft passes it took."""
    graph = TokenGraph(PROMPT[-1])
    return graph, grow_below(graph, grower, predict, stream, stopper, accept, params)


def grow_below(
    graph: TokenGraph,
    grower: Grower,
    predict: Predict,
    stream: RandomStream,
    stopper: Stopper | None = None,
    accept: Accept | None = None,
    params: SamplingParams | None = None,
) -> int:
    """Grow a graph that may hold given tokens already; returns the draft passes it took."""
    vocab_size = len(predict(PROMPT))
    proposer = DraftProposer(FakeEngine(predict, vocab_size, "draft", accept=accept), list(PROMPT))
    run(proposer.read())
    sampler = Sampler(params or SamplingParams(), PROMPT, (), vocab_size)
    run(proposer.propose(graph, grower, stopper or Fixed(), sampler, stream))
    return proposer.passes
