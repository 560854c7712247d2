"""GGUF files: settings and weights as in the folder they come from, for every shape and family; what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from checkpoints import SHAPES, VOCAB_SIZE, write_checkpoint, write_tokenizer
from gguf import GGMLQuantizationType as Kind
from gguf_files import Edit, edited, settings_of, write_all, write_gguf

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.checkpoints.gguf.config import FAMILIES
from draftwood.builder.checkpoints.gguf.file import is_read, read
from draftwood.builder.checkpoints.gguf.header import read_header
from draftwood.models.config import LlamaConfig
from draftwood.models.errors import CheckpointError
from draftwood.models.layers import network_of
from draftwood.models.llama import Llama
from draftwood.models.rope import inverse_frequencies

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8}
ROUNDED: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
READ = [kind for kind in gguf.GGML_QUANT_SIZES if is_read(kind)]


def refused(file: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(file)


# As the folder


SMALL: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 2.0**-17,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
SCALES = {"embedding_multiplier": 12.0, "attention_multiplier": 0.0625, "residual_multiplier": 0.25}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 2.0**20}
MORE: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "phi3": {"sliding_window": None, "original_max_position_embeddings": 1024},
    "smollm3": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
    "granite": SCALES | {"logits_scaling": 8.0},
    "gemma3": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 24, "sliding_window_pattern": 6}
    | {
        "rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}
    },
}


def own_settings(architecture: str) -> Edit:
    """Settings that one family alone has, as llama.cpp's converter writes them."""

    def edit(writer: gguf.GGUFWriter) -> None:
        if architecture == "granite":
            writer.add_embedding_scale(SCALES["embedding_multiplier"])
            writer.add_attention_scale(SCALES["attention_multiplier"])
            writer.add_residual_scale(SCALES["residual_multiplier"])
            writer.add_logit_scale(8.0)
        if architecture == "phi3":
            writer.add_rope_scaling_orig_ctx_len(1024)
            writer.add_sliding_window(0)
        if architecture == "gemma3":
            writer.add_sliding_window(24)
            writer.add_float32("gemma3.rope.freq_base_swa", 50.0)

    return edit


@pytest.fixture(scope="module", params=MORE)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The name of a family in llama.cpp, and a folder of a random model of it."""
    architecture, folder = request.param, tmp_path_factory.mktemp("family") / "folder"
    known = "gemma3_text" if architecture == "gemma3" else architecture
    config = transformers.AutoConfig.for_model(known, **SMALL, **MORE[architecture])
    create: Any = transformers.AutoModelForCausalLM.from_config
    model = create(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, 1.0)
    model.save_pretrained(folder)
    own = {"head_dim": 8} | json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(own))
    return architecture, write_tokenizer(folder)


def test_a_file_of_a_family_says_what_its_folder_says(family: tuple[str, Path], tmp_path: Path) -> None:
    """Its settings, and its tensors: fused ones, too, and rows that llama.cpp permutes in some of the families."""
    architecture, folder = family
    file = write_gguf(folder, tmp_path / "m.gguf", architecture=architecture, edit=own_settings(architecture))
    found, expected = Checkpoint(file), Checkpoint(folder)
    assert found.config == expected.config
    assert json.loads((folder / "config.json").read_text())["architectures"] == [FAMILIES[architecture].name]
    for name in network_of(expected.config).tensors():
        np.testing.assert_array_equal(found.tensor(name), expected.tensor(name))
    further = "blk.0.attn_q.weight" if architecture == "phi3" else "blk.4.attn_output.bias"  # beside the fused one
    shape = (32, 32) if further.endswith("weight") else 32

    def edit(writer: gguf.GGUFWriter) -> None:
        own_settings(architecture)(writer)
        writer.add_tensor(further, np.zeros(shape, np.float32))

    lacking = rf"no tensor '{further}'" if architecture in ("phi3", "qwen2") else r"tensor \S*_proj.bias is missing"
    refused(write_gguf(folder, tmp_path / "more.gguf", architecture=architecture, edit=edit), lacking)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_file_of_a_llama_says_what_its_folder_says(shape: str, tmp_path: Path) -> None:
    """transformers does not read llama3's and linear rope scaling from GGUF."""
    folder = write_tokenizer(write_checkpoint(tmp_path / "folder", shape))
    found, expected = Checkpoint(write_gguf(folder, tmp_path / "model.gguf")), Checkpoint(folder)
    same: dict[str, Any] = {"rope_scaling": None, "norm_eps": 1e-5}
    assert replace(found.config, **same) == replace(expected.config, **same)
    assert found.config.norm_eps == np.float32(1e-5)
    np.testing.assert_allclose(inverse_frequencies(found.config), inverse_frequencies(expected.config), rtol=1e-6)
    for name in network_of(expected.config).tensors():
        np.testing.assert_array_equal(found.tensor(name), expected.tensor(name))


