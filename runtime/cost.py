"""CostModel: what a pass of either engine costs on this machine, by rows and context; measured, stored, looked up.

The table of a bundle is `costs.json` beside the manifest, written by `draftwood profile`. It belongs to a machine and a
bundle, both of which it names, so it is not sealed with the bundle: who copies either of them measures anew, and is
told so.
"""

from __future__ import annotations

import json
import math
import os
import platform
import secrets
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..models.bindings import ROLES
from ..models.config import LlamaConfig
from ..models.errors import BundleError
from ..models.layers import num_parameters
from ..models.typed import typed
from ..plugins.native.cache import kernel_identity
from .bundle import COSTS, EngineBundle, Manifest
from .json_object import read_object

FILE = COSTS
FORMAT = 1
MOST_SECONDS, MOST_TOKENS = 3600.0, 1 << 24  # of a pass, and of its rows or context
BYTES_PER_SECOND = 40e9  # of a machine nobody has measured: a small server's memory
ROW_SHARE = 0.06  # what each further row adds to a pass there, as a share of the first
ASSUMED_ROWS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds of one engine's passes. seconds[i][j]: `widths[j]` rows behind `contexts[i]` committed ones, both
    ascending. padded: other numbers of rows cost as much as the next larger width, which they are filled up to."""

    widths: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    padded: bool = True

    def __post_init__(self) -> None:
        if any(list(axis) != sorted(set(axis)) or not axis for axis in (self.widths, self.contexts)):
            raise ValueError(f"widths {self.widths} and contexts {self.contexts} must ascend")
        shape = (len(self.contexts), len(self.widths))
        seconds = np.asarray(self.seconds, np.float64) if {*map(len, self.seconds)} == {shape[1]} else np.zeros(0)
        if seconds.shape != shape or not np.all((seconds > 0) & (seconds <= MOST_SECONDS)):
            raise ValueError(f"seconds must be {shape[0]} x {shape[1]} numbers above 0, {MOST_SECONDS:g} at most")
        if self.widths[0] < 1 or self.contexts[0] < 0 or max(self.widths[-1], self.contexts[-1]) > MOST_TOKENS:
            raise ValueError(f"widths {self.widths} and contexts {self.contexts} must be from 1 or 0 to {MOST_TOKENS}")

    def at(self, rows: int, context: int) -> float:
        """Seconds of a pass, between the nearest contexts; of more rows than were measured, in proportion."""
        return float(self.of(np.asarray(rows), context))

    def of(self, rows: NDArray[np.int64], context: int) -> NDArray[np.float64]:
        """The same of passes of so many rows each, of any shape."""
        widths = np.asarray(self.widths)
        if self.padded:
            rows = np.where(rows < widths[-1], widths[np.searchsorted(widths, np.minimum(rows, widths[-1]))], rows)
        seconds: NDArray[np.float64] = np.interp(rows, widths, self._behind(context)) * np.maximum(1, rows / widths[-1])
        return seconds

    def _behind(self, context: int) -> NDArray[np.float64]:
        """Seconds of every width. Beyond the last context they grow as between the last two, since attention does:
        never below the last, and a wider pass costs no less there either, whatever noise there is in its growth."""
        seconds = np.asarray(self.seconds)
        if len(self.contexts) == 1:
            return np.asarray(seconds[0])
        upper = min(max(1, bisect_left(self.contexts, context)), len(self.contexts) - 1)
        before, after = self.contexts[upper - 1 : upper + 1]
        growth = seconds[upper] - seconds[upper - 1]
        share = max(0.0, (context - before) / (after - before))
        if share < 1:
            return np.asarray(seconds[upper - 1] + share * growth)
        beyond = seconds[upper] + (share - 1) * np.maximum(growth, 0.0)
        return np.asarray(np.minimum.accumulate(beyond[::-1])[::-1])


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds outside both engines: of a plain round, of one with a proposal, and of every token proposed in it."""

    plain: float
    round: float
    token: float

    def __post_init__(self) -> None:
        if not all(0 <= seconds <= MOST_SECONDS for seconds in (self.plain, self.round, self.token)):
            raise ValueError(f"seconds outside the engines must be from 0 to {MOST_SECONDS:g}, not {self}")


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of both engines on one machine. greedy, sampled: host time at temperature 0 and above. machine: see
    `fingerprint`; empty where nothing was measured. spread: upper quartile / least of the seconds a pass took when it
    was repeated, the median over all passes; None where it is not known."""

    target: PassCosts
    draft: PassCosts
    greedy: HostCosts
    sampled: HostCosts
    machine: Mapping[str, str | int]
    spread: float | None = None

    def __post_init__(self) -> None:
        if self.spread is not None and not 0 < self.spread < math.inf:
            raise ValueError(f"spread must be a number above 0, not {self.spread}")

    def write(self, folder: Path) -> None:
        """Replace the bundle's table; a reader never sees half of it. Raises OSError."""
        staging = folder / f".{FILE}.{secrets.token_hex(4)}"
        try:
            staging.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n", encoding="utf-8")
            staging.replace(folder / FILE)
        finally:
            staging.unlink(missing_ok=True)  # of a full disk, half of it


