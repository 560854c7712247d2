"""Errors that a GPU would punish now and then, and the driver's stand-in always: each is made in passes of an engine or
in rounds on the device, and each is noticed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from compared_rounds import numbers_of
from cuda_driver.machine import Machine
from cuda_driver.streams import GLOBAL
from engine_parts import BUSHY, filled, random_text, score
from onnx_program import open_static
from scripted_rounds import DeviceRounds, Scorer
from uniforms import uniform_streams

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.models.errors import EngineError
from draftwood.plugins.device_round.images import STATE
from draftwood.runtime import SamplingParams
from draftwood.runtime.decoding.whole_rounds import uniforms_of, use_draws
from draftwood.runtime.engines import feeds
from draftwood.runtime.engines.rounds import BLOCK, RoundShape
from draftwood.runtime.engines.static import cuda, memory
from draftwood.runtime.engines.static.cuda import CudaDevice, load_driver
from draftwood.runtime.engines.static.draws import Draws
from draftwood.runtime.engines.static.memory import CacheMemory, StaticPass
from draftwood.runtime.engines.static.round import Round

pytestmark = pytest.mark.usefixtures("no_faults")
Change = Callable[[pytest.MonkeyPatch], None]
SHAPE, PARAMS, PROMPT = RoundShape(2, 2, 1, BLOCK, True), SamplingParams(temperature=0.8), (3, 1, 4)
PASSES, ROUNDS = "passes", "rounds"
KNOWN: dict[Any, Any] = {}  # what a variant uses again where it must not


def passes(gqa: Path, place: Path, gpu: Machine) -> list[bytes]:
    """Logits of rows that move, of a cache that ends while its rows move, and of a pass by another thread."""
    engine, found = open_static(Checkpoint(gqa), place, gpu), []
    for seed in range(2):
        cache = filled(engine, random_text(40, seed))
        for _ in range(3):
            found.append(score(engine, BUSHY.batch(engine.spec, cache.length), cache))
            cache.commit([0, 2, 4])
        cache.close()
        engine._idle.clear()
    with ThreadPoolExecutor(1) as pool:
        found.append(pool.submit(lambda: score(engine, BUSHY.batch(engine.spec, 0), engine.new_cache())).result())
    engine.close()
    return [logits.tobytes() for logits in found]


def rounds(gpu: Machine) -> list[Any]:
    """Two texts of two rounds each, one after the other; the second round of a text is a replay."""
    found = []
    for seed in range(2):
        draft = Scorer(seed, 20, 18)
        device = DeviceRounds(gpu, SHAPE, Scorer(seed + 10, 20, 18, draft), draft, [PROMPT])
        streams = uniform_streams(seed)
        for _ in range(2):
            found += device.run(numbers_of(SHAPE, PARAMS, streams))
            use_draws(found[-1], uniforms_of(streams))
    return found


def around(owner: type, name: str) -> Callable[[Callable[..., Any]], Change]:
    """A variant of a method: what is decorated is called with the method and its arguments."""

    def decorate(variant: Callable[..., Any]) -> Change:
        @wraps(variant)
        def change(patch: pytest.MonkeyPatch) -> None:
            method = getattr(owner, name)
            patch.setattr(owner, name, lambda *arguments: variant(method, *arguments))

        return change

    return decorate


@around(CudaDevice, "synchronize")
def no_wait(wait: Any, device: CudaDevice, stream: int) -> None:
    """The host reads results before it has waited."""


@around(CudaDevice, "allocate_pinned")
def pageable(allocate: Any, device: CudaDevice, nbytes: int) -> Any:
    """Memory of the host that is not page-locked."""
    return np.zeros(nbytes, np.uint8)


@around(CudaDevice, "_call")
def too_long_a_copy(call: Any, device: CudaDevice, name: str, *given: Any) -> Any:
    """Of more than there is."""
    return (
        call(device, name, *given[:2], given[2] + (1 << 20), given[3]) if "DtoH" in name else call(device, name, *given)
    )


@around(CudaDevice, "_call")
def no_wait_for_zeros(call: Any, device: CudaDevice, name: str, *given: Any) -> Any:
    """Memory is used by another stream than the one that zeroes it, without a wait between."""
    return None if name == "cuStreamSynchronize" and given == (device._setup,) else call(device, name, *given)


@around(CudaDevice, "release")
def freed_at_once(release: Any, device: CudaDevice, function: str, handle: Any) -> None:
    """What nobody refers to is freed, though queued work uses it."""
    device._enter()
    getattr(device._driver, function)(handle)


@around(Round, "_enqueue")
def forgotten(enqueue: Any, self: Round) -> None:
    """The buffers of a round, after the launch that writes them."""
    enqueue(self)
    self._buffers._places.clear()


def forgotten_and_freed(patch: pytest.MonkeyPatch) -> None:
    freed_at_once(patch)
    forgotten(patch)


@around(CudaDevice, "release")
def freed_twice(release: Any, device: CudaDevice, function: str, handle: Any) -> None:
    release(device, function, handle)
    if function == "cuMemFree" and not device._busy:
        device._driver.cuMemFree(handle)


def fed_late(patch: pytest.MonkeyPatch) -> None:
    """Inputs are written when their copy is queued."""
    late = list[Any]()

    @around(CudaDevice, "download")
    def then(download: Any, *arguments: Any) -> None:
        feeds.feed_sequences(*late.pop())
        download(*arguments)

    patch.setattr(memory, "feed_sequences", lambda *arguments: late.append(arguments))
    then(patch)


def while_capturing(extra: Callable[[StaticPass], object]) -> Change:
    """Something that CUDA forbids, in the work that is captured."""

    @around(StaticPass, "_capture")
    def captured(capture: Any, self: StaticPass) -> None:
        @around(CudaDevice, "capture")
        def with_more(method: Any, device: CudaDevice, work: Callable[[], None], stream: int) -> Any:
            def more() -> None:
                extra(self)
                work()

            return method(device, more, stream)

        with pytest.MonkeyPatch.context() as patch:
            with_more(patch)
            capture(self)

    return captured


def global_capture(patch: pytest.MonkeyPatch) -> None:
    """A capture that forbids other threads to allocate, while one does."""

    @around(CudaDevice, "capture")
    def crowded(capture: Any, device: CudaDevice, work: Callable[[], None], stream: int) -> Any:
        def more() -> None:
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(device.allocate, 64).exception() is not None
            work()

        return capture(device, more, stream)

    crowded(patch)
    patch.setattr(cuda, "load_driver", lambda: GlobalMode())


class GlobalMode:
    """cuda.bindings.driver, whose thread-local capture mode is the global one."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=GLOBAL)

    def __getattr__(self, name: str) -> Any:
        return getattr(load_driver(), name)


