"""SpeculativeConfig: kind and size of proposals, and their verifier; none that changes the output's distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ...models.bindings import TOP_COLUMNS
from ...models.errors import ConfigError, known_names, nearest, shown
from ..engines.rounds import BEST, BLOCK, MATCH, REJECTION, TRAVERSAL, RoundShape
from . import bounds
from .bounds import AUTO, NAMED, SHARES, Lowerable, check_bounds, check_effects
from .growers.baseline import Grower
from .growers.kinds import CHOSEN_GRAPH, DRAWN_CHAIN, DRAWN_GRAPH, DRAWN_TREE, KINDS, WHY, GrowerKind, Growth
from .growers.lookup import LENGTHS, PromptLookup
from .growers.specdecpp import Confidence, Entropy, Fixed, SpecDecPP, Stopper
from .planning.budget import DraftBudget
from .planning.calibration import Calibration, Estimate, uncorrected
from .planning.controller import Controller, Limits
from .planning.cost import CostModel
from .planning.estimate import Shapes
from .planning.history import History
from .verifier import VERIFIERS, Verifier, sample_and_match

# The verifiers that are exact for each kind of proposal, best first (docs/papers.md, What is biased).
LOSSLESS: dict[str, tuple[str, ...]] = {
    DRAWN_CHAIN: ("block", "traversal", "rejection", "match"),
    DRAWN_TREE: ("traversal", "rejection", "match"),
    DRAWN_GRAPH: ("rejection", "match"),
    CHOSEN_GRAPH: ("match",),  # p/q rules do not hold
}
GROWERS = tuple(KINDS)
CHOICES: dict[str, tuple[str, ...]] = {
    "grow": (AUTO, *GROWERS),
    "merge": bounds.MERGERS,
    "stop_rule": bounds.STOPPERS,
    "key": bounds.KEYS,
    "verify": (AUTO, *VERIFIERS),
    "budget": bounds.BUDGETS,
    "lookups": bounds.LOOKUPS,
}


class Rules(NamedTuple):
    """grower: of one round, by its greatest depth. stopper: of one round. See SpeculativeConfig's methods."""

    chooses: bool
    ranks: bool
    shape: RoundShape | None
    max_tokens: int
    verify: Verifier
    grower: Callable[[int, Estimate], Grower]
    stopper: Callable[[Estimate], Stopper]


