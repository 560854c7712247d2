"""The description of layers: it names what transformers writes, and says enough to compute other families' layers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from checkpoints import GQA, SHAPES, VOCAB_SIZE, scale, write_checkpoint
from native_parts import open_native, spec_of
from numpy.typing import NDArray
from safetensors.numpy import load_file

from benchmarks.tools.torch_engine import TorchEngine
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.export import export
from draftwood.models import bindings
from draftwood.models.config import LlamaConfig
from draftwood.models.families import Variant
from draftwood.models.layers import Matrix, layer_of, network_of, num_parameters
from draftwood.models.llama import Llama
from draftwood.models.rope import rope_tables
from draftwood.models.rope_scaling import RopeScaling
from draftwood.models.typed import typed
from draftwood.plugins.native import library
from draftwood.runtime.bundle.checks import Unsound, check_model
from draftwood.runtime.engines.onnx.onnxruntime import OnnxRuntimeEngine
from draftwood.runtime.engines.passes import prefill

HEAD_DIM, TOKENS = 8, 20
LLAMA = LlamaConfig.from_hf(GQA | {"architectures": ["LlamaForCausalLM"]})
MULTIPLIERS: dict[str, Any] = {"embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4}


class Family(NamedTuple):
    """How transformers is told of a family, `fields` of its configuration `<name>Config`, and how ours is."""

    name: str
    fields: dict[str, Any]
    variant: Variant


FAMILIES = {
    "norm on queries and keys": Family("Qwen3", {"head_dim": HEAD_DIM}, Variant(qk_norm=True)),
    "bias on q, k and v": Family("Qwen2", {}, Variant(qkv_bias=True)),
    "layer without RoPE": Family(
        "SmolLM3",
        {"no_rope_layers": [1, 0], "pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        Variant(layers_without_rope=(1,)),
    ),
    "four multipliers": Family(
        "Granite", MULTIPLIERS | {"logits_scaling": 2.0}, Variant(logits_multiplier=0.5, **MULTIPLIERS)
    ),
}


class Described(Checkpoint):
    """A checkpoint that lies in no folder: random weights as transformers names them."""

    def __init__(self, family: Family) -> None:
        fields = GQA | {"tie_word_embeddings": False} | family.fields
        settings = getattr(transformers, f"{family.name}Config")(**fields)
        self.reference = getattr(transformers, f"{family.name}ForCausalLM")(settings).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in self.reference.named_parameters():
                weight.normal_(*scale(name, weight), generator=generator)
        self.weights: dict[str, NDArray[np.float32]] = {
            name: weight.detach().numpy() for name, weight in self.reference.named_parameters()
        }
        self.config = replace(LLAMA, variant=family.variant)

    def tensor(self, name: str) -> NDArray[Any]:
        return self.weights[name]

    def expected(self) -> NDArray[np.float32]:
        """Logits of transformers behind each of some tokens, [T, V]."""
        with torch.no_grad():
            logits: NDArray[np.float32] = self.reference(torch.from_numpy(token_ids())[None]).logits[0].numpy()
        return logits


def token_ids() -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, VOCAB_SIZE, TOKENS)


@pytest.fixture(scope="module", params=FAMILIES)
def described(request: pytest.FixtureRequest) -> Described:
    return Described(FAMILIES[request.param])


def read(fields: dict[str, Any]) -> LlamaConfig:
    """As a manifest is read."""
    config: LlamaConfig = typed(LlamaConfig, json.loads(json.dumps(fields)), "model")
    return config


def parts(config: LlamaConfig) -> list[Any]:
    network = network_of(config)
    layers = [part for layer in network.layers for part in (*layer.norms, *layer.matrices)]
    return [network.embedding, *layers, network.norm, network.head]


def test_a_family_s_tensors_are_those_of_transformers(described: Described) -> None:
    found = {name: weight.shape for name, weight in described.weights.items()}
    assert network_of(described.config).tensors() == found
    assert num_parameters(described.config) == sum(weight.size for weight in described.weights.values())


def test_the_description_says_all_that_a_family_computes(described: Described, tmp_path: Path) -> None:
    """The torch model and the exported graph read nothing else, and predict what transformers does."""
    expected = described.expected()
    model = Llama(described.config, 64)
    model.load_state_dict({name: torch.from_numpy(weight) for name, weight in described.weights.items()})
    with torch.no_grad():
        logits = model.full(torch.from_numpy(token_ids())[None]).logits[0].numpy()
    np.testing.assert_allclose(logits, expected, atol=2e-4, rtol=0)
    plain = Llama(replace(described.config, variant=Variant()), 64)
    kept = plain.load_state_dict({name: torch.from_numpy(w) for name, w in described.weights.items()}, strict=False)
    assert not kept.missing_keys
    with torch.no_grad():
        ignored = plain.full(torch.from_numpy(token_ids())[None]).logits[0].numpy()
    assert np.abs(ignored - expected).max() > 0.1  # the family does differ from a LLaMA
    export(described, bindings.TARGET, 64, tmp_path / "graph.onnx", lambda name: None)
    names = bindings.output_names(bindings.TARGET)
    spec = replace(spec_of(described, bindings.TARGET, "fp32", (TOKENS,), 64), backend="onnxruntime", outputs=names)
    engine = OnnxRuntimeEngine(tmp_path / "graph.onnx", spec)
    output = prefill(engine, engine.new_cache(), token_ids().tolist())
    assert output is not None
    np.testing.assert_allclose(output.logits[0], expected[-1], atol=2e-4, rtol=0)


def test_cached_passes_compute_it_too(described: Described) -> None:
    spec = spec_of(described, bindings.TARGET, "fp32", (1, 7), 64)
    engine = TorchEngine(described.tensor, spec)
    output = prefill(engine, engine.new_cache(), token_ids().tolist())
    assert output is not None
    np.testing.assert_allclose(output.logits[0], described.expected()[-1], atol=2e-4, rtol=0)


def test_the_kernels_compute_it_too(described: Described, tmp_path: Path) -> None:
    spec = spec_of(described, bindings.TARGET, "fp32", (TOKENS,), 64)
    engine = open_native(described, spec, tmp_path)
    output = prefill(engine, engine.new_cache(), token_ids().tolist())
    engine.close()
    assert output is not None
    np.testing.assert_allclose(output.logits[0], described.expected()[-1], atol=2e-4, rtol=0)


def test_a_variant_survives_json_and_a_llama_has_none(described: Described) -> None:
    config = described.config
    assert read(config.to_dict()) == config
    assert config.to_dict()["variant"].keys() == set(config.variant.differences)
    assert "variant" not in LLAMA.to_dict() and read(LLAMA.to_dict()) == LLAMA
    scaled = replace(LLAMA, rope_scaling=RopeScaling("llama3", 8.0, original_max_position=64))
    assert scaled.to_dict()["rope_scaling"] == {"kind": "llama3", "factor": 8.0, "original_max_position": 64}
    assert read(scaled.to_dict()) == scaled
    for content in ({"no_such": 1}, 5, None, {"layers_without_rope": 3}):
        with pytest.raises(ValueError, match=r"model\.variant"):
            read(config.to_dict() | {"variant": content})


@pytest.mark.parametrize("shape", SHAPES)
def test_every_tensor_belongs_to_one_part(shape: str, tmp_path: Path) -> None:
    """What transformers wrote, no tensor more, none fewer and none twice; but a tied head is the embedding."""
    checkpoint = Checkpoint(write_checkpoint(tmp_path, shape))
    config = checkpoint.config
    stored = {name: tensor.shape for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert network_of(config).tensors() == stored
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


@pytest.mark.parametrize("indices", [(2,), (-1,), (1, 0), (0, 0)])
def test_a_manifest_names_each_layer_without_rope_once(indices: tuple[int, ...]) -> None:
    check_model("target", replace(LLAMA, variant=Variant(layers_without_rope=(0, 1))))
    with pytest.raises(Unsound, match="the target has no layers"):
        check_model("target", replace(LLAMA, variant=Variant(layers_without_rope=indices)))


YARN = RopeScaling("yarn", 4.0, original_max_position=64)
LONGROPE = RopeScaling("longrope", 4.0, original_max_position=64, factors=(1.0, 1.0, 2.0, 2.0))


@pytest.mark.parametrize(
    ("scaling", "theta", "sound"),
    [
        (YARN, 1e4, True),
        (LONGROPE, 1e4, True),
        (replace(YARN, attention_factor=0.0), 1e4, False),
        (replace(YARN, beta_fast=-1.0), 1e4, False),
        (replace(YARN, factors=(1.0,)), 1e4, False),
        (replace(YARN, kind="dynamic"), 1e4, False),
        (YARN, 1.0, False),
        (replace(LONGROPE, factors=(1.0, 2.0)), 1e4, False),
        (replace(LONGROPE, factors=(1.0, 0.0, 2.0, 2.0)), 1e4, False),
    ],
)
def test_a_manifest_s_scaling_gives_tables_or_is_refused(scaling: RopeScaling, theta: float, sound: bool) -> None:
    model = replace(LLAMA, rope_scaling=scaling, rope_theta=theta)
    assert read(model.to_dict()) == model
    if sound:
        check_model("target", model)
        assert all(np.isfinite(table).all() for table in rope_tables(model, 8))
        return
    with pytest.raises(Unsound, match="the target's rope_scaling is none"):
        check_model("target", model)


@pytest.mark.parametrize("size", [0, -2, 3, 10])
def test_a_manifest_rotates_pairs_of_a_head(size: int) -> None:
    check_model("target", replace(LLAMA, variant=Variant(rotary_size=4)))
    with pytest.raises(Unsound, match=f"the target's rotary_size is {size}"):
        check_model("target", replace(LLAMA, variant=Variant(rotary_size=size)))


@pytest.mark.parametrize("name", ["embedding", "attention", "residual", "logits"])
def test_a_manifest_s_multipliers_are_positive(name: str) -> None:
    for value in (0.0, -1.0):
        wrong: dict[str, Any] = {f"{name}_multiplier": value}
        with pytest.raises(Unsound, match="the target's multipliers are none"):
            check_model("target", replace(LLAMA, variant=Variant(**wrong)))
