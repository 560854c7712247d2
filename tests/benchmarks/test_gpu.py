"""The GPU check on a machine without a GPU: its parts over stand-ins, and that each notices what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from bundling import ROOT
from cuda_driver.machine import Machine
from onnx_device import stand_in_device
from tensorrt_bundles import demo_bundles

from benchmarks.gpu import check, engine, onnx_runtime, tensorrt
from benchmarks.gpu import kernel as gpu_kernel
from benchmarks.gpu.headline import Headline, Scale
from benchmarks.gpu.model import ProductStep, TorchSteps, dense_tree_attention
from benchmarks.gpu.report import FAILED, NOT_POSSIBLE, OK, Findings, NotPossible, Part, run_parts
from benchmarks.tools.pair import ModelShape
from draftwood.models.bindings import DRAFT, TARGET
from draftwood.plugins.tree_attention.plan import Shape
from draftwood.runtime import LLM, SamplingParams, SpeculativeConfig
from draftwood.runtime.engines.rounds import RoundDraws, RoundOutcome
from draftwood.runtime.engines.static.round import Round, TextPlace
from draftwood.runtime.engines.static.rounds import StaticRounds

NEEDS_CUDA = {"headline: transformers, compiled", "headline: where the time goes"}
WRONG: dict[str, Any] = {
    "accepted": (),
    "num_scored": 0,
    "written": [5],
}  # what a device writes that computes something else
Queue = Callable[[Callable[[], None], int], None]


def raising(error: Exception) -> Callable[[], Findings]:
    def run() -> Findings:
        raise error

    return run


def test_every_part_reports_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [
        Part("works", 1, lambda: Findings("fine", {"a": 1})),
        Part("impossible", 1, raising(NotPossible("no such device"))),
        Part("missing", 1, raising(ModuleNotFoundError("No module named 'triton'"))),
        Part("wrong", 1, raising(AssertionError("1 is not\n 2"))),
        Part("too long", 100, lambda: Findings("never", {})),
    ]
    found = [(result.status, result.summary) for result in run_parts(parts, budget=50)]
    assert found == [
        (OK, "fine"),
        (NOT_POSSIBLE, "no such device"),
        (NOT_POSSIBLE, "No module named 'triton'"),
        (FAILED, "AssertionError: 1 is not 2"),
        (NOT_POSSIBLE, "less than 100 s of 50 s are left"),
    ]
    monkeypatch.setattr(check, "find_device", lambda: None)
    monkeypatch.setattr(sys, "argv", ["check.py", "--output", str(tmp_path / "results")])
    assert check.main() == 0
    assert capsys.readouterr().out.startswith("No CUDA device") and not (tmp_path / "results").exists()


def test_every_part_has_its_time_within_its_group(tmp_path: Path) -> None:
    """Seconds that a process takes to start are a group's, too."""
    for name, group in check.GROUPS.items():
        longest = max(part.seconds for part in group.parts(str(tmp_path)))
        assert longest + 15 <= group.seconds <= check.BUDGET, name


def test_numerics_refuse_a_wrong_kernel() -> None:
    shapes = [Shape(1, 4, 2, 3, 5, 40, 16, "fp32"), Shape(2, 2, 1, 4, 4, 64, 32, "fp16")]

    def visible_only(query: Any, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Dense attention reads every slot: those that nobody sees must be finite."""
        return dense_tree_attention(query, key.nan_to_num(), value.nan_to_num(), *rest)

    found = gpu_kernel.check_numerics(visible_only, shapes, "cpu")
    assert 0 < max(found.figures["relative_error"].values()) < 1e-3
    with pytest.raises(AssertionError, match=r"fp32 N=1 H=4:2 T=3 S=5 C=40 D=16 differs by 1\.0e-01"):
        gpu_kernel.check_numerics(lambda *operands: 1.1 * visible_only(*operands), shapes, "cpu")
    with pytest.raises(AssertionError, match="differs by nan"):
        gpu_kernel.check_numerics(dense_tree_attention, shapes, "cpu")  # which multiplies unseen NaN by zero


# The check's own engine, over the driver in libcuda's place


@pytest.fixture
def queue(gpu: Machine, no_faults: None, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """Small sizes: dense attention takes as long as the cache is, and the executor of PTX a second a round."""
    monkeypatch.setattr(engine, "CAPACITY", 256)
    monkeypatch.setattr(engine, "MAX_LENGTH", 100)
    monkeypatch.setattr(engine, "WIDTHS", (1, 2, 4, 8, 16))
    monkeypatch.setattr(engine, "read_demo_prompts", lambda count: [list(range(40, 60)), list(range(70, 85))][:count])
    return lambda work, stream: gpu.enqueue("a program", work, ([], []), stream)


def test_texts_on_the_device_are_those_of_the_cpu(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = SpeculativeConfig("topk", budget="fixed", max_total_draft_tokens=3, max_draft_len=2, frontier_width=2)
    monkeypatch.setattr(engine, "CONFIGS", {"tree": tree})
    monkeypatch.setattr(engine, "MERGED", tree)
    found = engine.check_greedy(1, replace(engine.GREEDY, max_tokens=8), queue).figures
    assert found["device_rounds"] >= 2 and min(found["acceptance"].values()) > 1
    accept = StaticRounds.accept
    monkeypatch.setattr(StaticRounds, "accept", lambda self, outcome: accept(self, outcome._replace(**WRONG)))
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
    parts = [part for part in Headline(scale, lambda: 1e9, queue).parts() if part.name not in NEEDS_CUDA]
    found = {part.name: part.run().figures for part in parts}
    chained = found["headline: chain of 2, T = 0"]
    assert chained["same_tokens"] == [8] and chained["device_rounds"] > 0
    assert found["headline: transformers"].keys() == {"plain", "assisted", "assisted, T = 1"}


def test_the_kernels_compute_what_torch_computes() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when a kernel is imported."""
    pytest.importorskip("triton")
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "compared\n", done.stdout + done.stderr


def compare_kernels() -> None:
    from benchmarks.gpu.launches import TritonSteps, skinny

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float16)

    def same(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)

    torch.manual_seed(0)
    own, theirs = TritonSteps(), TorchSteps()
    rows, weight, matrix, residual = drawn(5, 96), drawn(96), drawn(40, 96), drawn(5, 40)
    same(own.norm(rows, weight, 1e-5), theirs.norm(rows, weight, 1e-5), 2e-3)
    same(own.gate(rows), theirs.gate(rows), 2e-3)
    for step in (ProductStep(), ProductStep(weight, 1e-5, residual=residual), ProductStep(weight, 1e-5, gates=True)):
        same(skinny(rows, matrix, step, (16, 64, 4, 3)), theirs.product(rows, matrix, step), 3e-2)
    head_dim, query_heads, kv_heads = 12, 3, 2
    qkv, tables = drawn(4, (query_heads + 2 * kv_heads) * head_dim), drawn(2, 50, head_dim // 2).unbind(0)
    results = []
    for steps in (own, theirs):
        turned, caches = qkv.clone(), torch.zeros(2, kv_heads, 30, head_dim, dtype=torch.float16)
        places = torch.tensor([7, 8, 8, 9]), tables, caches[0], caches[1], torch.tensor([11]), query_heads
        steps.rotate_and_store(turned, *places)
        results.append((turned[:, : query_heads * head_dim], caches))
    for one, other in zip(*results, strict=True):
        same(one, other, 4e-3)
    print("compared")


# ONNX Runtime, over the stand-in for its CUDA provider


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, demo_bundle: Path) -> None:
    monkeypatch.setattr(onnx_runtime, "build", lambda options, begin: copytree(demo_bundle, options.output))
    monkeypatch.setattr(onnx_runtime, "TOKENS", 12)
    monkeypatch.setattr(onnx_runtime, "REQUESTS", 2)


