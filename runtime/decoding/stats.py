"""SpecDecodeStats: what speculation did, in vLLM's definitions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..speculation.planning.controller import RoundPlan


class SpeculationSwitch(NamedTuple):
    """Speculation went on or off. token: tokens emitted by then. reason: in words, with what the best proposal was
    expected to bring over plain decoding."""

    token: int
    speculating: bool
    reason: str


@dataclass(slots=True)
class SpecDecodeStats:
    """Counts of one request, or of many added up.

    num_drafts: verified proposals. num_draft_tokens: tokens proposed in them. num_accepted_tokens: proposed tokens the
    target accepted, before an end of text or length limit cuts the path. accepted_per_round[j]: rounds that accepted
    j tokens. num_merged_tokens: proposed tokens that a merge (GSD) saved the draft. num_tokens: tokens emitted.
    target_passes and draft_passes exclude the prompt; draft_rows are rows the draft scored. Seconds: time inside each
    engine, and the whole of decoding, prompt excluded. Where the cost model plans the rounds: expected_tokens and
    expected_seconds of all plans together, num_chains of the plans for a chain, and every switch between speculation
    and plain decoding. num_cached_tokens: of the prompt, which the target did not read because another request had;
    always 0 outside of AsyncLLM.
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
    switches: list[SpeculationSwitch] = field(default_factory=list)
    num_cached_tokens: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verified proposal, the target's own included: 1 + accepted / drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the proposed tokens."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def host_seconds(self) -> float:
        """Decoding time outside both engines."""
        return self.decode_seconds - self.target_seconds - self.draft_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def record_plan(self, plan: RoundPlan) -> None:
        """One planned round. A probe is no switch."""
        self.expected_tokens += plan.tokens
        self.expected_seconds += plan.seconds
        self.num_chains += plan.chain
        speculating = plan.depth > 0
        before = self.switches[-1].speculating if self.switches else True
        if speculating != before and not plan.probe:
            why = plan.reason or f"a proposal promises {plan.speed_up:.2f} times plain speed"
            reason = f"{'speculating' if speculating else 'decoding plainly'} because {why}"
            self.switches.append(SpeculationSwitch(self.num_tokens, speculating, reason))

    @property
    def expected_tokens_per_second(self) -> float:
        """What the cost model promised; 0 where it did not plan."""
        return self.expected_tokens / self.expected_seconds if self.expected_seconds else 0.0

    def record_round(self, drafted: int, accepted: int) -> None:
        """One verified proposal."""
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        self.accepted_per_round += [0] * (accepted + 1 - len(self.accepted_per_round))
        self.accepted_per_round[accepted] += 1

    def to_dict(self) -> dict[str, Any]:
        """All counts and the derived rates, JSON-ready."""
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
