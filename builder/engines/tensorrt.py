"""Adapters of TensorRT's builder and Polygraphy: one logger, errors as text, progress, and interruption by Ctrl-C; and
weights and plans of any size, which stay in their files."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...models.errors import ConfigError
from ...plugins.installation import install
from ...plugins.tensorrt import PACKAGES, load_tensorrt, preload_rtx_libraries, tensorrt_logger
from ..progress import Begin, Step

OUTER_PHASES = 2  # depth of the builder's phases that are shown; deeper ones have one step each


def tensorrt_module(backend: str) -> ModuleType:
    """The package, or a ConfigError that says how to install it.

    TensorRT-RTX must not have been imported by other code: see `preload_rtx_libraries`.
    """
    if (
        backend == "tensorrt-rtx"
        and PACKAGES[backend] in sys.modules
        and not preload_rtx_libraries.cache_info().currsize
    ):
        raise ConfigError(
            "the package tensorrt_rtx was imported before its libraries were prepared, and would end the process: "
            "let draftwood.plugins.tensorrt.load_tensorrt import it"
        )
    try:
        return load_tensorrt(backend)
    except ModuleNotFoundError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def polygraphy(backend: str) -> Iterator[None]:
    """Polygraphy set up for `backend`, with our logger and without output of its own.

    Raises ConfigError when this process used it for the other package before: it decides once.
    """
    try:
        from polygraphy import config as settings
        from polygraphy.logger import G_LOGGER
    except ModuleNotFoundError as error:
        raise ConfigError(f"compiling needs polygraphy: {install(backend)}") from error
    rtx = backend == "tensorrt-rtx"
    if rtx != settings.USE_TENSORRT_RTX and "polygraphy.backend.trt" in sys.modules:
        raise ConfigError("one process compiles for TensorRT or for TensorRT-RTX, not for both: build them one by one")
    settings.USE_TENSORRT_RTX = rtx
    # Polygraphy creates a timing cache even when none is requested. TensorRT-RTX has deprecated this.
    with warnings.catch_warnings(), G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1):
        warnings.simplefilter("ignore", DeprecationWarning)
        from polygraphy.backend.trt import util

        util.TRT_LOGGER = tensorrt_logger(backend)  # a process has one: TensorRT ignores the second
        yield


@contextmanager
def builder_errors() -> Iterator[list[str]]:
    """Collect TensorRT's errors while the block runs. Warnings are dropped: they concern what was checked before."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, collector = logging.getLogger("draftwood.tensorrt"), Collector(logging.ERROR)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(collector)
    try:
        yield messages
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagate


def progress_monitor(trt: ModuleType, begin: Begin, name: str) -> Any:
    """An IProgressMonitor that announces the builder's outer phases as steps of the build.

    TensorRT calls it from its own threads and cannot pass an exception on, an interrupt for example: the exception is
    kept in `interruption`, and the build is told to end.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc,name-defined]  # the package has no types
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.depths: dict[str, int] = {}
            self.shown: dict[str, tuple[Iterator[int], Callable[[], None]]] = {}  # by phase: units left, advance
            self.interruption: BaseException | None = None

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            depth = self.depths[phase] = self.depths.get(parent or "", -1) + 1
            if depth <= OUTER_PHASES and steps > 1:
                title = f"Compiling the {name}: {phase}"
                self.guard(lambda: self.shown.update({phase: (iter(range(steps)), begin(Step(title, steps)))}))

        def step_complete(self, phase: str, step: int) -> bool:
            if phase in self.shown:
                self.advance(*self.shown[phase], 1)
            return self.interruption is None

        def phase_finish(self, phase: str) -> None:
            if phase in self.shown:  # a phase may end without having reported each step
                self.advance(*self.shown.pop(phase), None)

        def advance(self, left: Iterator[int], call: Callable[[], None], units: int | None) -> None:
            for _ in islice(left, units):
                self.guard(call)

        def guard(self, call: Callable[[], object]) -> None:
            try:
                call()
            except BaseException as error:
                self.interruption = error

    return Monitor()


class Parsed(NamedTuple):
    """A network and what it needs. weights: the files that hold its weights, mapped: the network refers to them."""

    builder: Any
    network: Any
    parser: Any
    weights: dict[Path, NDArray[np.uint8]]


def parse(trt: ModuleType, backend: str, graph: Path, flags: Sequence[Any]) -> Parsed:
    """Parse a graph. Weights beside it are mapped: the parser would read a copy of them into memory. Raises
    PolygraphyException with the parser's words for what it does not take."""
    import onnx_ir as ir  # imported here: options of a build are checked before
    from polygraphy.backend.trt import create_network
    from polygraphy.exception import PolygraphyException

    builder, network = create_network(strongly_typed=True)
    parser = trt.OnnxParser(network, tensorrt_logger(backend))
    for flag in flags:
        parser.set_flag(flag)
    files: dict[Path, NDArray[np.uint8]] = {}
    taken = [parser.load_model_proto(graph.read_bytes(), str(graph))]
    for name, value in ir.load(graph).graph.initializers.items():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            file = graph.with_name(Path(tensor.location).name)
            if file not in files:
                files[file] = np.memmap(file, np.uint8, "r")
            address = files[file].ctypes.data + (tensor.offset or 0)
            taken.append(parser.load_initializer(name, address, tensor.length))
    if not (all(taken) and parser.parse_model_proto()):
        reasons = [parser.get_error(index).desc() for index in range(parser.num_errors)]
        raise PolygraphyException("; ".join(reasons) or "the graph cannot be parsed")
    return Parsed(builder, network, parser, files)


class StreamingBuilder:
    """A builder for Polygraphy that writes the plan to a file piece by piece, without a copy in memory."""

    def __init__(self, trt: ModuleType, builder: Any, output: Path) -> None:
        self._trt, self._builder, self._output = trt, builder, output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def build_serialized_network(self, network: Any, config: Any) -> int:
        """The bytes of the plan; 0, and no file, if it cannot be built. Raises what writing the file raises."""
        size = 0
        try:
            with self._output.open("wb") as file:
                writer = stream_writer(self._trt, file)
                built = self._builder.build_serialized_network_to_stream(network, config, writer)
                if writer.failure is not None:
                    raise writer.failure
                size = file.tell() if built else 0
        finally:
            if not size:
                self._output.unlink()
        return size


def stream_writer(trt: ModuleType, file: BinaryIO) -> Any:
    """An IStreamWriter over a file. TensorRT cannot pass an exception on: it is kept in `failure`."""

    class Writer(trt.IStreamWriter):  # type: ignore[misc,name-defined]  # the package has no types
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.failure: BaseException | None = None

        def write(self, data: bytes) -> int:
            try:
                return file.write(data)
            except BaseException as error:
                self.failure = error
                return 0

    return Writer()
