"""RequestState: what belongs to one text while it is decoded, and ends with it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ..sampling.random import RandomStreams
from ..sampling.sampler import Sampler
from ..speculation.config import SpeculativeConfig
from ..speculation.graph.token_tree import TokenTree
from ..speculation.planning.controller import Controller, RoundPlan
from ..speculation.planning.estimate import choices_of
from ..speculation.stopwatch import Stopwatch
from ..speculation.verifier import Acceptance


class RequestState:
    """One text and what its own rounds teach. root: the last committed token. length: of prompt and output in tokens.
    room: tokens the text may still get; a proposal has one less, since one token is always the target's own. sharing:
    how many requests' passes run together just now, as far as its plans may know of them. scoring: the time of the
    target's passes. observed: whether an observer is shown its rounds."""

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
        self.controller, self.sharing = controller, sharing
        self.root, self.length = prompt[-1], len(prompt)
        self.room = min(params.max_tokens - len(sampler.output), max_length - self.length)
        self.greedy = params.greedy
        self.lookup = None if config is None else config.lookup()
        self.calibration = None if config is None else config.calibration(self.greedy)
        self.scoring = Stopwatch()
        self._endings = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
        if self.lookup is not None:
            self.lookup.extend(prompt)

    def learn(self, plan: RoundPlan | None, tree: TokenTree, acceptance: Acceptance, token_ids: Sequence[int]) -> None:
        """What a verified round, which yields `token_ids`, says about the next ones."""
        if self.lookup is not None:
            self.lookup.extend(token_ids)
        if self.calibration is not None:
            self.calibration.update(tree, acceptance.rows)
        if self.controller is not None and plan is not None and plan.depth:
            self.controller.observe(plan, acceptance.rows, choices_of(tree, acceptance.rows))

    def cut(self, token_ids: Sequence[int]) -> tuple[int, str | None]:
        """How many of a round's tokens are kept, and why the text ends there: perhaps inside an accepted path."""
        for index, token in enumerate(token_ids[: self.room]):
            if token in self._endings:
                return index + 1, "stop"
        return (self.room, "length") if len(token_ids) >= self.room else (len(token_ids), None)

    def commit(self, token_ids: Sequence[int], kept: int) -> None:
        """A round's tokens, of which the text keeps so many."""
        self.sampler.commit(token_ids[:kept])
        self.root, self.length, self.room = token_ids[-1], self.length + len(token_ids), self.room - len(token_ids)
