"""SpeculativeConfig: which proposal, which verifier, how large; refuses what would change the output distribution."""

from __future__ import annotations

from dataclasses import dataclass

from ...models.errors import ConfigError
from .baseline import BestFirst, Grower, SampledTree
from .verifier import Verifier, block_verification, recursive_rejection, sample_and_match

VERIFIERS: dict[str, Verifier] = {
    "match": sample_and_match,
    "rejection": recursive_rejection,
    "block": block_verification,
}
# Which verifier is exact for which proposal, best first (papers.md section 10 measures the bias of the other pairs).
LOSSLESS: dict[str, tuple[str, ...]] = {
    "chain": ("block", "rejection", "match"),  # drawn, one child per node
    "k-ary": ("rejection", "match"),  # drawn without replacement, shape fixed beforehand
    "topk": ("match",),  # chosen by score
}
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How to speculate. Raises ConfigError for settings that contradict each other or are not lossless.

    grow: "chain" (drawn from the draft), "k-ary" (drawn, `branching` children per depth), "topk" (best-first tree of
    the draft's most probable tokens), or "auto": the tree at temperature 0, where ranking by score costs nothing, the
    drawn chain above. verify: "match", "rejection", "block", or "auto": the best that is exact for the proposal.
    max_draft_len: depth of a proposal in tokens. max_total_draft_tokens: tokens of a tree. frontier_width: nodes of a
    tree the draft scores in one pass, and children each may offer.
    """

    grow: str = AUTO
    verify: str = AUTO
    max_draft_len: int = 5
    max_total_draft_tokens: int = 15
    frontier_width: int = 4
    branching: tuple[int, ...] = (2, 2, 1, 1)

    def __post_init__(self) -> None:
        if self.grow not in (AUTO, *LOSSLESS):
            raise ConfigError(f"grow must be one of {AUTO}, {', '.join(LOSSLESS)}, not {self.grow!r}")
        if self.verify not in (AUTO, *VERIFIERS):
            raise ConfigError(f"verify must be one of {AUTO}, {', '.join(VERIFIERS)}, not {self.verify!r}")
        for name in ("max_draft_len", "max_total_draft_tokens", "frontier_width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.branching or min(self.branching) < 1:
            raise ConfigError(f"branching must name at least one child per depth, not {self.branching}")
        exact = LOSSLESS.get(self.grow, ("match",))
        if self.verify != AUTO and self.verify not in exact:
            raise ConfigError(
                f"verify={self.verify!r} is not lossless for grow={self.grow!r}: its tokens are not drawn the way that "
                f"rule was proved for; use verify={exact[0]!r}"
            )
        if self.grow == "k-ary" and self.max_tokens > self.max_total_draft_tokens:
            raise ConfigError(
                f"branching {self.branching} draws {self.max_tokens} tokens, more than max_total_draft_tokens "
                f"({self.max_total_draft_tokens}): drawn tokens must not be dropped; raise the one or lower the other"
            )

    @property
    def max_tokens(self) -> int:
        """The most tokens one proposal may have, below its root."""
        if self.grow == "chain":
            return self.max_draft_len
        if self.grow == "k-ary":
            layer, total = 1, 0
            for children in self.branching:
                layer *= children
                total += layer
            return total
        return (
            max(self.max_total_draft_tokens, self.max_draft_len) if self.grow == AUTO else self.max_total_draft_tokens
        )

    def grower(self, greedy: bool, max_depth: int) -> Grower:
        """The grower of one round, no deeper than `max_depth`."""
        kind = self.kind(greedy)
        if kind == "chain":
            return SampledTree((1,) * min(self.max_draft_len, max_depth))
        if kind == "k-ary":
            return SampledTree(self.branching[:max_depth])
        depth = min(self.max_draft_len, max_depth)
        return BestFirst(self.max_total_draft_tokens, depth, self.frontier_width)

    def verifier(self, greedy: bool) -> Verifier:
        """The verifier for this configuration's proposals."""
        return VERIFIERS[LOSSLESS[self.kind(greedy)][0] if self.verify == AUTO else self.verify]

    def kind(self, greedy: bool) -> str:
        """The proposal, "auto" resolved."""
        if self.grow != AUTO:
            return self.grow
        return "topk" if greedy or self.verify == "match" else "chain"
