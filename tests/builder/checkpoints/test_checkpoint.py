"""Checkpoint: what is missing, damaged, foreign or dangerous is refused with the file or tensor named; fused matrices
are read as those that they hold."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import packers
import pytest
import torch
from adapters import PREFIX, write_adapter
from checkpoints import edit_weights, write_checkpoint
from families import write_family
from packers import compressed, pack_checkpoint
from safetensors.torch import load_file

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.checkpoints.safetensors import INDEX, WEIGHTS, Safetensors
from draftwood.builder.checkpoints.source import Blocks
from draftwood.builder.checkpoints.views import split as split_fused
from draftwood.models.errors import CheckpointError
from draftwood.models.layers import network_of

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


def weights(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    return lambda folder: edit_weights(folder, edit)


def settings(**fields: Any) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / "config.json", lambda config: config.update(fields))


def index_of(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / INDEX, edit)


def cut(kept: int) -> Callable[[Path], object]:
    return lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:kept])


def lose_a_shard(folder: Path) -> None:
    (folder / json.loads((folder / INDEX).read_text())["weight_map"][NAME]).unlink()


def name_another_shard(index: dict[str, Any]) -> None:
    """The index says where a tensor is, and it is not there."""
    files = index["weight_map"]
    files[NAME] = next(file for file in files.values() if file != files[NAME])


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 1234\n"  # of a clone without Git LFS
UNREADABLE = rf"{WEIGHTS} is not a readable safetensors file .*; download it again"
# What is done to a folder, and what its refusal says. The first table is of one file of weights, the other of several.
DAMAGED: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "config.json").unlink(), r"config\.json is missing"),
    *(
        (lambda folder, content=content: (folder / "config.json").write_bytes(content), "is not readable JSON")
        for content in (b"{", b"", b"\xff\xfe\x00", b'{"vocab_size": 1,}')
    ),
    (lambda folder: (folder / "config.json").write_text("[1, 2]"), r"not readable JSON: it holds no JSON object"),
    (settings(architectures=["GPT2LMHeadModel"]), "architecture .GPT2LMHeadModel. is not supported; this project runs"),
    (lambda folder: (folder / WEIGHTS).unlink(), rf"neither {WEIGHTS} nor {INDEX}: the checkpoint is incomplete"),
    *((cut(kept), UNREADABLE) for kept in (0, 4, 500, -1)),  # inside the length field, the header and the data
    (lambda folder: (folder / WEIGHTS).write_text(POINTER), UNREADABLE),
    (weights(lambda tensors: tensors.pop(NAME)), f"tensor {NAME} is missing; the checkpoint is incomplete"),
    (
        weights(lambda tensors: tensors.pop("lm_head.weight")),
        r"lm_head\.weight is missing; .* lacks tie_word_embeddings: true",
    ),
    (settings(tie_word_embeddings=True), r"tensor lm_head\.weight differs from the embedding's rows"),
    (
        weights(lambda tensors: tensors.update({NAME: torch.zeros(16, 31)})),
        rf"{NAME} has shape .*31\), .* asks for \(16, 32\)",
    ),
    *(
        (
            weights(lambda tensors, dtype=dtype: tensors.update({NAME: tensors[NAME].to(dtype)})),  # type: ignore[misc]
            f"tensor {NAME} is {stored}; use an fp32, fp16 or bf16 checkpoint",
        )
        for dtype, stored in ((torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.float64, "F64"))
    ),
]
DAMAGED_SHARDS: list[tuple[Callable[[Path], object], str]] = [
    *(
        (
            index_of(lambda index, path=path: index["weight_map"].update({NAME: path})),  # type: ignore[misc]
            "leaves the checkpoint folder; refusing to read it",
        )
        for path in ("/model.safetensors", "../other/model.safetensors", "a/../../model")
    ),
    (lose_a_shard, r"\.safetensors is missing; the checkpoint is incomplete"),
    (index_of(name_another_shard), f"tensor {NAME} is missing"),
    (index_of(lambda index: index.pop("weight_map")), "no weight_map; download the file again"),
    (index_of(lambda index: index.update(weight_map=[])), "no weight_map; download the file again"),
    (lambda folder: (folder / INDEX).write_text("{"), f"{INDEX} is not readable JSON"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGED)
def test_a_damaged_folder_is_refused_by_name(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    refused(folder, message)


@pytest.mark.parametrize(("damage", "message"), DAMAGED_SHARDS)
def test_damaged_shards_are_refused_by_name(sharded: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(sharded)
    refused(sharded, message)


def test_what_is_no_folder(folder: Path) -> None:
    for path in (folder / "nowhere", folder / WEIGHTS):
        refused(path, f"{path.name} is not a folder: give the path of a Hugging Face checkpoint")


def test_a_tied_model_may_store_its_embedding_twice(folder: Path) -> None:
    """With another projection, releases of transformers differ in what they compute."""
    settings(tie_word_embeddings=True)(folder)
    embedding = "model.embed_tokens.weight"
    edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding][:-1].clone()}))
    refused(folder, r"tensor lm_head\.weight differs from the embedding's rows")
    edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))
    Checkpoint(folder)
    edit_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))
    Checkpoint(folder)


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


class Explosive:
    """Leaves a file after when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


