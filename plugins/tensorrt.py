"""TensorRT's Python package, data centre or RTX: the one place that imports either, and its one logger."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import logging
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from .installation import install

PACKAGES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}  # backend, which is also the pip extra -> module
INLINED_AGAIN = "the output tensors of this new instance will not be queryable"  # one warning per node, layer by layer
RTX_LIBRARIES = "tensorrt_rtx_libs"


@functools.cache
def load_tensorrt(backend: str) -> ModuleType:
    """The module of `backend`, "tensorrt" or "tensorrt-rtx".

    Raises ValueError for another name, and ModuleNotFoundError, which names the extra to install, without the package.
    """
    if backend not in PACKAGES:
        raise ValueError(f"{backend!r} is no TensorRT backend; choose one of {', '.join(PACKAGES)}")
    if backend == "tensorrt-rtx":
        preload_rtx_libraries()
    name = PACKAGES[backend]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"the Python package {name} cannot be imported ({error}): {install(backend)}", name=name
        ) from error


@functools.cache
def preload_rtx_libraries() -> tempfile.TemporaryDirectory[str] | None:
    """Load TensorRT-RTX's libraries from a folder in which they also have names without a version.

    The ONNX parser of 1.7 opens "libtensorrt_rtx.so" beside itself when it meets a plugin. The wheel ships only
    "libtensorrt_rtx.so.1", and the process then ends in std::terminate. The folder lives as long as the process. None
    where there is nothing to load, or the package has been imported already and it is too late.
    """
    package = importlib.util.find_spec(RTX_LIBRARIES)
    if package is None or package.origin is None or PACKAGES["tensorrt-rtx"] in sys.modules:
        return None
    folder = tempfile.TemporaryDirectory(prefix="draftwood-rtx-")
    for library in sorted(Path(package.origin).parent.glob("lib*.so.*")):
        plain = library.name.partition(".so")[0] + ".so"
        (Path(folder.name) / library.name).symlink_to(library)
        if not (Path(folder.name) / plain).exists():
            (Path(folder.name) / plain).symlink_to(library)
    for library in sorted(Path(folder.name).glob("libtensorrt_rtx.so.*")):
        ctypes.CDLL(str(library))
    for library in sorted(Path(folder.name).glob("libtensorrt_onnxparser_rtx.so.*")):
        ctypes.CDLL(str(library))
    return folder


def check_plugin_parsing(trt: ModuleType) -> None:
    """Raises RuntimeError where parsing a plugin would end the process, see `preload_rtx_libraries`."""
    if trt.__name__ != PACKAGES["tensorrt-rtx"] or not sys.platform.startswith("linux"):
        return
    if importlib.util.find_spec(RTX_LIBRARIES) is not None and preload_rtx_libraries() is None:
        raise RuntimeError(
            "tensorrt_rtx was imported before draftwood loaded its libraries, and its ONNX parser cannot meet a plugin "
            "in this process: import it by draftwood.plugins.tensorrt.load_tensorrt, or build without the plugin"
        )


@functools.cache
def tensorrt_logger(backend: str) -> Any:
    """The process's logger of `backend`, of which TensorRT accepts one; it logs as draftwood.tensorrt."""
    trt = load_tensorrt(backend)
    target = logging.getLogger("draftwood.tensorrt")
    levels = {
        trt.ILogger.Severity.INTERNAL_ERROR: logging.CRITICAL,
        trt.ILogger.Severity.ERROR: logging.ERROR,
        trt.ILogger.Severity.WARNING: logging.WARNING,
        trt.ILogger.Severity.INFO: logging.DEBUG,  # dozens of lines per build: nothing a user acts on
        trt.ILogger.Severity.VERBOSE: logging.NOTSET,
    }

    class Logger(trt.ILogger):  # type: ignore[misc,name-defined]  # the package has no types
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if levels[severity] >= logging.DEBUG and INLINED_AGAIN not in message:
                target.log(levels[severity], message)

    return Logger()
