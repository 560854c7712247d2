"""Write a checkpoint as the native engine reads it: packed matrices, one safetensors file for each role."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ...models.acceptance_head import TrainedHead
from ...models.layers import Matrix, network_of
from ...models.rope import rope_tables
from ...plugins.native.packing import (
    LAYOUT,
    PANEL,
    alternated,
    code_panels,
    flat,
    fp16_pairs,
    fp16_panels,
    joined,
    pair_panels,
    panels,
    superblock_panels,
)
from ...runtime.bundle.digests import FileRecord
from ...runtime.engines.native.weights import (
    ACCEPTANCE,
    ALIGNMENT,
    DTYPES,
    LAYOUT_KEY,
    METADATA,
    ROPE,
    Stored,
    expected_tensors,
    tables_of,
)
from ..parallel import in_parts
from ..quantization.formats import Quantized, QuantizedCheckpoint, RoundedCheckpoint, Weights, widened
from ..quantization.kept import others_of

Join = Callable[[Sequence[NDArray[Any]]], NDArray[Any]]
Read = Callable[[], NDArray[Any]]


class Packer:
    """Contents of the tensors that a native engine reads. `expected_tensors` gives their names, dtypes and shapes."""

    def __init__(self, checkpoint: Weights, positions: int, head: TrainedHead | None) -> None:
        self.checkpoint, self.positions, self.head = checkpoint, positions, head
        self.config = checkpoint.config

    @property
    def precision(self) -> str:
        if isinstance(self.checkpoint, QuantizedCheckpoint):
            return self.checkpoint.form.precision
        return self.checkpoint.precision if isinstance(self.checkpoint, RoundedCheckpoint) else "fp32"

    def expected(self) -> dict[str, Stored]:
        """Every tensor of the file, in its order."""
        blocks = None if self.head is None else self.head.config.layers
        others = others_of(self.checkpoint)
        return dict(expected_tensors(self.config, self.precision, others, self.positions, blocks))

    def contents(self) -> dict[str, Read]:
        """Each tensor by its name, read when it is written."""
        network = network_of(self.config)
        contents: dict[str, Read] = {}
        for local in tables_of(network):
            tables = zip(ROPE[local], rope_tables(self.config, self.positions, local), strict=True)
            contents |= {name: partial(np.copy, table) for name, table in tables}
        if network.fusion is not None:
            contents |= self.matrix(network.fusion)
        for layer in network.layers:
            contents |= {norm.name: self.vector([norm.weight]) for norm in layer.norms}
            for matrix in layer.matrices:
                contents |= self.matrix(matrix)
        contents[network.norm.name] = self.vector([network.norm.weight])
        contents |= self.matrix(network.head)
        if self.head is not None:
            contents |= self.acceptance(self.head)
        if not self.config.tie_embeddings:
            contents |= self.matrix(network.embedding)
        return contents

    def acceptance(self, head: TrainedHead) -> dict[str, Read]:
        """The SpecDec++ head: each block's panels and bias, then the row that gives the log-odds."""
        config, weights = head.config, head.weights
        odds, shift = config.logit_projection(weights["output.weight"], weights["output.bias"])
        arrays = {"odds": flat(odds.ravel()), "shift": shift}
        for layer in range(config.layers):
            block = f"blocks.{config.block_of(layer)}.linear"
            arrays[f"block.{layer}.weights"] = panels(weights[f"{block}.weight"])
            arrays[f"block.{layer}.bias"] = flat(weights[f"{block}.bias"])
        return {ACCEPTANCE + name: partial(np.copy, array) for name, array in arrays.items()}

    def vector(self, sources: Sequence[str], join: Join = joined) -> Read:
        """Read vectors as one, in fp32, padded to whole panels."""
        return lambda: flat(join([self.checkpoint.tensor(source) for source in sources]))

    def matrix(self, matrix: Matrix) -> dict[str, Read]:
        """Read the panels of a merged matrix, the scales of its codes if it is quantised, and its bias."""
        name, weights, join = matrix.name, matrix.weights, in_turn if matrix.gated else joined
        contents = {f"{name}.bias": self.vector(matrix.biases, join)} if matrix.bias else {}
        checkpoint = self.checkpoint
        if isinstance(checkpoint, QuantizedCheckpoint):
            bits = checkpoint.form.of(weights[0]).bits
            waiting: list[Quantized] = []  # codes and scales are written one after the other, but joined once

            def codes() -> NDArray[Any]:
                parts = [checkpoint.quantized(weight) for weight in weights]
                waiting[:] = [joined_blocks(parts, join)]
                return packed(waiting[0].codes, lambda rows: code_panels(rows, bits))

            return contents | {f"{name}.weights": codes, f"{name}.scales": lambda: scale_panels(waiting.pop())}
        # 16-bit floats are stored as uint16, because numpy has no bf16.
        if isinstance(checkpoint, RoundedCheckpoint):
            pack = pair_panels if checkpoint.precision == "bf16" else panels
            return contents | {
                f"{name}.weights": lambda: packed(join([checkpoint.half(w).view(np.uint16) for w in weights]), pack)
            }
        return contents | {
            f"{name}.weights": lambda: packed(join([widened(checkpoint.tensor(w)) for w in weights]), panels)
        }


