"""SpecDecodeStats: counts of speculative decoding, with vLLM's definitions."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any, NamedTuple

from ..speculation.planning.controller import RoundPlan


class SpeculationSwitch(NamedTuple):
    """A switch to or from speculation. token: output tokens before it. reason: the expected gain, in a sentence."""

    token: int
    speculating: bool
    reason: str


@dataclass(slots=True)
class SpecDecodeStats:
    """Counts of one request, or the sums over many requests.

    num_drafts: verified proposals. num_draft_tokens: tokens of these proposals. num_accepted_tokens: proposed tokens
    that the target accepted, before an end of text or a length limit cuts the path. accepted_per_round[j]: rounds that
    accepted j tokens. num_merged_tokens: proposed tokens that the draft did not score because of a merge (GSD).
    num_tokens: output tokens. target_passes, draft_passes: passes without those over the prompt. draft_rows: rows that
    the draft scored. target_seconds, draft_seconds: time inside each engine. decode_seconds: the time of all rounds.
    prompt_seconds: the time of the prompt's passes. num_cached_tokens: prompt tokens whose rows the target took over
    from another request.

    Where the cost model plans the rounds: expected_tokens, expected_seconds: sums over all plans. num_chains: plans for
    a chain. num_chosen: plans for chosen tokens where the settings would draw them. num_looked_up: plans for what a
    prompt lookup found. switches: every switch between speculation and plain decoding, such lookups aside.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_round: list[int] = field(default_factory=list)
    num_merged_tokens: int = 0
    num_tokens: int = 0
    target_passes: int = 0
    draft_passes: int = 0
    draft_rows: int = 0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    decode_seconds: float = 0.0
    prompt_seconds: float = 0.0
    expected_tokens: float = 0.0
    expected_seconds: float = 0.0
    num_chains: int = 0
    num_chosen: int = 0
    num_looked_up: int = 0
    switches: list[SpeculationSwitch] = field(default_factory=list)
    num_cached_tokens: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Output tokens per verified proposal, the target's token included: 1 + accepted / drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """The share of the proposed tokens that the target accepted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def host_seconds(self) -> float:
        """The decoding time outside of both engines, in seconds."""
        return self.decode_seconds - self.target_seconds - self.draft_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def record_plan(self, plan: RoundPlan) -> None:
        """Add a planned round. A probe does not count as a switch, nor does a plain round where nothing was found."""
        self.expected_tokens += plan.tokens
        self.expected_seconds += plan.seconds
        self.num_chains += plan.chain
        self.num_chosen += plan.chosen and not plan.looked_up
        self.num_looked_up += plan.looked_up
        speculating, switches = plan.depth > 0, self.switches
        counts = (speculating or bool(plan.reason)) and not (plan.probe or plan.looked_up)
        if counts and speculating != (not switches or switches[-1].speculating):
            why = plan.reason or f"a proposal promises {plan.speed_up:.2f} times plain speed"
            reason = f"{'speculating' if speculating else 'decoding plainly'} because {why}"
            self.switches.append(SpeculationSwitch(self.num_tokens, speculating, reason))

    @property
    def expected_tokens_per_second(self) -> float:
        """The speed that the cost model expected; 0 where rounds are not planned."""
        return self.expected_tokens / self.expected_seconds if self.expected_seconds else 0.0

    def record_round(self, drafted: int, accepted: int) -> None:
        """Add a verified proposal with `drafted` tokens, of which `accepted` were accepted."""
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        while len(self.accepted_per_round) <= accepted:
            self.accepted_per_round.append(0)
        self.accepted_per_round[accepted] += 1

    def add(self, other: SpecDecodeStats) -> None:
        """Count another text as well, one that came after these."""
        moved = [switch._replace(token=self.num_tokens + switch.token) for switch in other.switches]
        for name in (each.name for each in fields(self) if each.name not in ("accepted_per_round", "switches")):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        pairs = zip_longest(self.accepted_per_round, other.accepted_per_round, fillvalue=0)
        self.accepted_per_round = [ours + theirs for ours, theirs in pairs]
        self.switches += moved

    def to_dict(self) -> dict[str, Any]:
        """All counts and derived rates, JSON-ready."""
        counts = {name: getattr(self, name) for name in self.__dataclass_fields__}
        counts["switches"] = [switch._asdict() for switch in self.switches]
        derived = (
            "mean_acceptance_length",
            "acceptance_rate",
            "host_seconds",
            "tokens_per_second",
            "expected_tokens_per_second",
        )
        return counts | {name: getattr(self, name) for name in derived}


class DraftCounts(NamedTuple):
    """The draft counts of a request up to some round, see SpecDecodeStats."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @classmethod
    def of(cls, stats: SpecDecodeStats) -> DraftCounts:
        return cls(stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens)
