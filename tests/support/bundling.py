"""Paths of test data, and bundles built for tests. docs/architecture.md describes the optional data."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from steps import quiet

from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build
from draftwood.plugins.native.cache import CACHE, cache_folder
from draftwood.runtime.bundle.bundle import COSTS, MANIFEST, checksum
from draftwood.runtime.bundle.digests import file_record

ROOT = Path(__file__).resolve().parents[2]
TEST_DATA = "DRAFTWOOD_TEST_DATA"  # the environment variable that names the folder of optional data
SHARED = Path(os.environ.get(TEST_DATA, ROOT.parent / "shared" / "data"))
DEMO = ROOT / "models" / "demo"


def optional(name: str) -> Path:
    """A folder of the optional data; a test that reads it skips without it."""
    folder = SHARED / name
    if not folder.is_dir():
        pytest.skip(f"needs {name} in the folder that {TEST_DATA} names: see docs/architecture.md, Tests")
    return folder


def built(target: Path, draft: Path, output: Path, head: Path | None = None) -> Path:
    """A bundle of the pair, built without a word."""
    build(BuildOptions(target, draft, output, acceptance_head=head), quiet)
    return output


def built_native(pair: Path, output: Path, precision: str = "fp32") -> Path:
    """A native bundle of a pair, built without a word."""
    options = BuildOptions(pair / "target", pair / "draft", output, "native", precision, draft_precision=precision)
    build(options, quiet)
    return output


@contextmanager
def own_cache(folder: Path) -> Iterator[Path]:
    """A cache of its own, with the kernels that were compiled before; yields the place of its bundles."""
    usual = cache_folder()
    for kernels in [] if usual is None else usual.glob("kernels-*"):
        shutil.copy2(kernels, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, str(folder))
        yield folder / "bundles"


def resigned(bundle: Path, change: Callable[[dict[str, Any]], object] = lambda content: None) -> Path:
    """Make the manifest list what lies in the bundle, edited by `change`: nothing of it is secret, so anybody can."""
    content = json.loads((bundle / MANIFEST).read_text())
    names = sorted(file.name for file in bundle.iterdir() if file.name not in (MANIFEST, COSTS))
    content["files"] = {name: file_record(bundle / name)._asdict() for name in names}
    change(content)
    del content["checksum"]
    content["checksum"] = checksum(content)
    (bundle / MANIFEST).write_text(json.dumps(content))
    return bundle
