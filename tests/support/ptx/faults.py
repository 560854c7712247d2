"""What a kernel may do wrong."""

from __future__ import annotations


class Fault(Exception):
    """A kernel broke a rule of the machine; the message begins with the instruction."""


class OutOfBounds(Fault):
    """An address outside every allocation, or a write to one that is only read."""


class Misaligned(Fault):
    """An address that is no multiple of the access's size."""


class Race(Fault):
    """Two threads touched the same byte, at least one of them wrote, and no barrier lies between."""


class InFlight(Fault):
    """Bytes or registers of an asynchronous operation were touched before its end was awaited."""


class Divergent(Fault):
    """Threads that must execute an instruction together did not."""


class Undefined(Fault):
    """A register was read before it was written, or an instruction is not known to the executor."""
