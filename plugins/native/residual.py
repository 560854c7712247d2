"""Structures and functions of kernels/residual.h, through ctypes."""

from __future__ import annotations

from ctypes import POINTER, PyDLL, Structure, c_double, c_float, c_int, c_int32, c_void_p
from typing import Any


class Row(Structure):
    """`struct row`: the softmax of a row of logits, see kernels/residual.h."""

    _fields_ = [
        *(("logits", c_void_p), ("size", c_int32), ("peak", c_float)),
        *(("temperature", c_double), ("sums", c_void_p)),
    ]


class Offers(Structure):
    """`struct offers`: tokens that may be offered at a row, and R."""

    _fields_ = [("ids", c_void_p), ("count", c_int32), ("R", c_void_p)]


def bind_residual(library: PyDLL) -> tuple[Any, Any, Any, Any]:
    """The functions reject, residual_runs, residual_run and offer. They are called as they are, many times a round."""
    row, offers = POINTER(Row), POINTER(Offers)
    library.draftwood_offer.argtypes = [row, offers, c_double]
    library.draftwood_reject.argtypes = [offers, c_void_p, c_double]
    library.draftwood_reject.restype = c_double
    library.draftwood_residual_runs.argtypes = [row, offers, c_void_p]
    library.draftwood_residual_runs.restype = None
    library.draftwood_residual_run.argtypes = [row, offers, c_int, c_void_p]
    return (
        library.draftwood_reject,
        library.draftwood_residual_runs,
        library.draftwood_residual_run,
        library.draftwood_offer,
    )
