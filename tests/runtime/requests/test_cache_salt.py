"""cache_salt: sequences of a pool share rows only with those of an equal salt."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.engines.test_prefix import VOCAB, churn, read, shared_pool, text_of

SALTS = st.sampled_from([None, "a", "b", "c"])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(SALTS, st.lists(st.integers(0, 1), min_size=1, max_size=30)), min_size=2, max_size=20),
    st.integers(0, 3),
)
def test_rows_are_taken_over_from_equal_salts_only(reads: list[tuple[str | None, list[int]]], moves: int) -> None:
    """Whatever else is read, and however often rows are moved."""
    pool, _ = shared_pool(retained=400)
    seen: dict[str | None, list[list[int]]] = {}
    for number, (salt, text) in enumerate(reads):
        cache = pool.new_cache()
        cache.salt = salt
        known, _ = read(pool, cache, text)
        before = seen.setdefault(salt, [])
        common = [int(np.cumprod([a == b for a, b in zip(text, other, strict=False)]).sum()) for other in before]
        assert known <= max(common, default=0), "rows of another salt"
        if number < moves:  # those of ended sequences stay
            live = np.ones(pool._storage.speculative, np.bool_)
            pool._compact(live)
        assert text_of(pool, cache) == tuple(text)
        before.append(text)
        cache.close()


def test_salts_survive_compactions_and_are_forgotten_with_their_rows() -> None:
    pool, _ = shared_pool(retained=400)
    for first in ("a", "b"):
        cache = pool.new_cache()
        cache.salt = first
        read(pool, cache, [1, 2, 3, 4] * 5)
        cache.close()
    for salt, expected in (("a", 20), ("b", 20), ("c", 0), (None, 0)):
        reader = pool.new_cache()
        reader.salt = salt
        assert read(pool, reader, [1, 2, 3, 4] * 5)[0] == expected
        reader.close()
    for seed in range(12):
        churn(pool, seed)
    assert pool.prefixes is not None and set(pool.prefixes._empty_texts) <= {"a", "b", "c"}
    pool.release()
    assert not pool.prefixes._empty_texts and not pool.prefixes._after
    reader = pool.new_cache()
    assert read(pool, reader, [0] * (VOCAB + 5))[0] == 0 and text_of(pool, reader) == (0,) * (VOCAB + 5)
