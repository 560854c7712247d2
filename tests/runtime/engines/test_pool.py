"""Rows of many requests in one pass: each request gets what it gets alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fakes import FakeEngine, mixture, random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from remembering import RememberingEngine

from draftwood.models.errors import EngineError
from draftwood.runtime.decoding.chunk import TokenChunk
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.request import Request
from draftwood.runtime.decoding.scheduler import Scheduler, select_joint
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.engines.base import Engine, ForwardOutput, KVCache, Pass, TokenBatch
from draftwood.runtime.engines.passes import Steps, causal_batch, prefill
from draftwood.runtime.engines.shared.memory import CacheBudget, OutOfMemoryError
from draftwood.runtime.engines.shared.pool import SPARE_PASSES, PooledEngine
from draftwood.runtime.engines.shared.sequence import PANEL, PooledKVCache
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import SpeculativeConfig

VOCAB = 12
CONFIGS = (
    None,
    SpeculativeConfig("chain", max_draft_len=3),
    SpeculativeConfig("topk", max_total_draft_tokens=8, max_draft_len=3, merge="gsd"),
    SpeculativeConfig("dyspec", max_total_draft_tokens=6, max_draft_len=3),
)


def request_of(
    engines: Sequence[Engine],
    prompt: list[int],
    config: SpeculativeConfig | None,
    params: SamplingParams,
    **more: Any,
) -> Request[TokenChunk]:
    """engines: the target, and the draft if there is one."""
    decoder, stats = SpeculativeDecoder(engines[0], engines[1] if config else None, config, 4096, ()), SpecDecodeStats()
    sampler = Sampler(params, prompt, (), engines[0].spec.model.vocab_size)
    steps = decoder.steps(prompt, sampler, seeded_streams(params.seed), stats)
    return Request(steps=steps, write=lambda chunk: chunk, stats=stats, **more)


def decode(
    engines: Sequence[Engine], requests: Sequence[tuple[list[int], SpeculativeConfig | None, SamplingParams]]
) -> list[list[int]]:
    """Run all requests at the same time over `engines`, target first; returns their tokens."""
    texts = {request_of(engines, *each): list[int]() for each in requests}
    scheduler: Scheduler[TokenChunk] = Scheduler(len(requests))
    for request, chunk in scheduler.run(list(texts)):
        texts[request] += chunk.token_ids
    return list(texts.values())


def test_a_scheduler_knows_how_many_requests_share_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of rounds depend on it, and on what such passes take."""
    pool, watched = PooledEngine(fake_engines()[0], 4096), list[tuple[int, int, int, float]]()
    scheduler: Scheduler[TokenChunk] = Scheduler(3, pools=(pool,), slots=CacheBudget(None, 4096, 64))
    monkeypatch.setattr(scheduler.drafts, "observe_pass", lambda *seen: watched.append(seen))
    assert scheduler.batch_size == 1
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True) for tokens in (2, 4, 6)]
    requests = [request_of((pool,), [1, 2], None, each, num_slots=64) for each in params]
    seen = [scheduler.batch_size for _ in scheduler.run(requests)]
    assert seen[0] == 3 and seen[-1] == 1 and sorted(seen, reverse=True) == seen
    assert [sharing for _, sharing, _, _ in watched] == [3, 2, 2]
    assert all(rows == sharing and seconds > 0 for rows, sharing, _, seconds in watched)
    assert [context for _, _, context, _ in watched] == sorted({context for _, _, context, _ in watched})


