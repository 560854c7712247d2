"""draftwood profile: the table lands in the bundle and the next request plans by it; a layer is compared with another
backend; tables of other bundles and machines are noticed. Time is a script's."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundling import DEMO, built_native
from costs import table
from disk import largest_file

from draftwood.builder.comparison import MAX_PARAMETERS, compare, num_weights, one_layer
from draftwood.builder.pass_times import time_pass
from draftwood.cli import profile
from draftwood.cli.main import main
from draftwood.models.config import LlamaConfig
from draftwood.models.errors import BundleError, EngineError
from draftwood.plugins.installation import install
from draftwood.runtime import LLM, SamplingParams
from draftwood.runtime.bundle.bundle import COSTS, EngineBundle
from draftwood.runtime.bundle.costs import fingerprint, read_costs, write_costs
from draftwood.runtime.engines.backends import NATIVE
from draftwood.runtime.engines.base import Engine
from draftwood.runtime.engines.comparison import Comparison
from draftwood.runtime.engines.passes import causal_batch

SEVEN_BILLION = LlamaConfig(32000, 4096, 11008, 32, 32, 8, 128, 4096, 1e-5, 1e4)
SMALL = LlamaConfig(49152, 128, 250, 30, 4, 2, 32, 2048, 1e-5, 1e4, tie_embeddings=True)
SLOW = Comparison("native fp32", "onnxruntime fp32", (1, 8), (0.003, 0.001), (0.002, 0.002))
Output = pytest.CaptureFixture[str]


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_native(DEMO, tmp_path_factory.mktemp("compared") / "bundle", "int8")


def test_the_command_stores_what_generate_then_reads(bundle: Path, capsys: Output) -> None:
    (bundle / COSTS).unlink(missing_ok=True)
    assert main(["profile", str(bundle), "--contexts", "8", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert all(f"A pass of the {role}:" in out for role in ("target", "draft", "draft, after another one"))
    assert main(["profile", str(bundle), "--contexts", "8,32", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    costs = read_costs(bundle)
    assert costs is not None and shown["target"]["contexts"] == [8, 32] == list(costs.target.contexts)
    with LLM(bundle) as llm:
        stats = llm.generate("hello", SamplingParams(max_tokens=20, ignore_eos=True))[0].stats
    assert stats.expected_seconds >= stats.target_passes * costs.target.at(1, 8) * 0.5
    EngineBundle.open(bundle)  # the table is no part of what is sealed
    (bundle / COSTS).write_text("{}")
    assert main(["generate", str(bundle), "--prompt", "hello", "--max-tokens", "4"]) == 2
    assert "draftwood profile" in capsys.readouterr().err


def test_what_cannot_be_stored_is_not_measured(
    tiny_bundle: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was measured for minutes, and then lost."""
    monkeypatch.setattr(EngineBundle, "open_engine", None)
    before = sorted(tiny_bundle.iterdir())
    with largest_file(0):
        code = main(["profile", str(tiny_bundle)])
    assert code == 2 and "the costs cannot be stored" in capsys.readouterr().err
    assert sorted(tiny_bundle.iterdir()) == before


