"""The table of costs beside a bundle: `costs.json`, written by `draftwood profile`, read when the bundle is opened.

It belongs to a machine and a bundle, both of which it names, so it is not sealed with the bundle. Whoever copies either
of them measures anew, and is told so.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from ...models.bindings import ROLES
from ...models.errors import BundleError
from ...models.plain_files import read_object
from ...models.typed import typed
from ..engines.backends import describe_backend
from ..speculation.planning.cost import CostModel
from .bundle import COSTS, EngineBundle, Manifest

FORMAT = 1


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
    """A backend with its version, where it is installed."""
    found = describe_backend(backend).release()
    return backend if found is None else f"{backend} {found}"


def differences(measured: Mapping[str, str | int], here: Mapping[str, str | int]) -> list[str]:
    """How this machine and bundle differ from those a table was measured on, in words; empty when the table holds."""
    return [
        f"{name} {measured[name]} there, {value} here" if name in measured else f"{name} not recorded there"
        for name, value in here.items()
        if measured.get(name) != value
    ]


def write_costs(costs: CostModel, folder: Path) -> None:
    """Replace the bundle's table; a reader never sees half of it. Raises OSError."""
    staging = folder / f".{COSTS}.{secrets.token_hex(4)}"
    try:
        staging.write_text(json.dumps({"format": FORMAT, **asdict(costs)}, indent=2) + "\n", encoding="utf-8")
        staging.replace(folder / COSTS)
    finally:
        staging.unlink(missing_ok=True)  # of a full disk, half of it