@around(CacheMemory, "bind_pass")
def passes_of_another_cache(bind_pass: Any, self: CacheMemory, shape: Any) -> StaticPass:
    """A graph is used for every cache, though it contains the addresses of one."""
    found: StaticPass = KNOWN.setdefault((id(self._engine), shape), bind_pass(self, shape))
    return found


@around(Round, "_capture")
def rounds_of_other_caches(capture: Any, self: Round) -> None:
    """The same for rounds of one shape."""
    capture(self)
    self._graph = KNOWN.setdefault(self._shape, self._graph)


@around(CudaDevice, "move_rows")
def moves_on_a_stream_of_their_own(move: Any, device: CudaDevice, rows: Any, stream: int) -> None:
    """Rows move while the pass that wrote them, or the one that reads them, may still run."""
    move(device, rows, device._setup)


@around(CudaDevice, "launch")
def a_kernel_on_another_stream(
    launch: Any, device: CudaDevice, kernel: str, grid: Any, values: Any, stream: int
) -> None:
    """It may run before the pass whose logits it reads."""
    launch(device, kernel, grid, values, device._setup if kernel == "excess" else stream)


@around(CudaDevice, "_enter")
def no_context(enter: Any, device: CudaDevice) -> None:
    """A thread uses the driver without a context."""
    if threading.current_thread() is threading.main_thread():
        enter(device)


@around(CudaDevice, "upload")
def given_late(upload: Any, device: CudaDevice, address: int, array: Any, stream: int) -> None:
    """A uniform number is written while the last one may not be uploaded yet."""
    upload(device, address, array, stream)
    array[-8:] = 0


@around(CudaDevice, "upload")
def too_little_given(upload: Any, device: CudaDevice, address: int, array: Any, stream: int) -> None:
    """The state without the uniform numbers."""
    upload(device, address, array[: 4 * STATE], stream)


