"""Rows of a chain that the native engine computes before the host has chosen their tokens. They decide nothing."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from bundling import DEMO, built_native

from draftwood.models.bindings import TARGET
from draftwood.models.errors import EngineError
from draftwood.plugins.native.library import NativeLibrary, Pass
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.engines.base import Ahead, TokenBatch
from draftwood.runtime.engines.native.engine import NativeEngine
from draftwood.runtime.engines.passes import causal_batch, prefill
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import BLOCK, RandomStreams, SeededStream, seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.sampling.softmax import Wanted
from draftwood.runtime.speculation.config import SpeculativeConfig

Pair = tuple[NativeEngine, NativeEngine]
TEXT = list(range(40, 60))
CHAIN = SpeculativeConfig("chain", max_draft_len=5, budget="fixed")
SETTINGS: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "min_p": 0.02},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "presence_penalty": 0.5},
    {"temperature": 3.0},  # many tokens are likely: the engine leaves them to the host
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    bundle = EngineBundle.open(built_native(DEMO, tmp_path_factory.mktemp("ahead") / "bundle", "int8"))
    target, draft = bundle.open_engine(TARGET, 2), bundle.open_draft(1)
    assert isinstance(target, NativeEngine) and isinstance(draft, NativeEngine)
    yield target, draft
    target.close()
    draft.close()


@pytest.fixture(autouse=True)
def by_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that the kernels run as a whole need no rows ahead."""
    monkeypatch.setattr(NativeEngine, "rounds", lambda *_: None)


class Written(NamedTuple):
    """A text, and what was counted while it was written."""

    tokens: list[int]
    accepted: list[int]
    passes: int
    rows: int


def written(pair: Pair, config: SpeculativeConfig, setting: dict[str, float], streams: RandomStreams) -> Written:
    params, stats = SamplingParams(max_tokens=24, ignore_eos=True, **setting), SpecDecodeStats()  # type: ignore[arg-type]
    decoder = SpeculativeDecoder(*pair, config, 256, ())
    sampler = Sampler(params, TEXT, (), pair[0].spec.model.vocab_size)
    tokens = [token for chunk in decoder.generate(TEXT, sampler, streams, stats) for token in chunk.token_ids]
    decoder.close()
    return Written(tokens, stats.accepted_per_round, stats.draft_passes, stats.draft_rows)


