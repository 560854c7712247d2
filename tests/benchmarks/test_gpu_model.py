"""The model of the GPU check over the driver in libcuda's place, and its kernels in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from bundling import ROOT
from cuda_driver.machine import Machine

from benchmarks.gpu import engine
from benchmarks.gpu.headline import Headline, Scale
from benchmarks.gpu.model import ProductStep, TorchSteps
from benchmarks.tools.pair import ModelShape
from draftwood.models.bindings import DRAFT, TARGET
from draftwood.models.config import LlamaConfig
from draftwood.models.errors import EngineError
from draftwood.models.families import Variant
from draftwood.runtime import SpeculativeConfig
from draftwood.runtime.engines.static.rounds import StaticRounds

NEEDS_CUDA = {"headline: transformers, compiled", "headline: where the time goes"}
pytestmark = pytest.mark.usefixtures("no_faults")
Queue = Callable[[Callable[[], None], int], None]


@pytest.fixture
def queue(gpu: Machine) -> Queue:
    return lambda work, stream: gpu.enqueue("a program", work, ([], []), stream)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense attention takes as long as the cache is, and the executor of PTX a second a round."""
    monkeypatch.setattr(engine, "CAPACITY", 256)
    monkeypatch.setattr(engine, "MAX_LENGTH", 100)
    monkeypatch.setattr(engine, "WIDTHS", (1, 2, 4, 8, 16))
    monkeypatch.setattr(engine, "read_demo_prompts", lambda count: [list(range(40, 60)), list(range(70, 85))][:count])


