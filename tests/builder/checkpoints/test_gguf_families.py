"""GGUF files of families beside LLaMA: the settings and tensors of the folder that each was written from. Which of the
families are run is decided by LlamaConfig alone, of a file as of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from checkpoints import write_tokenizer
from gguf_files import write_all, write_gguf

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.checkpoints.gguf.config import FAMILIES, config_of
from draftwood.builder.checkpoints.gguf.file import read_shards
from draftwood.builder.checkpoints.gguf.header import Metadata
from draftwood.models.errors import CheckpointError
from draftwood.models.layers import network_of

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
SCALES = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0625,
    "residual_multiplier": 0.25,
    "logits_scaling": 8.0,
}
MORE: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "phi3": {"sliding_window": None, "original_max_position_embeddings": 1024},
    "smollm3": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
    "granite": SCALES,
}


def add_own(writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    """Settings that one family alone has, as llama.cpp's converter writes them."""
    if architecture == "granite":
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        writer.add_sliding_window(config["sliding_window"] or 0)


@pytest.fixture(scope="module", params=MORE)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """A family, a folder of a random model of it, and the file written from that."""
    architecture, root = request.param, tmp_path_factory.mktemp("family")
    config = transformers.AutoConfig.for_model(architecture, **SMALL, **MORE[architecture])
    torch.manual_seed(0)
    create: Any = transformers.AutoModelForCausalLM.from_config
    model = create(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, 1.0)
    model.save_pretrained(root / "folder")
    write_tokenizer(root / "folder")
    own = json.loads((root / "folder" / "config.json").read_text())
    if "head_dim" not in own:
        (root / "folder" / "config.json").write_text(json.dumps(own | {"head_dim": 8}))
    file = write_gguf(
        root / "folder",
        root / "model.gguf",
        architecture=architecture,
        edit=lambda each: add_own(each, architecture, own),
    )
    return architecture, root / "folder", file


def test_a_file_says_what_its_folder_says(written: tuple[str, Path, Path]) -> None:
    """Its settings, and its tensors: fused ones, too, and rows that llama.cpp permutes in some of the families."""
    architecture, folder, file = written
    found, expected = Checkpoint(file), Checkpoint(folder)
    assert found.config == expected.config
    assert json.loads((folder / "config.json").read_text())["architectures"] == [FAMILIES[architecture].name]
    for name in network_of(expected.config).tensors():
        np.testing.assert_array_equal(found.tensor(name), expected.tensor(name))


def test_no_tensor_is_left_out(written: tuple[str, Path, Path], tmp_path: Path) -> None:
    architecture, folder, _ = written
    name = "blk.0.attn_q.weight" if architecture == "phi3" else "blk.4.attn_output.bias"  # beside the fused one
    config = json.loads((folder / "config.json").read_text())

    def edit(writer: gguf.GGUFWriter) -> None:
        add_own(writer, architecture, config)
        writer.add_tensor(name, np.zeros((32, 32) if name.endswith("weight") else 32, np.float32))

    refused = rf"has no tensor '{name}'" if architecture in ("phi3", "qwen2") else r"tensor \S*_proj.bias is missing"
    with pytest.raises(CheckpointError, match=refused):
        Checkpoint(write_gguf(folder, tmp_path / "model.gguf", architecture=architecture, edit=edit))


def test_a_part_of_a_head_may_rotate_in_phi3_alone(tmp_path: Path) -> None:
    values = {"general.architecture": "phi3", "phi3.embedding_length": 32, "phi3.attention.head_count": 4}
    values |= {"phi3.feed_forward_length": 48, "phi3.block_count": 1, "phi3.context_length": 64}
    values |= {"phi3.attention.layer_norm_rms_epsilon": 1e-5, "phi3.rope.dimension_count": 6}
    tensors = {"token_embd.weight": read_shards(one_tensor(tmp_path)).tensors["token_embd.weight"]}
    assert config_of(Metadata(tmp_path, values), tensors, {})["partial_rotary_factor"] == 0.75
    factors = {"rope_factors_long.weight": np.ones(3, np.float32), "rope_factors_short.weight": np.ones(3, np.float32)}
    values |= {"phi3.rope.scaling.attn_factor": 1.25, "phi3.rope.scaling.original_context_length": 32}
    rope = config_of(Metadata(tmp_path, values), tensors, factors)["rope_parameters"]
    assert rope["rope_type"] == "longrope" and rope["long_factor"] == rope["short_factor"] == [1.0] * 3
    assert rope["original_max_position_embeddings"] == 32 and rope["attention_factor"] == 1.25


def one_tensor(folder: Path) -> Path:
    writer = gguf.GGUFWriter(folder / "one.gguf", "phi3")
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    write_all(writer)
    return folder / "one.gguf"


LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": 32,
    "llama.attention.head_count": 4,
    "llama.feed_forward_length": 48,
    "llama.block_count": 1,
    "llama.context_length": 4096,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
LONG, SHORT, FREQS = "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"


def test_granite_without_rotary_positions_is_refused(tmp_path: Path) -> None:
    values = {key.replace("llama.", "granite."): value for key, value in LLAMA.items()}
    values |= {"general.architecture": "granite", "granite.rope.scaling.finetuned": False}
    tensors = {"token_embd.weight": read_shards(one_tensor(tmp_path)).tensors["token_embd.weight"]}
    with pytest.raises(CheckpointError, match="Granite without rotary positions is not supported"):
        config_of(Metadata(tmp_path, values), tensors, {})


def rope_of(folder: Path, settings: dict[str, Any], arrays: tuple[str, ...] = ()) -> dict[str, Any]:
    """The rope_parameters of a file with settings whose keys begin with `llama.rope.`, and arrays of ones."""
    values = LLAMA | {f"llama.rope.{key}": value for key, value in settings.items()}
    tensors = {"token_embd.weight": read_shards(one_tensor(folder)).tensors["token_embd.weight"]}
    factors = {name: np.ones(4, np.float32) for name in arrays}
    found: dict[str, Any] = config_of(Metadata(folder, values), tensors, factors)["rope_parameters"]
    assert found.pop("rope_theta") == 10000.0
    return found


TRAINED = {"scaling.original_context_length": 1024}
TUNED = {"scaling.yarn_beta_fast": 16.0, "scaling.yarn_attn_factor": 1.25}
NO_SCALING = {"rope_type": "default"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0} | TRAINED | TUNED,
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "beta_fast": 16.0,
                "attention_factor": 1.25,
            },
        ),
        ({"scaling.type": "yarn", "scale_linear": 4.0}, {"rope_type": "yarn", "factor": 4.0}),
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
    assert rope_of(tmp_path, settings) == expected


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
        rope_of(tmp_path, settings, arrays)
    rope_of(tmp_path, {"scaling.factor": 1.0} | TRAINED, arrays[:1])
    rope_of(tmp_path, {"scaling.type": "none", "scaling.factor": 4.0}, arrays[:1])
