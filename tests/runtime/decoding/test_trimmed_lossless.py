"""The output distribution is the target's own with a draft that predicts some of the tokens: exact enumeration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from enumeration import PROMPT, decoded, pair, total_variation
from fakes import FakeEngine
from numpy.typing import NDArray
from proposals import LEGAL, SETTINGS, speculative

from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.engines.base import ForwardOutput, KVCache, TokenBatch
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import RandomStream, seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.growers import drawing
from draftwood.runtime.speculation.growers.draft_vocabulary import DraftVocabulary
from draftwood.runtime.speculation.growers.drawing import Drawing

SHORT = replace(SETTINGS["plain"], max_tokens=2)
READING = ("penalties", "processor")  # settings that read whole rows, also those of the draft
# Beside the sample: three tokens, every setting, and a vocabulary of which three tokens are kept.
LONGER = [(0, 2), (1, 2), (0, 1, 3)]


@pytest.mark.parametrize(("name", "verify"), LEGAL)
def test_every_legal_pair_is_exact(name: str, verify: str) -> None:
    """I2: q = 0 for the tokens that the draft does not predict."""
    target, draft = pair(0, 3, (0, 2))
    expected = decoded(target, None, None, SHORT)
    assert total_variation(decoded(target, draft, speculative(name, verify), SHORT), expected) < 1e-12


@pytest.mark.parametrize("setting", READING)
@pytest.mark.parametrize("name", ["chain", "topk", "dyspec merged"])
def test_penalties_and_processors_read_rows_of_all_tokens(name: str, setting: str) -> None:
    params = replace(SETTINGS[setting], max_tokens=2)
    target, draft = pair(1, 4, (1, 3))
    expected = decoded(target, None, None, params)
    assert total_variation(decoded(target, draft, speculative(name, "auto"), params), expected) < 1e-12


@pytest.mark.full
@pytest.mark.parametrize("kept", LONGER, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("name", "verify"), LEGAL)
def test_every_setting_is_exact(name: str, verify: str, setting: str, kept: tuple[int, ...]) -> None:
    target, draft = pair(0, max(3, kept[-1] + 1), kept)
    expected = decoded(target, None, None, SETTINGS[setting])
    found = decoded(target, draft, speculative(name, verify), SETTINGS[setting])
    assert total_variation(found, expected) < 1e-12


class WrongToken(Drawing):
    """Maps a drawn column by another map than the columns of q."""

    def draw(self, stream: RandomStream) -> tuple[int, float, NDArray[np.float64]]:
        token, share, R = super().draw(stream)
        return int(self._ids[(self._ids.searchsorted(token) + 1) % len(self._ids)]), share, R


class WrongSum(Drawing):
    """Verifies with q as if the tokens that are not kept had the rest of the probability."""

    def draw(self, stream: RandomStream) -> tuple[int, float, NDArray[np.float64]]:
        token, share, R = super().draw(stream)
        return token, share, 0.6 * R


@pytest.mark.parametrize(
    ("wrong", "name", "verify"),
    [
        (WrongToken, "chain", "rejection"),  # siblings would be drawn with probability 0, which fails by itself
        (WrongToken, "chain", "block"),
        (WrongSum, "chain", "rejection"),
        (WrongSum, "dyspec", "traversal"),
        (WrongSum, "k-ary", "rejection"),
    ],
)
def test_the_enumeration_sees_a_wrong_map(
    wrong: type[Drawing], name: str, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "Drawing", wrong)
    target, draft = pair(0, 4, (0, 2, 3))
    found = decoded(target, draft, speculative(name, verify), SHORT)
    assert total_variation(found, decoded(target, None, None, SHORT)) > 1e-3


class RankingEngine(FakeEngine):
    """A draft that ranks its columns, as real ones do."""

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        logits, *_ = super().score(batch, cache)
        order = np.argsort(-logits, axis=1, kind="stable")
        return ForwardOutput(logits, order, np.take_along_axis(logits, order, 1).astype(np.float32))


def test_ranked_columns_become_tokens() -> None:
    """Greedy: a draft that keeps what the target says is always accepted, by its columns' tokens."""
    target, _ = pair(3, 9)
    plain = text(target, None, None)
    kept = tuple(sorted({*plain, 0}))
    assert kept[-1] >= len(kept), "columns and tokens must differ, or this shows nothing"
    draft = RankingEngine(target.predict, 9, "draft", kept_tokens=kept)
    stats = SpecDecodeStats()
    assert text(target, draft, stats) == plain
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0


def text(target: FakeEngine, draft: FakeEngine | None, stats: SpecDecodeStats | None) -> list[int]:
    sampler = Sampler(SamplingParams(max_tokens=8, temperature=0), PROMPT, (), 9)
    config = SpeculativeConfig("chain", max_draft_len=3, budget="fixed")
    decoder = SpeculativeDecoder(target, draft, config, 4096, ())
    chunks = decoder.generate(PROMPT, sampler, seeded_streams(0), stats or SpecDecodeStats())
    return [token for chunk in chunks for token in chunk.token_ids]


def test_a_processor_may_force_a_token_that_the_draft_does_not_predict() -> None:
    _, draft = pair(0, 4, (0, 2))
    forced = SamplingParams(logits_processors=(lambda tokens, logits: logits + 5000.0 * (np.arange(4) == 3),))
    own = DraftVocabulary(draft.spec).sampler(Sampler(forced, PROMPT, (), 4))
    q = own.candidates(np.zeros(2, np.float32), [])
    assert q.ids.tolist() == [3] and q.probs.tolist() == [1.0]


def test_at_the_hottest_temperature_no_other_token_is_drawn() -> None:
    _, draft = pair(0, 4, (0, 2))
    hot = SamplingParams(temperature=100, presence_penalty=0.1)
    own = DraftVocabulary(draft.spec).sampler(Sampler(hot, PROMPT, (), 4))
    assert own.candidates(np.zeros(2, np.float32), []).ids.tolist() == [0, 2]