@around(Round, "_enqueue")
def bound_in_a_capture(enqueue: Any, self: Round) -> None:
    """Shapes are bound while the round is captured: at its second run."""
    if KNOWN.setdefault(self, 0):
        self._targets[0].bind()
    KNOWN[self] += 1
    enqueue(self)


@around(Draws, "_weigh")
def too_few_programs(weigh: Any, self: Draws, row: Any, rows: int, *more: Any) -> None:
    """The last row of the target is not weighed; its sum is the last round's."""
    weigh(self, row, max(1, rows - 1), *more)


# What the driver says; nothing where only the results are wrong.
WRONG: dict[str, tuple[str, Change, str]] = {
    "no wait after a pass": (PASSES, no_wait, ""),
    "inputs fed late": (PASSES, fed_late, "changed before the host had waited"),
    "no wait for zeros": (PASSES, no_wait_for_zeros, "have no order"),
    "too long a copy of a pass": (PASSES, too_long_a_copy, "the source of a download touches"),
    "freed at once": (PASSES, freed_at_once, "memory was freed before the host had waited for move_rows"),
    "freed twice": (PASSES, freed_twice, "was freed before"),
    "an allocation in a capture": (
        PASSES,
        while_capturing(lambda each: each._engine.device.allocate(64)),
        "cuMemAlloc while a stream is captured",
    ),
    "a wait in a capture": (
        PASSES,
        while_capturing(lambda each: each._engine.device.synchronize(each._engine.stream)),
        "cuStreamSynchronize while a stream is captured",
    ),
    "shapes bound in a capture": (PASSES, while_capturing(StaticPass.bind), "a binding of input_ids while a stream"),
    "a capture of all threads": (PASSES, global_capture, "cuMemAlloc while a stream is captured"),
    "graphs of another cache": (PASSES, passes_of_another_cache, "freed memory"),
    "pageable memory of a pass": (PASSES, pageable, "memory that nobody allocated"),
    "moves on another stream": (PASSES, moves_on_a_stream_of_their_own, "a program and move_rows of another stream"),
    "no context": (PASSES, no_context, "in a thread without a context"),
    "no wait after a round": (ROUNDS, no_wait, ""),
    "numbers given late": (ROUNDS, given_late, "changed before the host had waited"),
    "too few numbers given": (ROUNDS, too_little_given, ""),
    "too long a copy of a round": (ROUNDS, too_long_a_copy, "the source of a download touches"),
    "pageable memory of a round": (ROUNDS, pageable, "memory that nobody allocated"),
    "a kernel on another stream": (ROUNDS, a_kernel_on_another_stream, "of another stream have no order"),
    "bound in a capture of a round": (ROUNDS, bound_in_a_capture, "a binding while a stream is captured"),
    "a graph of other caches": (ROUNDS, rounds_of_other_caches, "freed memory"),
    "buffers freed at once": (ROUNDS, forgotten_and_freed, "memory was freed before the host had waited"),
    "too few programs": (ROUNDS, too_few_programs, ""),
}


@pytest.fixture(scope="module")
def works(gqa: Path, tmp_path_factory: pytest.TempPathFactory, gpu: Machine) -> dict[str, Callable[[], list[Any]]]:
    folder = tmp_path_factory.mktemp("passes")
    return {PASSES: lambda: passes(gqa, folder, gpu), ROUNDS: lambda: rounds(gpu)}


@pytest.fixture(scope="module")
def expected(works: dict[str, Callable[[], list[Any]]], gpu: Machine) -> dict[str, list[Any]]:
    """The order of streams, which is another one each time, changes nothing."""
    found = {name: work() for name, work in works.items()}
    assert {name: work() for name, work in works.items()} == found and not gpu.faults
    return found


@pytest.mark.parametrize("name", WRONG)
def test_an_error_is_noticed(
    name: str, works: dict[str, Callable[[], list[Any]]], expected: dict[str, list[Any]], gpu: Machine
) -> None:
    subject, change, fault = WRONG[name]
    KNOWN.clear()
    with gpu.expecting() as faults, pytest.MonkeyPatch.context() as patch:
        change(patch)
        try:
            found = works[subject]()
        except (EngineError, AssertionError, KeyError, IndexError, RuntimeWarning, ValueError):
            found = []
        KNOWN.clear()
        gc.collect()
    if fault:
        assert any(fault in each for each in faults), faults
    else:
        assert found != expected[subject] and not faults, faults
