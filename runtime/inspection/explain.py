"""Explanation of one request: the drafted, accepted and rejected tokens of every round, as plain data and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from ..decoding.round import Round
from ..decoding.stats import SpecDecodeStats
from ..sampling.params import SamplingParams
from ..sampling.structured import StructuredOutput
from ..speculation.config import SpeculativeConfig
from ..speculation.graph.token_graph import ROOT, Edge, TokenGraph

ACCEPTED, REJECTED, NOT_SENT = "accepted", "rejected", "not sent"


class DraftedNode(NamedTuple):
    node: int
    token_id: int
    text: str
    depth: int
    parent: int  # -1 for the root
    draft_prob: float | None  # of the token in its parent's context; None if the draft gave none
    target_prob: float | None  # the same; None if the target did not score the node
    status: str  # "accepted", "rejected", or "not sent": drafted, but not scored by the target
    given: bool  # whether the token comes from prompt lookup


class MergeEdge(NamedTuple):
    """A second edge to a node."""

    parent: int
    child: int
    draft_prob: float | None  # of the node's token in this context, as in DraftedNode
    target_prob: float | None
    accepted: bool


class ExplainedRound(NamedTuple):
    nodes: list[DraftedNode]  # in creation order, the root first
    merge_edges: list[MergeEdge]
    path: list[int]  # the accepted nodes in order, below the root
    own_token_id: int  # the target's own token after the path, with its text and its probability there
    own_text: str
    own_prob: float
    num_tokens: int  # emitted tokens; in the last round of a text they may be fewer than the path and the own token
    finish_reason: str | None
    growth_end: str
    draft_ms: float
    target_ms: float
    host_ms: float

    @property
    def num_drafted(self) -> int:
        return len(self.nodes) - 1

    @property
    def texts(self) -> list[tuple[str, bool]]:
        """The text of each emitted token, and whether the token was drafted."""
        tokens = [*((self.nodes[node].text, True) for node in self.path), (self.own_text, False)]
        return tokens[: self.num_tokens]

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-ready."""
        lists = {
            "nodes": [node._asdict() for node in self.nodes],
            "merge_edges": [edge._asdict() for edge in self.merge_edges],
        }
        return self._asdict() | lists


class Explanation(NamedTuple):
    """One request."""

    prompt: str
    settings: Mapping[str, Any]  # name -> value, ready to be shown
    totals: Mapping[str, Any]
    rounds: list[ExplainedRound]

    def to_json(self) -> dict[str, Any]:
        """All content of the page, JSON-ready."""
        return {
            "prompt": self.prompt,
            "settings": dict(self.settings),
            "totals": dict(self.totals),
            "rounds": [round.to_dict() for round in self.rounds],
        }