@pytest.mark.usefixtures("short")
def test_a_provider_s_texts_are_compared_with_plain_ones_and_with_those_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with stand_in_device():
        found = onnx_runtime.check("fp32", "cuda").figures
    assert found["nodes_elsewhere"] == {"target": {}, "draft": {}}
    assert found["same_tokens"] == found["same_tokens_as_cpu"] == [12, 12]
    generate, calls = LLM.generate, list[int]()

    def wrong(self: LLM, texts: Any, params: SamplingParams) -> Any:
        found = generate(self, texts, params)
        if len(calls) >= 3:  # those with a proposal
            found[0].outputs[0].token_ids[:] = [5] * len(found[0].token_ids)
        calls.append(1)
        return found

    monkeypatch.setattr(onnx_runtime, "CONFIG", None)
    monkeypatch.setattr(LLM, "generate", wrong)
    with stand_in_device(), pytest.raises(AssertionError, match="of the speculative texts parts from plain at token"):
        onnx_runtime.check("fp32", "cuda")
    with pytest.raises(NotPossible, match=r"no CUDAExecutionProvider: pip install 'onnxruntime-gpu>=1\.27'"):
        onnx_runtime.check("fp32", "cuda")


# TensorRT, over stand-ins for its package and for the driver


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, gpu: Machine) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("bundles")
    with demo_bundles(folder, gpu) as open_llm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorrt, "TOKENS", 12)
        patch.setattr(tensorrt, "read_demo_prompts", lambda count: ["import os\n", "def f(x):\n"][:count])
        patch.setattr(tensorrt, "REQUESTS", 2)
        open_llm(1, None).close()
        yield folder / "1"


@pytest.mark.usefixtures("no_faults")
def test_every_stage_of_a_bundle_that_works(bundle: Path) -> None:
    found = {name: stage(bundle).figures for name, stage in tensorrt.STAGES.items()}
    assert set(found["capture"]["differences"].values()) == {0} and found["texts"].pop("device_rounds") >= 2
    assert found["texts"] == {"same_tokens": {name: [12, 12] for name in ("tree", "chain", "chain, host")}}
    assert min(found["speed"].values()) > 0


@pytest.mark.usefixtures("no_faults")
def test_a_device_that_does_something_else_fails_a_stage(
    bundle: Path, gpu: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "captures", False)
        with pytest.raises(AssertionError, match=r"not captured: a pass of 1 rows cannot be captured as a CUDA graph"):
            tensorrt.capture_passes(bundle)
    run = Round.run

    def wrong(self: Round, texts: Sequence[TextPlace], draws: RoundDraws | None) -> list[RoundOutcome]:
        return [each._replace(**WRONG) for each in run(self, texts, draws)]

    monkeypatch.setattr(Round, "run", wrong)
    with pytest.raises(AssertionError, match="text 0 of the tree parts from plain at token 0, no tie"):
        tensorrt.compare_texts(bundle)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(NotPossible, match="the bundle was not built"):
        tensorrt.check("tensorrt-rtx", "load", "our kernel", str(tmp_path))


if __name__ == "__main__":
    compare_kernels()
