"""The native engine. Our own kernels compute its passes; they are compiled for the processor at their first use.

Weights have the layout that the kernels read (plugins/native/packing.py). The bits of a row's logits depend neither on
the other rows of the pass, nor on its width, nor on the slots of the row's ancestors in the cache. Therefore greedy
speculative text equals plain text bit for bit, in every precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....models import bindings, layers
from ....models.bindings import BITS
from ....models.errors import EngineError, NoRoomError
from ....plugins.native.cache import open_kernels
from ....plugins.native.compile import CompilerError
from ....plugins.native.library import (
    FORMATS,
    HEAD,
    NO_MEMORY,
    REFUSALS,
    Layer,
    Matrix,
    Model,
    Moved,
    Pass,
    address,
    row_bytes,
)
from ....plugins.native.packing import PANEL, whole_panels
from ....plugins.native.processor import KernelError
from ..base import EngineSpec, ForwardOutput, KVCache, Runner, TokenBatch, check_cache, closed_error
from ..limits import available_bytes, cores
from .cache import NativeKVCache
from .softmax import NativeSoftmax, PreparedRows
from .weights import ACCEPTANCE, ROPE, packed_network, packed_rows, read_weights


class Results(NamedTuple):
    """Buffers of the passes that score R rows; each of these passes overwrites them. call: the C structure that
    points to the buffers and to the cache. output: the buffers. prepared: what a pass prepares of its rows."""

    call: Pass
    output: ForwardOutput
    prepared: PreparedRows


class NativeEngine(Runner):
    """One role's weights and the kernels that read them."""

    def __init__(self, path: Path, spec: EngineSpec, threads: int = 0, private: bool = False) -> None:
        """path: a file of weights. threads: 0 takes one for each core. private: see `read_weights`. Raises EngineError
        when the weights are unusable, when the rows of the widest pass do not fit the memory that is left, or when this
        machine has no kernels and cannot compile them."""
        if threads < 0:
            raise EngineError(f"threads must be 0, for one on each core, or more, not {threads}")
        self._handle: int | None = None
        self._lock = Lock()  # an engine is not closed during a pass
        self.spec = spec
        self._kept = np.array(spec.kept_tokens, np.int64) if spec.kept_tokens else None
        self._weights = read_weights(path, spec, private)
        try:
            self._library = open_kernels()
            self.softmax = NativeSoftmax(self._library)
            self._model = native_model(spec, self._weights)
            check_rows(spec, self._model)
            self._handle = self._library.open(self._model, spec.pass_widths[-1], threads or cores())
        except (KernelError, CompilerError) as error:
            raise EngineError(str(error)) from error

    def new_cache(self, salt: str | None = None) -> NativeKVCache:
        return NativeKVCache(self)

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        """See Engine.forward. Rows of padding are not computed; their outputs are undefined. Also raises EngineError
        for token ids and positions beyond those of the engine."""
        rows, outputs = batch.num_tokens, len(batch.output_rows)
        if rows > len(batch.mask):
            raise EngineError(f"{rows} rows do not fit a mask of {len(batch.mask)}")
        cache = check_cache(cache, NativeKVCache)
        start = cache.reserve(batch)
        call, output, prepared = cache.results(outputs)
        mask = np.ascontiguousarray(batch.mask)
        columns, scored = mask.shape[1], 0 if batch.cache_only else min(outputs, rows)
        cache.inputs.fill(batch, rows, scored)
        HEAD.pack_into(call, 0, rows, scored, cache.length, start, columns)
        call.mask, call.drawn = address(mask), 0
        call.slots = None if batch.slots is None else cache.inputs.addresses[-1]
        states = cache.inputs.states_of(self.spec) if batch.states_read else None
        call.states, call.given = address(states), address(batch.states)
        settings = batch.settings[:scored]
        softmaxes = prepared.ask(settings, call) if any(settings) else ()
        with self._lock:
            if self._handle is None:
                raise closed_error(self.spec)
            if refusal := self._library.forward(self._handle, call):
                raise refused(refusal)
        if cache.near is not None:
            cache.near.held[cache.slots_of(batch, start)] = True
        cache.speculative = cache.speculative + rows if batch.slots is None else columns
        # `_replace` would take five times as long.
        found = (output.logits, output.top_ids, output.top_logprobs, output.acceptance)
        return ForwardOutput(*found, softmaxes, None if states is None else states[:rows])

    def close(self) -> None:
        with self._lock:
            if self._handle is not None:
                self._library.close(self._handle)
                self._weights.clear()
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_lock", None) is not None:
            self.close()

    def results(self, outputs: int, cache: NativeKVCache) -> Results:
        """Allocate the buffers of a pass over `cache` that scores `outputs` rows."""
        model, names = self.spec.model, self.spec.outputs
        columns = bindings.top_columns(model.num_logits)
        ranked = bindings.TOP_IDS.name in names
        headed = bindings.ACCEPTANCE.name in names
        logits = np.zeros((outputs, model.num_logits), np.float32)
        acceptance = np.zeros(outputs, np.float32) if headed else None
        ids = np.zeros((outputs, columns), np.int64) if ranked else None
        logprobs = np.zeros((outputs, columns), np.float32) if ranked else None
        call = Pass(top=columns, cache=cache.rows.structure)
        if cache.near is not None:
            call.near = cache.near.structure
        call.logits, call.acceptance = address(logits), address(acceptance)
        call.ids, call.logprobs = address(ids), address(logprobs)
        call.tokens, call.positions, call.output_rows, _ = cache.inputs.addresses
        return Results(call, ForwardOutput(logits, ids, logprobs, acceptance), PreparedRows(logits, self.softmax))

    def move(self, moved: Sequence[Moved]) -> None:
        """Copy rows of a cache to other slots. Raises MemoryError, and then nothing has changed."""
        with self._lock:
            if self._handle is None:
                raise closed_error(self.spec)
            self._library.move(self._handle, moved)


