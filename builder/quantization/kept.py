"""In which integers a native engine holds the blocks of a file as they are: each matrix in its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...models.bindings import BITS, INTEGERS, SUPERBLOCKS
from ...models.layers import EMBEDDING_WEIGHT, HEAD_WEIGHT, network_of
from ...runtime.engines.backends import Backend, stored_matrices
from ..checkpoints.checkpoint import Checkpoint
from .formats import FORMATS, QuantizedCheckpoint, WeightFormat, Weights, stored_name

HOLDS = {  # by llama.cpp's types; int5 holds what int4 does, and int8 what has no offsets and blocks of 32
    **dict.fromkeys(("Q4_0", "Q4_1"), "int4"),
    **dict.fromkeys(("Q5_0", "Q5_1"), "int5"),
    "Q4_K": "int4k",
    "Q5_K": "int5k",
    "Q6_K": "int6k",
    "Q8_0": "int8",
}


def kept_format(checkpoint: Checkpoint, backend: Backend, precision: str) -> WeightFormat | None:
    """The format of a precision, with the one that holds a matrix's blocks for each matrix that is stored in blocks; of
    merged matrices the finest, with superblocks where it holds all of them. None where the precision has no codes, or a
    backend one format for all matrices."""
    usual = FORMATS.get((backend.name, precision))
    if usual is None or not backend.heads:
        return None
    others = dict(usual.others)
    for matrix in stored_matrices(network_of(checkpoint.config), checkpoint.config):
        types = [checkpoint.stored_type(stored_name(checkpoint, name)) for name in matrix.weights]
        if not HOLDS.keys() & set(types):
            continue
        held = [HOLDS.get(kind, usual.of(name).precision) for kind, name in zip(types, matrix.weights, strict=True)]
        finest = max(held, key=BITS.__getitem__)
        kinds = {(each in SUPERBLOCKS, each in backend.offsets) for each in held}
        if len(kinds) > 1 or checkpoint.is_adapted:  # some are rounded anew, which gives scales in fp16
            finest = SUPERBLOCKS.get(finest, finest)
        others |= dict.fromkeys(matrix.weights, FORMATS[backend.name, finest])
    if checkpoint.config.tie_embeddings and EMBEDDING_WEIGHT in others:
        others[HEAD_WEIGHT] = others[EMBEDDING_WEIGHT]
    return replace(usual, others=others)


def others_of(weights: Weights) -> dict[str, str]:
    """See EngineSpec.matrices."""
    if not isinstance(weights, QuantizedCheckpoint):
        return {}
    form, matrices = weights.form, stored_matrices(network_of(weights.config), weights.config)
    found = {matrix.name: form.of(matrix.weights[0]).precision for matrix in matrices}
    return {name: precision for name, precision in found.items() if precision != form.precision}


def nearest_integers(bits: int, precisions: Sequence[str]) -> str:
    """The fewest bits among a backend's integers that suffice for codes of so many, or the most."""
    return next((each for each in reversed(INTEGERS) if each in precisions and BITS[each] >= bits), INTEGERS[0])