FULL = [pytest.param(kind, marks=pytest.mark.full) for kind in ("F32", "BF16", "Q4_0", "Q5_0", "Q5_1")]


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1", "Q4_K", "Q6_K", *FULL])
def test_logits_equal_transformers_on_the_same_file(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate")
    shape = WIDE if kind.endswith("K") else ROUNDED
    folder = write_tokenizer(write_checkpoint(tmp_path / "folder", tie_word_embeddings=kind == "Q8_0", **shape))
    file, tokens = write_gguf(folder, tmp_path / "model.gguf", Kind[kind]), torch.arange(80).reshape(2, 40) % VOCAB_SIZE
    checkpoint, read_by = Checkpoint(file), transformers.LlamaForCausalLM.from_pretrained
    model, reference = Llama(checkpoint.config, 40), read_by(tmp_path, gguf_file=file.name, dtype=torch.float32)
    names = network_of(checkpoint.config).tensors()
    model.load_state_dict({name: torch.from_numpy(checkpoint.tensor(name).astype(np.float32)) for name in names})
    with torch.no_grad():
        found = model.full(tokens).logits
        torch.testing.assert_close(found, reference(tokens).logits, atol=2e-4, rtol=0)
    assert found.std() > 0.5  # of weights that matter


@pytest.mark.parametrize("kind", READ, ids=lambda kind: kind.name)
def test_every_type_is_read_as_the_gguf_package_reads_it(kind: Kind, tmp_path: Path) -> None:
    """Random bytes, more than one chunk of rows among them; what overflows, too."""
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    content = np.random.default_rng(kind).integers(0, 256, (5, 3 * nbytes), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("first", np.zeros(7, np.float32))
    writer.add_tensor("second", content, raw_dtype=kind)
    write_all(writer)
    tensor = read_header(tmp_path / "one.gguf").tensors["second"]
    assert (tensor.shape, tensor.dtype) == ((5, 3 * block), kind.name)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(content, kind)
        np.testing.assert_array_equal(read(tensor).astype(np.float32), expected)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(write_checkpoint(tmp_path / "folder"))


def test_floats_keep_their_stored_type(folder: Path, tmp_path: Path) -> None:
    for kind, dtype in (("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "float32")):
        checkpoint = Checkpoint(write_gguf(folder, tmp_path / f"{kind}.gguf", Kind[kind]))
        assert checkpoint.tensor("model.layers.0.self_attn.k_proj.weight").dtype.name == dtype


def test_parts_are_one_file_and_others_are_refused(folder: Path, tmp_path: Path) -> None:
    first = write_gguf(folder, tmp_path / "model.gguf", shards=3)
    second, third = (first.with_name(first.name.replace("00001-of", f"0000{part}-of")) for part in (2, 3))
    expected = Checkpoint(folder)
    for part in (first, second, third):
        checkpoint = Checkpoint(part)
        for name in network_of(expected.config).tensors():
            np.testing.assert_array_equal(checkpoint.tensor(name), expected.tensor(name))
    third.write_bytes(second.read_bytes())
    refused(first, "says that it is part 1 of 3: copy the right one")
    third.unlink()
    refused(first, r"00003-of-00003.gguf is missing: .* all of its parts")
    refused(first.rename(tmp_path / "first.gguf"), "is one of 3 parts, which are found by their names")
    refused(tmp_path / "model-00001-of-00000.gguf", "is one of 0 parts")
    damaged = write_gguf(folder, tmp_path / "damaged.gguf", edit=lambda each: each.add_string("split.count", "many"))
    refused(damaged, "split.count must be")


# Rotary positions, of settings alone


LONG, SHORT, FREQS = "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"
TRAINED = {"scaling.original_context_length": 1024}
NO_SCALING = {"rope_type": "default"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.yarn_beta_fast": 16.0} | TRAINED,
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16.0},
        ),
        (
            {"scaling.type": "yarn", "scale_linear": 4.0, "scaling.yarn_attn_factor": 1.25},
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
        ),
        ({"scaling.type": "yarn"}, {"rope_type": "yarn", "factor": 1.0}),
        ({"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scaling.factor": 2.0, "scale_linear": 4.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"scaling.type": "linear"}, NO_SCALING),
        ({"scaling.factor": 0.0, "scale_linear": 4.0}, NO_SCALING),
        ({"scaling.type": "none", "scale_linear": 4.0}, NO_SCALING),
        ({"scaling.type": "none", "scaling.factor": 4.0}, NO_SCALING),
    ],
)
def test_rope_scaling_is_what_llama_cpp_computes(
    settings: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    assert settings_of(tmp_path, settings, {})["rope_parameters"] == expected | {"rope_theta": 10000.0}


def test_a_part_of_a_head_may_rotate_in_phi3_alone(tmp_path: Path) -> None:
    assert settings_of(tmp_path, {"dimension_count": 6}, {}, "phi3")["partial_rotary_factor"] == 0.75
    long = {"dimension_count": 6, "scaling.attn_factor": 1.25, "scaling.original_context_length": 32}
    rope = settings_of(tmp_path, long, {LONG: 3, SHORT: 3}, "phi3")["rope_parameters"]
    assert rope["rope_type"] == "longrope" and rope["long_factor"] == rope["short_factor"] == [1.0] * 3
    assert rope["original_max_position_embeddings"] == 32 and rope["attention_factor"] == 1.25


def test_gemma3_has_a_window_if_the_file_says_so_and_the_largest_model_another_scale(tmp_path: Path) -> None:
    for layers, scalar in ((34, 16), (62, 8)):
        found = settings_of(tmp_path, {}, {}, "gemma3", **{"block_count": layers, "attention.key_length": 16})
        assert (found["query_pre_attn_scalar"], found["sliding_window"]) == (scalar, None)
        assert LlamaConfig.from_hf(found).variant.local_theta is None
        found = settings_of(tmp_path, {}, {}, "gemma3", **{"block_count": layers, "attention.sliding_window": 512})
        variant = LlamaConfig.from_hf(found).variant
        assert (variant.window, variant.local_theta, variant.full_layers[:2]) == (512, 1e4, (5, 11))


@pytest.mark.parametrize(
    ("arrays", "settings", "other"),
    [
        ((FREQS,), {"scaling.factor": 4.0}, "rope scaling 'linear' by 4"),
        ((FREQS,), {"scale_linear": 0.5}, "rope scaling 'linear' by 0.5"),
        ((FREQS,), {"scaling.type": "yarn"}, "rope scaling 'yarn' by 1"),
        ((FREQS, LONG), {}, LONG),
        ((LONG, SHORT), {"scaling.factor": 4.0}, "rope scaling 'linear' by 4"),
        ((LONG, SHORT), {"scaling.type": "longrope", "scaling.factor": 4.0}, "rope scaling 'longrope' by 4"),
    ],
)
def test_two_rope_scalings_are_refused(
    arrays: tuple[str, ...], settings: dict[str, Any], other: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"it has both {arrays[0]} and {other}; convert the model again"):
        settings_of(tmp_path, settings, dict.fromkeys(arrays, 4))
    for alone in ({"scaling.factor": 1.0} | TRAINED, {"scaling.type": "none", "scaling.factor": 4.0}):
        settings_of(tmp_path, alone, {arrays[0]: 4})


# Refusals


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", None, "lacks general.architecture; convert the model again"),
        ("llama.block_count", None, "lacks llama.block_count; convert the model again"),
        ("llama.context_length", None, "lacks llama.context_length; convert the model again"),
        ("llama.attention.sliding_window", 512, "sliding_window"),
        ("llama.expert_count", 8, "mixtures of experts are not supported"),
        ("llama.rope.dimension_count", 4, r"rope.dimension_count is 4 of 8: LlamaForCausalLM rotates whole heads"),
        ("llama.attention.value_length", 4, "keys and values of different lengths"),
        ("llama.attention.head_count", 3, r"num_attention_heads|is not a multiple|has shape"),
        ("llama.logit_scale", 0.5, "the setting 'llama.logit_scale' is not known"),
        ("llama.attention.clamp_kqv", 8.0, "the setting 'llama.attention.clamp_kqv' is not known"),
        ("llama.rope.scaling.type", "ntk", "rope scaling 'ntk' is not supported"),
        ("llama.embedding_length", "8", "llama.embedding_length must be a whole number, found '8'"),
        ("llama.vocab_size", 999, r"has shape \(288, 32\), its configuration asks for \(999, 32\)"),
        ("general.type", "adapter", "holds no model, but 'adapter'"),
        ("general.architecture", "gemma2", "read as a config.json, is refused: .*architecture 'gemma2'"),
    ],
)
def test_missing_settings_and_those_of_another_model_are_refused(
    key: str, value: Any, message: str, folder: Path, tmp_path: Path
) -> None:
    refused(write_gguf(folder, tmp_path / "model.gguf", edit=edited(key, value)), message)