class Misleading(SeededStream):
    """Tells other numbers than those with which it draws."""

    def ahead(self, count: int) -> array[float]:
        return array("d", (1 - number for number in super().ahead(count)))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_texts_are_those_of_pass_by_pass(
    pair: Pair, setting: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever numbers the engine was told, and with a prompt lookup beside the draft's chain."""
    lookup = SpeculativeConfig("chain", max_draft_len=5, budget="fixed", lookup_ngram=2)
    misled = seeded_streams(3)
    misled = misled._replace(draft=Misleading(np.random.SeedSequence(3).spawn(3)[0]))
    found = [written(pair, CHAIN, setting, seeded_streams(3)), written(pair, CHAIN, setting, misled)]
    found.append(written(pair, lookup, setting, seeded_streams(3)))
    monkeypatch.setattr(NativeEngine, "runs_ahead", False)
    alone = written(pair, CHAIN, setting, seeded_streams(3))
    assert found == [alone, alone, written(pair, lookup, setting, seeded_streams(3))]


def test_a_round_asks_the_engine_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    forward = NativeLibrary.forward

    def counted(library: NativeLibrary, handle: int, wanted: Pass) -> None:
        calls.append(handle)
        forward(library, handle, wanted)

    monkeypatch.setattr(NativeLibrary, "forward", counted)
    found = written(pair, CHAIN, {"temperature": 0.0}, seeded_streams(0))
    rounds = sum(found.accepted)
    assert found.passes > 3 * rounds and len(calls) < rounds + 6  # the target's, and those over the prompt


def ahead_of(draft: NativeEngine, ahead: Ahead, tokens: Sequence[int] = (7, 8)) -> TokenBatch:
    return causal_batch(draft.spec, tokens, len(TEXT), ahead=ahead)


@pytest.mark.parametrize("sampled", [False, True])
def test_rows_ahead_are_those_of_passes_by_themselves(pair: Pair, sampled: bool) -> None:
    draft, caches = pair[1], [pair[1].new_cache() for _ in range(2)]
    for cache in caches:
        prefill(draft, cache, TEXT)
    wanted, uniforms = Wanted(0.7, False, 1e-3), [0.2, 0.999, 0.5]
    ahead = Ahead(3, uniforms, wanted, BLOCK) if sampled else Ahead(3)
    output = draft.score(ahead_of(draft, ahead), caches[0])
    assert len(output.ahead) == 3 and caches[0].speculative == 5
    logits = output.logits.copy()
    likely = [output.softmaxes[row].likely(output.logits[row], 0.7, 1e-3) for row in range(4) if sampled]  # type: ignore[union-attr]
    ids = None if output.top_ids is None else output.top_ids.copy()
    batch = causal_batch(draft.spec, (7, 8), len(TEXT))
    for row in range(4):
        alone = draft.score(batch, caches[1])
        np.testing.assert_array_equal(alone.logits[0], logits[row])
        if row == 3:
            break
        column = 0 if ids is None else int(ids[row, 0])
        if sampled:
            columns, weights = draft.softmax.likely(alone.logits[0], 0.7, 1e-3)
            np.testing.assert_array_equal(columns, likely[row][0])
            np.testing.assert_array_equal(weights, likely[row][1])
            sums = weights.cumsum()
            column = int(columns[bisect_right(sums.tolist(), uniforms[row] * sums[-1])])
        token = draft.spec.kept_tokens[column] if draft.spec.kept_tokens else column
        assert token == output.ahead[row]
        mask = np.ones((1, 3 + row), np.bool_)
        batch = TokenBatch.pad([token], [len(TEXT) + 2 + row], mask, 1)
    for cache in caches:
        cache.close()


def test_too_many_likely_tokens_end_the_run(pair: Pair) -> None:
    cache = pair[1].new_cache()
    flat = Wanted(50.0, False, 1e-4)
    for most, count in ((BLOCK, 0), (3, 0)):
        output = pair[1].score(ahead_of(pair[1], Ahead(3, [0.5] * 3, flat, most)), cache)
        assert len(output.ahead) == count and cache.speculative == 2
        cache.truncate(0)
    cache.close()


def test_no_row_ahead_leaves_the_cache_or_the_positions(pair: Pair) -> None:
    draft, cache = pair[1], pair[1].new_cache()
    with pytest.raises(EngineError, match="cache slots"):
        draft.score(ahead_of(draft, Ahead(draft.spec.capacity)), cache)
    assert cache.speculative == 0
    batch = causal_batch(draft.spec, [7], len(draft._weights["cosine"]) - 2, ahead=Ahead(3))
    with pytest.raises(EngineError, match="beyond the engine's rotary table"):
        draft.score(batch, cache)
    cache.close()


@pytest.mark.parametrize(
    "ahead",
    [Ahead(0), Ahead(2, [0.5], Wanted(0.7, False, 1e-3)), Ahead(1, [0.5]), Ahead(1, [0.5], Wanted(0.7, True, 0.0))],
)
def test_rows_that_cannot_be_chosen_are_refused(pair: Pair, ahead: Ahead) -> None:
    cache = pair[1].new_cache()
    with pytest.raises(EngineError, match="rows ahead need"):
        pair[1].score(ahead_of(pair[1], ahead), cache)
    with pytest.raises(EngineError, match="rows ahead need"):
        pair[0].score(ahead_of(pair[1], Ahead(1)), pair[0].new_cache())  # a target ranks nothing
    cache.close()
