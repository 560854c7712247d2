"""Errors of rounds on the device that a GPU would punish now and then: each is made, and each is noticed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda_driver.machine import Machine
from drawn_rounds import numbers_of
from scripted_rounds import DeviceRounds, Scorer
from uniforms import uniform_streams

from draftwood.models.errors import EngineError
from draftwood.plugins.device_round.images import STATE
from draftwood.runtime import SamplingParams
from draftwood.runtime.decoding.whole_rounds import uniforms_of, use_draws
from draftwood.runtime.engines.rounds import BLOCK, RoundOutcome, RoundShape
from draftwood.runtime.engines.static.cuda import CudaDevice
from draftwood.runtime.engines.static.draws import Draws
from draftwood.runtime.engines.static.round import Round

pytestmark = pytest.mark.usefixtures("no_faults")
Change = Callable[[pytest.MonkeyPatch], None]
SHAPE, PARAMS, PROMPT = RoundShape(2, 2, 1, BLOCK, True), SamplingParams(temperature=0.8), (3, 1, 4)


def texts(gpu: Machine) -> list[RoundOutcome]:
    """Two texts of two rounds each, one after the other; the second round of a text is a replay."""
    found = []
    for seed in range(2):
        draft = Scorer(seed, 20, 18)
        rounds = DeviceRounds(gpu, SHAPE, Scorer(seed + 10, 20, 18, draft), draft, PROMPT)
        streams = uniform_streams(seed)
        for _ in range(2):
            found.append(rounds.run(numbers_of(SHAPE, PARAMS, streams)))
            use_draws(found[-1], uniforms_of(streams))
    return found


def no_wait(patch: pytest.MonkeyPatch) -> None:
    """The host reads the outcome before it has waited."""
    patch.setattr(CudaDevice, "synchronize", lambda self, stream: None)


def given_late(patch: pytest.MonkeyPatch) -> None:
    """A uniform number is written while the last one may not be uploaded yet."""
    upload = CudaDevice.upload

    def changed(self: CudaDevice, address: int, array: Any, stream: int) -> None:
        upload(self, address, array, stream)
        array[-8:] = 0

    patch.setattr(CudaDevice, "upload", changed)


def too_little_given(patch: pytest.MonkeyPatch) -> None:
    """The state without the uniform numbers."""
    upload, most = CudaDevice.upload, 4 * STATE
    patch.setattr(
        CudaDevice, "upload", lambda self, address, array, stream: upload(self, address, array[:most], stream)
    )


def too_long_a_copy(patch: pytest.MonkeyPatch) -> None:
    """A copy of more than there is."""
    call = CudaDevice._call

    def changed(self: CudaDevice, name: str, *arguments: Any) -> Any:
        if name == "cuMemcpyDtoHAsync":
            arguments = (*arguments[:2], arguments[2] + (1 << 20), arguments[3])
        return call(self, name, *arguments)

    patch.setattr(CudaDevice, "_call", changed)


def pageable(patch: pytest.MonkeyPatch) -> None:
    """Memory of the host that is not page-locked."""
    patch.setattr(CudaDevice, "allocate_pinned", lambda self, nbytes: np.zeros(nbytes, np.uint8))


def a_kernel_on_another_stream(patch: pytest.MonkeyPatch) -> None:
    """It may run before the pass whose logits it reads."""
    launch = CudaDevice.launch

    def changed(self: CudaDevice, kernel: str, grid: Any, values: Any, stream: int) -> None:
        launch(self, kernel, grid, values, self._setup if kernel == "excess" else stream)

    patch.setattr(CudaDevice, "launch", changed)


def bound_in_a_capture(patch: pytest.MonkeyPatch) -> None:
    """Shapes are bound while the round is captured."""
    enqueue, seen = Round._enqueue, set[int]()

    def changed(self: Round) -> None:
        if id(self) in seen:
            self._targets[0].bind()
        seen.add(id(self))
        enqueue(self)

    patch.setattr(Round, "_enqueue", changed)


def a_graph_of_other_caches(patch: pytest.MonkeyPatch) -> None:
    """Rounds of one shape share a graph, which contains the addresses of one pair of caches."""
    capture, graphs = Round._capture, dict[Any, Any]()

    def changed(self: Round) -> None:
        capture(self)
        self._graph = graphs.setdefault(self._shape, self._graph)

    patch.setattr(Round, "_capture", changed)


def freed_at_once(patch: pytest.MonkeyPatch) -> None:
    """A buffer is freed behind the launch that writes it."""
    enqueue = Round._enqueue

    def freed(self: CudaDevice, function: str, handle: Any) -> None:
        self._enter()
        getattr(self._driver, function)(handle)

    def changed(self: Round) -> None:
        enqueue(self)
        self._buffers._places.clear()

    patch.setattr(CudaDevice, "release", freed)
    patch.setattr(Round, "_enqueue", changed)


def too_few_programs(patch: pytest.MonkeyPatch) -> None:
    """The last row of the target is not weighed; its sum is the last round's."""
    weigh = Draws._weigh

    def changed(self: Draws, row: Any, rows: int, *arguments: Any) -> None:
        weigh(self, row, max(1, rows - 1), *arguments)

    patch.setattr(Draws, "_weigh", changed)


# What the driver says; nothing where only the outcomes are wrong.
CHANGES: dict[str, tuple[Change, str]] = {
    "no wait": (no_wait, ""),
    "given late": (given_late, "changed before the host had waited"),
    "too little given": (too_little_given, ""),
    "too long a copy": (too_long_a_copy, "the source of a download touches"),
    "pageable memory": (pageable, "memory that nobody allocated"),
    "a kernel on another stream": (a_kernel_on_another_stream, "of another stream have no order"),
    "bound in a capture": (bound_in_a_capture, "a binding while a stream is captured"),
    "a graph of other caches": (a_graph_of_other_caches, "freed memory"),
    "freed at once": (freed_at_once, "memory was freed before the host had waited"),
    "too few programs": (too_few_programs, ""),
}


@pytest.fixture(scope="module")
def expected(gpu: Machine) -> list[RoundOutcome]:
    found = texts(gpu)
    assert not gpu.faults and len(found) == 4
    return found


@pytest.mark.parametrize("name", CHANGES)
def test_an_error_is_noticed(
    name: str, expected: list[RoundOutcome], gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, fault = CHANGES[name]
    with gpu.expecting() as faults, monkeypatch.context() as patch:
        change(patch)
        try:
            found = texts(gpu)
        except (EngineError, AssertionError, KeyError, IndexError, RuntimeWarning, ValueError):
            found = []
        gc.collect()
    if fault:
        assert any(fault in each for each in faults), faults
    else:
        assert found != expected and not faults, faults


def test_without_a_change_nothing_is_found(expected: list[RoundOutcome], gpu: Machine) -> None:
    assert texts(gpu) == expected and not gpu.faults
