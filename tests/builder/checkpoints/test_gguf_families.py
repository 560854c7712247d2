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
from gguf_files import write_gguf
from safetensors.numpy import load_file

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.checkpoints.gguf.config import FAMILIES, config_of, hugging_face_names
from draftwood.builder.checkpoints.gguf.file import GgufTensors, read_shards
from draftwood.builder.checkpoints.gguf.metadata import Metadata
from draftwood.models.config import LlamaConfig
from draftwood.models.errors import CheckpointError

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


def described(file: Path) -> dict[str, Any]:
    header = read_shards(file)
    return config_of(Metadata(file, header.metadata), header.tensors, {})


def test_settings_are_the_folders(written: tuple[str, Path, Path]) -> None:
    architecture, folder, file = written
    own, found = json.loads((folder / "config.json").read_text()), described(file)
    for key in found.keys() - own.keys():
        assert not found[key], key  # false or nothing, as it is where a setting is left out
    same = {key for key in found.keys() & own.keys() if key != "rope_parameters" and found[key] == own[key]}
    assert same == found.keys() & own.keys() - {"rope_parameters"}
    assert found["rope_parameters"]["rope_theta"] == own["rope_parameters"]["rope_theta"]
    assert FAMILIES[architecture].name == own["architectures"][0]


def test_a_file_is_run_or_refused_as_its_folder_is(written: tuple[str, Path, Path]) -> None:
    _, folder, file = written
    outcomes: list[LlamaConfig | str] = []
    for path in (folder, file):
        try:
            outcomes.append(Checkpoint(path).config)
        except CheckpointError as error:
            outcomes.append(str(error).partition("refused: ")[2] or str(error))
    assert outcomes[0] == outcomes[1]


def test_tensors_are_the_folders(written: tuple[str, Path, Path]) -> None:
    """Fused ones, too, and rows that llama.cpp permutes in some of the families."""
    architecture, folder, file = written
    header, family = read_shards(file), FAMILIES[architecture]
    names = hugging_face_names(Metadata(file, header.metadata), family, SMALL["num_hidden_layers"], header.tensors)
    tensors = GgufTensors(file, header.tensors)
    tensors.rename(names, {"q_proj": 4, "k_proj": 2} if family.permuted else {})
    expected = load_file(folder / "model.safetensors")
    assert names.keys() == expected.keys()
    for name, array in expected.items():
        stored = tensors.stored(name)
        assert stored is not None and stored.shape == array.shape
        np.testing.assert_array_equal(tensors.tensor(name), array)


def test_a_part_of_a_head_may_rotate_in_phi3_alone(tmp_path: Path) -> None:
    values = {"general.architecture": "phi3", "phi3.embedding_length": 32, "phi3.attention.head_count": 4}
    values |= {"phi3.feed_forward_length": 48, "phi3.block_count": 1, "phi3.context_length": 64}
    values |= {"phi3.attention.layer_norm_rms_epsilon": 1e-5, "phi3.rope.dimension_count": 6}
    tensors = {"token_embd.weight": read_shards(one_tensor(tmp_path)).tensors["token_embd.weight"]}
    assert config_of(Metadata(tmp_path, values), tensors, {})["partial_rotary_factor"] == 0.75
    factors = {"rope_factors_long.weight": np.ones(3, np.float32), "rope_factors_short.weight": np.ones(3, np.float32)}
    values |= {"phi3.rope.scaling.attn_factor": 1.19, "phi3.rope.scaling.original_context_length": 32}
    rope = config_of(Metadata(tmp_path, values), tensors, factors)["rope_parameters"]
    assert rope["rope_type"] == "longrope" and rope["long_factor"] == rope["short_factor"] == [1.0] * 3
    assert rope["original_max_position_embeddings"] == 32


def one_tensor(folder: Path) -> Path:
    writer = gguf.GGUFWriter(folder / "one.gguf", "phi3")
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "one.gguf"


def test_granite_without_rotary_positions_is_refused(tmp_path: Path) -> None:
    values = {"general.architecture": "granite", "granite.embedding_length": 32, "granite.attention.head_count": 4}
    values |= {"granite.feed_forward_length": 48, "granite.block_count": 1, "granite.context_length": 64}
    values |= {"granite.attention.layer_norm_rms_epsilon": 1e-5, "granite.rope.scaling.finetuned": False}
    tensors = {"token_embd.weight": read_shards(one_tensor(tmp_path)).tensors["token_embd.weight"]}
    with pytest.raises(CheckpointError, match="Granite without rotary positions is not supported"):
        config_of(Metadata(tmp_path, values), tensors, {})


def test_yarn_is_what_config_json_would_say(tmp_path: Path) -> None:
    values = {"general.architecture": "llama", "llama.embedding_length": 32, "llama.attention.head_count": 4}
    values |= {"llama.feed_forward_length": 48, "llama.block_count": 1, "llama.context_length": 4096}
    values |= {"llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.scaling.type": "yarn"}
    values |= {"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.original_context_length": 1024}
    values |= {"llama.rope.scaling.yarn_beta_fast": 16.0, "llama.rope.scaling.yarn_attn_factor": 1.25}
    tensors = {"token_embd.weight": read_shards(one_tensor(tmp_path)).tensors["token_embd.weight"]}
    assert config_of(Metadata(tmp_path, values), tensors, {})["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 16.0,
        "attention_factor": 1.25,
    }
