"""DraftProposer: grows one round's TokenGraph with the draft engine, and updates the draft's KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..engines.base import Engine, ForwardOutput, KVCache, Pass, TokenBatch
from ..engines.passes import Passes, prefill_passes
from ..engines.rounds import RoundOutcome, Rounds
from ..sampling.random import RandomStream
from ..sampling.sampler import Sampler
from ..sampling.softmax import Wanted
from .graph.token_graph import ROOT, TokenGraph
from .graph.token_tree import TokenTree
from .growers.baseline import Grower
from .growers.draft_vocabulary import DraftVocabulary
from .growers.specdecpp import Fixed, Stopper
from .stopwatch import Stopwatch


class DraftProposer:
    """One request's draft. `pending`: committed tokens that the draft has not read; the last one is the root.

    Every drafted node has at most one cache slot, which is written when the node is scored. `passes`, `rows` and
    `scoring` (a stopwatch) count the draft engine's passes, rows and seconds since the prompt.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.context = engine.spec.model.draft_context  # see LlamaConfig.draft_context
        self._vocabulary = DraftVocabulary(engine.spec)
        self._cache = engine.new_cache()
        self._text: list[int] = []  # all committed tokens
        self.pending: list[int] = []
        self._slots: dict[int, int] = {}  # scored graph node -> its speculative cache slot
        self._visible: list[bytes] = []  # slot -> mask of the earlier slots on its path, the slot itself included
        self.passes = 0
        self.rows = 0
        self.scoring = Stopwatch()

    @property
    def unread(self) -> int:
        """The number of committed tokens that the first pass of the next round must read, the root included."""
        pending = len(self.pending)
        return self.readable(self._cache.length + pending) if self.outgrown else pending

    @property
    def outgrown(self) -> bool:
        """Whether the text is longer than the draft's context, so that the next round begins anew."""
        return self.context is not None and self._cache.length + len(self.pending) > self.context

    def readable(self, length: int) -> int:
        """How many of `length` committed tokens the draft has in its cache or reads: all. Of more than its context only
        the last ones, which fill half of it: then it does not have to begin anew soon."""
        return length if self.context is None or length <= self.context else self.context // 2

    def rounds(self, target: Engine, cache: KVCache) -> Rounds | None:
        """See Engine.rounds: with this draft, over this cache of the target."""
        return target.rounds(cache, self._engine, self._cache)

    def follow(self, outcome: RoundOutcome) -> None:
        """Take over the result of a round that an engine ran as a whole. It has committed both caches. Padding rows of
        the draft's passes count, too."""
        self.passes += outcome.draft_passes
        self.rows += outcome.draft_rows
        if outcome.seconds is not None:
            self.scoring.add(outcome.seconds[0])
        self._commit(outcome.written, outcome.num_scored)

    def start(self, prompt: Sequence[int], read: bool = True) -> Passes[None]:
        """Begin a new text. read: whether the draft reads the prompt now, without its last token, which is the first
        root; else the prompt stays pending."""
        self.passes, self.rows, self.scoring = 0, 0, Stopwatch()
        self._cache.truncate(0)
        self._text = list(prompt)
        self.pending = self._text[-self.readable(len(prompt)) :]
        if read:
            yield from prefill_passes(self._engine, self._cache, self.pending[:-1], output_read=False)
            self.pending = self.pending[-1:]

    def propose(
        self,
        graph: TokenGraph,
        grower: Grower,
        stopper: Stopper,
        sampler: Sampler,
        stream: RandomStream,
        ranking_only: bool = False,
    ) -> Passes[bool]:
        """Grow `graph` below its root, the last committed token. Returns whether the stopper ended the growth, because
        it rejected every node of the grower's frontier. ranking_only: neither grower nor stopper reads
        logits."""
        if self.outgrown:
            self.pending = self._text[-self.unread :]
            self._cache.truncate(0)
        self.passes += 1
        self.rows += len(self.pending)
        asked = None if ranking_only else sampler.drawn
        with self.scoring:
            output = yield from prefill_passes(self._engine, self._cache, self.pending, ranking_only, asked=asked)
        if output is None:
            raise AssertionError("propose before start: there is no root")
        self.pending, self._slots, self._visible = [], {}, []
        nodes, own, stops = [ROOT], self._vocabulary.sampler(sampler), not isinstance(stopper, Fixed)
        while True:
            note_acceptance(graph, nodes, output)
            if stops:
                drawn = enumerate(nodes)
                rows = [row for row, node in drawn if not stopper.before_draw(graph, node, output.logits[row])]
                if not rows:
                    return True
                if len(rows) < len(nodes):
                    nodes, output = [nodes[row] for row in rows], output.rows(rows)
            grower.expand(graph, nodes, output, own, stream)
            nodes = frontier = grower.frontier(graph)
            if stops:
                nodes = [node for node in frontier if not stopper.before_score(graph, node)]
            if not nodes:
                return bool(frontier)
            output = yield from self._score(graph, nodes, ranking_only, asked)

    def commit(self, tree: TokenTree, rows: Sequence[int], next_token: int) -> None:
        """Keep the draft's cache of accepted rows, up to the first row that the draft has not scored in the context of
        the accepted path. The other accepted tokens and the target's own token become pending."""
        scored = 0
        while scored < len(rows) and not tree.merged[rows[scored]] and tree.nodes[rows[scored]] in self._slots:
            scored += 1
        self._cache.commit([self._slots[tree.nodes[row]] for row in rows[:scored]])
        self._commit([*(tree.token_ids[row] for row in rows), next_token], scored)

    def _commit(self, committed: Sequence[int], scored: int) -> None:
        """Add tokens to the text, of which the draft has read the first `scored`."""
        self._text += committed
        self.pending = list(committed[scored:])

    def close(self) -> None:
        """Close the draft's cache."""
        self._cache.close()

    def skip(self, tokens: Sequence[int]) -> None:
        """Add tokens of a round in which the draft proposed nothing to the pending ones."""
        self._text += tokens
        self.pending += tokens

    def _score(
        self, graph: TokenGraph, nodes: Sequence[int], ranking_only: bool, asked: Wanted | None
    ) -> Passes[ForwardOutput]:
        """One draft pass over `nodes`, which get the next cache slots. asked: of the softmax of each row."""
        first, count = self._cache.speculative, len(nodes)
        self.passes += 1
        self.rows += count
        for slot, node in enumerate(nodes, start=first):
            parent = graph.parents[node]
            above = b"" if parent == ROOT else self._visible[self._slots[parent]]
            self._visible.append(above.ljust(slot, b"\0") + b"\1")
            self._slots[node] = slot
        lines = [line.ljust(first + count, b"\0") for line in self._visible[first:]]
        mask = np.frombuffer(bytearray().join(lines), np.bool_).reshape(count, first + count)
        # The root is already read, so the position of a node at depth d is the last read row's plus d.
        last = self._cache.length - 1
        positions = [last + graph.depths[node] for node in nodes]
        tokens = [graph.tokens[node] for node in nodes]
        width = self._engine.spec.width_for(count)
        wanted = () if asked is None else (asked,) * count
        batch = TokenBatch.pad(tokens, positions, mask, width, ranking_only=ranking_only, wanted=wanted)
        with self.scoring:
            return (yield Pass(self._engine, batch, self._cache))


def note_acceptance(graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput) -> None:
    """Store the head's estimates for nodes that were just scored, except for the root, which is already accepted."""
    if output.acceptance is not None:
        graph.acceptance.update((node, float(output.acceptance[row])) for row, node in enumerate(nodes) if node != ROOT)
