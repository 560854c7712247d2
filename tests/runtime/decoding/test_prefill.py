"""Running texts wait for prompts no longer than they should, in the seconds of a cost table: no clock is read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from costs import FREE, passes
from fakes import FakeEngine, Predict
from numpy.typing import NDArray

from draftwood.models.errors import ConfigError
from draftwood.runtime.decoding.chunk import TokenChunk
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.prefill import PrefillLimit
from draftwood.runtime.decoding.request import Request
from draftwood.runtime.decoding.scheduler import Scheduler
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.engines.base import ForwardOutput, KVCache, Pass, TokenBatch
from draftwood.runtime.engines.shared.memory import CacheBudget
from draftwood.runtime.engines.shared.pool import PooledEngine
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.planning.budget import DraftBudget
from draftwood.runtime.speculation.planning.cost import CostModel, PassCosts
from draftwood.runtime.speculation.planning.history import History

VOCAB = 8
WIDTHS = tuple(range(1, 65))
COSTS = CostModel(passes(0.010, 0.002), passes(0.001, 0.0001), FREE, FREE, {})  # a pass of 64 rows takes 136 ms


class Clock:
    seconds = 0.0


class Timed(FakeEngine):
    """Adds up what its passes would take."""

    def __init__(self, clock: Clock, costs: PassCosts, predict: Predict, role: str) -> None:
        super().__init__(predict, VOCAB, role)
        self._clock, self._costs, self.rows = clock, costs, 0

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        self.rows += batch.num_tokens
        self._clock.seconds += self._costs.at(batch.num_tokens, 0)
        return super().score(batch, cache)


class Texts:
    """Texts that share passes. found: their tokens. pauses: the longest time between two chunks of each."""

    def __init__(self, costs: CostModel, milliseconds: float | None) -> None:
        assert costs.draft is not None
        self.clock, self._costs = Clock(), costs
        self.engines = (
            Timed(self.clock, costs.target, confident, "target"),
            Timed(self.clock, costs.draft, confident, "draft"),
        )
        self._pools = tuple(PooledEngine(engine, 1 << 14) for engine in self.engines)
        pace = None if milliseconds is None else PrefillLimit(costs, milliseconds)
        self.scheduler: Scheduler[TokenChunk]
        self.scheduler = Scheduler(32, pools=self._pools, slots=CacheBudget(None, 4096, 64), prefill=pace)
        self._history, self._budget, self._rng = History(), DraftBudget(), np.random.default_rng(0)
        self.found: dict[int, list[int]] = {}
        self.pauses = dict[int, float]()
        self._last = dict[int, float]()

    def add(self, length: int, params: SamplingParams, config: SpeculativeConfig | None = None) -> None:
        """A text after a random prompt of this length."""
        number, prompt, stats = len(self.found), self._rng.integers(0, VOCAB, length).tolist(), SpecDecodeStats()
        self.found[number] = []
        target, draft = self._pools
        decoder = SpeculativeDecoder(
            target,
            draft,
            config,
            4096,
            (),
            self._costs,
            lambda: self.scheduler.batch_size,
            self._history,
            self._budget,
        )

        sampler = Sampler(params, prompt, (), VOCAB)
        steps = decoder.steps(prompt, sampler, seeded_streams(0), stats, salt=str(number))
        self.scheduler.add(Request(steps=steps, write=partial(lambda chunk: chunk), stats=stats, id=str(number)))

    def step(self) -> None:
        for request, chunk, error in self.scheduler.step():
            assert error is None
            if chunk is not None:
                number, now = int(request.id), self.clock.seconds
                self.found[number] += chunk.token_ids
                if number in self._last:
                    self.pauses[number] = max(self.pauses.get(number, 0.0), now - self._last[number])
                self._last[number] = now

    def run(self) -> None:
        while self.scheduler.queue.running:
            self.step()


def confident(context: tuple[int, ...]) -> NDArray[np.float64]:
    probs = np.full(VOCAB, 0.01)
    probs[(3 * context[-1] + len(context)) % VOCAB] = 1 - 0.01 * (VOCAB - 1)
    return probs


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0)


def longest_pauses(milliseconds: float | None, texts: int, prompts: int) -> tuple[float, dict[int, list[int]]]:
    """The longest time between two chunks of running texts, beside long prompts that arrive later, and all tokens."""
    running = Texts(COSTS, milliseconds)
    for _ in range(texts):
        running.add(3, greedy(60))
    for _ in range(10):
        running.step()
    for _ in range(prompts):
        running.add(300, greedy(3))
    running.run()
    assert [len(tokens) for tokens in running.found.values()] == [60] * texts + [3] * prompts
    return max(running.pauses[number] for number in range(texts)), running.found


@pytest.mark.parametrize("others", [0, 3])
def test_a_draft_reads_no_prompt_of_texts_that_came_together(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come while the first one's prompt is read. Four are faster without a draft, one alone is not."""
    running, config = Texts(COSTS, None), SpeculativeConfig("chain", max_draft_len=2)
    target, draft = running.engines
    score = target.score

    def score_meanwhile(batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        while len(running.found) <= others:
            running.add(40, greedy(40), config)
        return score(batch, cache)

    monkeypatch.setattr(target, "score", score_meanwhile)
    running.add(40, greedy(40), config)
    running.run()
    assert (draft.rows == 0) == (others > 0)


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
    pace = PrefillLimit(COSTS, 50)
    target, draft = (replace(FakeEngine(confident, VOCAB, role).spec, widths=WIDTHS) for role in ("target", "draft"))
    assert pace.most_rows(target, 0) == 16  # 40 ms; 17 rows are padded to 32, which take 72
    assert pace.most_rows(draft, 0) == 64
    assert PrefillLimit(CostModel(COSTS.target, None, FREE, FREE, {}), 50).most_rows(draft, 0) == 64
    with pytest.raises(ConfigError, match="max_pause_ms"):
        PrefillLimit(COSTS, 0)
    with pytest.raises(ConfigError, match="max_pause_ms"):
        PrefillLimit(COSTS, float("nan"))


def test_a_chunk_leaves_time_for_the_log_probabilities_of_its_rows() -> None:
    pace, engine = PrefillLimit(COSTS, 50), FakeEngine(confident, VOCAB)
    spec = replace(engine.spec, model=replace(engine.spec.model, vocab_size=100_000), widths=WIDTHS)
    engine.spec = spec
    scored, unscored = (
        Pass(engine, TokenBatch.pad([1] * 4, np.arange(4), np.tri(4, dtype=np.bool_), 4, last_only), engine.new_cache())
        for last_only in (False, True)
    )
    assert pace.added([], [unscored]) == COSTS.target.at(4, 0)
    assert pace.added([], [scored, unscored]) == pytest.approx(COSTS.target.at(8, 0) + 4 * 0.002)


@pytest.mark.parametrize(("steps", "prompt_logprobs"), [(0, None), (10, None), (10, 0)])
def test_one_long_prompt_makes_no_text_wait(steps: int, prompt_logprobs: int | None) -> None:
    """steps: before it comes. Chunks of a prompt that comes first are as wide as they can be, until a text runs."""
    running = Texts(COSTS, 50)
    for _ in range(2):
        running.add(3, greedy(60))
    for _ in range(steps):
        running.step()
    running.add(600, replace(greedy(3), prompt_logprobs=prompt_logprobs))
    running.run()
    assert max(running.pauses[number] for number in range(2)) <= 0.050 + COSTS.target.at(2, 0) + 1e-9


def test_a_draft_that_begins_late_makes_no_other_text_wait() -> None:
    """Among many texts speculation does not pay; when they have ended, the draft of one text reads what it missed."""
    costs = CostModel(passes(0.020, 0.0005), passes(0.002, 0.0004), FREE, FREE, {})
    running = Texts(costs, 50)
    running.add(3, greedy(300))
    running.add(600, greedy(1200), SpeculativeConfig(lookups="off"))
    for _ in range(10):
        running.add(3, greedy(30))
    running.run()
    assert running.engines[1].rows > 600, "the draft was used"
    assert running.pauses[0] <= 0.050 + costs.target.at(20, 0)


def test_requests_may_come_while_running_texts_are_looked_at() -> None:
    """To read `running` stands for a switch to another thread, which adds a request."""
    texts = Texts(COSTS, 50.0)

    class Interrupted(Request[TokenChunk]):
        __slots__ = ()

        @property
        def running(self) -> bool:
            if len(texts.found) < 8:
                texts.add(3, greedy(2))
            return False

        @running.setter
        def running(self, value: bool) -> None: ...

    for _ in range(2):
        texts.add(100, greedy(2))
    for request in texts.scheduler.queue.running:
        request.__class__ = Interrupted
    texts.run()
    assert [len(tokens) for tokens in texts.found.values()] == [2] * 8
