"""Several sequences of one engine: each is scored as alone, over caches of their own and over one that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from checkpoints import Reference
from engine_parts import CAPACITY, SHARED, TOLERANCE, random_text
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import Tree, trees

from draftwood.models.errors import EngineError
from draftwood.runtime.engines.base import Engine, Pass
from draftwood.runtime.engines.passes import causal_batch
from draftwood.runtime.engines.shared.pool import PooledEngine

pytestmark = pytest.mark.usefixtures("sound")


class Text:
    """One of several sequences: what it holds, and a tree of which the first `scored` rows are speculative."""

    def __init__(self, engine: Engine) -> None:
        self.cache, self.text, self.tree, self.scored = engine.new_cache(), list[int](), Tree((), ()), 0

    def prepare(self, tree: Tree, commit: bool) -> None:
        """Commit a path where that is asked for or nothing is left to score; have a tree."""
        if self.scored and (commit or self.scored == len(self.tree.tokens)):
            path = self.tree.path(self.scored - 1)
            self.cache.commit(path)
            self.text += [self.tree.tokens[row] for row in path]
            self.tree, self.scored = Tree((), ()), 0
        self.tree = self.tree if self.tree.tokens else tree


def check_together(engine: Engine, group: Sequence[Text], rows: int, gqa_reference: Reference) -> None:
    """Score the next rows of everybody's tree in one call."""
    stops = [min(len(each.tree.tokens), each.scored + rows) for each in group]
    batches = [
        each.tree.batch(engine.spec, len(each.text), each.scored, stop) for each, stop in zip(group, stops, strict=True)
    ]
    passes = [Pass(engine, batch, each.cache) for batch, each in zip(batches, group, strict=True)]
    for each, stop, output in zip(group, stops, engine.forward(passes), strict=True):
        expected = gqa_reference(each.tree.texts(each.text)[each.scored : stop])
        np.testing.assert_allclose(output.logits[: len(expected)], expected, atol=TOLERANCE)
        each.scored = stop


step = st.tuples(st.sampled_from(["pass", "pass", "commit", "leave"]), st.integers(0, 7), st.integers(1, 9), trees())


@pytest.mark.parametrize("pooled", [False, True], ids=["caches of their own", "a pool"])
@settings(max_examples=8, derandomize=True)
@given(steps=st.lists(step, min_size=4, max_size=14))
def test_any_mix_of_sequences_is_scored_as_alone(
    steps: list[Any], pooled: bool, backend: str, one: Engine, gqa_reference: Reference
) -> None:
    """Sequences come and go, draw rows over several passes, and commit what they like; `chosen` says whose turn it is,
    as bits."""
    if pooled and backend == SHARED:
        with pytest.raises(EngineError, match="caches are of a fixed size: no pool can share one"):
            PooledEngine(one, 2000)
        return
    engine = PooledEngine(one, CAPACITY) if pooled else one
    group = [Text(engine) for _ in range(3)]
    for kind, chosen, rows, tree in steps:
        turn = [number for number in range(3) if chosen >> number & 1]
        if kind == "leave":
            for number in turn:
                group[number].cache.close()  # its slots are the next one's
                group[number] = Text(engine)
            continue
        for number in turn:
            group[number].prepare(tree, kind == "commit")
        if kind == "pass" and turn:
            check_together(engine, [group[number] for number in turn], rows, gqa_reference)
    for each in group:
        each.cache.close()
    if pooled:
        engine.close()


def test_a_text_goes_on_behind_rows_that_another_computed(backend: str, one: Engine, gqa_reference: Reference) -> None:
    if backend == SHARED:
        pytest.skip("its sequences share no rows")
    pool, system = PooledEngine(one, CAPACITY), random_text(150)
    pool.share_prefixes(300)
    for turn in range(3):
        text, cache, computed = [*system, *random_text(20, turn + 1)], pool.new_cache(), 0
        for start in range(0, 170, 10):
            batch = causal_batch(pool.spec, text[start : start + 10], start)
            if (rest := pool.recall(Pass(pool, batch, cache, output_read=start == 160))) is not None:
                output, computed = rest.run(), computed + rest.num_rows
            cache.commit(range(10))
        assert computed == (20 if turn else 170)
        np.testing.assert_allclose(output.logits, gqa_reference([text]), atol=TOLERANCE)
        cache.close()
    pool.close()
