"""The interfaces of a GPU and of a compiled program that a static engine needs.

Addresses are numbers. Work is queued on streams and runs in order. A host array given to `upload` or `download` must
not change until `synchronize` has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Stream = int


class DeviceMemory(Protocol):
    """An allocation. It is freed after the object is garbage-collected and all earlier queued work is done."""

    @property
    def address(self) -> int: ...


class CacheGeometry(NamedTuple):
    """The memory layout of a cache: `tensors` tensors, the keys or the values of one layer each, at a distance of
    `tensor_bytes` bytes. A tensor has `heads` planes of `capacity` rows of `row_bytes` bytes."""

    tensors: int
    heads: int
    capacity: int
    row_bytes: int
    tensor_bytes: int

    @property
    def nbytes(self) -> int:
        return self.tensors * self.tensor_bytes


class RowMove(NamedTuple):
    """A copy of row sources[i] to targets[i], in order, in every plane of the cache at `address`."""

    address: int
    cache: CacheGeometry
    sources: NDArray[np.int64]
    targets: NDArray[np.int64]


class Device(Protocol):
    @property
    def number(self) -> int:
        """Devices with the same number share memory and streams."""

    @property
    def runs_rounds(self) -> bool:
        """Whether the device runs the kernels of `plugins/device_round`."""

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Allocate zeroed memory. Raises EngineError that names the sizes when there is too little."""

    def allocate_pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Allocate zeroed page-locked host memory. The GPU copies only such memory without the CPU."""

    def new_stream(self) -> Stream: ...

    def upload(self, address: int, array: NDArray[np.uint8], stream: Stream) -> None: ...

    def download(self, array: NDArray[np.uint8], address: int, stream: Stream) -> None: ...

    def move_rows(self, move: RowMove, stream: Stream) -> None:
        """Queue a move: one launch for all planes, none when there are no rows to move."""

    def load_rounds(self) -> int:
        """Load every kernel of `plugins/device_round`, so that no round waits for one. Returns their number."""

    def launch(self, kernel: str, grid: tuple[int, int], values: Sequence[int], stream: Stream) -> None:
        """Queue a kernel of `plugins/device_round`. values: addresses and numbers, in the order of its parameters."""

    def capture(self, work: Callable[[], None], stream: Stream) -> Any | None:
        """Capture the work that `work` queues on `stream` as a graph, without running it. None if that fails."""

    def replay(self, graph: Any, stream: Stream) -> None: ...

    def synchronize(self, stream: Stream) -> None: ...


class Execution(Protocol):
    """A program that is set up for one shape of pass."""

    def bind(self, name: str, shape: tuple[int, ...], address: int) -> None:
        """Set the shape and address of a tensor. Raises EngineError when the program refuses them."""

    def enqueue(self, stream: Stream) -> None: ...

    def is_capturable(self, stream: Stream) -> bool: ...


class Program(Protocol):
    """A compiled model on a device."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def workspace_bytes(self) -> int: ...

    @property
    def cache_itemsize(self) -> int:
        """Bytes of one number of a key or value."""

    @property
    def max_columns(self) -> int:
        """The largest number of columns that the mask of a pass may have."""

    @property
    def near_slots(self) -> int:
        """The slots of layers with a window, see `plan_slots`; 0: as many as those of the others."""

    def execution(self, width: int, stream: Stream) -> Execution: ...

    def close(self) -> None: ...
