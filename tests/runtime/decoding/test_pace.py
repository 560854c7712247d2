"""Running texts wait for prompts no longer than they should, in the seconds of a cost table: no clock is read."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
from costs import FREE, passes
from fakes import FakeEngine, random_model

from draftwood.models.errors import ConfigError
from draftwood.runtime.decoding.chunk import TokenChunk
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.loop import Job, Loop
from draftwood.runtime.decoding.pace import Pace
from draftwood.runtime.decoding.scheduler import Scheduler
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.engines.base import ForwardOutput, KVCache, TokenBatch
from draftwood.runtime.engines.shared.memory import CacheBudget
from draftwood.runtime.engines.shared.pool import PooledEngine
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.planning.cost import CostModel

VOCAB = 8
COSTS = CostModel(passes(0.010, 0.002), passes(0.001, 0.0001), FREE, FREE, {})  # a pass of 64 rows takes 136 ms


class Timed(FakeEngine):
    """Adds up what its passes would take."""

    seconds = 0.0

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        self.seconds += COSTS.target.at(batch.num_tokens, 0)
        return super().score(batch, cache)


def longest_pauses(milliseconds: float | None, texts: int, prompts: int) -> tuple[float, dict[int, list[int]]]:
    """The longest time between two chunks of running texts, beside long prompts that arrive later, and all tokens."""
    engine = Timed(random_model(0, VOCAB), VOCAB)
    pool = PooledEngine(engine, 4096)
    pace = None if milliseconds is None else Pace(COSTS, milliseconds)
    loop: Loop[Job[TokenChunk], TokenChunk] = Loop(Scheduler(32, 0), (pool,), CacheBudget(4096, 4096, 64), pace)
    rng = np.random.default_rng(0)
    longest, last, found = 0.0, dict[int, float](), dict[int, list[int]]()
    with ExitStack() as decoders:

        def add(number: int, length: int, tokens: int) -> None:
            prompt = rng.integers(0, VOCAB, length).tolist()
            decoder = SpeculativeDecoder(pool, None, None, 4096, ())
            decoders.callback(decoder.close)
            params, stats = SamplingParams(max_tokens=tokens, temperature=0), SpecDecodeStats()
            sampler = Sampler(params, prompt, (), VOCAB)
            steps = decoder.steps(prompt, sampler, seeded_streams(0), stats)
            loop.add(Job(steps=steps, write=partial(lambda chunk: chunk), stats=stats, cache_salt=str(number)))

        for number in range(texts):
            add(number, 3, 60)
        for step in range(4000):
            if step == 10:
                for number in range(prompts):
                    add(texts + number, 300, 3)
            for job, chunk, error in loop.step():
                assert error is None
                if chunk is None:
                    continue
                number = int(job.cache_salt or 0)
                found.setdefault(number, []).extend(chunk.token_ids)
                if number < texts and number in last:
                    longest = max(longest, engine.seconds - last[number])
                last[number] = engine.seconds
            if not loop.scheduler.num_running and step > 10:
                break
    assert all(len(tokens) == (60 if number < texts else 3) for number, tokens in found.items())
    assert len(found) == texts + prompts
    return longest, found


@pytest.mark.parametrize(("milliseconds", "texts", "prompts"), [(50, 1, 6), (50, 8, 6), (120, 3, 10), (25, 20, 2)])
def test_texts_wait_for_prompts_no_longer_than_they_should(milliseconds: float, texts: int, prompts: int) -> None:
    own = COSTS.target.at(texts, 0)
    paused, found = longest_pauses(milliseconds, texts, prompts)
    assert paused <= milliseconds / 1000 + own + 1e-9
    free, expected = longest_pauses(None, texts, prompts)
    assert free > 2 * milliseconds / 1000 + own, "the control: without a pace, they wait for all prompts"
    assert found == expected, "no token depends on it"


def test_prompts_are_read_however_slow_the_machine_is() -> None:
    """Not even a row fits into this pause: a chunk takes at most two passes of one row."""
    paused, _ = longest_pauses(1, 2, 2)
    assert paused <= 2 * COSTS.target.at(1, 0) + COSTS.target.at(2, 0) + 1e-9


def test_a_chunk_is_as_wide_as_the_pause_allows() -> None:
    pace = Pace(COSTS, 50)
    widths = tuple(range(1, 65))
    assert pace.most_rows("target", widths, 0) == 16  # 40 ms; 17 rows are padded to 32, which take 72
    assert pace.most_rows("draft", widths, 0) == 64
    assert Pace(CostModel(COSTS.target, None, FREE, FREE, {}), 50).most_rows("draft", widths, 0) == 64
    with pytest.raises(ConfigError, match="max_pause_ms"):
        Pace(COSTS, 0)
    with pytest.raises(ConfigError, match="max_pause_ms"):
        Pace(COSTS, float("nan"))
