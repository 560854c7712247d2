"""The parts of a GPU check, how they run, and what they report."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from benchmarks.tools.record import write_results

OK, FAILED, NOT_POSSIBLE = "ok", "failed", "not possible"


class NotPossible(Exception):
    """This machine lacks something that a part needs; the message names it."""


class Findings(NamedTuple):
    """Result of a part. summary: one line. figures: JSON-ready."""

    summary: str
    figures: dict[str, Any]


class Part(NamedTuple):
    """One part of the check. seconds: the most that it takes on a machine with a data-centre GPU."""

    name: str
    seconds: int
    run: Callable[[], Findings]


class Outcome(NamedTuple):
    """Status and findings of a part that was run or left out. trace: traceback of a failure."""

    part: str
    status: str
    seconds: float
    summary: str
    figures: dict[str, Any]
    trace: str = ""


def run_parts(parts: Sequence[Part], budget: float) -> Iterator[Outcome]:
    """Run the parts in order. A failure does not stop the others. A part that might not end within `budget` seconds of
    the start is left out."""
    begun = monotonic()
    for part in parts:
        start = monotonic()
        if start - begun + part.seconds > budget:
            yield Outcome(part.name, NOT_POSSIBLE, 0.0, f"less than {part.seconds} s of {budget:.0f} s are left", {})
            continue
        try:
            found = part.run()
            yield Outcome(part.name, OK, monotonic() - start, found.summary, found.figures)
        except (NotPossible, ModuleNotFoundError) as reason:
            yield Outcome(part.name, NOT_POSSIBLE, monotonic() - start, shorten(reason), {})
        except Exception as error:  # whatever failed, the other parts run
            trace = traceback.format_exc()
            yield Outcome(
                part.name, FAILED, monotonic() - start, f"{type(error).__name__}: {shorten(error)}", {}, trace
            )


def shorten(error: BaseException) -> str:
    """An error's message on one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]


def format_row(outcome: Outcome) -> str:
    """An outcome as a line of the table."""
    return f"{outcome.part:<20} {outcome.status:<13} {outcome.seconds:6.1f} s  {outcome.summary}"


def require(holds: bool, message: str) -> None:
    """Raises AssertionError with the message unless the condition holds; the part has failed then."""
    if not holds:
        raise AssertionError(message)


def write_outcomes(folder: Path, half: str, device: str, results: Sequence[Outcome]) -> Path:
    """Write the device and the outcomes as `gpu_check_<half>_<device>_<date>.json`. Returns the file."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    content = {"device": device, "half": half, "parts": [each._asdict() for each in results]}
    return write_results(folder, f"gpu_check_{half}_{name}", content)
