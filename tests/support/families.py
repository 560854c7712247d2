"""Every family that is built, as random checkpoints of transformers' own classes: odd shapes, one for each thing that a
family's config.json may say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from checkpoints import VOCAB_SIZE, scale, write_tokenizer
from native_parts import open_native, spec_of
from numpy.typing import NDArray

from benchmarks.tools.torch_engine import TorchEngine
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.export import export
from draftwood.models import bindings
from draftwood.models.config import LlamaConfig
from draftwood.runtime.engines.base import Runner
from draftwood.runtime.engines.onnx.onnxruntime import OnnxRuntimeEngine

WIDTHS, CAPACITY = (1, 2, 4, 8, 16, 32), 128  # of the engines
ORIGINAL = 24  # tokens of the context before it was scaled: texts reach beyond it where tables do not change


class Case(NamedTuple):
    """A checkpoint. family: `<family>ForCausalLM` of transformers. fields: of its configuration, besides SHAPE."""

    family: str
    fields: dict[str, Any]


# Three query heads of 10 for each key and value head, which are not as wide as the hidden rows; sizes that fill no
# vector.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 42,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **fields}}


YARN = rope("yarn", factor=8.0, original_max_position_embeddings=ORIGINAL, beta_fast=4.0)
FACTORS = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [4.0, 5.0, 6.0]}
# Windows end within the texts; the global layers are scaled, the local ones have a base of their own.
GEMMA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 6,
    "tie_word_embeddings": True,
    "final_logit_softcapping": None,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 700.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}
CASES = {
    "Llama": Case("Llama", {}),
    "Llama, biases": Case("Llama", {"attention_bias": True, "mlp_bias": True}),
    "Llama, llama3": Case(
        "Llama",
        rope(
            "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL
        ),
    ),
    "Llama, linear": Case("Llama", rope("linear", factor=4.0)),
    "Llama, dynamic": Case("Llama", rope("dynamic", factor=4.0)),
    "Llama, YaRN": Case("Llama", YARN),
    "Mistral": Case("Mistral", {"sliding_window": None}),
    "Mistral, window": Case("Mistral", {"sliding_window": 20}),
    "Qwen2": Case("Qwen2", {"tie_word_embeddings": True}),
    "Qwen2, YaRN": Case("Qwen2", YARN),
    "Qwen2, window": Case("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "Qwen3": Case("Qwen3", {}),
    "Qwen3, biases": Case("Qwen3", {"attention_bias": True}),
    "SmolLM3": Case("SmolLM3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "SmolLM3, biases": Case("SmolLM3", {"no_rope_layers": [0, 1], "attention_bias": True, "mlp_bias": True}),
    "Granite": Case(
        "Granite",
        {"embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.0}
        | {"tie_word_embeddings": True},
    ),
    "Phi3": Case("Phi3", {}),
    "Phi3, window": Case("Phi3", {"sliding_window": 20}),
    "Phi3, partial rotation": Case("Phi3", rope("default", partial_rotary_factor=0.6)),
    "Gemma3": Case("Gemma3", GEMMA),
    "Phi3, longrope": Case(
        "Phi3",
        {"head_dim": 6, "hidden_size": 36, "original_max_position_embeddings": 192}
        | rope("longrope", **FACTORS, partial_rotary_factor=1.0),
    ),
}


# What tests compare on each backend: logits with transformers', a row's bits with those it has alone, speculative text
# with plain text; of plans, which no machine here runs, that they build, and their graph with the reference.
COMPARED = {
    "torch": ("logits",),
    "reference": ("logits",),
    "onnxruntime": ("logits", "text"),
    "native": ("logits", "bits", "text"),
    "tensorrt-rtx": ("graph", "plan"),
}


def write_family(folder: Path, name: str, noise: float = 0.0, **overrides: Any) -> Path:
    """A checkpoint folder of CASES with a tokenizer of VOCAB_SIZE tokens; returns it. noise: what is added to weights
    that are otherwise the same each time, as a share of their deviation: a draft that often agrees."""
    case = CASES[name]
    config = config_class(case.family)(**SHAPE | case.fields | overrides)
    model = getattr(transformers, f"{case.family}ForCausalLM")(config)
    generator, other = (torch.Generator().manual_seed(seed) for seed in (0, 1))
    with torch.no_grad():
        for parameter, weight in model.named_parameters():
            mean, deviation = scale(parameter, weight)
            weight.normal_(mean, deviation, generator=generator)
            weight += noise * torch.empty_like(weight).normal_(0, deviation, generator=other)
    model.save_pretrained(folder)
    return write_tokenizer(folder)


def opened(backend: str, checkpoint: Checkpoint, folder: Path) -> Runner:
    """One role's engine in fp32; of TensorRT, what ONNX Runtime computes of its graph."""
    spec = spec_of(checkpoint, bindings.TARGET, "fp32", WIDTHS, CAPACITY)
    if backend == "native":
        return open_native(checkpoint, spec, folder)
    form = bindings.COMPACT if backend == "tensorrt-rtx" else bindings.ADDITIVE
    spec = replace(spec, backend="onnxruntime", outputs=bindings.output_names(bindings.TARGET, form=form))
    if backend == "torch":
        return TorchEngine(checkpoint.tensor, spec)
    export(checkpoint, bindings.TARGET, CAPACITY, folder / "target.onnx", lambda name: None, form=form)
    return OnnxRuntimeEngine(folder / "target.onnx", spec)


def expected_logits(folder: Path, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """What transformers predicts after each of some tokens [T]: [T, V]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: NDArray[np.float32] = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    return logits


# The settings that a config.json must have; everything else may be left out.
LEAST: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 320,
    "intermediate_size": 48,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "max_position_embeddings": 96,
}


def read(architecture: str, **fields: Any) -> LlamaConfig:
    """LEAST and some fields, as the product reads them."""
    return LlamaConfig.from_hf({"architectures": [architecture], **LEAST, **fields})


def reference(architecture: str, **fields: Any) -> Any:
    """LEAST and some fields, as transformers reads them: its configuration."""
    return config_class(architecture.removesuffix("ForCausalLM"))(**LEAST, **fields)


def config_class(family: str) -> Any:
    """Gemma3Config is that of the model that sees."""
    return getattr(transformers, f"{family}Config" if family != "Gemma3" else "Gemma3TextConfig")
