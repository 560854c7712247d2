"""Adapters of TensorRT's builder and Polygraphy: one logger, errors as text, progress, and interruption by Ctrl-C."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from typing import Any

from ...models.errors import ConfigError
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
        raise ConfigError(f"compiling needs polygraphy: pip install 'draftwood[{backend}]'") from error
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
    """Collect the errors that TensorRT reports while the block runs. Its warnings are dropped: they concern what was
    checked before."""
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