def test_granite_without_rotary_positions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Granite without rotary positions is not supported"):
        settings_of(tmp_path, {"scaling.finetuned": False}, {}, "granite")


NOT_THERE, NO_BIAS = "LlamaForCausalLM has no tensor '{}', and computing without it", r"\w+_proj.bias is missing"


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        *(
            (f"blk.{name}", [0.0] * 8, NOT_THERE)
            for name in ("0.attn_sinks", "0.attn_q_norm.weight", "0.attn_norm.bias")
        ),
        *((name, [0.0] * 8, NOT_THERE) for name in ("blk.2.attn_norm.weight", "output.bias", "token_embd.bias", "x")),
        *(
            (name, [0.0] * 8, NO_BIAS)
            for name in ("blk.0.attn_v.bias", "blk.0.attn_output.bias", "blk.0.ffn_down.bias")
        ),
        *((FREQS, numbers, "rope short_factor") for numbers in ([1.0, 2.0, 0.0, 2.0], [1.0, 1.0, float("nan"), 2.0])),
        *((FREQS, numbers, "rope short_factor") for numbers in ([1.0, -1.0, 1.0, 1.0], [1.0, 1.0])),
    ],
)
def test_tensors_that_the_network_lacks_are_refused(
    name: str, numbers: list[float], message: str, folder: Path, tmp_path: Path
) -> None:
    array = np.array(numbers, np.float32)
    file = write_gguf(folder, tmp_path / "model.gguf", edit=lambda writer: writer.add_tensor(name, array))
    refused(file, message.format(name))


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    folder = write_tokenizer(write_checkpoint(tmp_path / "folder", **WIDE))
    file = write_gguf(folder, tmp_path / "model.gguf", Kind.Q6_K)
    content = file.read_bytes()
    name = b"blk.0.ffn_up.weight"
    kind = content.index(name) + len(name) + 4 + 2 * 8
    for number, called in ((Kind.Q8_K, "Q8_K"), (77, "of type 77")):
        file.write_bytes(content[:kind] + int(number).to_bytes(4, "little") + content[kind + 4 :])
        refused(file, f"'?blk.0.ffn_up.weight'? is {called}, which is not read: requantise|lies in another one")
