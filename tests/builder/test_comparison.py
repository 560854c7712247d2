"""A layer of random weights with two backends: what is compared, and what is said of it. Time is a script's."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundling import DEMO, built_native
from costs import table

from draftwood.builder.comparison import MOST_PARAMETERS, compare, num_weights, one_layer
from draftwood.builder.pass_times import time_pass
from draftwood.cli import profile
from draftwood.cli.main import main
from draftwood.models.config import LlamaConfig
from draftwood.models.errors import BundleError, EngineError
from draftwood.plugins.installation import install
from draftwood.runtime.bundle.costs import read_costs, write_costs
from draftwood.runtime.engines.backends import NATIVE
from draftwood.runtime.engines.base import Engine
from draftwood.runtime.engines.comparison import Comparison
from draftwood.runtime.engines.passes import causal_batch

SEVEN_BILLION = LlamaConfig(32000, 4096, 11008, 32, 32, 8, 128, 4096, 1e-5, 1e4)
SMALL = LlamaConfig(49152, 128, 250, 30, 4, 2, 32, 2048, 1e-5, 1e4, tie_embeddings=True)
SLOW = Comparison("native fp32", "onnxruntime fp32", (1, 8), (0.003, 0.001), (0.002, 0.002))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_native(DEMO, tmp_path_factory.mktemp("compared") / "bundle", "int8")


@pytest.mark.parametrize("precision", NATIVE.precisions)
def test_both_backends_compute_the_layer(precision: str) -> None:
    """And the least of a backend's times counts, after the first passes."""
    seen: list[tuple[str, str]] = []
    others = cycle([5.0, 1.0, 7.0])  # how much longer other programs make a pass

    def seconds_of(engine: Engine, cache: Any, rows: int) -> float:
        name = engine.spec.backend
        if (name, engine.spec.precision) not in seen:
            seen.append((name, engine.spec.precision))
            assert time_pass(engine, cache, rows) > 0
            output = engine.score(causal_batch(engine.spec, [1], cache.length), cache)
            cache.truncate(cache.length)
            assert np.isfinite(output.logits).all() and np.ptp(output.logits) > 0
            return 1e-9  # a first pass, which does not count
        times = {("native", 1): 3.0, ("native", 8): 2.0, ("onnxruntime", 1): 2.0, ("onnxruntime", 8): 8.0}
        return times[name, rows] * next(others)

    found = compare(SMALL, NATIVE, precision, 1, seconds_of)
    beside = precision if precision in ("int8", "int4") else "fp32"
    assert seen == [("native", precision), ("onnxruntime", beside)]
    assert (found.backend, found.other) == (f"native {precision}", f"onnxruntime {beside}")
    assert found.rows == (1, 8) and found.ratios == (1.5, 0.25) and found.is_slower


def test_a_layer_is_halved_until_it_is_small() -> None:
    config = one_layer(SEVEN_BILLION)
    assert config.num_layers == 1 and num_weights(config) <= MOST_PARAMETERS < 4 * num_weights(config) + 1
    assert config.num_heads == 4 * config.num_kv_heads and config.head_dim == 128
    assert config.hidden_size % 32 == config.intermediate_size % 32 == 0
    small = one_layer(SMALL)
    assert (small.hidden_size, small.intermediate_size, small.num_heads, small.num_kv_heads) == (128, 256, 4, 2)


def test_a_faster_rival_is_stored_and_said_where_the_machine_is_quiet(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for found, busy, said in (
        (SLOW, 1e9, True),
        (SLOW, 1.0, False),  # every machine is busier than this
        (replace(SLOW, seconds=(0.002, 0.001)), 1e9, False),
    ):
        monkeypatch.setattr(profile, "BUSY", busy)
        monkeypatch.setattr(profile, "compare_layers", lambda *_: found)  # noqa: B023
        assert main(["profile", str(bundle), "--contexts", "8", "--json"]) == 0
        printed = capsys.readouterr()
        assert ("Backend onnxruntime takes 0.67 of the time for a layer at 1 row" in printed.err) == said
        assert ("is 1.50 at 1 row, 0.50 at 8 rows" in printed.err) == said
        costs = read_costs(bundle)
        assert costs is not None and costs.compared == found
        assert json.loads(printed.out)["compared"]["other"] == "onnxruntime fp32"
        assert main(["inspect", str(bundle), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["costs"]["compared"]["seconds"] == list(found.seconds)
        assert main(["inspect", str(bundle)]) == 0
        assert "compared" in capsys.readouterr().out


def test_what_cannot_be_compared_is_said(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs are measured all the same."""
    monkeypatch.setitem(sys.modules, "draftwood.builder.comparison", None)
    assert main(["profile", str(bundle), "--contexts", "8", "--json"]) == 0
    printed = capsys.readouterr()
    assert "Not compared with onnxruntime:" in printed.err and f"{install('build', 'cpu')}" in printed.err
    assert json.loads(printed.out)["compared"] is None


def test_a_rival_that_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood.runtime.engines.backends.find_spec", lambda name: None)
    with pytest.raises(EngineError, match="onnxruntime is not installed"):
        compare(SMALL, NATIVE, "fp32")


def test_a_damaged_comparison_is_refused(bundle: Path) -> None:
    """costs.json may be a stranger's."""
    write_costs(table(), bundle)
    file = bundle / "costs.json"
    content = json.loads(file.read_text())
    good = {"backend": "a", "other": "b", "rows": [1], "seconds": [1.0], "other_seconds": [2.0]}
    changes: list[dict[str, Any]] = [
        {"rows": []},
        {"seconds": [0.0]},
        {"seconds": [-1.0]},
        {"other_seconds": [1.0, 2.0]},
        {"rows": [0]},
    ]
    for change in changes:
        file.write_text(json.dumps(content | {"compared": good | change}))
        with pytest.raises(BundleError, match="damaged"):
            read_costs(bundle)
    file.write_text(json.dumps(content | {"compared": good}))
    costs = read_costs(bundle)
    assert costs is not None and costs.compared is not None and costs.compared.ratios == (0.5,)
