"""RequestState: what the rounds of one request know and change."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..engines.base import KVCache
from ..engines.rounds import Rounds
from ..sampling.random import RandomStreams
from ..sampling.sampler import Sampler
from ..speculation.config import SpeculativeConfig
from ..speculation.graph.token_tree import TokenTree
from ..speculation.planning.controller import Controller, RoundPlan
from ..speculation.planning.estimate import choices_of
from ..speculation.planning.lookups import FORCED, NO_MATCH, Match
from ..speculation.proposer import DraftProposer
from ..speculation.stopwatch import Stopwatch
from ..speculation.verifier import Acceptance
from .chunk import COMPLETE, LENGTH, STOP, TokenLogprob
from .whole_rounds import settings_of, uniforms_of


class RequestState:
    # Set once the request has its caches.
    cache: KVCache
    proposer: DraftProposer | None = None
    rounds: Rounds | None = None
    controller: Controller | None = None
    # What the next chunk says of the prompt, see TokenChunk.
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def __init__(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        streams: RandomStreams,
        max_length: int,
        eos: Collection[int],
        config: SpeculativeConfig | None,
        observed: bool,
    ) -> None:
        params = sampler.params
        self.sampler, self.streams, self.observed = sampler, streams, observed
        self.greedy = params.greedy
        # Prompt and output; the last one is the root of the next round, which no cache holds.
        self.tokens = list(prompt)
        # Tokens that the text may still get. A proposal may be one shorter, since each round adds one of the target.
        self.tokens_left = min(params.max_tokens - len(sampler.output), max_length - len(prompt))
        # The streams, if an engine can draw with their numbers; and how it draws, None at temperature 0.
        self.uniforms, self.draws = uniforms_of(streams), settings_of(params)
        # Whether rounds need rows of logits besides the tokens that are chosen or drawn from them.
        self.needs_logits = params.logprobs is not None or observed
        self.may_run_whole = not self.needs_logits and (self.greedy or bool(self.uniforms))
        # Whether a prompt lookup may take the place of a planned round, and where it looks.
        self.looks_up = config is not None and config.looks_up(self.greedy)
        self.lookup = None if config is None else config.lookup(self.greedy)
        # What a prompt lookup found for this round.
        self.match = NO_MATCH
        self.calibration = None if config is None else config.calibration(self.greedy)
        self.scoring = Stopwatch()  # of the target's passes
        self._endings = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}

    @property
    def root(self) -> int:
        """The last committed token."""
        return self.tokens[-1]

    def look_up(self, most: int) -> list[int]:
        """Up to `most` tokens, as the structured output forces or allows them: forced ones, else a prompt lookup's."""
        if self.lookup is None:
            return []
        forced = self.sampler.processing.forced()[: self.lookup.length]
        self.match = Match(FORCED, forced) if forced else self.lookup.propose(self.tokens)
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
        if plan.depth and not plan.looked_up:
            self.controller.observe(plan, acceptance.rows, choices_of(tree, acceptance.rows))

    def time_pass(self, rows: int) -> None:
        """Tell the controller what the target took for its last pass, of `rows`, and the draft for those before it."""
        if self.controller is None:
            return
        self.controller.observe_pass(rows, self.scoring.latest)
        if self.proposer is not None:
            drafted, seconds = self.proposer.latest_round()
            if drafted:
                self.controller.observe_draft(drafted, seconds)

    def cut(self, token_ids: Sequence[int]) -> tuple[int, str | None]:
        """How many of a round's tokens the text keeps, perhaps a part of a path; and the finish reason if it ends."""
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
        """Add a round's tokens. kept: how many of them the text keeps."""
        self.sampler.commit(token_ids[:kept])
        self.tokens += token_ids
        self.tokens_left -= len(token_ids)
