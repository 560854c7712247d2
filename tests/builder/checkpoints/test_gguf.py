"""GGUF files: configuration and weights as in the folder they come from, logits as transformers computes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import SHAPES, VOCAB_SIZE, write_checkpoint, write_tokenizer
from gguf import GGMLQuantizationType as Kind
from gguf_files import SCALES, edited, random_blocks, write_all, write_gguf

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.checkpoints.gguf.file import is_read, read
from draftwood.builder.checkpoints.gguf.header import read_header
from draftwood.models.errors import CheckpointError
from draftwood.models.layers import network_of
from draftwood.models.llama import Llama
from draftwood.models.rope import inverse_frequencies

TOLERANCE = 2e-4
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8}
ROUNDED: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
READ = [kind for kind in gguf.GGML_QUANT_SIZES if is_read(kind)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(write_checkpoint(tmp_path / "folder"))


def logits_of(checkpoint: Checkpoint, tokens: torch.Tensor) -> torch.Tensor:
    """The torch reference's."""
    model = Llama(checkpoint.config, tokens.shape[1])
    names = network_of(checkpoint.config).tensors()
    model.load_state_dict({name: torch.from_numpy(checkpoint.tensor(name).astype(np.float32)) for name in names})
    with torch.no_grad():
        return model.full(tokens).logits


def transformers_logits(file: Path, tokens: torch.Tensor) -> torch.Tensor:
    """What transformers computes from the same file."""
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate")
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = model(tokens).logits
    return logits


def some_tokens() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB_SIZE, (2, 40)))


KINDS = ("F16", "Q8_0", "Q4_1", "Q4_K", "Q6_K")
ALL_KINDS = [*KINDS, *(pytest.param(kind, marks=pytest.mark.full) for kind in ("F32", "BF16", "Q4_0", "Q5_0", "Q5_1"))]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_logits_equal_transformers_on_the_same_file(kind: str, tmp_path: Path) -> None:
    shape = WIDE if kind.endswith("K") else ROUNDED
    folder = write_tokenizer(write_checkpoint(tmp_path / "folder", tie_word_embeddings=kind == "Q8_0", **shape))
    file = write_gguf(folder, tmp_path / "model.gguf", Kind[kind])
    found = logits_of(Checkpoint(file), some_tokens())
    torch.testing.assert_close(found, transformers_logits(file, some_tokens()), atol=TOLERANCE, rtol=0)
    assert found.std() > 0.5  # of weights that matter


@pytest.mark.parametrize("shape", SHAPES)
def test_a_file_says_what_its_folder_says(shape: str, tmp_path: Path) -> None:
    """Every shape of a LLaMA; transformers does not read llama3's and linear rope scaling from GGUF."""
    folder = write_tokenizer(write_checkpoint(tmp_path / "folder", shape))
    checkpoint, expected = Checkpoint(write_gguf(folder, tmp_path / "model.gguf")), Checkpoint(folder)
    assert replace(checkpoint.config, rope_scaling=None, norm_eps=1e-5) == replace(
        expected.config, rope_scaling=None, norm_eps=1e-5
    )
    assert checkpoint.config.norm_eps == np.float32(1e-5)
    np.testing.assert_allclose(inverse_frequencies(checkpoint.config), inverse_frequencies(expected.config), rtol=1e-6)
    for name in network_of(expected.config).tensors():
        np.testing.assert_array_equal(checkpoint.tensor(name), expected.tensor(name))
    torch.testing.assert_close(
        logits_of(checkpoint, some_tokens()), logits_of(expected, some_tokens()), atol=TOLERANCE, rtol=0
    )


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


