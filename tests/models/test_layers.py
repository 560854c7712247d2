"""The description of layers: it names what transformers writes, and says enough to compute other families' layers."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import GQA, SHAPES, write_checkpoint
from families import write_family
from safetensors.numpy import load_file

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.models.config import LlamaConfig
from draftwood.models.families import Variant
from draftwood.models.layers import Matrix, layer_of, network_of, num_parameters
from draftwood.models.llama import Llama
from draftwood.models.rope import rope_tables
from draftwood.models.rope_scaling import RopeScaling
from draftwood.models.typed import typed
from draftwood.plugins.native import library
from draftwood.runtime.bundle.checks import Unsound, check_model

LLAMA = LlamaConfig.from_hf(GQA | {"architectures": ["LlamaForCausalLM"]})


def read(fields: dict[str, Any]) -> LlamaConfig:
    """As a manifest is read."""
    config: LlamaConfig = typed(LlamaConfig, json.loads(json.dumps(fields)), "model")
    return config


def parts(config: LlamaConfig) -> list[Any]:
    network = network_of(config)
    layers = [part for layer in network.layers for part in (*layer.norms, *layer.matrices)]
    return [network.embedding, *layers, network.norm, network.head]


VARIANTS = [
    Variant(qk_norm=True),
    Variant(qkv_bias=True),
    Variant(layers_without_rope=(1,)),
    Variant(embedding_multiplier=6.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_multiplier=0.5),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "+".join(variant.differences))
def test_a_variant_survives_json_and_a_llama_has_none(variant: Variant) -> None:
    config = replace(LLAMA, variant=variant)
    assert read(config.to_dict()) == config
    assert config.to_dict()["variant"].keys() == set(config.variant.differences)
    assert "variant" not in LLAMA.to_dict() and read(LLAMA.to_dict()) == LLAMA
    scaled = replace(LLAMA, rope_scaling=RopeScaling("llama3", 8.0, original_max_position=64))
    assert scaled.to_dict()["rope_scaling"] == {"kind": "llama3", "factor": 8.0, "original_max_position": 64}
    assert read(scaled.to_dict()) == scaled
    for content in ({"no_such": 1}, 5, None, {"layers_without_rope": 3}):
        with pytest.raises(ValueError, match=r"model\.variant"):
            read(config.to_dict() | {"variant": content})


@pytest.mark.parametrize("shape", [*SHAPES, "Qwen2", "Qwen3", "SmolLM3", "Granite"])
def test_every_tensor_belongs_to_one_part(shape: str, tmp_path: Path) -> None:
    """What transformers wrote, no tensor more, none fewer and none twice; but a tied head is the embedding."""
    folder = write_checkpoint(tmp_path, shape) if shape in SHAPES else write_family(tmp_path, shape)
    config = Checkpoint(folder).config
    stored = {name: tensor.shape for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert network_of(config).tensors() == stored
    assert num_parameters(config) == sum(math.prod(size) for size in stored.values())
    counts = Counter(name for part in parts(config) for name in part.tensors())
    assert {name for name, count in counts.items() if count > 1} == (
        {"model.embed_tokens.weight"} if config.tie_embeddings else set()
    )
    assert set(Counter(part.name for part in parts(config)).values()) == {1}
    model = Llama(config, 8)
    assert {name: tuple(weight.shape) for name, weight in model.named_parameters()} == stored


def test_the_structures_of_the_kernels_have_the_order_of_the_description() -> None:
    layer = layer_of(replace(LLAMA, variant=Variant(qk_norm=True)), 0)
    names = [norm.name for norm in layer.norms] + [matrix.name for matrix in layer.matrices]
    assert names == [f"layers.0.{name}" for name, *_ in library.Layer._fields_ if name != "pairs"]


def test_a_merged_matrix() -> None:
    matrix = Matrix("layers.0.gate_up", ("mlp.gate", "mlp.up"), 3, (5, 4), bias=True, gated=True)
    assert matrix.weights == ("mlp.gate.weight", "mlp.up.weight")
    assert matrix.biases == ("mlp.gate.bias", "mlp.up.bias")
    assert list(matrix.tensors().items()) == [
        ("mlp.gate.weight", (5, 3)),
        ("mlp.gate.bias", (5,)),
        ("mlp.up.weight", (4, 3)),
        ("mlp.up.bias", (4,)),
    ]
    plain = matrix._replace(bias=False)
    assert plain.biases == () and [*plain.tensors()] == [*plain.weights]


YARN = RopeScaling("yarn", 4.0, original_max_position=64)
LONGROPE = RopeScaling("longrope", 4.0, original_max_position=64, factors=(1.0, 1.0, 2.0, 2.0))


@pytest.mark.parametrize(
    "model",
    [
        replace(LLAMA, variant=Variant(layers_without_rope=(0, 1))),
        replace(LLAMA, variant=Variant(rotary_size=4)),
        replace(LLAMA, rope_scaling=YARN),
        replace(LLAMA, rope_scaling=LONGROPE),
    ],
)
def test_a_sound_manifest_gives_tables(model: LlamaConfig) -> None:
    check_model("target", model)
    assert all(np.isfinite(table).all() for table in rope_tables(model, 8))


def varied(**variant: Any) -> dict[str, Any]:
    return {"variant": Variant(**variant)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *((varied(layers_without_rope=each), "the target has no layers") for each in ((2,), (-1,), (1, 0), (0, 0))),
        *((varied(rotary_size=size), f"the target's rotary_size is {size}") for size in (0, -2, 3, 10)),
        *(
            (varied(**{f"{name}_multiplier": value}), "the target's multipliers are none")
            for name in ("embedding", "attention", "residual", "logits")
            for value in (0.0, -1.0)
        ),
        *(
            ({"rope_scaling": scaling, "rope_theta": theta}, "the target's rope_scaling is none")
            for scaling, theta in (
                (replace(YARN, attention_factor=0.0), 1e4),
                (replace(YARN, beta_fast=-1.0), 1e4),
                (replace(YARN, factors=(1.0,)), 1e4),
                (replace(YARN, kind="dynamic"), 1e4),
                (YARN, 1.0),
                (replace(LONGROPE, factors=(1.0, 2.0)), 1e4),
                (replace(LONGROPE, factors=(1.0, 0.0, 2.0, 2.0)), 1e4),
            )
        ),
    ],
)
def test_a_manifest_that_no_checkpoint_gives_is_refused(fields: dict[str, Any], message: str) -> None:
    model = replace(LLAMA, **fields)
    assert read(model.to_dict()) == model
    with pytest.raises(Unsound, match=message):
        check_model("target", model)
