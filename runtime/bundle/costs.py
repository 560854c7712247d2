"""The cost table beside a bundle: `costs.json`, written by `draftwood profile` and read when the bundle is opened.

The table belongs to a machine and a bundle and names both. It is not listed in the manifest. On another machine, or
with another bundle, a message asks for a new measurement.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from ...models.bindings import ROLES
from ...models.errors import BundleError, EngineError
from ...models.plain_files import read_object
from ...models.printable import shell_word
from ...models.typed import typed
from ..engines.backends import (
    COMPILED,
    CPU,
    describe_backend,
    matrix_bytes,
    num_weights,
    pass_matrices,
    slot_bytes,
    stored_network,
)
from ..engines.base import EngineSpec
from ..engines.gpus import find_driver
from ..engines.limits import cores
from ..speculation.planning.cost import CostModel
from ..speculation.planning.predicted import PassSizes, gpu_named, predicted, processor
from .bundle import COSTS, EngineBundle, Manifest
from .staging import advice

FORMAT = 1


class StoredCosts(NamedTuple):
    """measured: the table beside a bundle; None if nothing was measured. differences: between the machine and bundle of
    the measurement and the present ones, in words."""

    measured: CostModel | None
    differences: list[str]


def stored_costs(bundle: EngineBundle, provider: str, threads: int, draft_threads: int) -> StoredCosts:
    """The table for engines that are opened with these settings. Raises BundleError if it cannot be read."""
    measured = read_costs(bundle.folder)
    if measured is None:
        return StoredCosts(None, [])
    here = fingerprint(bundle.manifest, provider, threads, draft_threads)
    return StoredCosts(measured, differences(measured.machine, here))


def read_costs(folder: Path) -> CostModel | None:
    """The table of a bundle; None if there is none. Raises BundleError if it cannot be read."""
    file = folder / COSTS
    if not os.path.lexists(file):
        return None
    try:
        content = read_object(file, own=True)
        if content.pop("format", None) != FORMAT:
            raise ValueError("it is of another format")
        costs: CostModel = typed(CostModel, content, COSTS)
        return costs
    except (OSError, ValueError) as error:
        raise BundleError(
            f"{file} is damaged ({error}): run draftwood profile {shell_word(folder)}, or delete it"
        ) from error


def fingerprint(manifest: Manifest, provider: str, threads: int, draft_threads: int) -> dict[str, str | int]:
    """What a table depends on: processor, its usable cores, threads, backends' releases, provider, bundle, and GPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    backends = dict.fromkeys(manifest.engines[role].backend for role in ROLES if role in manifest.engines)
    found: dict[str, str | int] = {
        "processor": names[0] if names else platform.processor(),
        "cores": cores(),
        "threads": threads,
        "draft_threads": draft_threads,
        "backend": ", ".join(map(release, backends)),
        "provider": provider,
        "bundle": manifest.digest[:12],
    }
    return found | {"gpu": gpu_name()} if provider != CPU or set(backends) & set(COMPILED) else found


def gpu_name() -> str:
    """The driver's name of the first GPU; empty without one."""
    try:
        return find_driver().gpus[0].name
    except EngineError:
        return ""


def assumed_costs(target: EngineSpec, draft: EngineSpec | None, provider: str = CPU) -> CostModel:
    """Costs where nothing was measured: a GPU's for engines that run on one, else a small server's."""
    on_cpu = target.backend not in COMPILED and provider == CPU
    device = processor(cores()) if on_cpu else gpu_named(gpu_name())
    return predicted(device, pass_sizes(target), None if draft is None else pass_sizes(draft))


def pass_sizes(spec: EngineSpec) -> PassSizes:
    matrices = pass_matrices(stored_network(spec))
    return PassSizes(num_weights(matrices), matrix_bytes(spec, matrices), slot_bytes(spec))


def release(backend: str) -> str:
    """A backend's name, with its version if it is installed."""
    found = describe_backend(backend).release()
    return backend if found is None else f"{backend} {found}"


def differences(measured: Mapping[str, str | int], here: Mapping[str, str | int]) -> list[str]:
    """The differences between this machine and bundle and those of a table, in words; empty if the table is valid."""
    return [
        f"{name} {measured[name]} there, {value} here" if name in measured else f"{name} not recorded there"
        for name, value in here.items()
        if measured.get(name) != value
    ]


def write_costs(costs: CostModel, folder: Path) -> None:
    """Replace the bundle's table atomically. Raises BundleError if the folder cannot be written."""
    text = json.dumps({"format": FORMAT, **asdict(costs)}, indent=2) + "\n"
    with written_beside(text, folder) as staging:
        staging.replace(folder / COSTS)


def check_writable(folder: Path) -> None:
    """Raises as `write_costs` does, before anything is measured."""
    with written_beside("{}", folder):
        pass


@contextmanager
def written_beside(text: str, folder: Path) -> Iterator[Path]:
    """A file with this text in a bundle's folder, which is gone at the end. Raises as `write_costs` does."""
    staging = folder / f".{COSTS}.{secrets.token_hex(4)}"
    try:
        staging.write_text(text, encoding="utf-8")
        yield staging
    except OSError as error:
        fix = advice(error, "make it writable")
        raise BundleError(f"the costs cannot be stored in {folder} ({error.strerror}): {fix}") from error
    finally:
        staging.unlink(missing_ok=True)  # an incomplete file, for instance on a full disk
