"""SpeculativeDecoder: propose, verify, commit, repeat. Token ids in, chunks of token ids out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...models.bindings import TOP_IDS
from ..engines.base import Engine, ForwardOutput, Pass, Passes, forward, prefill_passes
from ..sampling.random import RandomStreams
from ..sampling.sampler import Sampler, largest
from ..sampling.softmax import softmax_of
from ..speculation.config import SpeculativeConfig
from ..speculation.graph.token_graph import TokenGraph
from ..speculation.graph.token_tree import TokenTree, unroll
from ..speculation.growers.lookup import PromptLookup, graft_chosen, graft_given
from ..speculation.planning.calibration import Calibration, uncorrected
from ..speculation.planning.controller import Controller, Experience, Plan
from ..speculation.planning.cost import CostModel
from ..speculation.planning.estimate import choices_of
from ..speculation.proposer import DraftProposer
from ..speculation.verifier import Acceptance, match_best
from .round import (
    END_OF_ROOM,
    NO_SPECULATION,
    NOT_WORTH_IT,
    Observer,
    Proposal,
    Round,
    growth_end,
    target_probabilities,
)
from .stats import SpecDecodeStats


class TokenLogprob(NamedTuple):
    """A token under the target's unprocessed distribution, natural logarithm, with the most probable alternatives."""

    token_id: int
    logprob: float
    top: dict[int, float]


class TokenChunk(NamedTuple):
    """Tokens one round added. The first `num_drafted` came from the draft, the last one is the target's own, unless the
    round was cut short. finish_reason: None while more follows, else "stop" or "length"."""

    token_ids: list[int]
    num_drafted: int
    logprobs: list[TokenLogprob]
    finish_reason: str | None


C = TypeVar("C")
Steps = Generator[Pass | C, ForwardOutput | None, None]  # passes to be answered with their outputs, and chunks


def drive(steps: Steps[C]) -> Iterator[C]:
    """The chunks, every pass run as soon as it is asked for."""
    answer: ForwardOutput | None = None
    with closing(steps):  # what it holds is free at once, also when a pass fails or nobody wants the rest
        while True:
            try:
                step = steps.send(answer)
            except StopIteration:
                return
            if isinstance(step, Pass):
                answer = step.run()
            else:
                answer = None
                yield step


def alone() -> int:
    """No other request shares a pass."""
    return 1


