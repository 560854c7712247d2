"""Checkpoint: what is missing, damaged, foreign or dangerous is refused with the file or tensor named."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import SHAPES, edit_weights, write_checkpoint

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.checkpoints.safetensors import INDEX, WEIGHTS, Safetensors
from draftwood.models.errors import CheckpointError
from draftwood.models.layers import network_of, num_parameters

NAME = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "sharded", shards=3)


def edit_json(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(folder)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_parameter_is_known_by_name_and_shape(shape: str, tmp_path: Path) -> None:
    """What transformers wrote is what is read, no tensor more and none fewer."""
    folder = write_checkpoint(tmp_path, shape)
    expected: dict[str, torch.Tensor] = {}
    edit_weights(folder, expected.update)
    checkpoint = Checkpoint(folder)
    shapes = network_of(checkpoint.config).tensors()
    for name, tensor in expected.items():
        assert shapes.pop(name) == tuple(tensor.shape)
        np.testing.assert_array_equal(checkpoint.tensor(name), tensor.numpy())
    assert not shapes
    assert num_parameters(checkpoint.config) == sum(tensor.numel() for tensor in expected.values())


def test_tensors_keep_their_stored_dtype(tmp_path: Path) -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        checkpoint = Checkpoint(write_checkpoint(tmp_path / dtype, dtype=dtype))
        assert checkpoint.tensor(NAME).dtype.name == dtype


def test_weights_that_change_while_they_are_read_are_refused(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    before = np.array(checkpoint.tensor(NAME))
    (folder / WEIGHTS).rename(folder / "before")
    with pytest.raises(CheckpointError, match=f"{WEIGHTS} cannot be read any more .*: build again"):
        checkpoint.tensor(NAME)
    content = (folder / "before").read_bytes()
    (folder / WEIGHTS).write_bytes(content + b" ")
    with pytest.raises(CheckpointError, match=r"cannot be read any more \(it has changed\)"):
        checkpoint.tensor(NAME)
    (folder / WEIGHTS).unlink()
    (folder / "before").rename(folder / WEIGHTS)
    np.testing.assert_array_equal(checkpoint.tensor(NAME), before)


def test_tensors_may_lie_anywhere_in_a_file(tmp_path: Path) -> None:
    """Also where no number of their size begins; and what is no tensor is none."""
    file, numbers = tmp_path / WEIGHTS, np.arange(6, dtype=np.float32).reshape(2, 3)
    tensors = {
        "__metadata__": {"format": "pt"},
        "odd": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [1, 25]},
        "none": {"dtype": "F16", "shape": [0, 4], "data_offsets": [25, 25]},
    }
    header = json.dumps(tensors).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\7" + numbers.tobytes())
    source = Safetensors(tmp_path, dict.fromkeys(tensors, file))
    assert {*source.names()} == {"odd", "a", "none"} and source.tensor("none").shape == (0, 4)
    np.testing.assert_array_equal(source.tensor("a"), numbers)
    assert source.tensor("a").flags.aligned and source.tensor("odd").tolist() == [7]


def test_missing_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere is not a folder: give the path of a Hugging Face checkpoint")


def test_a_file_is_no_folder(folder: Path) -> None:
    refused(folder / WEIGHTS, "is not a folder")


def test_missing_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    refused(folder, r"config\.json is missing")


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe\x00", b'{"vocab_size": 1,}'])
def test_corrupt_config(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    refused(folder, r"config\.json is not readable JSON")


def test_config_that_is_no_object(folder: Path) -> None:
    (folder / "config.json").write_text("[1, 2]")
    refused(folder, r"config\.json is not readable JSON: it holds no JSON object")


def test_unknown_architecture(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(architectures=["GPT2LMHeadModel"]))
    refused(folder, "architecture .GPT2LMHeadModel. is not supported; this project runs LlamaForCausalLM")


def test_missing_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    refused(folder, rf"neither {WEIGHTS} nor {INDEX}: the checkpoint is incomplete")


@pytest.mark.parametrize("kept", [0, 4, 500, -1])
def test_truncated_weights(folder: Path, kept: int) -> None:
    """Cut inside the length field, the header and the data."""
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:kept])
    refused(folder, rf"{WEIGHTS} is not a readable safetensors file .*; download it again")


def test_weights_that_are_only_a_pointer(folder: Path) -> None:
    """What a clone without Git LFS leaves behind."""
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 1234\n")
    refused(folder, "not a readable safetensors file .*; download it again")


def test_missing_tensor(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop(NAME))
    refused(folder, f"tensor {NAME} is missing; the checkpoint is incomplete")


def test_missing_vocabulary_projection(folder: Path) -> None:
    """Weights of a model with tied embeddings, config.json of one without."""
    edit_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))
    refused(folder, r"tensor lm_head\.weight is missing; .* or config\.json lacks tie_word_embeddings: true")
    edit_json(folder / "config.json", lambda config: config.update(tie_word_embeddings=True))
    Checkpoint(folder)


def test_a_projection_that_a_tied_model_stores_must_be_its_embedding(folder: Path) -> None:
    """With another one, releases of transformers differ in what they compute."""
    edit_json(folder / "config.json", lambda config: config.update(tie_word_embeddings=True))
    refused(folder, r"tensor lm_head\.weight differs from the embedding's rows")
    embedding = "model.embed_tokens.weight"
    edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding][:-1].clone()}))
    refused(folder, r"tensor lm_head\.weight differs from the embedding's rows")
    edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))
    Checkpoint(folder)


def test_wrong_shape(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({NAME: torch.zeros(16, 31)}))
    refused(folder, rf"tensor {NAME} has shape \(16, 31\), its configuration asks for \(16, 32\)")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_that_are_no_numbers(tmp_path: Path, dtype: str, value: float) -> None:
    """Found when the tensor is read: opening reads no weights."""
    folder = write_checkpoint(tmp_path, dtype=dtype)
    edit_weights(folder, lambda tensors: tensors[NAME][2, 3].fill_(value))
    checkpoint = Checkpoint(folder)
    with pytest.raises(CheckpointError, match=f"tensor {NAME} holds NaN or infinity; the checkpoint is damaged"):
        checkpoint.tensor(NAME)
    checkpoint.tensor("lm_head.weight")


@pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.float64, "F64")]
)
def test_unsupported_dtype(folder: Path, dtype: torch.dtype, stored: str) -> None:
    edit_weights(folder, lambda tensors: tensors.update({NAME: tensors[NAME].to(dtype)}))
    refused(folder, f"tensor {NAME} is {stored}; use an fp32, fp16 or bf16 checkpoint")


class Explosive:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_unopened(folder: Path, tmp_path: Path, name: str) -> None:
    trace = tmp_path / "trace"
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(pickle.dumps(Explosive(trace)))
    refused(folder, "pickled weights, which can run code when opened: convert them to safetensors first")
    assert not trace.exists()


def test_an_index_of_pickled_weights_is_refused_unopened(sharded: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    (sharded / "pytorch_model.bin").write_bytes(pickle.dumps(Explosive(trace)))
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({NAME: "pytorch_model.bin"}))
    refused(sharded, r"pytorch_model\.bin is not a readable safetensors file")
    assert not trace.exists()


@pytest.mark.parametrize("path", ["{folder}/model.safetensors", "../other/model.safetensors", "a/../../model"])
def test_an_index_must_stay_in_its_folder(sharded: Path, tmp_path: Path, path: str) -> None:
    other = write_checkpoint(tmp_path / "other")
    path = path.format(folder=other)
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({NAME: path}))
    refused(sharded, "leaves the checkpoint folder; refusing to read it")


def test_links_of_a_hub_cache_are_followed(sharded: Path, tmp_path: Path) -> None:
    """There every file of the folder is a link to a blob elsewhere."""
    for file in list(sharded.glob("*.safetensors")):
        blob = file.rename(tmp_path / file.stem)
        file.symlink_to(blob)
    assert Checkpoint(sharded).tensor(NAME).shape == (16, 32)


def test_missing_shard(sharded: Path) -> None:
    shard = json.loads((sharded / INDEX).read_text())["weight_map"][NAME]
    (sharded / shard).unlink()
    refused(sharded, f"{shard} is missing; the checkpoint is incomplete")


def test_a_shard_without_its_tensor(sharded: Path) -> None:
    """The index says where a tensor is, and it is not there."""
    files = json.loads((sharded / INDEX).read_text())["weight_map"]
    other = next(file for file in files.values() if file != files[NAME])
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({NAME: other}))
    refused(sharded, f"tensor {NAME} is missing")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}'])
def test_an_index_without_a_map(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    refused(sharded, "no weight_map; download the file again")


def test_corrupt_index(sharded: Path) -> None:
    (sharded / INDEX).write_text("{")
    refused(sharded, f"{INDEX} is not readable JSON")
