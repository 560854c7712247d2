"""The target as an engine that writes many texts at a time. It is compiled once for a state folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...models.bindings import TARGET
from ...models.errors import ConfigError
from ...models.layers import network_of
from ...models.plain_files import read_object
from ...runtime.bundle.staging import staging_folder
from ...runtime.decoding.chunk import TokenChunk
from ...runtime.engines.backends import BACKENDS, Opening, choose_backend
from ...runtime.engines.base import EngineSpec, Pass
from ...runtime.engines.passes import Steps
from ...runtime.engines.shared.memory import CacheBudget, cache_budget
from ...runtime.engines.shared.pool import PooledEngine
from ...runtime.sampling.softmax import Softmax
from ..checkpoints.checkpoint import Checkpoint
from ..comparison import compare
from ..engines.make import Source, engine_spec, make_engine
from ..options import BuildOptions
from ..progress import Begin
from ..quantization.formats import FORMATS, QuantizedCheckpoint
from .state import id_type

MARKER = "target.json"
LONGEST = 1536  # tokens of a text that the target writes
RETAINED = 2048  # slots for the rows of common prefixes
COLUMNS = 32  # K
SHARE = 1e-5  # tokens below this share of the most probable one's probability count as tail


class TextTarget:
    """An open target for up to `requests` texts at a time: a context, which closes it."""

    def __init__(self, folder: Path, spec: EngineSpec, requests: int, eos: tuple[int, ...], threads: int) -> None:
        """folder: as `compile_target` wrote it."""
        self._engine = BACKENDS[spec.backend].open(folder / spec.file, spec, Opening(threads))
        self.budget: CacheBudget = cache_budget([spec], None)
        slots = requests * spec.capacity
        allocated = self.budget.allocated
        self.pool = PooledEngine(self._engine, slots if allocated is None else min(slots, allocated))
        self.pool.share_prefixes(RETAINED)
        self.eos = eos
        self.vocab_size = spec.model.vocab_size

    def __enter__(self) -> TextTarget:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()
        self._engine.close()


def text_spec(checkpoint: Checkpoint, folder: Path) -> tuple[Source, EngineSpec, BuildOptions]:
    """How the target is compiled: with the kernels and the precision that are fast here. That is int8 on the native
    engine if the matrices divide into blocks; else the backend's first precision. A target that `folder` holds keeps
    its backend."""
    max_length = min(checkpoint.config.longest, LONGEST)
    compiled = (read_identity(folder) or {}).get("backend")  # a second measurement could choose another one
    if not isinstance(compiled, str) or compiled not in BACKENDS:
        compiled = choose_backend(partial(compare, checkpoint.config, BACKENDS["native"], "int8")).backend
    backend = BACKENDS[compiled]
    precision = backend.draft_precision or backend.precisions[0]
    if form := FORMATS.get((backend.name, precision)):
        try:
            QuantizedCheckpoint(checkpoint, form)
        except ConfigError:
            precision = backend.precisions[0]
    options = BuildOptions(checkpoint.path, checkpoint.path, folder, backend.name, precision, max_length=max_length)
    source = Source(checkpoint, TARGET, None, backend.name, precision)
    return source, engine_spec(source, options, max_length), options


def compile_target(checkpoint: Checkpoint, folder: Path, begin: Begin) -> EngineSpec:
    """Write the target's engine and its tokenizer to a folder, unless they are there already. Raises ConfigError for
    a folder of another target."""
    source, spec, options = text_spec(checkpoint, folder)
    compiled = {"backend": spec.backend, "precision": spec.precision, "capacity": spec.capacity}
    identity = {"model": digest(checkpoint), **compiled}
    if (found := read_identity(folder)) is not None:
        if found != identity:
            raise ConfigError(
                f"{folder} belongs to another target, or was compiled for another machine: choose another --state, or "
                f"remove {folder.parent}"
            )
        return spec
    with staging_folder(folder, MARKER, ConfigError) as staging:
        checkpoint.write_tokenizer(staging)
        spec, parity, _ = make_engine(source, spec, options, staging, begin)
        (staging / MARKER).write_text(json.dumps({"identity": identity, "parity": parity}) + "\n", encoding="utf-8")
    return spec


def check_target(checkpoint: Checkpoint, folder: Path) -> None:
    """Raises ConfigError where `compile_target` wrote another target to the folder, whose texts lie beside it."""
    found = read_identity(folder)
    if found is not None and found.get("model") != digest(checkpoint):
        raise ConfigError(
            f"{folder} belongs to another target: choose another --state, or remove {folder.parent} and its texts"
        )


def read_identity(folder: Path) -> dict[str, Any] | None:
    """What tells the target in a folder from others; None where there is none. Raises ConfigError."""
    if not (folder / MARKER).is_file():
        return None
    try:
        identity = read_object(folder / MARKER, own=True).get("identity")
        if not isinstance(identity, dict):
            raise ValueError("it has no identity")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / MARKER} is not readable ({error}): remove {folder}") from error
    return identity


def digest(checkpoint: Checkpoint) -> str:
    """SHA-256 of a model's configuration and of some of its tensors, which tells models apart."""
    network = network_of(checkpoint.config)
    state = hashlib.sha256(json.dumps(checkpoint.config.to_dict(), sort_keys=True).encode())
    for name in (network.norm.weight, *network.layers[0].tensors(), *network.layers[-1].tensors()):
        state.update(checkpoint.tensor(name).tobytes())
    return state.hexdigest()


class TopTokens(NamedTuple):
    """A distribution at temperature 1."""

    ids: NDArray[np.unsignedinteger[Any]]  # [K], best first
    logprobs: NDArray[np.float16]  # [K], -inf where there are fewer tokens
    tail: float  # the probability of all other tokens


class TopSelector:
    """Selects the K most probable tokens of rows of logits."""

    def __init__(self, softmax: Softmax, vocab_size: int, columns: int) -> None:
        """softmax: the engine's. columns: K."""
        self._softmax, self._columns = softmax, columns
        self._buffer = np.empty(vocab_size, softmax.dtype)
        self._type = id_type(vocab_size)

    def select(self, logits: NDArray[np.float32]) -> TopTokens:
        """logits: [V]. Raises EngineError when one is NaN or infinite."""
        total = self._softmax.weights(logits, 1.0, self._buffer).total
        found, weights = self._softmax.likely(logits, 1.0, SHARE)
        if len(found) > self._columns:  # a partial sort: a flat distribution has thousands of likely tokens
            best = np.argpartition(weights, -self._columns)[-self._columns :]
            found, weights = found[best], weights[best]
        order = np.argsort(-weights, kind="stable")
        probs = weights[order] / total
        ids = np.zeros(self._columns, self._type)
        logprobs = np.full(self._columns, -np.inf, np.float16)
        ids[: len(order)] = found[order]
        logprobs[: len(order)] = np.minimum(np.log(probs), 0)
        return TopTokens(ids, logprobs, min(1.0, max(0.0, 1 - float(probs.sum()))))


def recorded(
    steps: Steps[TokenChunk],
    select: Callable[[NDArray[np.float32]], TopTokens],
    rows: list[TopTokens],
) -> Steps[TokenChunk]:
    """The steps of plain decoding. Each pass that decides a token adds to `rows`."""
    try:
        answer = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration:
                return
            answer = yield step
            if isinstance(step, Pass) and step.output_read and answer is not None:
                rows.append(select(answer.logits[0]))  # now: the next pass overwrites the logits
    finally:
        steps.close()