def test_memory_that_ran_out_is_used_again_where_nothing_limits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first texts end, and the next ones get the memory that they need."""
    target = fake_engines()[0]
    pool, score, failures = PooledEngine(target, 4096), target.score, iter([True, True])
    scheduler: Scheduler[TokenChunk] = Scheduler(2, pools=(pool,), slots=CacheBudget(None, 4096, 64))

    def short(batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        if next(failures, False):
            raise MemoryError
        return score(batch, cache)

    def texts() -> list[list[int]]:
        params = SamplingParams(max_tokens=4, temperature=0)
        requests = [request_of((pool,), [first, 3], None, params, num_slots=4096) for first in (1, 2)]
        found = {each: list[int]() for each in requests}
        for request, chunk in scheduler.run(list(found)):
            found[request] += chunk.token_ids
        return list(found.values())

    monkeypatch.setattr(target, "score", short)
    with pytest.raises(OutOfMemoryError):
        texts()
    assert [len(text) for text in texts()] == [4, 4]


def no_steps() -> Steps[TokenChunk]:
    yield from ()


def fake_engines() -> tuple[FakeEngine, FakeEngine]:
    truth = random_model(3, VOCAB)
    return FakeEngine(truth, VOCAB), FakeEngine(mixture(truth, random_model(4, VOCAB), 0.6), VOCAB, "draft")


request = st.tuples(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=70),
    st.sampled_from(CONFIGS),
    st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 20),
        temperature=st.sampled_from([0.0, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        seed=st.integers(0, 99),
    ),
)


@settings(max_examples=25)
@given(st.lists(request, min_size=1, max_size=6), st.booleans())
def test_every_request_gets_the_text_it_gets_alone(
    requests: list[tuple[list[int], SpeculativeConfig | None, SamplingParams]],
    places: bool,
) -> None:
    """Sampled with a seed, too: nothing of one request's draws depends on another's."""
    alone = [decode(fake_engines(), [one])[0] for one in requests]
    engines = fake_engines()
    for engine in engines:
        engine.places = places
    pools = [PooledEngine(engine, 4096) for engine in engines]
    assert decode(pools, requests) == alone


def test_a_full_pool_says_what_to_do_and_a_closed_cache_is_refused() -> None:
    with pytest.raises(EngineError, match="allow more memory"):
        PooledEngine(fake_engines()[0], 63)
    pool, held = PooledEngine(fake_engines()[0], 4096), list[PooledKVCache]()
    with pytest.raises(EngineError, match="run fewer requests"):
        for _ in range(100):
            held.append(pool.new_cache())
            prefill(pool, held[-1], [1] * 60)
    assert held[0].length == 60
    for each in (*held, *held):  # a second time changes nothing
        each.close()
    with pytest.raises(EngineError, match="this cache was closed"):
        prefill(pool, held[0], [1])
    cache = pool.new_cache()
    pool.score(causal_batch(pool.spec, [1, 2, 3], 0), cache)
    with pytest.raises(EngineError, match="not computed"):
        cache.commit([3])
    cache.commit([0, 1, 2])
    cache.truncate(2)
    assert (cache.length, cache.speculative) == (2, 0)


def test_a_pass_holds_as_many_as_fit_and_the_draft_goes_first() -> None:
    target, draft = (PooledEngine(engine, 4096) for engine in fake_engines())

    def waiting(engine: Engine, rows: int) -> Request[TokenChunk]:
        wanted = Pass(engine, causal_batch(engine.spec, [0] * rows, 0), engine.new_cache())
        return Request(steps=no_steps(), write=lambda chunk: chunk, next_pass=wanted)

    for_target = [waiting(target, rows) for rows in (40, 20, 10)]
    assert select_joint(for_target) == for_target[:2]
    for_draft = [waiting(draft, 5)]
    assert select_joint([*for_target, *for_draft]) == for_draft
    plain = fake_engines()[0]
    single = [waiting(plain, 1), waiting(plain, 1)]
    assert select_joint(single) == single[:1]
    assert select_joint([]) == []


def test_after_a_burst_the_cache_shrinks() -> None:
    """Attention spans every slot there is: one request must not go on paying for eight."""
    pool = PooledEngine(RememberingEngine(random_model(3, VOCAB), VOCAB), 8192)
    keeper, guests = pool.new_cache(), [pool.new_cache() for _ in range(12)]
    prefill(pool, keeper, [1] * 49)
    for number, guest in enumerate(guests):
        prefill(pool, guest, [number] * 200)
    burst = pool._storage.capacity
    for guest in guests:
        guest.close()
    for spare in range(SPARE_PASSES + 1):  # another burst may be near
        output = prefill(pool, keeper, [2])
        assert (pool._storage.capacity == burst) is (spare < SPARE_PASSES)
        keeper.truncate(49)
    assert burst > 2000 and pool._storage.capacity < burst / 4 and output is not None
    np.testing.assert_allclose(output.logits[0], np.log(random_model(3, VOCAB)((*[1] * 49, 2))))


def test_rows_of_a_sequence_lie_in_panels_of_its_own() -> None:
    """Also when proposals are rejected, whose slots are used again, and when others come and go."""
    model = random_model(0, 8)
    pool = PooledEngine(FakeEngine(model, 8, places=True), 4096)
    caches = [pool.new_cache() for _ in range(5)]
    texts: list[list[int]] = [[] for _ in caches]
    for step in range(60):
        chains = [[(step * number + row) % 8 for row in range(1 + (step + number) % 3)] for number in range(5)]
        batches = [causal_batch(pool.spec, chain, cache.length) for chain, cache in zip(chains, caches, strict=True)]
        outputs = pool.forward([Pass(pool, batch, cache) for batch, cache in zip(batches, caches, strict=True)])
        for text, chain, output, cache in zip(texts, chains, outputs, caches, strict=True):
            np.testing.assert_allclose(output.logits[0], np.log(model((*text, *chain))))
            cache.commit([0])
            text.append(chain[0])
    panels = [set((cache.slots // PANEL).tolist()) for cache in caches]
    assert sum(map(len, panels)) == len(set().union(*panels))
    assert max(map(len, panels)) <= 60 // PANEL + 2
