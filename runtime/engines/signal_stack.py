"""The alternate stack on which this thread handles signals, kept what it is while a library runs.

OpenVINO 2026.4 sets one and frees its memory with the model: the next signal of the thread, Ctrl-C for instance, then
ends the process with a segmentation fault.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager


class SignalStack(ctypes.Structure):
    """C's `stack_t`."""

    _fields_ = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


@contextmanager
def signal_stack_kept() -> Iterator[None]:
    """Whatever happens inside, this thread handles signals on the stack it had before."""
    sigaltstack = getattr(ctypes.CDLL(None), "sigaltstack", None)
    if sigaltstack is None:  # not a Unix
        yield
        return
    before = SignalStack()
    sigaltstack(None, ctypes.byref(before))
    try:
        yield
    finally:
        sigaltstack(ctypes.byref(before), None)
