"""The target as a bundle whose engine writes many texts at a time. It is built once for a state folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...models.bindings import TARGET
from ...models.errors import ConfigError
from ...models.layers import network_of
from ...models.plain_files import read_object
from ...runtime.bundle.bundle import MANIFEST, EngineBundle
from ...runtime.decoding.chunk import TokenChunk
from ...runtime.engines.backends import BACKENDS, choose_backend
from ...runtime.engines.base import Pass
from ...runtime.engines.passes import Steps
from ...runtime.engines.shared.memory import CacheBudget, cache_budget
from ...runtime.engines.shared.pool import PooledEngine
from ...runtime.sampling.softmax import Softmax
from ..checkpoints.checkpoint import Checkpoint
from ..comparison import compare
from ..options import BuildOptions
from ..pipeline import build
from ..progress import Begin
from ..quantization.formats import FORMATS, QuantizedCheckpoint
from .state import id_type, write_json

LONGEST = 1536  # tokens of a text that the target writes
RETAINED = 2048  # slots for the rows of common prefixes
COLUMNS = 32  # K
MOST = float(np.finfo(np.float16).max)
SHARE = 1e-5  # tokens below this share of the most probable one's probability count as tail


class TextTarget:
    """An open target for up to `requests` texts at a time: a context, which closes it."""

    def __init__(self, bundle: EngineBundle, requests: int, threads: int) -> None:
        """bundle: as `compile_target` built it."""
        spec = bundle.manifest.engines[TARGET]
        self._engine = bundle.open_engine(TARGET, threads)
        self.budget: CacheBudget = cache_budget([spec], None)
        slots = requests * spec.capacity
        allocated = self.budget.allocated
        self.pool = PooledEngine(self._engine, slots if allocated is None else min(slots, allocated))
        if not spec.model.taps:  # rows of a shared prefix are not computed again, and show no states
            self.pool.share_prefixes(RETAINED)
        self.eos = bundle.manifest.eos_token_ids
        self.vocab_size = spec.model.vocab_size

    def __enter__(self) -> TextTarget:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()
        self._engine.close()


def compile_target(checkpoint: Checkpoint, folder: Path, begin: Begin) -> EngineBundle:
    """Build the target's bundle with the kernels and the precision that are fast here, unless it is there already. That
    is int8 on the native engine if the matrices divide into blocks; else the backend's first precision. Raises
    ConfigError for a folder of another target."""
    check_target(checkpoint, folder)
    if (folder / MANIFEST).is_file():
        return EngineBundle.open(folder)
    if folder.exists():
        raise ConfigError(f"{folder} is no bundle, or one of an older release: remove it; the texts beside it stay")
    backend = BACKENDS[choose_backend(partial(compare, checkpoint.config, BACKENDS["native"], "int8")).backend]
    precision = backend.draft_precision or backend.precisions[0]
    if form := FORMATS.get((backend.name, precision)):
        try:
            QuantizedCheckpoint(checkpoint, form)
        except ConfigError:
            precision = backend.precisions[0]
    max_length = min(checkpoint.config.longest, LONGEST)
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_json(marker(folder), {"model": digest(checkpoint)})
    taps = checkpoint.config.taps
    return build(BuildOptions(checkpoint.path, None, folder, backend.name, precision, max_length, taps=taps), begin)


def check_target(checkpoint: Checkpoint, folder: Path) -> None:
    """Raises ConfigError where `compile_target` built another target there, whose texts lie beside it."""
    file = marker(folder)
    if not file.is_file():
        return
    try:
        found = read_object(file, own=True).get("model")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not readable ({error}): remove it and {folder}") from error
    if found != digest(checkpoint):
        raise ConfigError(
            f"{folder} belongs to another target, or to drafts of the other --kind: choose another --state, or remove "
            f"{folder.parent} and its texts"
        )


def marker(folder: Path) -> Path:
    """The file that tells the target in a folder from others."""
    return folder.with_suffix(".json")


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
    states: list[NDArray[np.float16]] | None = None,
) -> Steps[TokenChunk]:
    """The steps of plain decoding. Each pass that decides a token adds to `rows`, and each pass the states of its
    tokens, [tokens, S], to `states`."""
    try:
        answer = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration:
                return
            if isinstance(step, Pass) and states is not None:
                step = step._replace(batch=replace(step.batch, states_read=True))
            answer = yield step
            if not isinstance(step, Pass) or answer is None:
                continue
            if step.output_read:
                rows.append(select(answer.logits[0]))  # now: the next pass overwrites the logits
            if states is not None and answer.states is not None:
                states.append(answer.states[: step.batch.num_tokens].clip(-MOST, MOST).astype(np.float16))
    finally:
        steps.close()
