"""DraftProposer: grows one round's TokenGraph with the draft engine, and updates the draft's KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from ..engines.base import Engine, ForwardOutput, KVCache, Pass, TokenBatch
from ..engines.passes import PENDING, Passes, causal_batch, prefill_passes
from ..engines.rounds import RoundOutcome
from ..sampling.random import RandomStream
from ..sampling.sampler import Sampler
from ..sampling.softmax import SoftmaxSettings
from .graph.token_graph import ROOT, TokenGraph
from .graph.token_tree import TokenTree
from .growers.baseline import Grower
from .growers.draft_vocabulary import DraftVocabulary
from .growers.specdecpp import Fixed, Stopper
from .stopwatch import Stopwatch
from .target_states import KEPT, States, TargetStates, salt_after

T = TypeVar("T")


class DraftProposer:
    """One request's draft. It reads the request's text, which ends with the root, the last committed token.

    Every drafted node has at most one cache slot, which is written when the node is scored. `passes`, `rows` and
    `scoring` (a stopwatch) count the draft engine's passes, rows and seconds since the prompt.
    """

    def __init__(self, engine: Engine, text: list[int], salt: str | None = None) -> None:
        """text: all committed tokens, to which the caller appends. Raises EngineError where no cache is left."""
        model = engine.spec.model
        self._engine, self._text, self._salt = engine, text, salt
        self.context = model.draft_context  # see LlamaConfig.draft_context
        self._vocabulary = DraftVocabulary(engine.spec)
        self.states = None if model.reads is None else TargetStates(model.reads, model)
        # Where the tokens in the cache begin.
        self._first = max(len(text) - self.readable(len(text)), 0 if self.states is None else 1)
        self.cache = self._new_cache()
        self._own: dict[int, States] = {}  # scored graph node -> the draft's state of it
        self._slots: dict[int, int] = {}  # scored graph node -> its speculative cache slot
        self._visible: list[bytes] = []  # slot -> mask of the earlier slots on its path, the slot itself included
        self.passes = 0
        self.rows = 0
        self.scoring = Stopwatch()
        self._round: list[int] = []  # rows of each pass of the latest round
        self._before = 0.0  # seconds before that round

    @property
    def pending(self) -> list[int]:
        """Committed tokens that the draft has not read; the last one is the root."""
        return self._text[self._first + self.cache.length :]

    @property
    def num_unread(self) -> int:
        """How many tokens the first pass of the next round must read, the root included."""
        length = len(self._text)
        return self.readable(length - self._first) if self.outgrown else length - self._first - self.cache.length

    @property
    def outgrown(self) -> bool:
        """Whether the text is longer than the draft's context, so that the next round begins anew."""
        return self.context is not None and len(self._text) - self._first > self.context

    def readable(self, length: int) -> int:
        """How many of `length` committed tokens the draft has in its cache or reads: all. Of more than its context only
        the last ones, which fill half of it: then it does not have to begin anew soon. Of a text that was read it
        may only begin where states are left."""
        if self.context is None or length <= self.context:
            return length
        began = self.states is not None and self.states.end > 0
        return min(self.context // 2, KEPT) if began else self.context // 2

    def latest_round(self) -> tuple[list[int], float]:
        """Rows of each pass of the latest round, and their seconds; empty where it also read much text. Once each."""
        rows, self._round = self._round, []
        return rows, self.scoring.seconds - self._before

    def follow(self, outcome: RoundOutcome) -> None:
        """Count a round that an engine ran as a whole. Padding rows of the draft's passes count, too."""
        self.passes += outcome.draft_passes
        self.rows += outcome.draft_rows
        if outcome.seconds is not None:
            self.scoring.add(outcome.seconds[0])

    @property
    def is_behind(self) -> bool:
        """Whether it must read before the next round: states are not kept for longer."""
        return self.states is not None and self.num_unread > KEPT and not self.outgrown

    def read(self) -> Passes[None]:
        """Read the text before the root, as far as its states are known; else the next round does."""
        unread = self.pending[:-1]
        if self.states is not None:
            unread = unread[: max(0, self.states.end + 1 - self._read)]
        yield from prefill_passes(
            self._engine, self.cache, unread, output_read=False, states=self._states_before(len(unread))
        )

    def recall(self) -> int:
        """Take over rows of the text that the engine already holds. Returns how many tokens of the text the target may
        take over, too: it must compute the states of those after them."""
        while chunk := self.pending[:-1][: self._engine.spec.max_width]:
            batch, after = causal_batch(self._engine.spec, chunk, self.cache.length), self.pending[len(chunk) : -1]
            work = Pass(self._engine, batch, self.cache, output_read=False, after=after)
            rest = self._engine.recall(work)
            left = 0 if rest is None else rest.num_rows
            self.cache.commit(range(len(chunk) - left))
            if left:
                break
        return self._read - 1

    def read_beside(self, passes: Passes[T]) -> Passes[T]:
        """Passes of the target over a prompt, whose states the draft reads as they come."""
        try:
            work = next(passes)
            while True:
                start = work.cache.length
                output = yield work._replace(batch=replace(work.batch, states_read=True))
                self.see(start, output)
                work = passes.send(output)  # before others run, for the output is a view
                yield from self.read()
        except StopIteration as end:
            yield from self.read()
            return end.value  # type: ignore[no-any-return]

    def see(self, start: int, output: ForwardOutput, rows: Sequence[int] | None = None) -> None:
        """Keep the states of a pass of the target: of committed tokens from `start` on. rows: theirs; None: all."""
        if self.states is not None and output.states is not None:
            states = output.states if rows is None else output.states[[*rows]]
            self.states.add(start, states, len(self._text) if self.outgrown else self._read - 1)

    @property
    def _read(self) -> int:
        """Where the tokens begin that it has not read."""
        return self._first + self.cache.length

    def _states_before(self, count: int) -> States | None:
        """The states that it takes for the next `count` unread tokens."""
        return None if self.states is None else self.states.before(self._read, count)

    def _new_cache(self) -> KVCache:
        salt = self._salt if self.states is None else salt_after(self._salt, self._text[: self._first])
        return self._engine.new_cache(salt)

    def propose(
        self,
        graph: TokenGraph,
        grower: Grower,
        stopper: Stopper,
        sampler: Sampler,
        stream: RandomStream,
        ranking_only: bool = False,
    ) -> Passes[bool]:
        """Grow `graph` below its root, the last committed token. Returns whether the stopper ended it, by rejecting the
        whole frontier. ranking_only: neither grower nor stopper reads logits."""
        if self.outgrown:
            self._first = len(self._text) - self.num_unread
            self.cache.truncate(0)
            if self.states is not None:
                self.cache.close()
                self.cache = self._new_cache()
        pending, self._before = self.pending, self.scoring.seconds
        self.passes += 1
        self.rows += len(pending)
        settings = None if ranking_only else sampler.drawn
        most = min(PENDING, self._engine.spec.max_width)
        read = len(pending) - 1 if len(pending) > most else 0  # in passes that others need not wait for
        with self.scoring:
            given = self._states_before(read)
            yield from prefill_passes(self._engine, self.cache, pending[:read], output_read=False, states=given)
            given, shows = self._states_before(len(pending) - read), self.states is not None
            start = self.cache.length
            batch = causal_batch(self._engine.spec, pending[read:], start, ranking_only, settings, given, shows)
            output = yield Pass(self._engine, batch, self.cache)
            self.cache.commit(range(batch.num_tokens))
        self._own = {} if output.states is None else {ROOT: output.states[-1].copy()}
        self._slots, self._visible = {}, []
        self._round = [] if read else [len(pending)]
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
            output = yield from self._score(graph, nodes, ranking_only, settings)

    def commit(self, tree: TokenTree, rows: Sequence[int]) -> None:
        """Keep the draft's cache of accepted rows, up to the first row that the draft has not scored in the context of
        the accepted path. The tokens of the others become pending, and the target's own token. Nodes that were scored
        with the draft's own states are read again, with the target's."""
        scored, most = 0, len(rows) if self.states is None else 0
        while scored < most and not tree.merged[rows[scored]] and tree.nodes[rows[scored]] in self._slots:
            scored += 1
        self.cache.commit([self._slots[tree.nodes[row]] for row in rows[:scored]])

    def close(self) -> None:
        self.cache.close()

    def _score(
        self, graph: TokenGraph, nodes: Sequence[int], ranking_only: bool, settings: SoftmaxSettings | None
    ) -> Passes[ForwardOutput]:
        """One draft pass over `nodes`, which get the next cache slots. settings: of the softmax of each row."""
        first, count = self.cache.speculative, len(nodes)
        self.passes += 1
        self.rows += count
        if self._round:
            self._round.append(count)
        for slot, node in enumerate(nodes, start=first):
            parent = graph.parents[node]
            above = b"" if parent == ROOT else self._visible[self._slots[parent]]
            self._visible.append(above.ljust(slot, b"\0") + b"\1")
            self._slots[node] = slot
        lines = [line.ljust(first + count, b"\0") for line in self._visible[first:]]
        mask = np.frombuffer(bytearray().join(lines), np.bool_).reshape(count, first + count)
        # The root is already read, so the position of a node at depth d is the last read row's plus d.
        last = self.cache.length - 1
        positions = [last + graph.depths[node] for node in nodes]
        tokens = [graph.tokens[node] for node in nodes]
        width = self._engine.spec.width_for(count)
        every = () if settings is None else (settings,) * count
        # A merged node has the state of the parent that created it. Another one would change what is proposed after
        # it, and any distribution may propose: a merged graph is verified by what the target says of each whole path.
        parents = graph.parents
        given = None if self.states is None else self.states.after([self._own[parents[node]] for node in nodes])
        batch = TokenBatch.pad(tokens, positions, mask, width, False, ranking_only, every, given, given is not None)
        with self.scoring:
            output = yield Pass(self._engine, batch, self.cache)
        if output.states is not None:
            self._own.update(zip(nodes, output.states.copy(), strict=False))
        return output


def note_acceptance(graph: TokenGraph, nodes: Sequence[int], output: ForwardOutput) -> None:
    """Store the head's estimates for nodes that were just scored, except for the root, which is already accepted."""
    if output.acceptance is not None:
        graph.acceptance.update((node, float(output.acceptance[row])) for row, node in enumerate(nodes) if node != ROOT)