class RoundRecorder:
    """Collects the rounds of one request. Pass `observe` to `LLM.generate` or `LLM.stream`."""

    def __init__(self, text_of: Callable[[int], str], max_nodes: float = math.inf) -> None:
        """text_of: see `token_texts`. max_nodes: later rounds are left out, and the explanation's settings say so."""
        self._text_of = text_of
        self._nodes_left = max_nodes
        self.rounds: list[ExplainedRound] = []

    def observe(self, round: Round) -> bool:
        """Add a round: numbers of its nodes, no distributions. Returns whether further rounds are left out."""
        tree, graph = round.proposal.tree, round.proposal.graph
        self._nodes_left -= len(graph.tokens)
        if self._nodes_left < 0:
            return True
        above = [round.target_probs.get(parent) for parent in tree.parents]  # None: nothing may follow the parent
        probs = [0.0 if p is None else float(p[token]) for p, token in zip(above, tree.token_ids, strict=True)]
        # An edge leads to one row per path over it. The accepted row is shown, or else the first one.
        accepted = {(tree.nodes[tree.parents[row]], tree.nodes[row]): row for row in round.acceptance.rows}
        rows = {
            (tree.nodes[tree.parents[row]], tree.nodes[row]): row for row in reversed(range(1, len(tree)))
        } | accepted
        path = [tree.nodes[row] for row in round.acceptance.rows]
        sent, on_path = set(tree.nodes), {ROOT, *path}
        nodes = [
            DraftedNode(ROOT, graph.tokens[ROOT], self._text_of(graph.tokens[ROOT]), 0, -1, None, None, ACCEPTED, False)
        ]
        merges = []
        ranked = any(value != 0 for value in graph.values)
        for parent, edges in enumerate(graph.edges):
            for edge in edges:
                row = rows.get((parent, edge.child))
                q, p = draft_probability(graph, parent, edge, ranked), None if row is None else probs[row]
                if graph.parents[edge.child] != parent:
                    merges.append(MergeEdge(parent, edge.child, q, p, (parent, edge.child) in accepted))
                    continue
                status = ACCEPTED if edge.child in on_path else REJECTED if edge.child in sent else NOT_SENT
                token, depth = graph.tokens[edge.child], graph.depths[edge.child]
                text = self._text_of(token)
                nodes.append(DraftedNode(edge.child, token, text, depth, parent, q, p, status, edge.looked_up))
        own, last = round.acceptance.next_token, round.acceptance.rows[-1] if round.acceptance.rows else 0
        self.rounds.append(
            ExplainedRound(
                nodes=sorted(nodes),
                merge_edges=merges,
                path=path,
                own_token_id=own,
                own_text=self._text_of(own),
                own_prob=float(round.target_probs[last][own]),
                num_tokens=len(round.token_ids),
                finish_reason=round.finish_reason,
                growth_end=round.proposal.growth_end,
                draft_ms=1000 * round.draft_seconds,
                target_ms=1000 * round.target_seconds,
                host_ms=1000 * round.host_seconds,
            )
        )
        return False

    def explanation(
        self, prompt: str, config: SpeculativeConfig | None, params: SamplingParams, stats: SpecDecodeStats
    ) -> Explanation:
        """The collected rounds and the settings of their request."""
        cut = {"rounds": f"the first {len(self.rounds)}"} if self._nodes_left < 0 else {}
        return Explanation(prompt, settings(config, params) | cut, stats.to_dict(), list(self.rounds))


def draft_probability(graph: TokenGraph, parent: int, edge: Edge, ranked: bool) -> float | None:
    """The draft's probability of a token, None if unknown or given. ranked: the graph has log-probabilities."""
    if edge.looked_up:
        return None
    if parent in graph.draft_probs:
        return graph.draft_probs[parent].probability(graph.tokens[edge.child])
    return math.exp(edge.gain) if ranked else None


def settings(config: SpeculativeConfig | None, params: SamplingParams) -> dict[str, Any]:
    """The settings that differ from the defaults, and the main settings in any case; a processor is shown by its
    name, the form of the text by its kind and text."""
    chosen: dict[str, Any] = {"temperature": params.temperature, "max_tokens": params.max_tokens}
    defaults = asdict(SamplingParams())
    for name in defaults:
        value = getattr(params, name)
        if name == "logits_processors":
            value = [getattr(processor, "__name__", type(processor).__name__) for processor in value]
        if isinstance(value, StructuredOutput):
            value = {value.kind: value.text}
        if list_of(value) != list_of(defaults[name]):
            chosen[name] = list_of(value)
    if config is None:
        return chosen | {"speculation": "off"}
    plain = asdict(SpeculativeConfig())
    given = {name: list_of(value) for name, value in asdict(config).items()}
    always = ("grow", "merge", "stop_rule", "verify", "max_draft_len", "max_total_draft_tokens")
    return chosen | {name: value for name, value in given.items() if name in always or value != list_of(plain[name])}


def list_of(value: Any) -> Any:
    """Tuples as lists, which JSON can express."""
    return list(value) if isinstance(value, tuple) else value