def refused(refusal: int) -> EngineError | MemoryError:
    return MemoryError(REFUSALS[refusal]) if refusal == NO_MEMORY else EngineError(REFUSALS[refusal])


def check_rows(spec: EngineSpec, model: Model) -> None:
    """Raises NoRoomError when no memory is left for the rows of the widest pass, which the kernels take at once."""
    rows, available = spec.pass_widths[-1], available_bytes()
    if available is not None and (needed := row_bytes(model, rows)) > available:
        raise NoRoomError(
            f"the {spec.role}'s passes of up to {rows} rows take {needed >> 20} MiB of memory, and {available >> 20} "
            "are left: rebuild the bundle with smaller --widths, free some, or raise the limit of this process"
        )


def native_model(spec: EngineSpec, weights: dict[str, NDArray[Any]]) -> Model:
    """The C structures of the model, which point into `weights`. `check_tensors` has compared these with the spec."""
    model, network = spec.model, packed_network(spec.model, spec.precision)
    windowed = spec.num_windowed_layers > 0

    def matrix(name: str, outputs: int, precision: str) -> Matrix:
        packed, scales = weights[f"{name}.weights"], weights.get(f"{name}.scales")
        inputs = packed.shape[1] * 32 // BITS[precision] if scales is not None else packed[0].size // PANEL
        bias, form = weights.get(f"{name}.bias"), FORMATS.index(precision)
        return Matrix(address(packed), address(scales), address(bias), outputs, inputs, form)

    def described(part: layers.Matrix) -> Matrix:
        outputs = packed_rows(part) if part.gated else sum(part.outputs)
        return matrix(part.name, outputs, spec.matrices.get(part.name, spec.precision))

    def norm(part: layers.Norm | None) -> int | None:
        return None if part is None else address(weights[part.name])

    def layer(parts: layers.Layer) -> Layer:
        norms = (
            parts.input_norm,
            parts.post_norm,
            parts.query_norm,
            parts.key_norm,
            parts.output_norm,
            parts.down_norm,
            parts.token_norm,
        )
        tables = (address(weights[name]) for name in ROPE[parts.local])
        after = network.layers.index(parts) + 1
        windows = [windowed and each.window is not None for each in network.layers[:after]]
        tap = network.taps.index(after) + 1 if after in network.taps else 0
        local, place = windows[-1], windows.count(windows[-1]) - 1
        shape = parts.rotary_size // 2, local, place, tap, parts.norm_first
        return Layer(*map(norm, norms), *tables, *map(described, parts.matrices), *shape)

    decoder = (Layer * model.num_layers)(*map(layer, network.layers))
    headed = bindings.ACCEPTANCE.name in spec.outputs
    blocks: list[Matrix] = []
    while headed and f"{ACCEPTANCE}block.{len(blocks)}.weights" in weights:
        blocks.append(matrix(f"{ACCEPTANCE}block.{len(blocks)}", model.hidden_size, "fp32"))
    return Model(
        model.vocab_size,
        model.hidden_size,
        whole_panels(decoder[0].down.inputs),
        model.num_layers,
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        len(weights["cosine"]),
        len(blocks),
        model.variant.window or 0 if windowed else 0,
        model.variant.gelu,
        len(network.taps),
        model.norm_eps,
        float(weights[f"{ACCEPTANCE}shift"][0]) if headed else 0.0,
        network.layers[0].attention_scale,
        network.layers[0].residual_multiplier,
        network.logits_multiplier,
        network.embedding_multiplier,
        address(weights[network.norm.name]),
        address(weights[f"{ACCEPTANCE}odds"]) if headed else None,
        decoder,
        (Matrix * len(blocks))(*blocks),
        described(network.head),
        described(network.head if model.tie_embeddings else network.embedding),
        Matrix() if network.fusion is None else described(network.fusion),
    )
