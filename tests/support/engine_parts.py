"""Shared parts of the tests of engines: sizes, a tree, a spec, and shorthands for passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from checkpoints import VOCAB_SIZE
from numpy.typing import NDArray
from trees import Tree

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.models import bindings
from draftwood.runtime.engines.base import Engine, EngineSpec, TokenBatch
from draftwood.runtime.engines.native.cache import NativeKVCache, Rows
from draftwood.runtime.engines.onnx.device import DeviceKVCache
from draftwood.runtime.engines.passes import prefill
from draftwood.runtime.engines.static.engine import StaticKVCache
from draftwood.runtime.engines.static.memory import CacheMemory
from draftwood.runtime.engines.static.pool import SharedKVCache

WIDTHS, CAPACITY = (1, 2, 4, 8, 16, 32), 600
SHARED_CAPACITY, SHARED_COLUMNS = 256, 192  # of three sequences: regions of 192 slots, shares of 53 columns
TOLERANCE = 2e-4
STAND_IN = "onnxruntime on a device"  # caches of its own memory, as on a GPU; the CPU's provider stands for CUDA's
STATIC = {"static": 1, "static for 3": 3}  # sequences of an engine over the driver in libcuda's place
SHARED = "static for 3"
Open = Callable[..., Engine]

BUSHY = Tree((9, 40, 41, 7, 200, 8, 8, 31), (-1, 0, 0, 1, 2, 2, 4, 6))  # its longest path: 0, 2, 4, 6, 7


def engine_spec(checkpoint: Checkpoint, backend: str, role: str, capacity: int = CAPACITY) -> EngineSpec:
    form, kept = bindings.COMPACT if backend == "tensorrt" else bindings.ADDITIVE, checkpoint.kept_tokens
    return EngineSpec(
        role=role,
        backend=backend,
        file="",
        model=checkpoint.config,
        widths=WIDTHS,
        capacity=capacity,
        precision="fp32",
        outputs=bindings.output_names(role, form=form, states=checkpoint.config.state_size > 0),
        kept_tokens=() if kept is None else tuple(kept.tolist()),
    )


def random_text(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB_SIZE, length)]


def filled(engine: Engine, text: Sequence[int]) -> Any:
    """A cache that holds `text`."""
    cache = engine.new_cache()
    prefill(engine, cache, text)
    return cache


def score(engine: Engine, batch: TokenBatch, cache: Any) -> NDArray[np.float32]:
    """Logits of the real rows, copied: the engine owns its output only until the next pass."""
    return engine.score(batch, cache).logits[: batch.num_tokens].copy()


def stored(cache: Any) -> Any:
    """All rows of a cache that is not native, [2 * layers, 1, H_kv, C, D]."""
    if isinstance(cache, StaticKVCache):
        with cache._engine.lock:
            return held_by(cache._memory)
    if isinstance(cache, SharedKVCache):
        pool, first = cache._pool, cache.first_slot
        with pool._engine.lock:
            pool._queue_moves()
            return held_by(pool.memory)[:, :, :, first : first + pool.region]
    return cache._value.numpy()[:, None] if isinstance(cache, DeviceKVCache) else cache.buffer


def held_by(memory: CacheMemory) -> NDArray[Any]:
    """A copy of a cache's rows on a device: float32, or uint16 with the bits of fp16 or bf16."""
    engine, (part,) = memory._engine, memory.parts
    geometry = part.geometry
    device, head_dim = engine.device, engine.spec.model.head_dim
    block = device.allocate_pinned(geometry.nbytes)
    device.download(block, part.address, engine.stream)
    device.synchronize(engine.stream)
    dtype = np.float32 if geometry.row_bytes == 4 * head_dim else np.uint16
    used = geometry.heads * geometry.capacity * geometry.row_bytes
    shape = (geometry.tensors, 1, geometry.heads, geometry.capacity, head_dim)
    return block.reshape(geometry.tensors, -1)[:, :used].copy().view(dtype).reshape(shape)


def contents(cache: Any) -> NDArray[np.float32]:
    """Keys and values of the committed rows, [2 * layers, 1, H_kv, rows, D]."""
    if not isinstance(cache, NativeKVCache):
        return torch.as_tensor(stored(cache)[:, :, :, : cache.length]).numpy(force=True).copy()
    slots = np.arange(cache.length)
    found = [native_rows(cache.rows, slots)]
    if cache.near is not None:
        assert cache.near.held[slots].all(), "a cache by itself drops nothing"
        found.append(native_rows(cache.near._rows, cache.near._lie(slots)))
    return np.concatenate(found)


def native_rows(rows: Rows, slots: NDArray[np.int64]) -> NDArray[np.float32]:
    """The same of some layers, from slots as they lie in memory."""
    keys, values = rows.keys.swapaxes(-1, -2), rows.values.swapaxes(-3, -2)  # the slots before the numbers of each
    layers, heads, size, count = *keys.shape[:2], keys.shape[-1], rows.values.shape[3]
    shape = layers, heads, count, math.prod(values.shape[3:])
    parts = [keys.reshape(layers, heads, count, size), values.reshape(shape)[..., :size]]
    if rows.scales is not None:
        parts = [part * scales[..., None] for part, scales in zip(parts, rows.scales, strict=True)]
    stacked = np.stack([part[:, :, slots].astype(np.float32) for part in parts], 1)
    return np.array(stacked.reshape(2 * layers, 1, heads, len(slots), size))