def test_texts_on_the_device_are_those_of_the_cpu(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = SpeculativeConfig("topk", budget="fixed", max_total_draft_tokens=3, max_draft_len=2, frontier_width=2)
    monkeypatch.setattr(engine, "CONFIGS", {"tree": tree})
    monkeypatch.setattr(engine, "MERGED", tree)
    found = engine.check_greedy(1, replace(engine.GREEDY, max_tokens=8), queue).figures
    assert found["device_rounds"] >= 2 and min(found["acceptance"].values()) > 1
    accept = StaticRounds.accept
    monkeypatch.setattr(
        StaticRounds,
        "accept",
        lambda self, outcome: accept(self, outcome._replace(accepted=(), num_scored=0, written=[5])),
    )
    with pytest.raises(AssertionError, match="tree and the CPU's text part at token"):
        engine.check_greedy(1, replace(engine.GREEDY, max_tokens=8), queue)


def test_texts_that_share_passes_are_those_of_the_cpu(
    queue: Queue, demo_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "build", lambda options, begin: copytree(demo_bundle, options.output))
    monkeypatch.setattr(engine, "TREE", engine.CHAIN)
    found = engine.check_shared(2, replace(engine.GREEDY, max_tokens=8), queue).figures["shared"]
    assert found["plain"] == 0 < found["chain of 4"]


def test_drawn_texts_have_the_targets_distribution(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = SpeculativeConfig("chain", budget="fixed", max_draft_len=2)
    monkeypatch.setattr(engine, "CONFIGS", {"chain": chain})
    found = engine.check_drawn(1, 3, replace(engine.DRAWN, max_tokens=6), queue).figures["drawn"]["chain"]
    assert found["same_tokens"] == [6] and found["device_rounds_of_draws"] >= 3


@pytest.mark.parametrize(("drawn", "is_likely"), [([0.5, 0.3, 0.15, 0.05], True), ([0.45, 0.35, 0.15, 0.05], False)])
def test_draws_of_another_distribution_are_noticed(drawn: list[float], is_likely: bool) -> None:
    found = Counter(np.random.default_rng(0).choice(4, 4000, p=drawn).tolist())
    assert (engine.chance_of(found, np.array([0.5, 0.3, 0.15, 0.05])) > engine.UNLIKELY) == is_likely


def test_logits_are_compared_before_and_after_capture(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    found = engine.check_parity(("fp32",), queue).figures["parity"]
    assert found.keys() == {"fp32, first", "fp32, captured", "fp32, replayed"} and 0 < max(found.values()) < 1e-5
    monkeypatch.setitem(engine.LOGIT_TOLERANCES, "bf16", 1e-6)
    with pytest.raises(AssertionError, match="bf16, first: logits differ by"):
        engine.check_parity(("bf16",), queue)


def test_the_headline_in_small(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part, transformers included, on a pair whose agreement is by construction."""
    monkeypatch.setattr(engine, "CONFIGS", {})
    chain = {"chain of 2": SpeculativeConfig("chain", budget="fixed", max_draft_len=2)}
    monkeypatch.setattr("benchmarks.gpu.headline.CONFIGS", chain)
    monkeypatch.setattr("benchmarks.gpu.headline.PROMPT", 6)
    shapes = {TARGET: ModelShape(128, 2, 4, 2, 256), DRAFT: ModelShape(64, 1, 2, 1, 128)}
    scale = Scale(shapes, vocabulary=768, tokens=8, texts=1, precision="fp32", device="cpu")
    found = {
        part.name: part.run().figures
        for part in Headline(scale, lambda: 1e9, queue).parts()
        if part.name not in NEEDS_CUDA
    }
    chain_figures = found["headline: chain of 2, T = 0"]
    assert chain_figures["same_tokens"] == [8] and chain_figures["device_rounds"] > 0
    assert chain_figures["synchronize_per_round"] < 3 <= found["headline: plain, T = 0"]["synchronize_per_round"] + 3
    assert found["headline: transformers"].keys() == {"plain", "assisted", "assisted, T = 1"}


def test_models_that_the_check_does_not_compute_are_refused() -> None:
    config = LlamaConfig(64, 32, 48, 1, 2, 1, 16, 64, 1e-5, 1e4, variant=Variant(qk_norm=True))
    with pytest.raises(EngineError, match="is a LLaMA without biases"):
        engine.static_engine(config, lambda name: torch.zeros(1), TARGET, "fp32", lambda work, stream: None)


def test_the_kernels_compute_what_torch_computes() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when a kernel is imported."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout == "norm gate product rotate_and_store\n", done.stdout + done.stderr


def compare_kernels() -> None:
    from benchmarks.gpu.launches import TritonSteps, skinny

    torch.manual_seed(0)
    own, theirs = TritonSteps(), TorchSteps()
    rows, weight = torch.randn(5, 96, dtype=torch.float16), torch.randn(96, dtype=torch.float16)
    torch.testing.assert_close(own.norm(rows, weight, 1e-5), theirs.norm(rows, weight, 1e-5), atol=2e-3, rtol=2e-3)
    print("norm", end=" ")
    torch.testing.assert_close(own.gate(rows), theirs.gate(rows), atol=2e-3, rtol=2e-3)
    print("gate", end=" ")
    matrix, residual = torch.randn(40, 96, dtype=torch.float16), torch.randn(5, 40, dtype=torch.float16)
    for step in (ProductStep(), ProductStep(weight, 1e-5, residual=residual), ProductStep(weight, 1e-5, gates=True)):
        found = skinny(rows, matrix, step, (16, 64, 4, 3))
        torch.testing.assert_close(found, theirs.product(rows, matrix, step), atol=3e-2, rtol=3e-2)
    print("product", end=" ")
    head_dim, query_heads, kv_heads, capacity = 12, 3, 2, 30
    qkv = torch.randn(4, (query_heads + 2 * kv_heads) * head_dim, dtype=torch.float16)
    tables = torch.randn(2, 50, head_dim // 2, dtype=torch.float16).unbind(0)
    positions, first = torch.tensor([7, 8, 8, 9]), torch.tensor([11])
    results = []
    for steps in (own, theirs):
        turned, caches = qkv.clone(), torch.zeros(2, kv_heads, capacity, head_dim, dtype=torch.float16)
        steps.rotate_and_store(turned, positions, tables, caches[0], caches[1], first, query_heads)
        results.append((turned[:, : query_heads * head_dim], caches))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=4e-3, rtol=4e-3)
    print("rotate_and_store")


if __name__ == "__main__":
    compare_kernels()
