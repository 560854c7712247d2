"""Passes that are prepared before the first request, over the driver in libcuda's place."""

from __future__ import annotations

import gc
import io
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_checkpoint
from cuda_driver.machine import Machine
from cuda_driver.memory import DEVICE
from engine_parts import BUSHY, WIDTHS, filled, random_text, score
from numpy.typing import NDArray
from rich.console import Console
from tensorrt_bundles import demo_bundles

from draftwood.cli.progress import warm_up
from draftwood.runtime import SamplingParams, SpeculativeConfig
from draftwood.runtime.engines.static.engine import StaticEngine
from tests.runtime.engines.test_static_pool import BATCH, opened

pytestmark = pytest.mark.usefixtures("no_faults")


@pytest.fixture(scope="module")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gqa"), "gqa")


def scores(engine: StaticEngine) -> list[NDArray[np.float32]]:
    """A text in chunks of several widths, and a tree behind it, twice: each over a cache of its own."""
    found = []
    for seed in range(2):
        cache = filled(engine, random_text(32 + 8 + 4 + 2 + 1, seed))
        found.append(score(engine, BUSHY.batch(engine.spec, cache.length), cache))
        cache.close()
    return found


@pytest.mark.parametrize("max_batch", [1, BATCH])
def test_the_first_passes_of_a_warm_engine_are_replayed(
    max_batch: int, gqa: Path, tmp_path: Path, gpu: Machine
) -> None:
    before = gpu.memory.used(DEVICE)
    engine = opened(gqa, tmp_path, gpu, max_batch=max_batch)
    expected = scores(engine)
    engine.close()
    engine = opened(gqa, tmp_path, gpu, max_batch=max_batch)
    steps = engine.warm_up()
    for step in steps:
        step()
    assert gpu.counts["captured"] and len(steps) == 2 * len(WIDTHS) - 1
    gpu.counts.clear()
    for found, wanted in zip(scores(engine), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert gpu.counts["graph"] > 0 and gpu.counts["enqueue"] == gpu.counts["captured"] == 0
    engine.close()
    del engine, steps, step
    gc.collect()
    assert gpu.memory.used(DEVICE) <= before, "nothing is kept of a closed engine"


def test_caches_that_are_open_together_share_no_memory(gqa: Path, tmp_path: Path, gpu: Machine) -> None:
    engine = opened(gqa, tmp_path, gpu, max_batch=1)
    for step in engine.warm_up():
        step()
    first, second = (filled(engine, random_text(40, seed)) for seed in range(2))
    batch = BUSHY.batch(engine.spec, 40)
    found, other = (score(engine, batch, cache) for cache in (first, second))
    first.close()
    np.testing.assert_array_equal(score(engine, batch, filled(engine, random_text(40, 0))), found)
    assert not np.array_equal(found, other)
    engine.close()


def test_a_command_prepares_both_engines_and_shows_how_far_it_is(tmp_path: Path, gpu: Machine) -> None:
    shown = Console(file=io.StringIO(), width=80, force_terminal=True)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with demo_bundles(tmp_path, gpu) as open_llm:
        chain = SpeculativeConfig("chain", budget="fixed", max_draft_len=4)
        with open_llm(1, chain) as llm:
            (expected,) = llm.generate(["import os\n"], params)
        with open_llm(1, chain) as llm:
            warm_up(llm, shown)
            (found,) = llm.generate(["import os\n"], params)
    assert found.token_ids == expected.token_ids
    assert isinstance(shown.file, io.StringIO) and "Preparing passes" in shown.file.getvalue()
