"""Errors that a GPU would punish now and then, and the driver's stand-in always: each is made, and each is noticed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoints import write_checkpoint
from cuda_driver.machine import Machine
from cuda_driver.streams import GLOBAL
from engine_parts import BUSHY, CAPACITY, engine_spec, filled, random_text, score
from numpy.typing import NDArray
from onnx_program import static_engine

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.export import export
from draftwood.models import bindings
from draftwood.models.errors import EngineError
from draftwood.runtime.engines import feeds
from draftwood.runtime.engines.base import EngineSpec
from draftwood.runtime.engines.static import cuda, memory
from draftwood.runtime.engines.static.cuda import CudaDevice, load_driver
from draftwood.runtime.engines.static.memory import CacheMemory, StaticPass

Change = Callable[[pytest.MonkeyPatch], None]


class Model:
    def __init__(self, folder: Path, gpu: Machine) -> None:
        checkpoint = Checkpoint(write_checkpoint(folder / "checkpoint", "gqa"))
        self.graph, self.gpu = folder / "draft.onnx", gpu
        export(checkpoint, bindings.DRAFT, CAPACITY, self.graph, lambda name: None, form=bindings.COMPACT)
        self.spec: EngineSpec = engine_spec(checkpoint, "tensorrt", bindings.DRAFT, CAPACITY)

    def rounds(self) -> list[NDArray[np.float32]]:
        """Logits of some rounds: rows that move, a cache that ends while its rows move, and one by another thread."""
        engine = static_engine(self.graph, self.spec, self.gpu)
        found = []
        for seed in range(2):
            cache = filled(engine, random_text(40, seed))
            for _ in range(3):
                found.append(score(engine, BUSHY.batch(engine.spec, cache.length), cache).copy())
                cache.commit([0, 2, 4])
            cache.close()
            engine._idle.clear()
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(lambda: score(engine, BUSHY.batch(engine.spec, 0), engine.new_cache())).result())
        engine.close()
        return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, gpu: Machine) -> Model:
    return Model(tmp_path_factory.mktemp("model"), gpu)


@pytest.fixture(scope="module")
def expected(model: Model) -> list[NDArray[np.float32]]:
    found = model.rounds()
    assert not model.gpu.faults and len(found) == 7
    return found


def no_wait(patch: pytest.MonkeyPatch) -> None:
    """The host reads the results of a pass before it has waited."""
    patch.setattr(CudaDevice, "synchronize", lambda self, stream: None)


def fed_late(patch: pytest.MonkeyPatch) -> None:
    """Inputs are written when their copy is queued."""
    feed, download, late = feeds.feed_sequences, CudaDevice.download, list[Any]()

    def changed(self: CudaDevice, *arguments: Any) -> None:
        feed(*late.pop())
        download(self, *arguments)

    patch.setattr(memory, "feed_sequences", lambda *arguments: late.append(arguments))
    patch.setattr(CudaDevice, "download", changed)


def no_wait_for_zeros(patch: pytest.MonkeyPatch) -> None:
    """Memory is used by another stream than the one that zeroes it, without a wait between."""
    call = CudaDevice._call

    def changed(self: CudaDevice, name: str, *arguments: Any) -> Any:
        if name == "cuStreamSynchronize" and arguments == (self._setup,):
            return None
        return call(self, name, *arguments)

    patch.setattr(CudaDevice, "_call", changed)


def freed_at_once(patch: pytest.MonkeyPatch) -> None:
    """What nobody refers to is freed, though queued work uses it."""

    def changed(self: CudaDevice, function: str, handle: Any) -> None:
        self._enter()
        getattr(self._driver, function)(handle)

    patch.setattr(CudaDevice, "release", changed)


def freed_twice(patch: pytest.MonkeyPatch) -> None:
    release = CudaDevice.release

    def changed(self: CudaDevice, function: str, handle: Any) -> None:
        release(self, function, handle)
        if function == "cuMemFree" and not self._busy:
            self._driver.cuMemFree(handle)

    patch.setattr(CudaDevice, "release", changed)


def while_capturing(extra: Callable[[StaticPass], object]) -> Change:
    """Something that CUDA forbids, in the work that is captured."""

    def change(patch: pytest.MonkeyPatch) -> None:
        capture = StaticPass._capture

        def changed(self: StaticPass) -> None:
            device = self._engine.device
            original = device.capture

            def with_more(work: Callable[[], None], stream: int) -> Any:
                def more() -> None:
                    extra(self)
                    work()

                return original(more, stream)

            device.capture = with_more  # type: ignore[method-assign]
            capture(self)
            device.capture = original  # type: ignore[method-assign]

        patch.setattr(StaticPass, "_capture", changed)

    return change


def global_capture(patch: pytest.MonkeyPatch) -> None:
    """A capture that forbids other threads to allocate, while one does."""
    capture = CudaDevice.capture

    def changed(self: CudaDevice, work: Callable[[], None], stream: int) -> Any:
        def crowded() -> None:
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(self.allocate, 64).exception() is not None
            work()

        return capture(self, crowded, stream)

    patch.setattr(CudaDevice, "capture", changed)
    patch.setattr(cuda, "load_driver", lambda: GlobalMode())


class GlobalMode:
    """cuda.bindings.driver, whose thread-local capture mode is the global one."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=GLOBAL)

    def __getattr__(self, name: str) -> Any:
        return getattr(load_driver(), name)