def test_floats_keep_their_stored_type(folder: Path, tmp_path: Path) -> None:
    for kind, dtype in (("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "float32")):
        checkpoint = Checkpoint(write_gguf(folder, tmp_path / f"{kind}.gguf", Kind[kind]))
        assert checkpoint.tensor("model.layers.0.self_attn.k_proj.weight").dtype.name == dtype


@pytest.mark.parametrize("given_part", [1, 2, 3])
def test_parts_are_read_as_one_file(given_part: int, folder: Path, tmp_path: Path) -> None:
    first = write_gguf(folder, tmp_path / "model.gguf", shards=3)
    checkpoint = Checkpoint(first.with_name(first.name.replace("00001-of", f"{given_part:05}-of")))
    expected = Checkpoint(folder)
    for name in network_of(expected.config).tensors():
        np.testing.assert_array_equal(checkpoint.tensor(name), expected.tensor(name))


def test_parts_that_do_not_belong_together_are_refused(folder: Path, tmp_path: Path) -> None:
    first = write_gguf(folder, tmp_path / "model.gguf", shards=3)
    second, third = (first.with_name(first.name.replace("00001-of", f"0000{part}-of")) for part in (2, 3))
    content = third.read_bytes()
    third.write_bytes(second.read_bytes())
    refused(first, "says that it is part 1 of 3: copy the right one")
    third.unlink()
    refused(first, r"00003-of-00003.gguf is missing: .* all of its parts")
    third.write_bytes(content)
    alone = first.rename(tmp_path / "first.gguf")
    refused(alone, "is one of 3 parts, which are found by their names")
    refused(tmp_path / "model-00001-of-00000.gguf", "is one of 0 parts")
    damaged = write_gguf(folder, tmp_path / "damaged.gguf", edit=lambda each: each.add_string("split.count", "many"))
    refused(damaged, "split.count must be")


def refused(file: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(file)


@pytest.mark.parametrize("divisors", [[1, 2, 0, 2], [1, 1, float("nan"), 2], [1, -1, 1, 1], [1, 1]])
def test_divisors_of_frequencies_that_are_none_are_refused(divisors: list[float], tmp_path: Path) -> None:
    folder = write_tokenizer(write_checkpoint(tmp_path / "folder", hidden_size=32, head_dim=8))
    array = np.array(divisors, np.float32)
    file = write_gguf(folder, tmp_path / "m.gguf", edit=lambda writer: writer.add_tensor("rope_freqs.weight", array))
    refused(file, "read as a config.json, is refused: config.json: rope short_factor")


def test_scales_are_where_the_table_says() -> None:
    """Blocks of the helper hold numbers of the size that was asked for."""
    for kind in SCALES:
        numbers = gguf.quants.dequantize(random_blocks((4, 512), kind, 0, 0.25), kind)
        assert 0.2 < np.abs(numbers).mean() < 0.3, kind


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
        ("general.architecture", "gemma3", "read as a config.json, is refused: .*architecture 'gemma3'"),
    ],
)
def test_missing_settings_and_those_of_another_model_are_refused(
    key: str, value: Any, message: str, folder: Path, tmp_path: Path
) -> None:
    refused(write_gguf(folder, tmp_path / "model.gguf", edit=edited(key, value)), message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            (name, f"LlamaForCausalLM has no tensor '{name}', and computing without it")
            for name in (
                *("blk.0.attn_sinks", "blk.0.attn_q_norm.weight", "blk.2.attn_norm.weight", "cls.weight", "x"),
                *("blk.0.attn_norm.bias", "output_norm.bias", "output.bias", "token_embd.bias"),
            )
        ),
        *(
            (name, r"tensor model.layers.\d.(self_attn|mlp).\w+_proj.bias is missing")
            for name in (
                *("blk.0.attn_v.bias", "blk.1.attn_q.bias", "blk.0.attn_output.bias"),
                *("blk.1.ffn_gate.bias", "blk.0.ffn_down.bias"),
            )
        ),
    ],
)
def test_tensors_that_the_network_lacks_are_refused(name: str, message: str, folder: Path, tmp_path: Path) -> None:
    file = write_gguf(
        folder, tmp_path / "model.gguf", edit=lambda writer: writer.add_tensor(name, np.zeros(8, np.float32))
    )
    refused(file, message)


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    folder = write_tokenizer(write_checkpoint(tmp_path / "folder", **WIDE))
    file = write_gguf(folder, tmp_path / "model.gguf", Kind.Q6_K)
    content = file.read_bytes()
    name = b"blk.0.ffn_up.weight"
    kind = content.index(name) + len(name) + 4 + 2 * 8
    for number, called in ((Kind.Q8_K, "Q8_K"), (77, "of type 77")):
        file.write_bytes(content[:kind] + int(number).to_bytes(4, "little") + content[kind + 4 :])
        refused(file, f"'?blk.0.ffn_up.weight'? is {called}, which is not read: requantise|lies in another one")
