"""SpeculativeDecoder: decodes a prompt in rounds of propose, verify, commit and learn, each of which yields a chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from ...models.bindings import TOP_IDS
from ..engines.base import Engine, ForwardOutput, Pass
from ..engines.passes import Steps, Works, prefill_passes
from ..engines.rounds import RoundShape
from ..sampling.random import RandomStreams
from ..sampling.sampler import Sampler, ScoredRows
from ..sampling.softmax import softmax_of
from ..speculation.config import Rules, SpeculativeConfig, rules_of
from ..speculation.graph.token_graph import TokenGraph
from ..speculation.graph.token_tree import TokenTree, root_alone, unroll
from ..speculation.planning.budget import DraftBudget
from ..speculation.planning.calibration import uncorrected
from ..speculation.planning.controller import RoundPlan
from ..speculation.planning.cost import CostModel
from ..speculation.planning.history import History
from ..speculation.planning.lookups import NO_MATCH
from ..speculation.proposer import DraftProposer
from ..speculation.stopwatch import Stopwatch
from ..speculation.verifier import Acceptance, end_before_nothing, match_best
from .chunk import LENGTH, TokenChunk, output_logprobs, read_prompt
from .request import Request
from .round import (
    END_OF_ROOM,
    NO_SPECULATION,
    NO_STATE,
    NOT_WORTH_IT,
    Observer,
    Outcome,
    Proposal,
    describe_round,
    growth_end,
    propose_found,
)
from .scheduler import drive
from .state import RequestState
from .stats import SpecDecodeStats
from .whole_rounds import run_whole, shape_of

Verified = tuple[ForwardOutput, Acceptance]


def count_one() -> int:
    """The default of `batch_size`: a request shares its passes with no other request."""
    return 1


class SpeculativeDecoder:
    """Decodes with a target engine and, if `config` asks for one, a draft engine. The last committed token (the root)
    is in no cache. A round scores it together with the proposal below it."""

    def __init__(
        self,
        target: Engine,
        draft: Engine | None,
        config: SpeculativeConfig | None,
        max_length: int,
        eos: Sequence[int],
        costs: CostModel | None = None,
        batch_size: Callable[[], int] = count_one,
        history: History | None = None,
        budget: DraftBudget | None = None,
    ) -> None:
        """costs: the cost model of both engines; rounds are planned by it where `config` has the budget "cost".
        batch_size: returns how many requests share passes at present. history: measurements of earlier requests; by
        default this decoder collects its own. budget: of the draft tokens of all requests that share passes."""
        self._target, self._costs, self._batch_size = target, costs, batch_size
        self._history = History() if history is None else history
        self._budget = budget
        self._config = config if draft is not None or config is None or not config.drafts else None
        self._draft = draft if self._config is not None and self._config.drafts else None
        self._max_length, self._eos = max_length, frozenset(eos)

    def generate(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        streams: RandomStreams,
        stats: SpecDecodeStats,
        observe: Observer | None = None,
    ) -> Iterator[TokenChunk]:
        """Yield one chunk per round until the text ends. `stats` is updated before each chunk is yielded.

        observe: called with every round before its tokens are committed, until it returns True. It consumes no
        randomness, and its time is not part of `stats`. Raises EngineError when an engine has no cache left.
        """
        steps = self.steps(prompt, sampler, streams, stats, observe)
        return drive(Request(steps=steps, write=lambda chunk: chunk, stats=stats))

    def steps(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        streams: RandomStreams,
        stats: SpecDecodeStats,
        observe: Observer | None = None,
        salt: str | None = None,
    ) -> Steps[TokenChunk]:
        """The same for a caller that runs the passes. Yields each pass that it needs and receives the pass's output;
        yields each chunk and receives None. salt: see Engine.new_cache."""
        observed = observe is not None
        request = RequestState(prompt, sampler, streams, self._max_length, self._eos, self._config, observed)
        with ExitStack() as caches:
            cache = self._target.new_cache(salt)
            caches.callback(cache.close)
            request.cache = cache
            if self._draft is not None:
                request.proposer = DraftProposer(self._draft, request.tokens, salt)
                caches.callback(request.proposer.close)
                request.rounds = self._target.rounds(cache, self._draft, request.proposer.cache)
                if request.rounds is not None:
                    caches.callback(request.rounds.close)
                    request.looks_up = False  # beside rounds on a device the cost of a lookup was never measured
            reading, decoding = Stopwatch(), Stopwatch()
            with reading:
                yield from self._read(request)
            if request.controller is not None:
                caches.callback(request.controller.leave)
            stats.prompt_seconds = reading.seconds
            finish_reason = None if request.tokens_left else LENGTH
            if finish_reason is not None:
                yield TokenChunk([], 0, [], finish_reason, request.prompt_logprobs)
            while finish_reason is None:
                with decoding:
                    outcome = yield from self._round(request)
                    kept, finish_reason = request.cut(outcome.token_ids)
                    rows, token_ids = outcome.acceptance.rows, outcome.token_ids[:kept]
                    logprobs = output_logprobs(outcome.logits, rows, token_ids, request.sampler)
                    self._record(stats, request, outcome)
                if observe is not None:
                    seconds = self._lap(request, decoding)
                    if observe(describe_round(outcome, request.sampler, kept, finish_reason, seconds)):
                        observe = None
                with decoding:
                    request.commit(outcome.token_ids, kept)
                    stats.num_tokens += kept
                stats.decode_seconds = decoding.seconds
                yield TokenChunk(token_ids, min(kept, len(rows)), logprobs, finish_reason, request.prompt_logprobs)
                request.prompt_logprobs = None

    def _round(self, request: RequestState) -> Works[Outcome]:
        """Run one round: plan, propose, verify, commit, learn."""
        if request.proposer is not None and request.proposer.is_behind:
            yield from request.proposer.read()
        plan = self._plan(request)
        rules = self._rules(request, plan)
        shape = self._whole_shape(request, plan, rules)
        if shape is not None and request.rounds is not None and request.proposer is not None:
            return (yield from run_whole(request.rounds, request.proposer, request, plan, shape))
        proposal = yield from self._propose(request, plan, rules)
        tree = proposal.tree
        output, acceptance = yield from self._verify(request, rules, tree)
        rows = len(tree.token_ids)
        request.time_pass(rows)
        request.cache.commit([0, *acceptance.rows])
        if request.proposer is not None:
            request.proposer.see(len(request.tokens) - 1, output, (0, *acceptance.rows))
        if request.proposer is not None and rows > 1 and not (plan is not None and plan.looked_up):
            request.proposer.commit(tree, acceptance.rows)
        token_ids = [*map(tree.token_ids.__getitem__, acceptance.rows), acceptance.next_token]
        request.learn(plan, tree, acceptance, token_ids)
        return Outcome(plan, rows - 1, sum(tree.merged), output.logits, acceptance, token_ids, proposal)

    def _rules(self, request: RequestState, plan: RoundPlan | None) -> Rules | None:
        """The rules of the round's proposal; None where there is none."""
        if self._config is None or (plan is not None and not plan.depth):
            return None
        return rules_of(self._config, None if plan is None else plan.limits, request.greedy)

    def _whole_shape(self, request: RequestState, plan: RoundPlan | None, rules: Rules | None) -> RoundShape | None:
        """The shape of the next round if an engine runs it as a whole; None if the host does. Only this decides it."""
        rounds, proposer = request.rounds, request.proposer
        if rounds is None or proposer is None or rules is None or proposer.outgrown:
            return None
        if request.sampler.follows_path or not request.may_run_whole:
            return None
        if plan is not None and plan.looked_up:
            return None
        # A drawn tree is as deep as it was planned.
        may_end = plan is not None and rules.shape is not None and rules.shape.is_tree
        shape = shape_of(rules.shape, request.draws, request.tokens_left, may_end)
        return shape if shape is not None and rounds.fits(shape, proposer.num_unread) else None

    def _read(self, request: RequestState) -> Works[None]:
        """Both engines read the prompt without its last token, which becomes the first root.

        Each request learns from its own rounds only. The plans of its rounds may also depend on earlier requests and on
        requests that run at the same time. They do not where the text depends on the plans, see
        SamplingParams.is_seeded."""
        sampler, prompt, proposer = request.sampler, request.tokens, request.proposer
        sampler.use(softmax_of(self._target))
        beside = proposer if proposer is not None and proposer.states is not None and request.tokens_left > 1 else None
        count = sampler.params.prompt_logprobs
        if count is not None:
            logprobs = read_prompt(self._target, request.cache, prompt, count)
            request.prompt_logprobs = yield from (logprobs if beside is None else beside.read_beside(logprobs))
        else:
            known = len(prompt) - 1 if beside is None else beside.recall()
            yield from prefill_passes(self._target, request.cache, prompt[:known], output_read=False)
            if beside is not None:
                rest = prefill_passes(self._target, request.cache, prompt[known:-1], output_read=False)
                yield from beside.read_beside(rest)
        controller = None
        if self._config is not None and self._costs is not None:
            history, budget = (None, None) if sampler.params.is_seeded else (self._history, self._budget)
            draft_context = None if proposer is None else proposer.context
            controller = self._config.controller(
                self._costs, self._target.spec.widths, request.greedy, history, budget, draft_context
            )
        request.controller = controller
        if proposer is not None and request.tokens_left and beside is None:
            # Where the controller expects no gain from speculation, the draft does not read the prompt yet.
            left, batch_size = request.tokens_left - 1, self._batch_of(request)
            if controller is None or controller.worth_reading(len(prompt), left, batch_size, proposer.num_unread):
                yield from proposer.read()

    def _batch_of(self, request: RequestState) -> int:
        """How many requests share passes; 1 for a request whose plans must not depend on others."""
        return 1 if request.sampler.params.is_seeded else self._batch_size()

    def _plan(self, request: RequestState) -> RoundPlan | None:
        """The plan of the next round; None where rounds are not planned or no proposed token fits."""
        controller, max_depth = request.controller, request.tokens_left - 1
        if controller is None or max_depth < 1:
            return None
        batch_size = self._batch_of(request)
        drafted = 0 if request.proposer is None or not request.proposer.num_unread else max_depth
        plan = controller.held(drafted, batch_size)
        if plan is None:
            unread = 1 if request.proposer is None else request.proposer.num_unread
            plan = controller.plan(len(request.tokens), drafted, batch_size, unread)
        if not request.looks_up or not controller.considers_lookups(plan):
            request.match = NO_MATCH
            return plan
        request.look_up(max_depth)
        return controller.or_lookup(plan, request.match)

    def _propose(self, request: RequestState, plan: RoundPlan | None, rules: Rules | None) -> Works[Proposal]:
        """The round's proposal; it is the root alone where the plan wants no proposal or no proposed token fits."""
        graph, max_depth = TokenGraph(request.root), request.tokens_left - 1
        if self._config is None or max_depth < 1:
            return Proposal(graph, root_alone(request.root), NO_SPECULATION if self._config is None else END_OF_ROOM)
        if request.proposer is None or (plan is not None and plan.looked_up):
            return propose_found(request.root, request.look_up(max_depth), plan)
        if rules is None:
            return Proposal(graph, root_alone(request.root), NOT_WORTH_IT)
        if not request.proposer.num_unread:
            return Proposal(graph, root_alone(request.root), NO_STATE)
        sampler = request.sampler
        depth = max_depth if plan is None else min(max_depth, plan.depth)
        estimate = request.calibration or uncorrected
        grower, stopper = rules.grower(depth, estimate), rules.stopper(estimate)
        ranking_only = rules.ranks and not sampler.follows_path
        draft = request.streams.draft
        by_rule = yield from request.proposer.propose(graph, grower, stopper, sampler, draft, ranking_only)
        tree, reason = unroll(graph, rules.max_tokens, max_depth), ""
        if request.observed:
            reason = growth_end(graph, tree, self._config, request.greedy, max_depth, plan, by_rule)
        return Proposal(graph, tree, reason)

    def _verify(self, request: RequestState, rules: Rules | None, tree: TokenTree) -> Works[Verified]:
        """Score the root and the tree with the target, and choose the accepted path."""
        with request.scoring:
            ranks = TOP_IDS.name in self._target.spec.outputs  # then its most probable tokens are enough, no logits
            follows_path, settings = request.sampler.follows_path, request.sampler.settings
            needs_best = ranks and request.greedy and not (request.needs_logits or follows_path)
            reads = request.proposer is not None and request.proposer.states is not None
            batch = tree.to_batch(self._target.spec, request.cache.length, needs_best, settings, reads)
            output = yield Pass(self._target, batch, request.cache)
        if batch.ranking_only and output.top_ids is not None:
            return output, match_best(tree, output.top_ids[:, 0])
        scored, streams = ScoredRows(request.sampler, output.logits, output.softmaxes), request.streams
        if len(tree.token_ids) == 1 or rules is None:
            return output, Acceptance([], scored.choose(0, [], streams.target))
        return output, end_before_nothing(tree, rules.verify(tree, scored, streams))

    def _record(self, stats: SpecDecodeStats, request: RequestState, outcome: Outcome) -> None:
        stats.target_passes += 1
        stats.target_seconds = request.scoring.seconds
        if outcome.plan is not None:
            stats.record_plan(outcome.plan)
        if outcome.num_drafted:
            stats.record_round(outcome.num_drafted, len(outcome.acceptance.rows))
            stats.num_merged_tokens += outcome.num_merged
        if request.proposer is not None and (outcome.plan is None or outcome.plan.depth):
            stats.draft_passes, stats.draft_rows = request.proposer.passes, request.proposer.rows
            stats.draft_seconds = request.proposer.scoring.seconds

    def _lap(self, request: RequestState, decoding: Stopwatch) -> tuple[float, float, float]:
        """Seconds of the latest round: in the draft, in the target, and on the host."""
        draft = 0.0 if request.proposer is None else request.proposer.scoring.lap()
        target = request.scoring.lap()
        return draft, target, decoding.lap() - draft - target