def packed(rows: NDArray[Any], pack: Callable[[NDArray[Any]], NDArray[Any]]) -> NDArray[Any]:
    """Lay out rows [N, ...] in panels [panels, ...]. pack: does so for some of the rows."""
    first = pack(rows[:PANEL])
    result = np.empty((-(-len(rows) // PANEL), *first.shape[1:]), first.dtype)

    def fill(part: slice) -> None:
        result[part.start // PANEL : -(-part.stop // PANEL)] = pack(rows[part])

    in_parts(len(rows), rows[:1].size, fill)
    return result


def scale_panels(matrix: Quantized) -> NDArray[Any]:
    """The scales and offsets of codes as kernels/scales.h says."""
    _, scales, offsets, factors = matrix
    if factors is not None:
        return superblock_panels(scales, offsets, factors)
    return fp16_panels(scales) if offsets is None else fp16_pairs(scales, offsets)


def joined_blocks(parts: Sequence[Quantized], join: Join) -> Quantized:
    codes, scales = join([part.codes for part in parts]), join([part.scales for part in parts])
    offsets = [part.offsets for part in parts if part.offsets is not None]
    factors = [part.factors for part in parts if part.factors is not None]
    return Quantized(codes, scales, join(offsets) if offsets else None, join(factors) if factors else None)


def in_turn(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Alternate the panels of gate and up, so that one thread computes both."""
    first, second = parts
    return alternated(first, second)


def write_weights(
    checkpoint: Weights,
    positions: int,
    path: Path,
    head: TrainedHead | None = None,
    follow: Callable[[int], object] = lambda layer: None,
) -> FileRecord:
    """Write `checkpoint`, with the draft's head, for passes at up to `positions` positions, one matrix in memory at a
    time. follow: called with the number of each layer when it was written, one by one, in another thread; codes of its
    matrices are still there. Returns the file's record. Raises CheckpointError when a weight holds NaN or infinity."""
    packer = Packer(checkpoint, positions, head)
    expected, contents = packer.expected(), packer.contents()
    last = {layer.matrices[-1].name: index for index, layer in enumerate(network_of(packer.config).layers)}
    ends = {[name for name in expected if name.startswith(f"{matrix}.")][-1]: at for matrix, at in last.items()}
    header: dict[str, Any] = {METADATA: {LAYOUT_KEY: LAYOUT}}
    end = 0
    for name, stored in expected.items():
        header[name] = {"dtype": stored.dtype, "shape": stored.shape, "data_offsets": (end, end + stored.nbytes)}
        end += -(-stored.nbytes // ALIGNMENT) * ALIGNMENT
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    digest = hashlib.sha256()
    pending: list[Future[Any]] = []  # work on what was written, done while the next layer is packed
    with path.open("wb") as file, ThreadPoolExecutor(1) as hashing, ThreadPoolExecutor(2) as threads:

        def write(content: Any) -> None:
            file.write(content)  # not numpy's tofile: of a full disk it says only how many bytes it wrote
            pending.append(hashing.submit(digest.update, content))

        write(len(text).to_bytes(8, "little") + text)
        for name, stored in expected.items():
            content = np.ascontiguousarray(contents[name](), DTYPES[stored.dtype])
            assert content.nbytes == stored.nbytes, name
            write(content.data.cast("B"))
            write(bytes(-content.nbytes % ALIGNMENT))
            if name in ends:
                finish(pending)
                pending += [threads.submit(os.fsync, file.fileno()), threads.submit(follow, ends[name])]
        finish(pending)
        forget(file)
    return FileRecord(path.stat().st_size, digest.hexdigest())


def finish(pending: list[Future[Any]]) -> None:
    """Wait for work, and forget it. Raises what it raised."""
    for each in pending:
        each.result()
    pending.clear()


def forget(file: BinaryIO) -> None:
    """Remove a written file from the system's page cache. The system reads it again when the file is mapped, and then
    uses large pages, which it does not for what was written."""
    file.flush()
    os.fsync(file.fileno())  # pages that are not on the disk yet cannot be removed
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
