"""Engines of every backend, and the checkpoint that most tests of engines open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Reference, transformers_logits, write_checkpoint
from engine_parts import CAPACITY, SHARED, SHARED_CAPACITY, STAND_IN, STATIC, Open, engine_spec

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.export import export
from draftwood.models import bindings
from draftwood.runtime.engines.base import Engine
from draftwood.runtime.engines.static.engine import StaticEngine

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BACKENDS = ["onnxruntime", STAND_IN, pytest.param("onnxruntime on cuda", marks=ON_GPU), "native", "torch", *STATIC]


@pytest.fixture(scope="session")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gqa") / "gqa", "gqa")


@pytest.fixture(scope="session")
def gqa_reference(gqa: Path) -> Reference:
    return transformers_logits(gqa)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sound(backend: str, request: pytest.FixtureRequest) -> None:
    """What runs over the driver does nothing wrong with it."""
    if backend in STATIC:
        request.getfixturevalue("no_faults")


@pytest.fixture(scope="module")
def open_engine(backend: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Open:
    """Opens a checkpoint folder as an engine of the backend under test."""

    def opened(folder: Path, role: str = bindings.DRAFT, capacity: int = CAPACITY) -> Engine:
        # Opened here, so that other tests of this folder import no more than they need.
        from native_parts import open_native
        from onnx_device import stand_in_device
        from onnx_program import open_static

        from benchmarks.tools.torch_engine import TorchEngine
        from draftwood.runtime.engines.onnx.onnxruntime import OnnxRuntimeEngine

        checkpoint, place = Checkpoint(folder), tmp_path_factory.mktemp("engine")
        if backend in STATIC:
            slots = SHARED_CAPACITY if backend == SHARED else capacity
            engine = open_static(checkpoint, place, request.getfixturevalue("gpu"), role, slots, STATIC[backend])
            return making_room(engine) if backend == SHARED else engine
        spec = engine_spec(checkpoint, backend, role, capacity)
        if backend.startswith("torch"):
            return TorchEngine(checkpoint.tensor, spec)
        if backend == "native":
            return open_native(checkpoint, spec, place)
        file = place / f"{role}.onnx"
        export(checkpoint, role, capacity, file, lambda name: None)
        if backend == STAND_IN:
            with stand_in_device():
                return OnnxRuntimeEngine(file, spec, provider="cuda")
        return OnnxRuntimeEngine(file, spec, provider="cuda" if backend.endswith("cuda") else "cpu")

    return opened


def making_room(engine: StaticEngine) -> StaticEngine:
    """Tests of the contract close no caches: the oldest one makes room for a new one."""
    new_cache = engine.new_cache

    def replacing(salt: str | None = None) -> Any:
        if len(engine.pool._caches) == engine.spec.max_batch:
            next(iter(engine.pool._caches.values())).close()
        return new_cache()

    engine.new_cache = replacing  # type: ignore[method-assign]
    return engine


@pytest.fixture(scope="module")
def one(gqa: Path, open_engine: Open) -> Engine:
    """The engine of one shape, for what does not depend on the shape."""
    return open_engine(gqa)