class StoredCosts(NamedTuple):
    """measured: the table beside a bundle, None where nobody measured. differences: between what it was measured with
    and what is here, in words."""

    measured: CostModel | None
    differences: list[str]


def stored_costs(bundle: EngineBundle, provider: str, threads: int, draft_threads: int) -> StoredCosts:
    """For engines that are opened like this. Raises BundleError when the table cannot be read."""
    measured = read_costs(bundle.folder)
    if measured is None:
        return StoredCosts(None, [])
    here = fingerprint(bundle.manifest, provider, threads, draft_threads)
    return StoredCosts(measured, differences(measured.machine, here))


def read_costs(folder: Path) -> CostModel | None:
    """The table of a bundle, None when nobody has measured. Raises BundleError when it cannot be read."""
    file = folder / FILE
    if not os.path.lexists(file):
        return None
    try:
        content = read_object(file)
        if content.pop("format", None) != FORMAT:
            raise ValueError("it is of another format")
        costs: CostModel = typed(CostModel, content, FILE)
        return costs
    except (OSError, ValueError) as error:
        raise BundleError(f"{file} is damaged ({error}): run draftwood profile {folder}, or delete it") from error


def fingerprint(manifest: Manifest, provider: str, threads: int, draft_threads: int) -> dict[str, str | int]:
    """What a table depends on: processor, cores this process may use, threads, the backends' releases, provider, and
    the bundle."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    backends = dict.fromkeys(manifest.engines[role].backend for role in ROLES)
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": cores,
        "threads": threads,
        "draft_threads": draft_threads,
        "backend": ", ".join(map(release, backends)),
        "provider": provider,
        "bundle": manifest.digest[:12],
    }


def release(backend: str) -> str:
    """A backend with its version; the native engine's is what its kernels were compiled from, for and by."""
    if backend == "native":
        return f"native {kernel_identity()}"
    for package in (backend, f"{backend}-gpu"):  # onnxruntime-gpu provides onnxruntime, too
        with suppress(PackageNotFoundError):
            return f"{backend} {version(package)}"
    return backend


def differences(measured: Mapping[str, str | int], here: Mapping[str, str | int]) -> list[str]:
    """How this machine and bundle differ from those a table was measured on, in words; empty when the table holds."""
    return [
        f"{name} {measured[name]} there, {value} here" if name in measured else f"{name} not recorded there"
        for name, value in here.items()
        if measured.get(name) != value
    ]


def assumed(target: LlamaConfig, draft: LlamaConfig) -> CostModel:
    """Costs nobody has measured: every pass reads all weights once at a usual memory's speed, rows add a little."""

    def passes(model: LlamaConfig) -> PassCosts:
        once = 4 * num_parameters(model) / BYTES_PER_SECOND + 1e-4
        return PassCosts(ASSUMED_ROWS, (0,), (tuple(once * (1 + ROW_SHARE * (rows - 1)) for rows in ASSUMED_ROWS),))

    return CostModel(passes(target), passes(draft), HostCosts(5e-5, 1e-4, 1e-5), HostCosts(8e-5, 1.5e-4, 4e-5), {})