@known_names(ConfigError)
@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Settings of speculation. Raises ConfigError for settings that contradict each other, are not lossless, have the
    wrong type, or exceed the bounds of `bounds.py`.

    grow: the grower, or a paper's name (NAMED). "chain", "k-ary" and "static" draw a fixed shape from the draft
    (`branching` children per depth, or any `topology`). "dyspec" draws tokens where acceptance is likely, in a static
    shape; "dyspec-heap" and "dyspec-threshold" are the paper's own forms. "topk" chooses the most probable tokens.
    "lookup" proposes what a prompt lookup finds and needs no draft.
    "auto" is "lookup" without a draft. Else it is "topk" at temperature 0, with merge="gsd" and with verify="match",
    and "dyspec" otherwise. With budget="cost" and no merge, "auto" is "chain" or, if nothing asks for drawn tokens,
    "topk" in rounds where that is expected to be faster. At temperature 0 every proposal is lossless, so all growers
    choose the most probable tokens instead of drawing, and "dyspec" is "topk".
    merge: "gsd" links recurring sequences of `merge_ngram` tokens. Drawn merges are exact under rejection with
    "dyspec-threshold", and only under matching with the other growers.
    stop_rule: the rule that ends a branch before the limits. key: the estimate of acceptance that DySpec grows by: the
    "draft"'s probability as in the paper, this probability "calibrated" by earlier rounds, or the trained "head" for
    tokens that the draft has read. verify: "match", "rejection", "block", "traversal", or "auto" for the best verifier
    that is exact for the proposal. lookup_ngram: length of the n-gram that "lookup" looks up, 0 for several lengths.
    lookup_len: most tokens that it proposes. lookups: "auto" lets grow="auto" take what a lookup finds in rounds where
    that is expected to be faster, if other settings are defaults.

    budget: "cost" chooses the depth and size of each round's proposal, or plain decoding, by measured costs, up to the
    limits below. "fixed" always proposes up to them, as "dyspec-heap" does above temperature 0.

    max_draft_len: depth of a proposal in tokens. max_total_draft_tokens: tokens of a tree, or of what "auto" proposes
    in its place. frontier_width: nodes that the draft scores in one pass of a tree, and the most children of a node
    with "topk". draft_threshold: least value of a draw ("dyspec-threshold"). rejection_threshold: probability of a
    rejection at which "specdec++" stops. min_draft_len: tokens that "specdec++" proposes in any case.
    confidence_threshold: least draft probability. entropy_threshold: least bound on acceptance. sibling_share,
    leaf_share: GSD's pruning of chosen tokens, see BestFirst. Bundles with less room lower sizes that are not given.
    """

    grow: str = AUTO
    merge: str = "none"
    stop_rule: str = "fixed"
    key: str = "calibrated"
    verify: str = AUTO
    max_draft_len: int = Lowerable(15)
    max_total_draft_tokens: int = Lowerable(15)
    frontier_width: int = Lowerable(4)
    branching: tuple[int, ...] = (2, 1, 1)
    topology: tuple[int, ...] = ()
    draft_threshold: float = 0.05
    merge_ngram: int = 2
    sibling_share: float = 0.0
    leaf_share: float = 0.0
    rejection_threshold: float = 0.7
    confidence_threshold: float = 0.4
    entropy_threshold: float = 0.3
    min_draft_len: int = 1
    lookup_ngram: int = 0
    lookup_len: int = Lowerable(4)
    budget: str = "cost"
    lookups: str = AUTO

    def __post_init__(self) -> None:
        for name, value in NAMED.get(self.grow, {}).items() if isinstance(self.grow, str) else ():
            object.__setattr__(self, name, value)
        check_bounds({name: getattr(self, name) for name in SpeculativeConfig.__dataclass_fields__})
        for name in ("branching", "topology"):
            if type(getattr(self, name)) is list:  # as read from JSON
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, names in CHOICES.items():
            if getattr(self, name) not in names:
                value, papers = getattr(self, name), NAMED if name == "grow" else {}
                near = nearest(value, (*names, *papers))
                raise ConfigError(f"{name} must be one of {', '.join((*names, *papers))}, not {shown(value)}{near}")
        for name in SHARES:
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be in [0, 1], not {shown(getattr(self, name))}")
        if not 0 < self.draft_threshold <= 1:
            raise ConfigError(f"draft_threshold must be in (0, 1], not {shown(self.draft_threshold)}")
        if not self._kind.layered and self.stop_rule != "fixed":
            raise ConfigError(
                f"stop_rule={self.stop_rule!r} needs growth by layers: use grow='dyspec' instead of {self.grow!r}"
            )
        self._check_shape()
        exact = LOSSLESS[self.proposal]
        if self.verify not in (AUTO, *exact):
            made = f"{self.proposal} (grow={self.grow!r}, merge={self.merge!r}), whose {WHY[self.proposal]}"
            fix = " or ".join(f"verify={name!r}" for name in exact)
            raise ConfigError(f"verify={self.verify!r} is not lossless for a {made}: use {fix}")
        check_effects(self)

    def _check_shape(self) -> None:
        if not self.branching or min(self.branching) < 1:
            raise ConfigError(f"branching must name at least one child per depth, not {shown(self.branching)}")
        if any(not 0 <= parent <= index for index, parent in enumerate(self.topology)):
            raise ConfigError("topology must name each position's parent, an earlier position; 0 is the root")
        shape = self._limits().shape
        if self.shaped and not shape:
            raise ConfigError("grow='static' needs a topology, such as 0,0,1")
        if len(shape) > self.max_total_draft_tokens:
            raise ConfigError(
                f"this shape draws {len(shape)} tokens, more than max_total_draft_tokens "
                f"({self.max_total_draft_tokens}): drawn tokens must not be dropped; raise the one or lower the other"
            )

    @property
    def drafts(self) -> bool:
        return self._kind.drafts

    @property
    def proposal(self) -> str:
        """The kind of the proposals above temperature 0, a key of LOSSLESS."""
        return self._kind.merged if self.merge == "gsd" else self._kind.proposal

    @property
    def needs_acceptance(self) -> bool:
        """Whether the draft's engine must contain an acceptance head."""
        return self.stop_rule == "specdec++" or self.key == "head"

    @property
    def shaped(self) -> bool:
        """Whether the settings fix the shape of all proposals."""
        return self._kind.shape is not None

    @property
    def max_tokens(self) -> int:
        """The most tokens of one proposal, without its root."""
        if not self.drafts:
            return min(self.lookup_len, self.max_draft_len)
        return self.max_draft_len if self._kind.is_chain else self.max_total_draft_tokens

    @property
    def max_frontier(self) -> int:
        """The most nodes that one draft pass scores."""
        return max((rows for greedy in (False, True) for rows in self._kind.rows(self._limits(), greedy)), default=1)

    @property
    def max_draft_rows(self) -> int:
        """The most nodes that the draft scores in one round."""
        return max(sum(self._kind.rows(self._limits(), greedy)) for greedy in (False, True))

    def rules(self, greedy: bool) -> Rules:
        """What its rounds need, computed once for many of them."""
        limits, make = self._limits(), self._kind.choose if greedy else self._kind.draw
        deepest = self._kind.deepest(limits, greedy)

        def grower(max_depth: int, estimate: Estimate) -> Grower:
            return make(limits._replace(depth=min(deepest, max_depth), estimate=estimate))

        known = self.chooses(greedy), self.ranks(greedy), self.round_shape(greedy)
        return Rules(*known, self.max_tokens, self.verifier(greedy), grower, self.stopper)

    def round_shape(self, greedy: bool) -> RoundShape | None:
        """The shape of all proposals, where they are those of `BestFirst` alone, drawn chains or trees of
        `DySpecLayers`, and a device can verify them: without merges and rules that end a branch. None for other
        settings."""
        kind, prunes = self._kind, self.sibling_share or self.leaf_share
        if not kind.drafts or self.stop_rule != "fixed" or self.merge != "none" or prunes:
            return None
        depth = self.deepest(greedy)
        sizes = (depth, 1) if kind.is_chain else (self.max_total_draft_tokens, self.frontier_width)
        if self.ranks(greedy):
            return RoundShape(depth, *sizes, BEST if greedy else MATCH)
        is_tree = kind == KINDS["dyspec"] and self.key == "calibrated"
        exact = (TRAVERSAL, REJECTION, MATCH) if is_tree else (BLOCK, MATCH) if kind.is_chain else ()
        if self._verify not in exact:
            return None
        return RoundShape(depth, *sizes, self._verify, is_drawn=True, is_tree=is_tree)

    def deepest(self, greedy: bool) -> int:
        """The greatest depth of a proposal."""
        return self._kind.deepest(self._limits(), greedy)

    def controller(
        self,
        costs: CostModel,
        widths: Sequence[int],
        greedy: bool,
        history: History | None = None,
        budget: DraftBudget | None = None,
        draft_context: int | None = None,
    ) -> Controller | None:
        """The controller that plans one request's rounds, for a target with these widths; None for a fixed budget.
        draft_context: see LlamaConfig."""
        if self.budget == "fixed" or not (self._kind.layered or greedy):
            return None
        shapes, drawn = self._shapes(widths), greedy or self.stop_rule != "fixed" or self.key == "head"
        # Only matching verifies chosen tokens.
        chooses = self.grow == AUTO and shapes.chain and self.verify == AUTO and not drawn
        return Controller(costs, shapes, greedy, history, budget, draft_context, chooses, self.looks_up(greedy))

    def looks_up(self, greedy: bool) -> bool:
        """Whether the tokens of a round may be those that a prompt lookup found. They are exact under matching only."""
        if not self.drafts:
            return self.budget == "cost"
        planned = self.grow == AUTO and self.budget == "cost" and self.lookups == AUTO
        plain = self.merge == "none" and self.stop_rule == "fixed" and self.key != "head"
        return planned and plain and (greedy or self.verify in (AUTO, "match"))

    def _shapes(self, widths: Sequence[int]) -> Shapes:
        """The shapes of proposals from which a controller may choose."""
        if self.shaped:
            return Shapes((len(self._limits().shape),), self.deepest(True), self.max_frontier, False)
        if not self.drafts:
            return Shapes((), self.max_tokens, 0, True)
        if self._kind.is_chain:
            return Shapes((), self.max_draft_len, 1, True)
        most = self.max_total_draft_tokens
        depth = min(self.max_draft_len, most)  # also of a chain or a lookup in the place of a tree
        sizes = {most, *(width - 1 for width in widths if 0 < width - 1 < most)}
        # A chain is drawn like the tree's first branch, and every verifier that is exact for trees is exact for chains.
        either = self.grow == AUTO and self.merge == "none"
        return Shapes(tuple(sorted(sizes)), depth, self.frontier_width, either)

    def within(self, depth: int, size: int, chain: bool, chosen: bool) -> SpeculativeConfig:
        """The same configuration with a plan's limits. A shape that the settings fix keeps its size."""
        if self.shaped or not self.drafts:
            return self
        grow = "topk" if chosen else "chain" if chain else self.grow
        width = 1 if chain and chosen else self.frontier_width
        verify = "match" if chosen else self.verify  # only matching verifies chosen tokens
        within = replace(self, grow=grow, verify=verify, frontier_width=width)
        return replace(within, max_draft_len=depth, max_total_draft_tokens=size)

    def calibration(self, greedy: bool) -> Calibration | None:
        """The calibration table of one request, if the configuration corrects the draft's probabilities."""
        drawn_by_value = not greedy and self._kind.by_value and self.key != "draft"
        return Calibration() if drawn_by_value or self.stop_rule == "specdec++" else None

    def stopper(self, estimate: Estimate = uncorrected) -> Stopper:
        """The stopper that ends branches early. `estimate` corrects the draft's probabilities."""
        if self.stop_rule == "specdec++":
            return SpecDecPP(self.rejection_threshold, self.min_draft_len, estimate)
        if self.stop_rule == "confidence":
            return Confidence(self.confidence_threshold)
        return Entropy(self.entropy_threshold) if self.stop_rule == "entropy" else Fixed()

    def lookup(self, greedy: bool) -> PromptLookup | None:
        """The n-gram index of one request, if the configuration enables prompt lookup."""
        if self.drafts and not self.looks_up(greedy):
            return None
        return PromptLookup((self.lookup_ngram,) if self.lookup_ngram else LENGTHS, self._shapes(()).depth)

    def verifier(self, greedy: bool) -> Verifier:
        """The verifier of the proposals. At temperature 0 all verifiers agree, and matching is the cheapest."""
        return sample_and_match if greedy else VERIFIERS[self._verify]

    def ranks(self, greedy: bool) -> bool:
        """Whether proposals need only the draft's most probable tokens, and no other column of its logits."""
        few = self.frontier_width <= TOP_COLUMNS
        return self.chooses(greedy) and few and not self.shaped and self.stop_rule != "entropy"

    def chooses(self, greedy: bool) -> bool:
        """Whether tokens of a proposal are chosen by score, not drawn."""
        return greedy or self._kind.proposal == CHOSEN_GRAPH

    @property
    def _verify(self) -> str:
        """The name of the verifier above temperature 0, after "auto" is resolved."""
        return LOSSLESS[self.proposal][0] if self.verify == AUTO else self.verify

    @property
    def _kind(self) -> GrowerKind:
        """The kind of the grower, after "auto" is resolved."""
        chosen = self.verify == "match" or self.merge == "gsd"
        return KINDS[("topk" if chosen else "dyspec") if self.grow == AUTO else self.grow]

    def _limits(self, estimate: Estimate = uncorrected) -> Growth:
        """The arguments of growers, for a proposal that the end of the text does not shorten."""
        shape = () if self._kind.shape is None else self._kind.shape(self.branching, self.topology)
        size, depth, width = self.max_total_draft_tokens, self.max_draft_len, self.frontier_width
        tau, shares = self.merge_ngram - 1 if self.merge == "gsd" else None, (self.sibling_share, self.leaf_share)
        return Growth(size, depth, width, shape, tau, self.draft_threshold, *shares, self.key == "head", estimate)


@lru_cache(maxsize=1024)
def rules_of(config: SpeculativeConfig, limits: Limits | None, greedy: bool) -> Rules:
    """The rules of a configuration within a plan's limits. Cached: texts mostly have the plans of others."""
    return (config if limits is None else config.within(*limits)).rules(greedy)
