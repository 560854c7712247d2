"""What a static engine asks of a GPU and of a compiled program, and nothing else: the seam that tests replace.

Addresses are numbers. Work is queued on streams and runs in order; a host array given to `upload` or `download` must
stay as it is until the stream was waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Stream = int


class DeviceMemory(Protocol):
    """An allocation. Once nothing refers to it any more, it is given back as soon as what was queued before has run."""

    @property
    def address(self) -> int: ...


class CacheGeometry(NamedTuple):
    """`tensors` keys or values of a layer, each of `heads` planes of `capacity` rows of `row_bytes` bytes; a tensor
    begins `tensor_bytes` behind the one before."""

    tensors: int
    heads: int
    capacity: int
    row_bytes: int
    tensor_bytes: int

    @property
    def nbytes(self) -> int:
        return self.tensors * self.tensor_bytes


class RowMove(NamedTuple):
    """In every plane of the cache at `address`, row sources[i] is copied to row targets[i], one after the other: a row
    that was overwritten is read as it is then."""

    address: int
    cache: CacheGeometry
    sources: NDArray[np.int64]
    targets: NDArray[np.int64]


class Device(Protocol):
    """A GPU, or what stands in for one."""

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Zeroed memory. Raises EngineError that names the size when there is not enough."""

    def allocate_pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Page-locked host memory, zeroed: the only kind that is copied without the processor."""

    def new_stream(self) -> Stream: ...

    def upload(self, address: int, array: NDArray[np.uint8], stream: Stream) -> None: ...

    def download(self, array: NDArray[np.uint8], address: int, stream: Stream) -> None: ...

    def move_rows(self, move: RowMove, stream: Stream) -> None:
        """One launch for all planes, and nothing where no row is to be moved."""

    def capture(self, work: Callable[[], None], stream: Stream) -> Any | None:
        """What `work` queues on `stream`, as a graph, without running it; None when it cannot be captured."""

    def replay(self, graph: Any, stream: Stream) -> None: ...

    def synchronize(self, stream: Stream) -> None: ...


class Execution(Protocol):
    """A program set up for one shape of pass."""

    def bind(self, name: str, shape: tuple[int, ...], address: int) -> None:
        """Raises EngineError when the program takes no such tensor at this address."""

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
        """The widest mask a pass may have."""

    def execution(self, width: int, stream: Stream) -> Execution: ...

    def close(self) -> None: ...
