"""OpenVINO: what other engines cannot promise, and what it refuses. tests/test_engines.py holds it to the contract."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bundling import DEMO
from checkpoints import SHAPES, VOCAB_SIZE, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit import OPENVINO, PRECISIONS, assert_a_tree_changes_no_bit, greedy_texts, open_engine
from trees import Tree, trees

from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build
from draftwood.models.errors import ConfigError, EngineError
from draftwood.runtime import SpeculativeConfig
from draftwood.runtime.bundle import EngineBundle
from draftwood.runtime.engines.base import Engine, prefill
from draftwood.runtime.engines.openvino import OpenVinoEngine

few = settings(max_examples=6)
prefixes = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40)
MODELS = ("gqa", "mha", "mqa", "demo target")


@pytest.fixture(scope="module", params=[(model, precision) for model in MODELS for precision in PRECISIONS], ids=str)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    model, precision = request.param
    folder = tmp_path_factory.mktemp("openvino")
    source = write_checkpoint(folder / "checkpoint", model) if model in SHAPES else DEMO / "target"
    return open_engine(source, "openvino", precision, folder / "target.onnx")


@OPENVINO
@few
@given(tree=trees(), prefix=prefixes, data=st.data())
def test_a_row_has_the_same_bits_alone_and_in_a_tree(
    tree: Tree, prefix: list[int], data: st.DataObject, engine: Engine
) -> None:
    assert_a_tree_changes_no_bit(engine, prefix, tree, data)


@OPENVINO
def test_capacity_and_chunks_of_the_prompt_change_no_bit(engine: Engine) -> None:
    """A text that outgrows the first buffer, prefilled in passes of 64 rows, or token by token in a larger one."""
    text = [int(token) for token in np.random.default_rng(0).integers(0, VOCAB_SIZE, 270)]
    grown, large = engine.new_cache(), engine.new_cache()
    prefill(engine, large, text)  # makes it grow, to 512 slots
    large.truncate(0)
    prefill(engine, grown, text[:240])
    assert (grown.capacity, large.capacity) == (256, 512)
    for start in range(0, 240, 3):
        prefill(engine, large, text[start : start + 3])
    np.testing.assert_array_equal(grown.buffer[:, :, :, :240], large.buffer[:, :, :, :240])
    for start in range(240, 270, 10):
        prefill(engine, grown, text[start : start + 10])
        prefill(engine, large, text[start : start + 10])
    np.testing.assert_array_equal(grown.buffer[:, :, :, :270], large.buffer[:, :, :, :270])


@OPENVINO
@pytest.mark.parametrize("precision", PRECISIONS)
def test_speculative_text_is_plain_text_and_the_bundle_says_how(precision: str, tmp_path: Path) -> None:
    options = BuildOptions(DEMO / "target", DEMO / "draft", tmp_path / "bundle", "openvino", precision)
    manifest = build(options, lambda step: lambda: None).manifest
    target, draft = manifest.engines["target"], manifest.engines["draft"]
    assert (target.backend, target.precision) == ("openvino", precision)
    assert (draft.backend, draft.precision) == ("onnxruntime", {"int4": "int8"}.get(precision, precision))
    assert target.widths == (2, 4, 8, 12, 16, 24, 32, 48, 64)
    limit = 1e-5 if precision == "fp32" else 0.05
    assert manifest.parity["target"] < limit
    prompts = ["def fibonacci(n):\n", "import os\n\n", "class Stack:\n    "]
    plain = greedy_texts(options.output, None, prompts, 100)
    for config in (
        SpeculativeConfig("chain", max_draft_len=4, budget="fixed"),
        SpeculativeConfig("topk", max_total_draft_tokens=15, max_draft_len=6, budget="fixed"),
    ):
        assert greedy_texts(options.output, config, prompts, 100) == plain


@OPENVINO
def test_a_draft_may_run_there_too(tmp_path: Path) -> None:
    options = BuildOptions(
        DEMO / "target",
        DEMO / "draft",
        tmp_path / "bundle",
        "openvino",
        "int4",
        draft_backend="openvino",
        draft_precision="int8",
        acceptance_head=DEMO / "head",
    )
    build(options, lambda step: lambda: None)
    engine = EngineBundle.open(options.output).open_engine("draft")
    assert (engine.spec.backend, engine.spec.precision) == ("openvino", "int8")
    cache = engine.new_cache()
    output = engine.forward(Tree((5, 6, 7), (-1, 0, 1)).batch(engine.spec, 0), cache)
    assert output.top_ids is not None and output.top_logprobs is not None and output.acceptance is not None
    np.testing.assert_array_equal(output.top_ids[:, 0], output.logits.argmax(-1))
    assert (output.acceptance > 0).all() and (output.acceptance < 1).all()


@OPENVINO
def test_a_file_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    engine = open_engine(write_checkpoint(tmp_path / "gqa"), "openvino", "fp32", tmp_path / "target.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"not a graph")
    for name in ("broken.onnx", "missing.onnx"):
        with pytest.raises(EngineError, match=f"{name} cannot be opened by OpenVINO"):
            OpenVinoEngine(tmp_path / name, engine.spec)
    with pytest.raises(EngineError, match="no pass of one row"):
        OpenVinoEngine(tmp_path / "target.onnx", replace(engine.spec, widths=(1, 2)))


def test_without_openvino_both_build_and_bundle_name_the_extra(
    tmp_path: Path, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = EngineBundle.open(tiny_bundle).manifest.engines["target"]
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(EngineError, match=r"pip install 'draftwood\[openvino\]'"):
        OpenVinoEngine(tiny_bundle / "target.onnx", replace(spec, backend="openvino", widths=(2, 4)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"openvino is not installed: pip install 'draftwood\[openvino\]'"):
        BuildOptions(tmp_path, tmp_path, tmp_path, "openvino")


@OPENVINO
def test_signals_are_handled_where_they_were(tmp_path: Path) -> None:
    """In a process of its own, since what is wrong ends it: a signal after a model was closed."""
    script = (
        "import os, signal, sys\n"
        "from draftwood.runtime import LLM, SamplingParams\n"
        "heard = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: heard.append(1))\n"
        "for _ in range(2):\n"
        "    with LLM(sys.argv[1], None) as llm:\n"
        "        llm.generate('import os', SamplingParams(max_tokens=8))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print(len(heard))\n"
    )
    build(BuildOptions(DEMO / "target", DEMO / "draft", tmp_path / "b", "openvino"), lambda step: lambda: None)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "b")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
