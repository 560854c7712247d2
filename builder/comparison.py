"""Compares two backends on this machine, by one layer of random weights.

No second engine of the whole model is made: all layers of a model are alike, and the time of a pass does not depend on
the values of weights. A large layer is halved until its weights are quickly written. So the comparison says which
kernels compute faster, not which read a large model faster from memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..models.bindings import TARGET, output_names
from ..models.config import LlamaConfig
from ..models.errors import EngineError
from ..models.families import Variant
from ..models.layers import Matrix, network_of
from ..plugins.installation import lacking
from ..runtime.engines.backends import BACKENDS, BLOCKS, WEIGHTS, Backend, Opening
from ..runtime.engines.base import Engine, EngineSpec
from ..runtime.engines.comparison import Comparison
from ..runtime.engines.passes import prefill
from .checkpoints.checkpoint import Checkpoint
from .checkpoints.source import Blocks
from .pass_times import time_pass
from .quantization.formats import FORMATS, Quantized, WeightFormat, stored_as
from .quantization.kept import others_of

TimePass = Callable[[Engine, Any, int], float]

ROWS = (1, 8)  # of a plain round, and of a round with a usual proposal
CONTEXT = 64
REPEATS, UNCOUNTED = 15, 2  # the first passes bind buffers and wake threads
MAX_PARAMETERS = 12_000_000  # of the layer
MAX_NARROW = 256  # a layer is not made narrower
VOCABULARY = 256


class RandomLayer(Checkpoint):
    """A checkpoint of random weights, which is on no disk."""

    def __init__(self, config: LlamaConfig) -> None:
        self.config = config
        self._shapes, self._generator = network_of(config).tensors(), np.random.default_rng(0)

    def tensor(self, name: str) -> NDArray[Any]:
        return self._generator.random(self._shapes[name], np.float32) * np.float32(0.04) - np.float32(0.02)

    def blocks(self, name: str) -> Blocks | None:
        return None


def compare(
    model: LlamaConfig, backend: Backend, precision: str, threads: int = 0, seconds_of: TimePass = time_pass
) -> Comparison:
    """Compare a backend with its rival on a layer of this model's shape. precision: of the backend's weights; the rival
    takes its default where it does not have it. threads: of both engines; 0 lets each choose. seconds_of: times a pass,
    see `time_pass`. Raises EngineError if the rival is not installed, or has none."""
    rival = BACKENDS[backend.rival]
    rival.check_machine(None)
    config = one_layer(model)
    pairs = [(backend, precision), (rival, precision if precision in rival.precisions else rival.precisions[0])]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        engines = [
            stack.enter_context(closing(make(config, *pair, Path(folder) / pair[0].name, threads))) for pair in pairs
        ]
        times = time_in_turn(engines, seconds_of)
    own, other = (f"{each.name} {kind}" for each, kind in pairs)
    return Comparison(own, other, ROWS, *times)


def one_layer(model: LlamaConfig) -> LlamaConfig:
    """A model of one layer, halved until it is small, without the quick steps that only some families have."""
    config = replace(
        model,
        vocab_size=VOCABULARY,
        intermediate_size=-(-model.intermediate_size // BLOCKS[0]) * BLOCKS[0],  # low-bit formats fill up blocks
        num_layers=1,
        max_position=max(model.max_position, CONTEXT + max(ROWS)),
        rope_scaling=None,
        tie_embeddings=False,
        variant=Variant(),
        draft_vocab_size=None,
        draft_context=None,
        taps=(),
        reads=None,
    )
    while num_weights(config) > MAX_PARAMETERS and config.hidden_size >= 2 * MAX_NARROW:
        kv_heads = max(1, config.num_kv_heads // 2)
        config = replace(
            config,
            hidden_size=halved(config.hidden_size),
            intermediate_size=halved(config.intermediate_size),
            num_kv_heads=kv_heads,
            num_heads=kv_heads * (config.num_heads // config.num_kv_heads),
        )
    return config


def halved(size: int) -> int:
    """Half of a size, in whole blocks of every low-bit format."""
    return size // 2 // BLOCKS[0] * BLOCKS[0]


def num_weights(config: LlamaConfig) -> int:
    return sum(each.inputs * sum(each.outputs) for each in network_of(config).layers[0].matrices)


def make(config: LlamaConfig, backend: Backend, precision: str, folder: Path, threads: int) -> Engine:
    folder.mkdir()
    capacity = CONTEXT + max(ROWS)
    form = FORMATS.get((backend.name, precision))
    weights = stored_as(RandomLayer(config), backend, precision, {} if form is None else random_codes(config, form))
    outputs, others = output_names(TARGET), others_of(weights)
    spec = EngineSpec(TARGET, backend.name, backend.file, config, ROWS, capacity, precision, outputs, matrices=others)
    if backend.file == WEIGHTS:
        from .engines.native import write_weights

        write_weights(weights, capacity, folder / spec.file)
    else:
        try:
            from .engines.export import export
        except ModuleNotFoundError as error:
            raise EngineError(f"a comparison needs {lacking(error)}") from error
        export(weights, TARGET, capacity, folder / spec.file, lambda name: None, precision=precision)  # type: ignore[arg-type]
    return backend.open(folder / spec.file, spec, Opening(threads))


def random_codes(config: LlamaConfig, form: WeightFormat) -> dict[str, Quantized]:
    """Codes of every matrix: rounding weights would take most of the time, and they are random anyway."""
    generator, network = np.random.default_rng(1), network_of(config)

    def codes(name: str, outputs: int, inputs: int) -> Quantized:
        own = form.of(name)
        least, most = (0, 16) if own.offset else (-(2 ** (own.bits - 1)), 2 ** (own.bits - 1))
        scales = np.full((outputs, inputs // own.block_of(name, inputs)), 2.0**-10, np.float32)
        offsets = -8 * scales if own.offset else None
        return Quantized(generator.integers(least, most, (outputs, inputs), np.int8), scales, offsets)

    matrices: list[Matrix] = [*network.layers[0].matrices, network.head]
    return {
        name: codes(name, outputs, matrix.inputs)
        for matrix in matrices
        for name, outputs in zip(matrix.weights, matrix.outputs, strict=True)
    }


def time_in_turn(engines: list[Engine], seconds_of: TimePass) -> list[tuple[float, ...]]:
    """The least seconds of each engine's passes, taken in turn, by ROWS: other programs only make passes longer."""
    caches = [engine.new_cache() for engine in engines]
    times: list[dict[int, list[float]]] = [{rows: [] for rows in ROWS} for _ in engines]
    for engine, cache in zip(engines, caches, strict=True):
        for start in range(0, CONTEXT, max(ROWS)):
            prefill(engine, cache, [start] * max(ROWS))
    for repeat in range(UNCOUNTED + REPEATS):
        for rows in ROWS:
            for engine, cache, found in zip(engines, caches, times, strict=True):
                elapsed = seconds_of(engine, cache, rows)
                found[rows] += [elapsed] if repeat >= UNCOUNTED else []
    return [tuple(min(found[rows]) for rows in ROWS) for found in times]
