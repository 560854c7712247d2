"""Native engines of test checkpoints, and matrices for tests of the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.native import scale_panels, write_weights
from draftwood.builder.quantization.formats import (
    FORMATS,
    HALF,
    Quantized,
    QuantizedCheckpoint,
    RoundedCheckpoint,
    Weights,
)
from draftwood.builder.quantization.kept import others_of
from draftwood.models.acceptance_head import TrainedHead
from draftwood.models.bindings import SUPERBLOCKS, output_names
from draftwood.plugins.native import cache
from draftwood.plugins.native.compile import FLAGS
from draftwood.plugins.native.library import FORMATS as NAMES
from draftwood.plugins.native.library import Matrix, NativeLibrary, address
from draftwood.plugins.native.packing import code_panels, flat, pair_panels, panels
from draftwood.runtime.engines.base import EngineSpec
from draftwood.runtime.engines.native.engine import NativeEngine

PRECISIONS = [name for name in NAMES if name not in SUPERBLOCKS]  # to which any matrix can be rounded


def kernels(*flags: str) -> Path:
    """The kernels compiled for this processor, or with other flags in place of -march=native; kept in the cache."""
    return cache.kernels((*(flag for flag in FLAGS if not flag.startswith("-march")), *flags) if flags else FLAGS)


def no_compiler(patch: pytest.MonkeyPatch) -> None:
    """A machine without a C compiler."""
    patch.delenv("CC", raising=False)
    patch.setattr("draftwood.plugins.native.compile.shutil.which", lambda name: None)
    patch.setattr("draftwood.plugins.native.compile.importlib.util.find_spec", lambda name: None)


def held(folder: Path, precision: str) -> Weights:
    """The weights an engine holds."""
    checkpoint = Checkpoint(folder)
    if form := FORMATS.get(("native", precision)):
        return QuantizedCheckpoint(checkpoint, form)
    return RoundedCheckpoint(checkpoint, precision) if precision in HALF else checkpoint


def open_native(
    weights: Weights, spec: EngineSpec, folder: Path, threads: int = 2, head: TrainedHead | None = None
) -> NativeEngine:
    """Pack weights into `folder` and open them."""
    file = folder / f"{spec.role}.weights"
    write_weights(weights, spec.capacity, file, head)
    return NativeEngine(file, spec, threads)


def spec_of(weights: Weights, role: str, precision: str, widths: tuple[int, ...], capacity: int) -> EngineSpec:
    outputs, others = output_names(role), others_of(weights)
    return EngineSpec(role, "native", "", weights.config, widths, capacity, precision, outputs, matrices=others)


class Packed:
    """One matrix [N, K] as the kernels read it. stored: its codes, which are rounded here otherwise. wide: what it
    holds, fp32."""

    def __init__(
        self,
        matrix: NDArray[np.float32],
        precision: str,
        bias: NDArray[np.float32] | None = None,
        stored: Quantized | None = None,
    ) -> None:
        self._kept: list[NDArray[Any]] = []  # what the structure points to
        self.codes = self.scales = self.offsets = None
        weights: NDArray[Any]
        scales: NDArray[Any] | None
        if form := FORMATS.get(("native", precision)):
            stored = form.quantize("matrix", matrix) if stored is None else stored
            self.codes, self.scales, self.offsets, _ = stored
            self.wide, weights = stored.dequantized(), code_panels(stored.codes, form.bits)
            scales = scale_panels(stored)
        elif precision in HALF:
            half = matrix.astype(HALF[precision])
            pack = pair_panels if precision == "bf16" else panels
            self.wide, weights, scales = half.astype(np.float32), pack(half.view(np.uint16)), None
        else:
            self.wide, weights, scales = matrix, panels(matrix), None
        outputs, inputs = matrix.shape
        parts = [self._keep(part) for part in (weights, scales, None if bias is None else flat(bias))]
        self.matrix = Matrix(*parts, outputs, inputs, NAMES.index(precision))

    def times(self, rows: NDArray[np.float32], library: NativeLibrary) -> NDArray[np.float32]:
        return library.linear(self.matrix, rows)

    def _keep(self, array: NDArray[Any] | None) -> int | None:
        if array is not None:
            self._kept.append(array)
        return address(array)
