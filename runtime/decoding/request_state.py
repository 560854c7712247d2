"""RequestState: the state of one request while it is decoded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ..sampling.random import RandomStreams
from ..sampling.sampler import Sampler
from ..speculation.config import SpeculativeConfig
from ..speculation.graph.token_tree import TokenTree
from ..speculation.planning.controller import Controller, RoundPlan
from ..speculation.planning.estimate import choices_of
from ..speculation.planning.lookups import NO_MATCH, Match
from ..speculation.stopwatch import Stopwatch
from ..speculation.verifier import Acceptance
from .chunk import COMPLETE, LENGTH, STOP, TokenLogprob
from .whole_rounds import settings_of, uniforms_of


class RequestState:
    """The state of one request: its text so far, and the statistics that its rounds collect.

    root: the last committed token. length: tokens of prompt and output together. tokens_left: tokens that the text may
    still get; a proposal may be one token shorter, since each round adds one token of the target. sharing: returns how
    many requests share passes, or 1 where the plans must not depend on other requests. scoring: the stopwatch of the
    target's passes. uniforms: the streams, where an engine can draw with their numbers; else none. draws: how an engine
    draws with them; None at temperature 0. match: what a prompt lookup found for this round. observed: whether an
    observer receives the rounds. needs_logits: whether rounds need rows of logits besides the tokens that are chosen or
    drawn from them. may_run_whole: whether an engine may choose or draw the tokens of a round. prompt_logprobs: what
    the next chunk says of the prompt, see TokenChunk.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        streams: RandomStreams,
        max_length: int,
        eos: Collection[int],
        config: SpeculativeConfig | None,
        controller: Controller | None,
        sharing: Callable[[], int],
        observed: bool,
    ) -> None:
        params = sampler.params
        self.sampler, self.streams, self.observed = sampler, streams, observed
        self.greedy = params.greedy
        self.uniforms, self.draws = uniforms_of(streams), settings_of(params)
        self.needs_logits = params.logprobs is not None or observed
        self.may_run_whole = not self.needs_logits and (self.greedy or bool(self.uniforms))
        self.controller, self.sharing = controller, sharing
        self.root, self.length = prompt[-1], len(prompt)
        self.tokens_left = min(params.max_tokens - len(sampler.output), max_length - self.length)
        self.lookup = None if config is None else config.lookup(self.greedy)
        self.match = NO_MATCH
        self.calibration = None if config is None else config.calibration(self.greedy)
        self.scoring = Stopwatch()
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self._endings = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
        self._unindexed = list(prompt)  # until the next lookup: where none pays, nothing is indexed

    def look_up(self, most: int) -> list[int]:
        """What a prompt lookup finds: up to `most` tokens, as far as the structured output allows them."""
        if self.lookup is None:
            return []
        self.lookup.extend(self._unindexed)
        self._unindexed.clear()
        self.match = self.lookup.propose()
        found = self.match.tokens[:most]
        self.match = Match(self.match.ngram, found[: self.sampler.processing.count_allowed(found)])
        return self.match.tokens

    def learn(self, plan: RoundPlan | None, tree: TokenTree, acceptance: Acceptance, token_ids: Sequence[int]) -> None:
        """Update calibration and controller by a verified round with the output `token_ids`."""
        if self.calibration is not None and not (plan is not None and plan.chosen):
            self.calibration.update(tree, acceptance.rows)
        if self.controller is None or plan is None:
            return
        if self.match.tokens:
            self.controller.observe_match(self.match, token_ids)
        if plan.depth and not plan.given:
            self.controller.observe(plan, acceptance.rows, choices_of(tree, acceptance.rows))

    def time_pass(self, rows: int) -> None:
        """Tell the controller how long the target took for its last pass, which had so many rows."""
        if self.controller is not None:
            self.controller.observe_pass(rows, self.scoring.latest)

    def cut(self, token_ids: Sequence[int]) -> tuple[int, str | None]:
        """How many of a round's tokens the text keeps, and the finish reason if it ends there. A text may end inside an
        accepted path."""
        endings, processing = self._endings, self.sampler.processing
        if len(token_ids) < self.tokens_left and endings.isdisjoint(token_ids) and not processing.is_constrained:
            return len(token_ids), None
        for index, token in enumerate(token_ids[: self.tokens_left]):
            if token in endings:
                return index + 1, STOP
            if processing.is_constrained and processing.completes(token_ids[: index + 1]):
                return index + 1, COMPLETE
        return (self.tokens_left, LENGTH) if len(token_ids) >= self.tokens_left else (len(token_ids), None)

    def commit(self, token_ids: Sequence[int], kept: int) -> None:
        """Add a round's tokens to the state. kept: how many of them the text keeps."""
        if self.lookup is not None:
            self._unindexed += token_ids
        self.sampler.commit(token_ids[:kept])
        self.root = token_ids[-1]
        self.length += len(token_ids)
        self.tokens_left -= len(token_ids)