class SpeculativeDecoder:
    """Decodes one request over a target engine and, unless `config` is None, a draft engine.

    The last committed token (the root) is in no cache: a round scores it together with the proposal below it.
    """

    def __init__(
        self,
        target: Engine,
        draft: Engine | None,
        config: SpeculativeConfig | None,
        max_length: int,
        eos: Sequence[int],
        costs: CostModel | None = None,
        sharing: Callable[[], int] = alone,
        experience: Experience | None = None,
    ) -> None:
        """costs: of both engines, by which rounds are planned where `config` has a budget of "cost". sharing: says how
        many requests' passes run together just now. experience: of earlier requests, this decoder's own by default."""
        self._sharing = sharing
        self._experience = Experience() if experience is None else experience
        self._target = target
        self._costs = costs
        self._controller: Controller | None = None
        self._within: dict[tuple[int, int, bool], SpeculativeConfig] = {}  # the configuration under a plan's limits
        self._config = config if draft is not None else None
        self._cache: Any = target.new_cache()
        self._proposer = DraftProposer(draft) if draft is not None and config is not None else None
        self._lookup: PromptLookup | None = None
        self._calibration: Calibration | None = None
        self._max_length = max_length
        self._eos = frozenset(eos)

    def generate(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        streams: RandomStreams,
        stats: SpecDecodeStats,
        observe: Observer | None = None,
    ) -> Iterator[TokenChunk]:
        """Yield one chunk per round until the text ends. `stats` is updated before each chunk is handed out.

        observe: is shown every round before its tokens are committed; draws nothing, and its time is not counted.
        """
        return drive(self.steps(prompt, sampler, streams, stats, observe))

    def steps(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        streams: RandomStreams,
        stats: SpecDecodeStats,
        observe: Observer | None = None,
    ) -> Steps[TokenChunk]:
        """The same for whoever runs the passes: yields each pass it needs, to be answered with its output, and each
        chunk, to be answered with None."""
        start = perf_counter()
        sampler.use(softmax_of(self._target))
        yield from self._read(prompt, sampler)
        begun = perf_counter()
        stats.prompt_seconds = begun - start
        root, length = prompt[-1], len(prompt)
        while True:
            # The longest path that still fits: one token is always the target's own.
            room = min(sampler.params.max_tokens - len(sampler.output), self._max_length - length)
            round_start, draft_before = perf_counter(), stats.draft_seconds
            plan = self._plan(length, room - 1)
            proposal = yield from self._propose(root, room - 1, plan, sampler, streams, observe is not None)
            tree = proposal.tree
            scoring = perf_counter()
            batch = tree.to_batch(self._target.spec, self._cache.length, self._needs_best(sampler, observe))
            output = yield from forward(self._target, batch, self._cache)
            seconds = perf_counter() - scoring
            acceptance = self._verify(tree, output, batch.ranking_only, sampler, streams)
            self._commit(tree, acceptance)
            self._learn(plan, tree, acceptance)
            self._record(stats, plan, tree, acceptance, seconds)
            tokens = [tree.token_ids[row] for row in acceptance.rows] + [acceptance.next_token]
            kept, reason = self._cut(tokens, sampler, room)
            sources = [0, *acceptance.rows]
            logprobs = top_logprobs(output.logits, sources[:kept], tokens[:kept], sampler.params.logprobs)
            if observe is not None:
                shown = perf_counter()
                draft_seconds = stats.draft_seconds - draft_before
                host_seconds = shown - round_start - seconds - draft_seconds
                probs = target_probabilities(tree, output.logits, acceptance, sampler)
                observe(Round(proposal, probs, acceptance, tokens[:kept], reason, draft_seconds, seconds, host_seconds))
                begun += perf_counter() - shown
            sampler.commit(tokens[:kept])
            root, length = acceptance.next_token, length + len(tokens)
            stats.num_tokens += kept
            handed_out = perf_counter()
            stats.decode_seconds = handed_out - begun
            yield TokenChunk(tokens[:kept], min(kept, len(acceptance.rows)), logprobs, reason)
            if reason is not None:
                return
            begun += perf_counter() - handed_out  # what the reader does with a chunk is not decoding

    def _read(self, prompt: Sequence[int], sampler: Sampler) -> Passes[None]:
        """The prompt through both engines, all but its last token, which is the first root."""
        self._cache.truncate(0)
        yield from prefill_passes(self._target, self._cache, prompt[:-1], output_read=False)
        if self._config is not None and self._proposer is not None:
            self._begin(self._config, sampler)
            # A draft that is not worth asking need not read the prompt either.
            room = min(sampler.params.max_tokens, self._max_length - len(prompt))
            controller = self._controller
            read = controller is None or controller.worth_reading(len(prompt), room - 1, self._sharing())
            yield from self._proposer.start(prompt, read)
        if self._lookup is not None:
            self._lookup.extend(prompt)

    def _plan(self, length: int, max_depth: int) -> Plan | None:
        """The round's limits, where rounds are planned and there is room for a proposal."""
        if self._controller is None or self._proposer is None or max_depth < 1:
            return None
        return self._controller.plan(length, max_depth, self._sharing(), self._proposer.unread)

    def _begin(self, config: SpeculativeConfig, sampler: Sampler) -> None:
        """What a request learns about itself starts anew with each. What a draft is worth to earlier ones is a first
        guess; but a sampled text with a seed must not depend on them."""
        greedy = sampler.params.greedy
        experience = self._experience if greedy or sampler.params.seed is None else None
        self._lookup, self._calibration = config.lookup(), config.calibration(greedy)
        if self._costs is not None:
            self._controller = config.controller(self._costs, self._target.spec.widths, greedy, experience)

    def _propose(
        self,
        root: int,
        max_depth: int,
        plan: Plan | None,
        sampler: Sampler,
        streams: RandomStreams,
        explain: bool,
    ) -> Passes[Proposal]:
        """This round's proposal, or the bare root when none is wanted or none fits. explain: say why growth ended."""
        graph = TokenGraph(root)
        if self._proposer is None or self._config is None or max_depth < 1:
            return Proposal(graph, unroll(graph, 0, 0), NO_SPECULATION if self._config is None else END_OF_ROOM)
        config, greedy, depth = self._config, sampler.params.greedy, max_depth
        if plan is not None:
            if not plan.depth:
                return Proposal(graph, unroll(graph, 0, 0), NOT_WORTH_IT)
            config, depth = self._limited(config, plan), min(max_depth, plan.depth)
        found = [] if self._lookup is None else self._lookup.propose()[:depth]
        if not config.chooses(greedy):
            graft_given(graph, found)
        estimate = self._calibration or uncorrected
        grower, stopper = config.grower(greedy, depth, estimate), config.stopper(estimate)
        ranking_only = config.ranks(greedy) and not sampler.follows_path
        by_rule = yield from self._proposer.propose(graph, grower, stopper, sampler, streams.draft, ranking_only)
        if config.chooses(greedy):
            graft_chosen(graph, found)
        tree = unroll(graph, config.max_tokens, max_depth)
        reason = growth_end(graph, tree, self._config, greedy, max_depth, plan, by_rule) if explain else ""
        return Proposal(graph, tree, reason)

    def _limited(self, config: SpeculativeConfig, plan: Plan) -> SpeculativeConfig:
        limits = plan.depth, plan.size, plan.chain
        if limits not in self._within:
            self._within[limits] = config.within(plan)
        return self._within[limits]

    def _needs_best(self, sampler: Sampler, observe: Observer | None) -> bool:
        """Whether this round reads nothing of the target's output but each row's most probable token."""
        ranked = TOP_IDS.name in self._target.spec.outputs and sampler.params.greedy and not sampler.follows_path
        return ranked and sampler.params.logprobs is None and observe is None

    def _verify(
        self, tree: TokenTree, output: ForwardOutput, ranking_only: bool, sampler: Sampler, streams: RandomStreams
    ) -> Acceptance:
        if ranking_only and output.top_ids is not None:
            return match_best(tree, output.top_ids[:, 0])
        logits = output.logits
        if len(tree) == 1 or self._config is None:
            return Acceptance([], sampler.choose(logits[0], [], streams.target))
        return self._config.verifier(sampler.params.greedy)(tree, logits, sampler, streams)

    def _commit(self, tree: TokenTree, acceptance: Acceptance) -> None:
        self._cache.commit([0, *acceptance.rows])
        if self._lookup is not None:
            self._lookup.extend([*(tree.token_ids[row] for row in acceptance.rows), acceptance.next_token])
        if self._proposer is None:
            return
        if len(tree) > 1:
            self._proposer.commit(tree, acceptance.rows, acceptance.next_token)
        else:
            self._proposer.skip(acceptance.next_token)

    def _cut(self, tokens: Sequence[int], sampler: Sampler, room: int) -> tuple[int, str | None]:
        """How many of a round's tokens are kept, and why the text ends there: perhaps inside an accepted path."""
        params = sampler.params
        for index, token in enumerate(tokens[:room]):
            if token in params.stop_token_ids or (token in self._eos and not params.ignore_eos):
                return index + 1, "stop"
        return (room, "length") if len(tokens) >= room else (len(tokens), None)

    def _learn(self, plan: Plan | None, tree: TokenTree, acceptance: Acceptance) -> None:
        """What a verified round says about the next ones."""
        if self._calibration is not None:
            self._calibration.update(tree, acceptance.rows)
        if self._controller is not None and plan is not None and plan.depth:
            self._controller.observe(plan, acceptance.rows, choices_of(tree, acceptance.rows))

    def _record(
        self, stats: SpecDecodeStats, plan: Plan | None, tree: TokenTree, acceptance: Acceptance, seconds: float
    ) -> None:
        """Count a round. seconds: of the target's pass."""
        stats.target_passes += 1
        stats.target_seconds += seconds
        if plan is not None:
            stats.record_plan(plan)
        if len(tree) > 1:
            stats.record_round(len(tree) - 1, len(acceptance.rows))
            stats.num_merged_tokens += sum(tree.merged)
        if self._proposer is not None:
            stats.draft_passes, stats.draft_rows = self._proposer.passes, self._proposer.rows
            stats.draft_seconds = self._proposer.seconds


def top_logprobs(
    logits: NDArray[np.float32], rows: Sequence[int], tokens: Sequence[int], count: int | None
) -> list[TokenLogprob]:
    """Log-probabilities of `tokens`, each predicted by its row of `logits` [rows, V]; empty when `count` is None."""
    if count is None:
        return []
    results = []
    for row, token in zip(rows, tokens, strict=True):
        scores = logits[row].astype(np.float64)
        scores -= scores.max()
        scores -= np.log(np.exp(scores).sum())
        best = largest(scores, count).tolist()
        results.append(TokenLogprob(token, float(scores[token]), {index: float(scores[index]) for index in best}))
    return results