def test_pickled_weights_are_refused_unopened(folder: Path, sharded: Path, tmp_path: Path) -> None:
    pickled, trace = pickle.dumps(Explosive(tmp_path / "trace")), tmp_path / "trace"
    (folder / WEIGHTS).unlink()
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth"):
        (folder / name).write_bytes(pickled)
        refused(folder, "pickled weights, which can run code when opened: convert them to safetensors first")
        (folder / name).rename(sharded / name)
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({NAME: "pytorch_model.bin"}))
    refused(sharded, r"pytorch_model\.bin is not a readable safetensors file")
    assert not trace.exists()


LAYER = "model.layers.1"
QKV, GATE_UP = f"{LAYER}.self_attn.qkv_proj.weight", f"{LAYER}.mlp.gate_up_proj.weight"


@pytest.fixture
def phi(tmp_path: Path) -> Path:
    return write_family(tmp_path / "checkpoint", "Phi3")


class InBlocks(Safetensors):
    """A file whose matrices are stored in blocks: their codes are the numbers of their places."""

    def blocks(self, name: str) -> Blocks | None:
        shape = self.tensor(name).shape
        codes = np.arange(np.prod(shape)).reshape(shape).astype(np.int8)
        scales = np.arange(shape[0], dtype=np.float32)[:, None]
        return Blocks(8, codes, scales, -scales, scales[..., None])


def test_blocks_of_a_fused_matrix_are_those_of_its_parts(phi: Path) -> None:
    split, whole = split_fused(InBlocks(phi), Checkpoint(phi).config), InBlocks(phi).blocks(QKV)
    parts = [split.blocks(f"{LAYER}.self_attn.{part}.weight") for part in ("q_proj", "k_proj", "v_proj")]
    assert whole is not None
    for index in range(1, len(whole)):
        found = np.concatenate([np.asarray(part[index]) for part in parts if part is not None])
        np.testing.assert_array_equal(found, np.asarray(whole[index]))
    plain = f"{LAYER}.self_attn.o_proj.weight"
    assert (kept := split.blocks(plain)) is not None and kept.codes.shape == split.tensor(plain).shape


@pytest.mark.parametrize("fused", [QKV, GATE_UP])
def test_a_fused_matrix_of_another_size_is_refused(fused: str, phi: Path) -> None:
    shorter = load_file(phi / "model.safetensors")[fused][:-1].clone()
    for wrong, shape in ((shorter, r"\(\d+, 42\), config.json asks for 10[04] rows"), (torch.zeros(()), r"\(\)")):
        edit_weights(phi, lambda tensors, wrong=wrong: tensors.update({fused: wrong}))  # type: ignore[misc]
        with pytest.raises(CheckpointError, match=rf"tensor {fused} has shape {shape}"):
            Checkpoint(phi)


def test_a_fused_matrix_that_is_missing_or_damaged_is_refused(phi: Path) -> None:
    edit_weights(phi, lambda tensors: tensors[QKV][70, 3].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=f"{LAYER}.self_attn.k_proj.weight holds NaN or infinity"):
        Checkpoint(phi).tensor(f"{LAYER}.self_attn.k_proj.weight")
    Checkpoint(phi).tensor(f"{LAYER}.self_attn.q_proj.weight")
    edit_weights(phi, lambda tensors: tensors.pop(QKV))
    with pytest.raises(CheckpointError, match=f"{LAYER}.self_attn.q_proj.weight is missing; the checkpoint is inc"):
        Checkpoint(phi)


def test_fused_matrices_may_be_quantised(phi: Path, tmp_path: Path) -> None:
    """They are dequantised first, and split then."""
    plain = write_family(tmp_path / "plain", "Phi3")
    pack_checkpoint(phi, plain, compressed("int-quantized", num_bits=8), packers.compressed_int8)
    checkpoint, expected = Checkpoint(phi), Checkpoint(plain)
    for name in network_of(checkpoint.config).tensors():
        np.testing.assert_array_equal(checkpoint.tensor(name), expected.tensor(name))


def test_an_adapter_of_a_fused_matrix_changes_its_parts(phi: Path, tmp_path: Path) -> None:
    tensors = write_adapter(tmp_path / "lora", phi, ("qkv_proj",), settings={"r": 4, "lora_alpha": 8})
    module = QKV.removesuffix(".weight")
    first, second = (tensors[f"{PREFIX}{module}.lora_{end}.weight"].double().numpy() for end in "AB")
    change = 2 * second @ first
    before, after = Checkpoint(phi), Checkpoint(phi, tmp_path / "lora")
    row = 0
    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"{LAYER}.self_attn.{part}.weight"
        weight = before.tensor(name)
        expected = weight.astype(np.float64) + change[row : row + len(weight)]
        np.testing.assert_allclose(after.tensor(name), expected, atol=1e-6, rtol=0)
        row += len(weight)
