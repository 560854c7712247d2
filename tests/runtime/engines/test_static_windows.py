"""Static caches that have fewer slots for layers with a window: rows are what they are in caches that keep all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE
from cuda_driver.machine import Machine
from families import write_family
from native_parts import open_native, spec_of
from numpy.typing import NDArray
from onnx_program import open_static
from trees import Tree

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.models import bindings
from draftwood.models.errors import EngineError
from draftwood.runtime import SamplingParams, SpeculativeConfig
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.engines.passes import prefill
from draftwood.runtime.engines.shared import sizes
from draftwood.runtime.engines.static.engine import StaticEngine, StaticKVCache
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler

pytestmark = pytest.mark.usefixtures("no_faults")
WINDOW, COLUMNS, CAPACITY = 20, 40, 512
Open = Callable[[str], StaticEngine]
After = Callable[[list[int]], NDArray[np.float32]]  # the logits after a text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"sliding_window": WINDOW, "max_position_embeddings": CAPACITY}
    return write_family(tmp_path_factory.mktemp("windows") / "checkpoint", "Gemma3", **shape)


@pytest.fixture
def opened(folder: Path, tmp_path: Path, gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> Open:
    monkeypatch.setattr(sizes, "MOVED_TOKENS", 16)

    def opened(role: str) -> StaticEngine:
        return open_static(Checkpoint(folder), tmp_path, gpu, role, CAPACITY, columns=COLUMNS)

    return opened


@pytest.fixture
def after(folder: Path, tmp_path: Path) -> After:
    """The logits after a text, by the native engine."""
    checkpoint = Checkpoint(folder)
    engine = open_native(checkpoint, spec_of(checkpoint, bindings.TARGET, "fp32", (1, 32), CAPACITY), tmp_path)

    def logits(text: list[int]) -> NDArray[np.float32]:
        output = prefill(engine, engine.new_cache(), text)
        assert output is not None
        return np.array(output.logits[0])

    return logits


def test_a_text_of_any_length_fits_few_slots(opened: Open, after: After) -> None:
    """It is read in chunks, and grows by trees of which a path is kept."""
    engine, draw = opened(bindings.TARGET), Random(0)
    far, near = (part.geometry for part in engine.lend().parts)
    assert (far.capacity, near.capacity) == (CAPACITY, WINDOW + COLUMNS + 16)
    assert engine.memory.kv_cache == far.nbytes + near.nbytes
    cache, text = engine.new_cache(), [draw.randrange(VOCAB_SIZE) for _ in range(30)]
    assert isinstance(cache, StaticKVCache)
    prefill(engine, cache, text)
    while len(text) < 300:
        if draw.random() < 0.5:
            more = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(1, 40))]
            output = prefill(engine, cache, more)
            text += more
            assert output is not None
            np.testing.assert_allclose(output.logits[0], after(text), atol=1e-4, rtol=0)
        else:
            tokens = tuple(draw.randrange(VOCAB_SIZE) for _ in range(8))
            tree = Tree(tokens, tuple(draw.randrange(-1, row) for row in range(8)))
            engine.score(tree.batch(engine.spec, cache.length), cache)
            path = tree.path(draw.randrange(len(tree.tokens)))
            cache.commit(path)
            text += [tree.tokens[node] for node in path]
    assert cache.memory.dropped > 200
    with pytest.raises(EngineError, match="needs rows that this cache has dropped"):
        cache.truncate(150)
    cache.truncate(0)
    output = prefill(engine, cache, text[:50])
    assert output is not None
    np.testing.assert_allclose(output.logits[0], after(text[:50]), atol=1e-4, rtol=0)
    cache.close()
    again = engine.new_cache()
    output = prefill(engine, again, text[:50])
    assert output is not None
    np.testing.assert_allclose(output.logits[0], after(text[:50]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("on_device", [False, True], ids=["by the host", "whole rounds"])
def test_speculation_writes_the_plain_text(on_device: bool, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = opened(bindings.TARGET), opened(bindings.DRAFT)
    if not on_device:
        monkeypatch.setattr(StaticEngine, "rounds", lambda *_: None)
    params = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)
    config = SpeculativeConfig("chain", budget="fixed", max_draft_len=3)
    texts: list[list[int]] = []
    for each in (None, config):
        stats = SpecDecodeStats()
        decoder = SpeculativeDecoder(target, draft if each else None, each, CAPACITY, ())
        sampler = Sampler(params, [5, 6, 7], (), VOCAB_SIZE)
        chunks = decoder.generate([5, 6, 7], sampler, seeded_streams(None), stats)
        texts.append([token for chunk in chunks for token in chunk.token_ids])
    assert texts[0] == texts[1] and len(texts[0]) == 150
    memories = list(target._rounds)
    assert bool(memories) == on_device
    assert all(memory.dropped > 50 for memory in (*(memories[0] if on_device else ()), target.lend()))
