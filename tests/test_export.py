"""Exported graphs on a real ONNX Runtime session against Hugging Face transformers on the same folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch
from transformers import LlamaForCausalLM

from draftwood.builder.checkpoint import Checkpoint
from draftwood.builder.export import export
from draftwood.models import bindings
from draftwood.runtime.engines.base import EngineSpec, prefill
from draftwood.runtime.engines.onnxruntime import OnnxRuntimeEngine


def test_prefill_logits_equal_transformers(stories: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint(stories / "target")
    file = tmp_path / "draft.onnx"
    export(checkpoint, bindings.DRAFT, 512, file, lambda name: None)
    onnx.checker.check_model(onnx.load(file), full_check=True)
    outputs = bindings.output_names(bindings.DRAFT)
    spec = EngineSpec("draft", "onnxruntime", file.name, checkpoint.config, (1, 8, 64), 512, "fp32", outputs, "")
    engine = OnnxRuntimeEngine(file, spec)
    cache = engine.new_cache()
    tokens = np.random.default_rng(0).integers(3, checkpoint.config.vocab_size, 300).tolist()
    output = prefill(engine, cache, tokens)
    reference = LlamaForCausalLM.from_pretrained(stories / "target", dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0, -1].numpy()
    assert output is not None and cache.length == 300
    np.testing.assert_allclose(output.logits[0], expected, atol=2e-4)
    assert output.top_ids is not None and output.top_ids[0, 0] == expected.argmax()