def graphs_of_another_cache(patch: pytest.MonkeyPatch) -> None:
    """A graph is used for every cache, though it contains the addresses of one."""
    bind_pass, passes = CacheMemory.bind_pass, dict[Any, StaticPass]()

    def changed(self: CacheMemory, shape: Any) -> StaticPass:
        return passes.setdefault((id(self._engine), shape), bind_pass(self, shape))

    patch.setattr(CacheMemory, "bind_pass", changed)


def pageable(patch: pytest.MonkeyPatch) -> None:
    """Memory of the host that is not page-locked."""
    patch.setattr(CudaDevice, "allocate_pinned", lambda self, nbytes: np.zeros(nbytes, np.uint8))


def moves_on_a_stream_of_their_own(patch: pytest.MonkeyPatch) -> None:
    """Rows move while the pass that wrote them, or the one that reads them, may still run."""
    move = CudaDevice.move_rows
    patch.setattr(CudaDevice, "move_rows", lambda self, rows, stream: move(self, rows, self._setup))


def no_context(patch: pytest.MonkeyPatch) -> None:
    """A thread uses the driver without a context."""
    main = threading.get_ident()
    enter = CudaDevice._enter
    patch.setattr(CudaDevice, "_enter", lambda self: enter(self) if threading.get_ident() == main else None)


def too_long_a_copy(patch: pytest.MonkeyPatch) -> None:
    """A copy of a byte more than there is."""
    call = CudaDevice._call

    def changed(self: CudaDevice, name: str, *arguments: Any) -> Any:
        if name == "cuMemcpyDtoHAsync":
            arguments = (*arguments[:2], arguments[2] + (1 << 20), arguments[3])
        return call(self, name, *arguments)

    patch.setattr(CudaDevice, "_call", changed)


# What the driver says; nothing where only the results are wrong.
CHANGES: dict[str, tuple[Change, str]] = {
    "no wait after a pass": (no_wait, ""),
    "fed late": (fed_late, "changed before the host had waited"),
    "no wait for zeros": (no_wait_for_zeros, "have no order"),
    "freed at once": (freed_at_once, "memory was freed before the host had waited for move_rows"),
    "freed twice": (freed_twice, "was freed before"),
    "an allocation in a capture": (
        while_capturing(lambda each: each._engine.device.allocate(64)),
        "cuMemAlloc while a stream is captured",
    ),
    "a wait in a capture": (
        while_capturing(lambda each: each._engine.device.synchronize(each._engine.stream)),
        "cuStreamSynchronize while a stream is captured",
    ),
    "shapes bound in a capture": (while_capturing(StaticPass.bind), "a binding of input_ids while a stream"),
    "a capture of all threads": (global_capture, "cuMemAlloc while a stream is captured"),
    "graphs of another cache": (graphs_of_another_cache, "freed memory"),
    "pageable memory": (pageable, "memory that nobody allocated"),
    "moves on another stream": (
        moves_on_a_stream_of_their_own,
        "a program and move_rows of another stream have no order",
    ),
    "no context": (no_context, "in a thread without a context"),
    "too long a copy": (too_long_a_copy, "the source of a download touches"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_error_is_noticed(
    name: str, model: Model, expected: list[NDArray[np.float32]], monkeypatch: pytest.MonkeyPatch
) -> None:
    change, fault = CHANGES[name]
    with model.gpu.expecting() as faults, monkeypatch.context() as patch:
        change(patch)
        try:
            found = model.rounds()
        except EngineError:
            found = []
        gc.collect()
    if fault:
        assert any(fault in each for each in faults), faults
    else:
        assert not any(map(np.array_equal, found, expected)) and not faults


def test_without_a_change_nothing_is_found(model: Model, expected: list[NDArray[np.float32]]) -> None:
    """The order of streams, which is another one each time, changes nothing."""
    for found, wanted in zip(model.rounds(), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert not model.gpu.faults
