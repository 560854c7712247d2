"""What a pass of the native engine prepares of sampled rows on all of its threads, against the same row by row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundling import DEMO, built_native
from hypothesis import given
from hypothesis import strategies as st
from native_parts import held, open_native, spec_of
from numpy.typing import NDArray

from draftwood.models.errors import EngineError
from draftwood.plugins.native.packing import PANEL
from draftwood.runtime import LLM, SamplingParams, SpeculativeConfig
from draftwood.runtime.engines.base import ForwardOutput, Pass
from draftwood.runtime.engines.native.engine import NativeEngine
from draftwood.runtime.engines.native.softmax import MAX_ASKED, ROOM, PreparedSoftmax
from draftwood.runtime.engines.passes import prefill
from draftwood.runtime.engines.shared.pool import PooledEngine
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler, largest, top
from draftwood.runtime.sampling.softmax import Softmax, SoftmaxSettings
from draftwood.runtime.speculation.graph.token_tree import TokenTree, root_alone

NAN = 7  # a token whose embedding is no number
SETTINGS = (
    SoftmaxSettings(0.7, True, 0.0),
    SoftmaxSettings(1e-46, True, 0.0),
    SoftmaxSettings(0.7, True, 1e-4),
    SoftmaxSettings(0.3, False, 0.05),
    SoftmaxSettings(1e39, False, 1e-4),  # every token is likely: there is no room for so many
    SoftmaxSettings(0.0, False, 0.0),
    None,
)


@pytest.fixture(scope="module", params=[1, 3], ids=["1 thread", "3 threads"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeEngine:
    weights = held(DEMO / "target", "int8")
    spec = spec_of(weights, "target", "int8", (1, 2, 4, 8, 16), 256)
    folder = tmp_path_factory.mktemp("prepared")
    open_native(weights, spec, folder).close()
    opened = NativeEngine(folder / "target.weights", spec, request.param, private=True)
    opened._weights["embedding.scales"][NAN // PANEL, :, NAN % PANEL] = np.float16(np.nan).view(np.uint16)
    return opened


def tree_of(tokens: Sequence[int], parents: Sequence[int]) -> TokenTree:
    """Rows in the order of a tree's nodes, parents first."""
    rows, depths = range(len(tokens)), list[int]()
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    below = tuple(tuple(row for row in rows if parents[row] == parent) for parent in rows)
    nothing, shares = (False,) * len(tokens), (1.0,) * len(tokens)
    return TokenTree(tuple(tokens), tuple(parents), tuple(depths), below, tuple(rows), nothing, shares, {}, {})


def scored(engine: NativeEngine, requests: Sequence[tuple[TokenTree, SoftmaxSettings | None]]) -> list[ForwardOutput]:
    """One joint pass of these requests, after texts of their own."""
    pool = PooledEngine(engine, engine.spec.capacity)
    caches = [pool.new_cache() for _ in requests]
    for index, cache in enumerate(caches):
        prefill(pool, cache, range(20 + index, 40 + index))  # longer than a panel: attention joins no requests
    batches = [
        tree.to_batch(pool.spec, cache.length, settings=settings)
        for (tree, settings), cache in zip(requests, caches, strict=True)
    ]
    return pool.forward([Pass(pool, *each) for each in zip(batches, caches, strict=True)])


def answers(softmax: Softmax, logits: NDArray[np.float32], settings: SoftmaxSettings) -> list[NDArray[Any]]:
    """All that a sampler or a verifier may read of a row."""
    found: list[NDArray[Any]] = [] if settings.temperature else [np.array(softmax.best(logits))]
    if settings.weights:
        weights = softmax.weights(logits, settings.temperature, np.empty(len(logits), np.float32))
        numbers = seeded_streams(7).target
        drawn = [weights.draw(numbers) for _ in range(5)]
        residual = weights.residual(np.array([5, 900, 2047]))
        pi = residual.reject(np.array([0.1, 0.2, 0.7]), 0.5)
        drawn.append(residual.draw(numbers))
        found += [np.array(each) for each in (weights.total, drawn, pi, residual.probs, weights.values.copy())]
    if settings.share:
        found += softmax.likely(logits, settings.temperature, settings.share)
    return found


def test_prepared_rows_have_the_bits_of_rows_by_themselves(engine: NativeEngine) -> None:
    requests = [(tree_of([9, 3], [-1, 0]) if index % 2 else root_alone(4), each) for index, each in enumerate(SETTINGS)]
    for together in (requests, requests[::-1], requests[2:3], requests[1:2]):
        for (tree, settings), output in zip(together, scored(engine, together), strict=True):
            for row in range(len(tree) if settings else 0):
                prepared, logits = output.softmaxes[row], output.logits[row]
                assert isinstance(prepared, PreparedSoftmax) and settings is not None
                for found, own in zip(
                    answers(prepared, logits, settings), answers(engine.softmax, logits, settings), strict=True
                ):
                    np.testing.assert_array_equal(found, own)
            assert settings or not any(output.softmaxes)


def test_passes_may_want_more_than_is_kept(engine: NativeEngine) -> None:
    """Some wishes recur while they are known, others after they were forgotten."""
    pool, values = PooledEngine(engine, engine.spec.capacity), np.empty(2048, np.float32)
    cache = pool.new_cache()
    prefill(pool, cache, range(20, 40))
    for index in range(2 * MAX_ASKED):
        temperature = 0.5 + (index if index % 2 else 1) / 100
        batch = root_alone(4).to_batch(pool.spec, cache.length, settings=SoftmaxSettings(temperature, True, 0.0))
        (output,) = pool.forward([Pass(pool, batch, cache)])
        prepared, logits = output.softmaxes[0], output.logits[0]
        assert isinstance(prepared, PreparedSoftmax)
        found = prepared.weights(logits, temperature, values).total
        assert found == engine.softmax.weights(logits, temperature, values).total
        cache.truncate(20)


