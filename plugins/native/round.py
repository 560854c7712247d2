"""`struct round` of kernels/round.h, through ctypes."""

from __future__ import annotations

from ctypes import Structure, c_double, c_int32, c_void_p
from struct import Struct

from .library import Pass

VERIFIERS = ("best", "match", "block", "traversal", "rejection")  # `enum verify`
MOST_NODES, MOST_KEPT, MOST_WIDTH = 1024, 256, 64  # of a tree, of its rows, and of a draft's pass: kernels/tree.h
MOST_COLUMNS = 1 << 18  # of logits: the runs of a row have two levels of MOST_CATEGORIES
COUNTS = 9  # `enum counts`: numbers before those of rows
GIVEN = Struct("=7i7Q")  # fields of `struct round` that differ from round to round, from `pending` on


class Cuts(Structure):
    """`struct cuts` of kernels/truncation.h."""

    _fields_ = [("top_p", c_double), ("min_p", c_double), ("top_k", c_int32)]


class Round(Structure):
    """`struct round`."""

    _fields_ = [
        *((name, c_int32) for name in ("depth", "size", "width", "verify", "is_drawn", "is_tree", "outputs")),
        *(("pending", c_int32), ("positions", c_int32 * 2), ("starts", c_int32 * 2)),
        *(("lengths", c_int32 * 2), ("pending_tokens", c_void_p)),
        *(("numbers", c_void_p * 3), ("estimates", c_void_p), ("visible", c_void_p * 2)),
        *(("target", Pass), ("draft", Pass)),
        *(("names", c_void_p), ("room", c_void_p), ("cuts", Cuts)),
        *((name, c_void_p) for name in ("counts", "tokens", "parents", "depths", "slots", "accepted")),
        *((name, c_void_p) for name in ("seconds", "shares")),
    ]
