"""The torch model itself, with gradients and batches, which no engine asks it for; and the description of its layers:
it names what transformers writes, and says enough to compute other families' layers."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import GQA, SHAPES, VOCAB_SIZE, write_checkpoint
from families import write_family
from safetensors.numpy import load_file
from transformers import LlamaForCausalLM

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.models import bindings
from draftwood.models.config import LlamaConfig, Reading
from draftwood.models.families import Variant
from draftwood.models.layers import layer_of, network_of, num_parameters
from draftwood.models.llama import Llama
from draftwood.models.rope_scaling import RopeScaling
from draftwood.models.typed import typed
from draftwood.plugins.native import library
from draftwood.runtime.bundle.checks import Unsound, check_model


def loaded(folder: Path, positions: int = 64) -> Llama:
    checkpoint = Checkpoint(folder)
    model = Llama(checkpoint.config, positions)
    names = network_of(checkpoint.config).tensors()
    model.load_state_dict({name: torch.from_numpy(checkpoint.tensor(name).copy()) for name in names})
    return model


def random_ids(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB_SIZE, shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_hidden_states_and_gradients_equal_transformers(shape: str, tmp_path: Path) -> None:
    folder, token_ids = write_checkpoint(tmp_path, shape), random_ids(2, 40)
    model, reference = loaded(folder), LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = model.full(token_ids)
    expected = reference(token_ids, output_hidden_states=True)
    torch.testing.assert_close(output.logits, expected.logits, atol=2e-4, rtol=0)
    torch.testing.assert_close(output.hidden, expected.hidden_states[-1], atol=2e-4, rtol=0)
    for logits in (output.logits, expected.logits):
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), token_ids[:, 1:].flatten())
        torch.autograd.backward(loss)
    gradients = {name: weight.grad for name, weight in reference.named_parameters()}
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name], atol=1e-4, rtol=1e-3, msg=name)


def test_both_ways_in_agree_for_a_batch(tmp_path: Path) -> None:
    """A prompt and a tree after it, for two sequences at once; only chosen rows are scored."""
    model, tokens = loaded(write_checkpoint(tmp_path)), random_ids(2, 13)
    config = model.config
    cache = torch.zeros(2 * config.num_layers, 2, config.num_kv_heads, 64, config.head_dim)
    causal = torch.full((10, 10), bindings.MASKED).triu(1)[None, None]
    # Rows 10 and 11 are siblings after the prompt, 12 is the child of 11.
    tree = torch.zeros(1, 1, 3, 13)
    tree[0, 0, 0, 11:] = tree[0, 0, 1, [10, 12]] = tree[0, 0, 2, 10] = bindings.MASKED
    positions, tree_positions = torch.arange(10).expand(2, -1), torch.tensor([[10, 10, 11]]).expand(2, -1)
    with torch.no_grad():
        prompt = model(tokens[:, :10], positions, causal, cache, 0, torch.tensor([9]))
        leaves = model(tokens[:, 10:], tree_positions, tree, cache, 10, torch.tensor([0, 2]))
        short = model.full(tokens[:, :11])
        long = model.full(tokens[:, [*range(10), 11, 12]])
    assert prompt.logits.shape == (2, 1, VOCAB_SIZE) and leaves.hidden.shape == (2, 2, config.hidden_size)
    torch.testing.assert_close(prompt.logits[:, 0], short.logits[:, 9], atol=2e-4, rtol=0)
    for leaf, expected in enumerate((short, long)):
        torch.testing.assert_close(leaves.logits[:, leaf], expected.logits[:, -1], atol=2e-4, rtol=0)
        torch.testing.assert_close(leaves.hidden[:, leaf], expected.hidden[:, -1], atol=2e-4, rtol=0)


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
    Variant(window=8, full_layers=(1,), local_theta=50.0, output_norms=True, gelu=True),
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


@pytest.mark.parametrize("shape", [*SHAPES, "Qwen2", "Qwen3", "SmolLM3", "Granite", "Gemma3"])
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
    variant = Variant(qk_norm=True, output_norms=True)
    layer = layer_of(replace(LLAMA, variant=variant, reads=Reading((1,), LLAMA.hidden_size)), 0)
    others = ("cosine", "sine", "pairs", "local", "place", "tap", "norm_first")
    names = [norm.name for norm in layer.norms] + [matrix.name for matrix in layer.matrices]
    assert names == [f"layers.0.{name}" for name, *_ in library.Layer._fields_ if name not in others]


YARN = RopeScaling("yarn", 4.0, original_max_position=64)
LONGROPE = RopeScaling("longrope", 4.0, original_max_position=64, factors=(1.0, 1.0, 2.0, 2.0))


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
