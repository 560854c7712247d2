"""Weights are mapped: engines share one copy, in one process and in several."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from checkpoints import write_checkpoint
from native_parts import held, spec_of

from draftwood.builder.engines.native import write_weights
from draftwood.models.errors import EngineError
from draftwood.plugins.native.library import row_bytes
from draftwood.runtime.engines.base import EngineSpec
from draftwood.runtime.engines.native import engine as native
from draftwood.runtime.engines.native.engine import NativeEngine
from draftwood.runtime.engines.native.weights import read_weights

ENGINES = 8
ROLLUP = Path("/proc/self/smaps_rollup")
needs_smaps = pytest.mark.skipif(not ROLLUP.is_file(), reason="only Linux tells a process's own memory")


class File(NamedTuple):
    path: Path
    spec: EngineSpec
    size: int


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> File:
    folder = tmp_path_factory.mktemp("weights")
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    weights = held(write_checkpoint(folder / "checkpoint", **sizes), "fp32")
    path = folder / "target.weights"
    write_weights(weights, 64, path)
    return File(path, spec_of(weights, "target", "fp32", (1, 2), 64), path.stat().st_size)


def memory(kind: str) -> int:
    """Bytes of this process. kind: "Anonymous", its own, or "Pss", shared ones by the number of mappings."""
    [line] = [line for line in ROLLUP.read_text(encoding="utf-8").splitlines() if line.startswith(f"{kind}:")]
    return int(line.split()[1]) << 10


def touched(file: File) -> object:
    """Weights of which every page was read."""
    weights = read_weights(file.path, file.spec)
    assert np.isfinite([float(tensor.sum()) for tensor in weights.values()]).all()
    return weights


@needs_smaps
def test_engines_of_one_process_share_one_copy(file: File) -> None:
    assert file.size > 50_000_000
    touched(file)  # whatever numpy needs for itself is there
    own, shared = memory("Anonymous"), memory("Pss")
    kept = [touched(file) for _ in range(ENGINES)]
    assert memory("Anonymous") - own < file.size / 10
    assert memory("Pss") - shared < 1.2 * file.size
    del kept


def share_of(file: File, everybody: object, results: object) -> None:
    """What one of several processes adds to the memory of all, once all have read the weights."""
    before = memory("Pss")
    kept = touched(file)
    everybody.wait()  # type: ignore[attr-defined]
    results.put(memory("Pss") - before)  # type: ignore[attr-defined]
    everybody.wait()  # type: ignore[attr-defined]
    del kept


@needs_smaps
def test_processes_share_one_copy(file: File) -> None:
    context = multiprocessing.get_context("fork")
    processes = 3
    everybody, results = context.Barrier(processes), context.Queue()
    started = [context.Process(target=share_of, args=(file, everybody, results)) for _ in range(processes)]
    for each in started:
        each.start()
    shares = [results.get(timeout=60) for _ in started]
    for each in started:
        each.join()
    assert sum(shares) < 1.5 * file.size


@needs_smaps
def test_rows_take_as_many_bytes_as_is_said_and_are_refused_without_them(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a manifest says of them: the system ends a process that takes more than there is."""
    spec = replace(file.spec, widths=(1, 4096))
    NativeEngine(file.path, file.spec).close()
    own = memory("Anonymous")
    engine = NativeEngine(file.path, spec, 1)
    needed = row_bytes(engine._model, 4096)
    assert needed > 50_000_000
    assert memory("Anonymous") - own < 1.1 * needed  # less where the process has memory of earlier tests left
    engine.close()
    monkeypatch.setattr(native, "available_bytes", lambda: needed)
    NativeEngine(file.path, spec, 1).close()
    monkeypatch.setattr(native, "available_bytes", lambda: needed - 1)
    with pytest.raises(EngineError, match=r"passes of up to 4096 rows take \d+ MiB .*: rebuild .* smaller --widths"):
        NativeEngine(file.path, spec, 1)


def test_mapped_and_private_weights_are_the_same(file: File) -> None:
    mapped, private = (read_weights(file.path, file.spec, how) for how in (False, True))
    assert mapped.keys() == private.keys()
    for name, tensor in mapped.items():
        np.testing.assert_array_equal(tensor, private[name])
        assert tensor.ctypes.data % 64 == private[name].ctypes.data % 64 == 0


@pytest.mark.parametrize("private", [False, True])
def test_a_file_that_was_cut_off_is_refused(private: bool, file: File, tmp_path: Path) -> None:
    """Where it shrank before it was opened. What shrinks later is for the bundle's watch to tell."""
    cut = tmp_path / "target.weights"
    cut.write_bytes(file.path.read_bytes()[:-4096])
    with pytest.raises(EngineError, match="is cut off"):
        read_weights(cut, file.spec, private)
