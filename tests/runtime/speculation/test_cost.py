"""The table of costs: lookups, storage, whose machine it describes."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from costs import table
from disk import largest_file
from fakes import FakeEngine, random_model
from hypothesis import given
from hypothesis import strategies as st

from draftwood.models.bindings import ROLES
from draftwood.models.errors import BundleError
from draftwood.runtime.bundle.bundle import COSTS, Manifest
from draftwood.runtime.bundle.costs import (
    assumed_costs,
    differences,
    fingerprint,
    pass_sizes,
    read_costs,
    write_costs,
)
from draftwood.runtime.bundle.digests import FileRecord
from draftwood.runtime.engines.gpus import Driver, Gpu
from draftwood.runtime.engines.limits import cores
from draftwood.runtime.speculation.planning.cost import CostModel, HostCosts, PassCosts
from draftwood.runtime.speculation.planning.predicted import (
    UNKNOWN_GPU,
    PassSizes,
    gpu_named,
    pass_seconds,
    predicted,
    processor,
)

MEASURED = PassCosts((1, 4, 8), (100, 300), ((1.0, 2.0, 3.0), (3.0, 6.0, 9.0)))


@pytest.mark.parametrize(
    ("rows", "context", "seconds"),
    [
        (1, 100, 1.0),
        (2, 100, 2.0),
        (4, 100, 2.0),
        (5, 200, 6.0),
        (8, 300, 9.0),
        (1, 0, 1.0),
        (1, 900, 9.0),
        (16, 900, 54.0),
        (16, 100, 6.0),
    ],
)
def test_the_smallest_pass_that_holds_the_rows_between_the_nearest_contexts_and_on_beyond_them(
    rows: int, context: int, seconds: float
) -> None:
    assert MEASURED.at(rows, context) == pytest.approx(seconds)


@pytest.mark.parametrize(("rows", "seconds"), [(1, 1.0), (2, 4 / 3), (4, 2.0), (5, 2.25), (16, 6.0)])
def test_a_pass_that_is_not_padded_costs_what_its_rows_do(rows: int, seconds: float) -> None:
    assert replace(MEASURED, padded=False).at(rows, 100) == pytest.approx(seconds)


@given(st.integers(1, 20), st.integers(0, 400), st.booleans())
def test_more_rows_or_a_longer_context_never_cost_less(rows: int, context: int, padded: bool) -> None:
    passes = replace(MEASURED, padded=padded)
    assert passes.at(rows, context) == pytest.approx(float(passes.of(np.array(rows), context)), rel=1e-12)
    assert passes.at(rows + 1, context) >= passes.at(rows, context)
    assert passes.at(rows, context + 10) >= passes.at(rows, context)


@pytest.mark.parametrize(
    ("longest", "rows", "seconds"),
    [
        ((2.0, 2.25), 1, 3.0),  # 1 s more for each 200 tokens, as between the measured contexts
        ((0.5, 2.0), 1, 0.5),  # noise: the longest context was the cheapest
        ((3.0, 2.5), 1, 3.5),  # 5 s by its own growth: more than the wider pass
        ((3.0, 2.5), 4, 3.5),
    ],
)
def test_beyond_the_longest_context_passes_grow_as_between_the_last_two(
    longest: tuple[float, float], rows: int, seconds: float
) -> None:
    assert PassCosts((1, 4), (100, 300), ((1.0, 1.5), longest)).at(rows, 500) == pytest.approx(seconds, rel=1e-12)


seconds_of_a_row = st.lists(st.floats(1e-4, 1.0), min_size=3, max_size=3).map(lambda row: tuple(sorted(row)))


@given(
    st.lists(seconds_of_a_row, min_size=1, max_size=3), st.integers(1, 20), st.integers(0, 9000), st.integers(0, 9000)
)
def test_whatever_noise_says_passes_grow_beyond_the_longest_context(
    seconds: list[tuple[float, ...]], rows: int, context: int, more: int
) -> None:
    """Rows of a table ascend, as `smoothed` of the profile makes them; a longer context may have come out cheaper."""
    passes = PassCosts((1, 4, 8), (100, 300, 700)[: len(seconds)], tuple(seconds))
    last = passes.contexts[-1]
    assert passes.at(rows, last + context + more) >= passes.at(rows, last + context) >= passes.at(rows, last)
    assert passes.at(rows + 1, context) >= passes.at(rows, context) * (1 - 1e-12)


@pytest.mark.parametrize(
    ("widths", "contexts", "seconds"),
    [
        ((2, 1), (0,), ((1.0, 1.0),)),
        ((1, 2), (0,), ((1.0,),)),
        ((1,), (0,), ((0.0,),)),
        ((1,), (), ()),
        ((), (0,), ((),)),
        ((0, 1), (0,), ((1.0, 1.0),)),
        ((1,), (-1,), ((1.0,),)),
        ((2**24 + 1,), (0,), ((1.0,),)),
        ((1,), (2**24 + 1,), ((1.0,),)),
        ((1,), (0,), ((3600.5,),)),
    ],
)
def test_a_table_of_another_shape_is_refused(
    widths: tuple[int, ...], contexts: tuple[int, ...], seconds: tuple[tuple[float, ...], ...]
) -> None:
    with pytest.raises(ValueError, match="must"):
        PassCosts(widths, contexts, seconds)


@pytest.mark.parametrize("host", [(-1e-9, 0.0, 0.0), (0.0, 3600.5, 0.0), (0.0, 0.0, math.nan)])
def test_impossible_times_on_the_host_are_refused(host: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="must be from 0 to 3600"):
        HostCosts(*host)


@pytest.mark.parametrize("spread", [0.0, math.inf, math.nan])
def test_an_impossible_spread_is_refused(spread: float) -> None:
    with pytest.raises(ValueError, match="spread must be a number above 0"):
        replace(table(), spread=spread)


def test_the_limits_themselves_are_taken() -> None:
    passes, host = PassCosts((1, 2**24), (0, 2**24), ((3600.0, 3600.0),) * 2), HostCosts(3600.0, 0.0, 3600.0)
    assert CostModel(passes, passes, host, host, {}, spread=1e-9).target.at(1, 0) == 3600


def test_a_table_comes_back_as_it_was_stored(tmp_path: Path) -> None:
    assert read_costs(tmp_path) is None
    costs = table(1.0, 0.125)
    assert costs.draft is not None
    costs = replace(costs, draft=replace(costs.draft, padded=False), spread=1.25)
    write_costs(costs, tmp_path)
    assert read_costs(tmp_path) == costs
    assert [file.name for file in tmp_path.iterdir()] == [COSTS]


@pytest.mark.parametrize("text", ["", "{}", '{"format": 9}', '{"format": 1, "target": 3}'])
def test_a_damaged_table_names_the_fix(text: str, tmp_path: Path) -> None:
    (tmp_path / COSTS).write_text(text)
    with pytest.raises(BundleError, match="draftwood profile"):
        read_costs(tmp_path)


def test_half_a_table_is_damaged(tmp_path: Path) -> None:
    write_costs(table(), tmp_path)
    content = json.loads((tmp_path / COSTS).read_text())
    del content["draft"]["seconds"]
    (tmp_path / COSTS).write_text(json.dumps(content))
    with pytest.raises(BundleError, match="damaged"):
        read_costs(tmp_path)


def edited(folder: Path, change: Callable[[Any], object]) -> None:
    """A table that somebody else wrote."""
    write_costs(table(), folder)
    content = json.loads((folder / COSTS).read_text())
    change(content)
    (folder / COSTS).write_text(json.dumps(content))


@pytest.mark.parametrize(
    "seconds", [float("inf"), float("nan"), -1.0, 0, 1e9, pytest.param(10**400, id="huge"), True, "1", None, []]
)
def test_no_pass_takes_an_impossible_time(seconds: Any, tmp_path: Path) -> None:
    """Infinity was read, and every plan made by it."""

    def change(content: Any) -> None:
        content["target"]["seconds"][0][0] = seconds

    edited(tmp_path, change)
    with pytest.raises(BundleError, match=r"costs\.json is damaged .*: run draftwood profile"):
        read_costs(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["greedy"].update(plain=-1.0),
        lambda c: c["sampled"].update(token=1e300),
        lambda c: c["greedy"].update(more=1.0),
        lambda c: c["draft"].update(widths=[0, 1, 2, 4, 8, 16, 32]),
        lambda c: c["draft"].update(contexts=[-5]),
        lambda c: c["draft"].update(contexts=[1 << 40]),
        lambda c: c["draft"].update(padded="yes"),
        lambda c: c["draft"]["seconds"][0].pop(),
        lambda c: c["draft"].update(seconds=[[]]),
        lambda c: c.update(spread=-1.0),
        lambda c: c.update(machine={"processor": "\x1b[31mred"}),
        lambda c: c.update(machine=[1]),
        lambda c: c.update(more=1),
    ],
)
def test_a_hostile_table_is_damaged(change: Callable[[Any], object], tmp_path: Path) -> None:
    edited(tmp_path, change)
    with pytest.raises(BundleError, match="is damaged"):
        read_costs(tmp_path)


def test_a_table_that_is_no_plain_file_is_damaged(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / COSTS)
    with pytest.raises(BundleError, match="no plain file"):
        read_costs(tmp_path)
    (tmp_path / COSTS).unlink()
    (tmp_path / COSTS).write_text("[" * 100_000)
    with pytest.raises(BundleError, match="nested too deep"):
        read_costs(tmp_path)
    (tmp_path / COSTS).unlink()
    (tmp_path / COSTS).symlink_to("/etc/hostname")
    with pytest.raises(BundleError, match="is damaged"):
        read_costs(tmp_path)


def manifest(backends: tuple[str, str] = ("onnxruntime", "onnxruntime"), sha256: str = "0") -> Manifest:
    specs = [FakeEngine(random_model(0, 8), 8, role).spec for role in ROLES]
    engines = {spec.role: replace(spec, backend=name) for spec, name in zip(specs, backends, strict=True)}
    return Manifest("draftwood", 200, (), engines, {}, {"target.weights": FileRecord(1, sha256)})


def test_another_machine_is_noticed() -> None:
    here = fingerprint(manifest(), "cpu", 0, 1)
    assert differences(here, here) == []
    there = {**here, "processor": "abacus", "cores": 999}
    assert differences(there, here) == [
        f"processor abacus there, {here['processor']} here",
        f"cores 999 there, {here['cores']} here",
    ]
    assert len(differences({}, here)) == len(here)


def test_another_bundle_is_noticed() -> None:
    mine = manifest()
    here = fingerprint(mine, "cpu", 0, 1)
    rebuilt, wider = manifest(sha256="1"), {role: replace(spec, widths=(1, 2)) for role, spec in mine.engines.items()}
    for other in (rebuilt, replace(mine, engines=wider)):
        (difference,) = differences(fingerprint(other, "cpu", 0, 1), here)
        assert re.fullmatch(f"bundle [0-9a-f]{{12}} there, {here['bundle']} here", difference)
    older = {name: value for name, value in here.items() if name != "bundle"}
    assert differences(older, here) == ["bundle not recorded there"]


def test_both_backends_are_named_with_their_releases() -> None:
    native = str(fingerprint(manifest(("native", "native")), "cpu", 0, 1)["backend"])
    assert re.fullmatch("native [0-9a-f]{12}", native), "kernels are no part of a bundle, and decide what passes cost"
    both = str(fingerprint(manifest(("native", "onnxruntime")), "cpu", 0, 1)["backend"])
    assert re.fullmatch(r"native [0-9a-f]{12}, onnxruntime [\d.]+\S*", both)


def test_requests_that_share_passes_take_more_time_of_the_host() -> None:
    """A loop runs beside them. Chosen tokens are made as at temperature 0, and verified as plain rounds are drawn."""
    greedy, sampled = HostCosts(1.0, 2.0, 0.1), HostCosts(1.5, 3.0, 0.2)
    assert greedy.shared == HostCosts(2.0, 4.0, 0.2)
    costs = replace(table(), greedy=greedy)
    assert replace(costs, sampled=sampled).chosen == HostCosts(1.5, 2.5, 0.1)


def test_a_gpu_reads_weights_and_cache_or_multiplies() -> None:
    """More rows cost nothing until the arithmetic does; the context costs its bytes; a faster GPU is faster."""
    sizes = PassSizes(7.5e9, 15e9, 131072)
    assert gpu_named("NVIDIA A100-SXM4-80GB").name == "A100" and gpu_named("NVIDIA H100 80GB HBM3").name == "H100"
    assert gpu_named("an unknown GPU") is UNKNOWN_GPU
    costs = predicted(gpu_named("NVIDIA L40S"), sizes, None)
    once = 3e-5 + 15e9 / (0.85 * 0.864e12)
    assert costs.draft is None and not costs.machine
    assert costs.target.at(1, 0) == costs.target.at(16, 0) == pytest.approx(once)
    assert costs.target.at(1, 4096) - once == pytest.approx(4096 * 131072 / (0.85 * 0.864e12))
    assert pass_seconds(UNKNOWN_GPU, sizes, 128, 0) == pytest.approx(3e-5 + 2 * 7.5e9 * 128 / 75e12)
    assert pass_seconds(gpu_named("H100"), sizes, 1, 0) < 0.3 * once
    # Two cores: 34 ms for 1.5B weights in 4 bits, and 9 ms for each row from the fifth on.
    small = PassSizes(1.54e9, 1.04e9, 28672)
    assert [round(1e3 * pass_seconds(processor(2), small, rows, 0)) for rows in (1, 3, 5, 8)] == [34, 34, 44, 70]


def test_the_gpu_belongs_to_the_machine_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of one GPU is not another's, and what nobody measured has a GPU's shape."""
    driver = Driver((13, 0), (Gpu("Stand-in GPU", "9.0", 80 << 30),))
    monkeypatch.setattr("draftwood.runtime.bundle.costs.find_driver", lambda: driver)
    plans = manifest(("tensorrt-rtx", "tensorrt-rtx"))
    assert fingerprint(plans, "cpu", 0, 1)["gpu"] == "Stand-in GPU"
    assert fingerprint(manifest(("native", "onnxruntime")), "cuda", 0, 1)["gpu"] == "Stand-in GPU"
    assert "gpu" not in fingerprint(manifest(("native", "onnxruntime")), "cpu", 0, 1)
    spec = replace(plans.engines["target"], precision="fp16")
    assert assumed_costs(spec, None) == predicted(UNKNOWN_GPU, pass_sizes(spec), None)
    other = replace(manifest(("native", "native")).engines["target"], precision="int8")
    assert assumed_costs(other, other) == predicted(processor(cores()), pass_sizes(other), pass_sizes(other))
    graph = replace(manifest(("onnxruntime", "onnxruntime")).engines["target"], precision="fp32")
    assert assumed_costs(graph, None, "cuda") == predicted(UNKNOWN_GPU, pass_sizes(graph), None)
    assert assumed_costs(graph, None) == predicted(processor(cores()), pass_sizes(graph), None)


def test_a_full_disk_leaves_no_half_table(tmp_path: Path) -> None:
    with largest_file(100), pytest.raises(BundleError, match=r"File too large\): free some space"):
        write_costs(table(), tmp_path)
    assert not list(tmp_path.iterdir())