def test_the_pass_itself_computes_what_is_wanted(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And for other settings, or other logits than those of the pass, the row is computed anew."""
    settings, flat = SETTINGS[2], SETTINGS[4]
    assert settings is not None and flat is not None
    output = scored(engine, [(root_alone(4), settings), (root_alone(4), flat)])[0]
    prepared, logits, values = output.softmaxes[0], output.logits[0], np.empty(2048, np.float32)
    assert prepared is not None
    copy = logits.copy()
    copy[:] = copy[::-1]
    assert prepared.likely(copy, 0.7, 1e-4)[0].max() == 2047 - prepared.likely(logits, 0.7, 1e-4)[0].min()
    assert prepared.weights(copy, 0.7, values).values.argmax() == 2047 - logits.argmax()

    def refuse(*_: object) -> None:
        raise AssertionError("computed by the host")

    monkeypatch.setattr(engine.softmax.library, "softmax", refuse)
    monkeypatch.setattr(engine.softmax.library, "likely", refuse)
    assert len(prepared.likely(logits, 0.7, 1e-4)[0]) < ROOM
    prepared.weights(logits, 0.7, values)
    for temperature, share in ((0.7, 0.5), (0.8, 1e-4)):
        with pytest.raises(AssertionError, match="by the host"):
            prepared.likely(logits, temperature, share)
    with pytest.raises(AssertionError, match="by the host"):
        prepared.weights(logits, 0.8, values)


def test_a_row_of_no_numbers_disturbs_its_own_request_only(engine: NativeEngine) -> None:
    for settings in filter(None, SETTINGS):
        alone = answers(engine.softmax, (one := scored(engine, [(root_alone(4), settings)])[0]).logits[0], settings)
        assert not np.isnan(one.logits[0]).any()
        sound, damaged = scored(engine, [(root_alone(4), settings), (root_alone(NAN), settings)])
        prepared, broken = sound.softmaxes[0], damaged.softmaxes[0]
        assert prepared is not None and broken is not None and np.isnan(damaged.logits[0]).all()
        for found, own in zip(answers(prepared, sound.logits[0], settings), alone, strict=True):
            np.testing.assert_array_equal(found, own)
        with pytest.raises(EngineError, match="a logit that is NaN or infinite: its weights are damaged"):
            answers(broken, damaged.logits[0], settings)


def test_a_tree_wants_the_rows_of_its_first_children(engine: NativeEngine) -> None:
    """A verifier seldom reads others; and a row of padding has no logits."""
    tree = tree_of((1, 2, 3, 4, 5), (-1, 0, 0, 1, 1))
    assert tree.to_batch(engine.spec, 0).settings == ()
    settings = SETTINGS[0]
    assert tree.to_batch(engine.spec, 0, settings=settings).settings == (settings, settings, None, settings)


def test_what_a_request_wants() -> None:
    def settings(**settings: object) -> SoftmaxSettings | None:
        return Sampler(SamplingParams(**settings), [1], (), 20).settings  # type: ignore[arg-type]

    assert settings(temperature=0.0) == (0.0, False, 0.0) and settings(temperature=0.7, presence_penalty=0.5) is None
    assert settings(temperature=0.7) == (0.7, True, 0.0) and settings(temperature=0.7, top_p=0.9) == (0.7, True, 1e-4)
    assert settings(temperature=0.7, top_k=5, top_p=0.9) == (0.7, False, 1e-4)
    assert settings(temperature=0.7, min_p=0.2, top_k=5) == (0.7, False, 0.2)


@given(seed=st.integers(0, 99), size=st.integers(1, 40), count=st.integers(1, 45), known=st.integers(0, 40))
def test_the_largest_of_the_likely_are_the_largest_of_all(seed: int, size: int, count: int, known: int) -> None:
    """With equal scores, and some that are impossible."""
    generator = np.random.default_rng(seed)
    scores = generator.integers(0, 6, size).astype(np.float32)
    scores[generator.random(size) < 0.2] = -np.inf
    least = np.sort(scores)[::-1][: max(1, known)][-1]
    likely = ((scores >= least) & (scores > -np.inf)).nonzero()[0]
    assert top(scores, likely, count).tolist() == sorted(largest(scores, count).tolist())


@pytest.mark.parametrize("speculative", [None, SpeculativeConfig()], ids=["plain", "default"])
def test_sampled_texts_are_those_of_rows_by_themselves(
    speculative: SpeculativeConfig | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded, under every kind of truncation, side by side."""
    truncations: tuple[dict[str, float], ...] = ({}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05})
    settings = [SamplingParams(temperature=0.7, max_tokens=24, seed=3, **each) for each in truncations]  # type: ignore[arg-type]
    prompts = ["def fibonacci(n):", "import os\n", "class Stack:", "for i in range(10):"]
    with LLM(built_native(DEMO, tmp_path / "bundle", "int8"), speculative, threads=2) as llm:
        prepared = [each.outputs[0].token_ids for each in llm.generate(prompts, settings)]
        monkeypatch.setattr(Sampler, "settings", None)
        assert prepared == [each.outputs[0].token_ids for each in llm.generate(prompts, settings)]