def test_costs_of_another_bundle_or_machine_are_noticed(
    bundle: Path, no_bos_bundle: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def served(*_: object) -> bool:
        return True

    def stale(machine: dict[str, Any]) -> str:
        write_costs(replace(table(), machine=machine), bundle)
        with LLM(bundle) as llm:
            (said,) = llm.stale_costs
        return said

    def shown_by(command: str, *options: str) -> str:
        assert main([command, str(bundle), *options]) == 0
        return "".join(capsys.readouterr())

    assert stale(fingerprint(EngineBundle.open(no_bos_bundle).manifest, "cpu", 0, 0)).startswith("bundle ")
    assert "abacus" in stale(fingerprint(EngineBundle.open(bundle).manifest, "cpu", 0, 0) | {"processor": "abacus"})
    assert "measured elsewhere" in shown_by("generate", "--prompt", "hello", "--max-tokens", "4")
    prompts = bundle.with_name("prompts.jsonl")
    prompts.write_text('{"prompt": "hello"}')
    benched = shown_by("bench", "--prompts", str(prompts), "--configs", "auto", "--max-tokens", "4")
    assert "measured elsewhere (processor" in benched
    shown = json.loads(shown_by("inspect", "--json"))["costs"]
    assert shown["source"] == "measured elsewhere" and "abacus there" in shown["differences"][0]
    text = shown_by("inspect")
    assert re.search(r"costs .* measured elsewhere", text) and "draftwood profile measures" in text
    assert f"Costs were measured elsewhere: {shown['differences'][0]}." in text
    monkeypatch.setattr("draftwood.runtime.serving.http.server.serve", served)
    assert "measured elsewhere" in shown_by("serve", "--port", "0")
    shown_by("profile", "--contexts", "8")
    with LLM(bundle) as llm:
        assert llm.stale_costs == []


# A layer with two backends


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
    assert config.num_layers == 1 and num_weights(config) <= MAX_PARAMETERS < 4 * num_weights(config) + 1
    assert config.num_heads == 4 * config.num_kv_heads and config.head_dim == 128
    assert config.hidden_size % 32 == config.intermediate_size % 32 == 0
    small = one_layer(SMALL)
    assert (small.hidden_size, small.intermediate_size, small.num_heads, small.num_kv_heads) == (128, 256, 4, 2)


def test_a_faster_rival_is_stored_and_said_where_the_machine_is_quiet(
    native: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    for found, busy, said in (
        (SLOW, 1e9, True),
        (SLOW, 1.0, False),  # every machine is busier than this
        (replace(SLOW, seconds=(0.002, 0.001)), 1e9, False),
    ):
        monkeypatch.setattr(profile, "BUSY", busy)
        monkeypatch.setattr(profile, "compare_layers", lambda *_: found)  # noqa: B023
        assert main(["profile", str(native), "--contexts", "8", "--json"]) == 0
        printed = capsys.readouterr()
        assert ("The machine was busy" in printed.err) == (busy == 1.0)
        assert ("Backend onnxruntime takes 0.67 of the time for a layer at 1 row" in printed.err) == said
        assert ("is 1.50 at 1 row, 0.50 at 8 rows" in printed.err) == said
        costs = read_costs(native)
        assert costs is not None and costs.compared == found
        assert json.loads(printed.out)["compared"]["other"] == "onnxruntime fp32"
        assert main(["inspect", str(native), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["costs"]["compared"]["seconds"] == list(found.seconds)
    assert main(["inspect", str(native)]) == 0
    assert "compared" in capsys.readouterr().out


def test_what_cannot_be_compared_is_said(native: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are measured all the same."""
    monkeypatch.setattr("draftwood.runtime.engines.backends.find_spec", lambda name: None)
    with pytest.raises(EngineError, match="onnxruntime is not installed"):
        compare(SMALL, NATIVE, "fp32")
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "draftwood.builder.engines.export", raising=False)
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    assert main(["profile", str(native), "--contexts", "8", "--json"]) == 0
    printed = capsys.readouterr()
    assert "Not compared with onnxruntime:" in printed.err and f"{install('onnxruntime')}" in printed.err
    assert json.loads(printed.out)["compared"] is None


def test_a_damaged_comparison_is_refused(native: Path) -> None:
    """costs.json may be a stranger's."""
    write_costs(table(), native)
    content = json.loads((native / COSTS).read_text())
    good = {"backend": "a", "other": "b", "rows": [1], "seconds": [1.0], "other_seconds": [2.0]}
    changes: list[dict[str, Any]] = [{"rows": []}, {"seconds": [0.0]}, {"seconds": [-1.0]}, {"rows": [0]}]
    for change in [*changes, {"other_seconds": [1.0, 2.0]}]:
        (native / COSTS).write_text(json.dumps(content | {"compared": good | change}))
        with pytest.raises(BundleError, match="damaged"):
            read_costs(native)
    (native / COSTS).write_text(json.dumps(content | {"compared": good}))
    costs = read_costs(native)
    assert costs is not None and costs.compared is not None and costs.compared.ratios == (0.5,)
