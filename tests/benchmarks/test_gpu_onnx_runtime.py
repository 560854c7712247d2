"""The part of the GPU check for ONNX Runtime, over the stand-in for its CUDA provider."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree
from typing import Any

import onnxruntime
import pytest
from onnx_device import stand_in_device

from benchmarks.gpu import onnx_runtime
from benchmarks.gpu.report import NotPossible
from draftwood.runtime import LLM, SamplingParams


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, demo_bundle: Path) -> None:
    monkeypatch.setattr(onnx_runtime, "build", lambda options, begin: copytree(demo_bundle, options.output))
    monkeypatch.setattr(onnx_runtime, "TOKENS", 12)
    monkeypatch.setattr(onnx_runtime, "REQUESTS", 2)


def test_texts_are_compared_with_plain_ones_and_with_those_of_the_cpu() -> None:
    with stand_in_device():
        found = onnx_runtime.check("fp32", "cuda").figures
    assert found["nodes_elsewhere"] == {"target": {}, "draft": {}}
    assert found["same_tokens"] == found["same_tokens_as_cpu"] == [12, 12]
    assert min(found["tokens_per_second"], found["plain_tokens_per_second"]) > 0


def test_a_provider_that_writes_another_text_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_runtime, "CONFIG", None)
    generate = LLM.generate

    def wrong(self: LLM, texts: Any, params: SamplingParams) -> Any:
        found = generate(self, texts, params)
        if len(calls) >= 3:  # those with a proposal
            found[0].outputs[0].token_ids[:] = [5] * len(found[0].token_ids)
        calls.append(1)
        return found

    calls: list[int] = []
    monkeypatch.setattr(LLM, "generate", wrong)
    with stand_in_device(), pytest.raises(AssertionError, match="of the speculative texts parts from plain at token"):
        onnx_runtime.check("fp32", "cuda")


def test_a_machine_without_the_provider_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(NotPossible, match=r"no CUDAExecutionProvider: pip install 'onnxruntime-gpu>=1\.27'"):
        onnx_runtime.check("fp32", "cuda")
