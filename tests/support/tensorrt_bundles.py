"""Pairs as bundles for TensorRT-RTX whose plans are graphs, for the stand-ins of package and driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
from bundling import DEMO
from cuda_driver.machine import Machine
from fake_tensorrt import HEADER, FakeTensorRT
from steps import quiet

from draftwood.builder import pipeline
from draftwood.builder.engines import make
from draftwood.builder.engines.plan import CompileOptions
from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build
from draftwood.models.config import LlamaConfig
from draftwood.runtime import LLM, SpeculativeConfig
from draftwood.runtime.engines.compatibility import LayerReport, TensorRTPlan
from draftwood.runtime.engines.static import tensorrt

MAX_LENGTH, WIDTHS = 160, (1, 2, 4, 8, 16, 32)


class OpenLLM(Protocol):
    """Opens the pair, built for so many requests in a pass."""

    def __call__(self, max_batch: int, config: SpeculativeConfig | None, precision: str = "fp32") -> LLM: ...


def graph_as_plan(graph: Path, output: Path, model: LlamaConfig, options: CompileOptions, begin: Any) -> TensorRTPlan:
    """Instead of `compile_plan`: the stand-in's plans are graphs."""
    output.write_bytes(HEADER + str(graph).encode())
    layers = LayerReport(100, model.num_layers, 0, 2 * model.num_layers)
    return TensorRTPlan("tensorrt-rtx", "1.7.1", ("8.9",), None, options.families, options.columns, layers, False)


@contextmanager
def demo_bundles(
    folder: Path, gpu: Machine, target: Path = DEMO / "target", draft: Path = DEMO / "draft"
) -> Iterator[OpenLLM]:
    """Of the demo pair or another one. Bundles are built when they are opened first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "compile_plan", graph_as_plan)
        patch.setattr(make, "runs_here", lambda plan: False)
        patch.setattr(pipeline, "check_compiler", lambda options: None)
        patch.setattr(tensorrt, "tensorrt_logger", lambda backend: None)
        patch.setattr(tensorrt, "installed_packages", lambda: {"tensorrt-rtx": "1.7.1"})

        def open_llm(max_batch: int, config: SpeculativeConfig | None, precision: str = "fp32") -> LLM:
            name = str(max_batch) if precision == "fp32" else f"{max_batch}-{precision}"
            bundle = folder / name
            options = BuildOptions(
                target,
                draft,
                bundle,
                backend="tensorrt-rtx",
                precision=precision,
                max_length=MAX_LENGTH,
                widths=WIDTHS,
                max_batch=max_batch,
                compute_capability=("8.9",),
                graphs=folder / f"graphs-{name}",
            )
            if not bundle.exists():
                build(options, quiet)
            compiled = options.compile_options()
            package = FakeTensorRT(gpu, compiled.families, compiled.columns)
            patch.setattr(tensorrt, "load_tensorrt", lambda backend: package)
            return LLM(bundle, config)

        yield open_llm
