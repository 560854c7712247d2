"""Sliding windows on every engine: inside of trees, in long texts and shared caches, and one of another size fails. And
a Gemma 3 that sees."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE
from families import WIDTHS, expected_logits, opened, write_family
from native_parts import open_native, spec_of
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.parity import Rows, largest_difference, rows_of
from draftwood.builder.reference import score_rows
from draftwood.models import bindings
from draftwood.models.config import LlamaConfig
from draftwood.models.errors import BundleError, CheckpointError
from draftwood.models.layers import last_seen, network_of
from draftwood.models.llama import Llama
from draftwood.runtime.engines.base import ForwardOutput, KVCache, Pass
from draftwood.runtime.engines.passes import causal_batch, prefill
from draftwood.runtime.engines.shared.pool import PooledEngine

LONG = 700


def windowed(config: LlamaConfig, window: int) -> LlamaConfig:
    return replace(config, variant=replace(config.variant, window=window))


@pytest.mark.parametrize("backend", ["torch", "onnxruntime", "native", "tensorrt-rtx"])
def test_a_window_ends_inside_of_a_tree_of_the_prompt_and_between(backend: str, tmp_path: Path) -> None:
    """The reference computes it by positions; with a window that is larger by one the comparison fails."""
    checkpoint = Checkpoint(write_family(tmp_path / "checkpoint", "Gemma3"))
    for window in (1, 3, 20, 26):
        checkpoint.config = windowed(checkpoint.config, window)
        engine = opened(backend, checkpoint, tmp_path)
        rows = rows_of(engine.spec)
        near = rows.positions[None, :] > rows.positions[:, None] - window
        np.testing.assert_array_equal(last_seen(rows.mask, window), rows.mask & near)
        assert largest_difference(engine, score_rows(checkpoint.tensor, checkpoint.config, rows)) < 2e-4
        another = score_rows(checkpoint.tensor, windowed(checkpoint.config, window + 1), rows)
        with pytest.raises(BundleError, match="differs from the reference"):
            largest_difference(engine, another)
        engine.close()


class Long:
    """A long text and what the reference says of its end, and transformers, whose angles have 24 bits."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = Checkpoint(write_family(folder, "Gemma3", sliding_window=150, max_position_embeddings=1024))
        self.tokens: NDArray[np.int64] = np.random.default_rng(0).integers(0, VOCAB_SIZE, LONG)
        rows = Rows(self.tokens, np.arange(LONG), np.tri(LONG, dtype=np.bool_))
        self.expected = score_rows(self.checkpoint.tensor, self.checkpoint.config, rows).logits[-1]
        np.testing.assert_allclose(self.expected, expected_logits(folder, self.tokens)[-1], atol=2e-3, rtol=0)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Long:
    return Long(tmp_path_factory.mktemp("long") / "checkpoint")


def test_a_long_text_has_the_same_bits_whoever_computes_it(long: Long, tmp_path: Path) -> None:
    """One thread or some, which share the slots of a window; in chunks of any width; beside another text."""
    spec = spec_of(long.checkpoint, bindings.TARGET, "fp32", WIDTHS, 1024)
    tokens, last = long.tokens.tolist(), list[NDArray[np.float32]]()
    for threads in (1, 3):
        engine = open_native(long.checkpoint, spec, tmp_path, threads)
        cache = engine.new_cache()
        prefill(engine, cache, tokens[:-3])
        for token in tokens[-3:]:
            last.append(engine.score(causal_batch(spec, [token], cache.length), cache).logits[0].copy())
            cache.commit(range(1))
        if threads == 3:
            last.append(beside_another(PooledEngine(engine, 4096), tokens).logits[-1].copy())
        engine.close()
    np.testing.assert_allclose(last[2], long.expected, atol=2e-3, rtol=0)
    for one, other in zip([*last[:3], last[2]], last[3:], strict=True):
        np.testing.assert_array_equal(one, other)


def beside_another(pool: PooledEngine, tokens: list[int]) -> ForwardOutput:
    """The last output of a text whose slots lie among those of another one: the same read backwards."""
    caches: list[KVCache] = [pool.new_cache(), pool.new_cache()]
    for first in range(0, LONG, 7):
        texts = [each[first : first + 7] for each in (tokens, tokens[::-1])]
        batches = [causal_batch(pool.spec, text, first) for text in texts]
        outputs = pool.forward([Pass(pool, *each) for each in zip(batches, caches, strict=True)])
        for each in caches:
            each.commit(range(7))
    return outputs[0]


def test_what_training_reads_ends_at_the_window(long: Long) -> None:
    """And a window of another size gives other logits."""
    ids, found = torch.from_numpy(long.tokens)[None], list[NDArray[np.float32]]()
    for window in (150, 151):
        model = Llama(windowed(long.checkpoint.config, window), LONG)
        weights = {name: np.array(long.checkpoint.tensor(name)) for name in model.state_dict()}
        model.load_state_dict({name: torch.from_numpy(weight) for name, weight in weights.items()})
        with torch.no_grad():
            found.append(model.full(ids).logits[0, -1].numpy())
    np.testing.assert_allclose(found[0], long.expected, atol=2e-3, rtol=0)
    assert np.abs(found[1] - found[0]).max() > 1e-3


def test_of_a_gemma_that_sees_the_part_that_reads_text_is_read(tmp_path: Path) -> None:
    """As if its checkpoint had nothing else; the file says where its picture tokens are, which nobody can send."""
    folder = write_family(tmp_path / "text", "Gemma3")
    config = json.loads((folder / "config.json").read_text())
    seeing = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "image_token_index": 7}
    (tmp_path / "seeing").mkdir()
    weights = {f"language_model.{name}": weight for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(weights, tmp_path / "seeing" / "model.safetensors")
    write_json = (tmp_path / "seeing" / "config.json").write_text
    write_json(json.dumps(seeing))
    with pytest.raises(CheckpointError, match="text_config must be an object"):
        Checkpoint(tmp_path / "seeing")
    write_json(json.dumps(seeing | {"text_config": config, "eos_token_id": [2, 5]}))
    found, expected = Checkpoint(tmp_path / "seeing"), Checkpoint(folder)
    assert found.config == replace(expected.config, eos_token_ids=(2, 5))
    assert found.notes == ("of a model that sees, the part that reads text alone is built",)
    for name in network_of(expected.config).tensors():
        np.testing.assert_array_equal(found.tensor(name), expected.tensor(name))
