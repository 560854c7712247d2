"""GGUF files of Hugging Face folders, written by the gguf package, with names from its own table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.numpy import load_file

from draftwood.builder.checkpoints.gguf.config import config_of
from draftwood.builder.checkpoints.gguf.header import Metadata, Tensor

# Bytes of a block at which an fp16 scale lies, for types that the gguf package reads and does not write.
SCALES = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}
SCALES |= {Kind.IQ4_NL: (0,), Kind.IQ4_XS: (0,)}
PERMUTED = ("llama", "granite", "smollm3")
ROPE_FREQS = "rope_freqs.weight"
Edit = Callable[[gguf.GGUFWriter], object]


def blocks_of(matrix: NDArray[np.float32], kind: Kind, seed: int = 0) -> NDArray[Any]:
    """A matrix in a type, as bytes; of types in SCALES, random blocks of the size of its numbers."""
    if kind in SCALES:
        return random_blocks(matrix.shape, kind, seed, float(np.abs(matrix).mean()))
    return np.asarray(gguf.quants.quantize(matrix, kind))


def random_blocks(shape: tuple[int, ...], kind: Kind, seed: int, size: float = 1.0) -> NDArray[np.uint8]:
    """Random bytes of a type, whose scales make numbers of about `size`."""
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    content = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, nbytes), np.uint8)
    for begin in SCALES.get(kind, ()):
        content[..., begin : begin + 2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    typical = np.abs(gguf.quants.dequantize(content.reshape(-1, nbytes), kind)).mean()
    for begin in SCALES.get(kind, ()):
        content[..., begin : begin + 2] = np.frombuffer(np.float16(size / typical).tobytes(), np.uint8)
    return content.reshape(*shape[:-1], -1)


def permuted(array: NDArray[Any], heads: int) -> NDArray[Any]:
    """As llama.cpp's convert_hf_to_gguf.py puts the rows of queries and keys."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def write_gguf(
    folder: Path,
    file: Path,
    kind: Kind = Kind.F32,
    architecture: str = "llama",
    shards: int = 1,
    others: Mapping[str, Kind] = {},
    edit: Edit = lambda writer: None,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    """Write a folder's model, and its tokenizer if it has one; matrices in `kind`, where their rows divide into its
    blocks. others: types of tensors by GGUF's names. shards: parts, of which the first one's path is returned. edit:
    adds to the metadata."""
    config = json.loads((folder / "config.json").read_text())
    tensors = list(gguf_tensors(folder, config, kind, architecture, others))
    each = -(-len(tensors) // shards) if shards > 1 else 0
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=each, endianess=endianess)
    add_settings(writer, config)
    if (folder / "tokenizer.json").is_file():
        add_tokenizer(writer, folder)
    edit(writer)
    for name, array, raw in tensors:
        writer.add_tensor(name, array, raw_dtype=raw)
    write_all(writer)
    return file if shards == 1 else file.with_name(f"{file.stem}-00001-of-{shards:05}.gguf")


def write_all(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(
    folder: Path, config: dict[str, Any], usual: Kind, architecture: str, others: Mapping[str, Kind]
) -> Iterator[tuple[str, NDArray[Any], Kind]]:
    """Name, content and type of every tensor."""
    arch = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for seed, (name, array) in enumerate(load_file(folder / "model.safetensors").items()):
        module = name.split(".")[-2]
        if architecture == "gemma3" and module.endswith("norm"):
            array = array + 1  # as llama.cpp's converter does
        if architecture in PERMUTED and module in heads:
            array = permuted(array, heads[module])
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert mapped is not None, name
        kind = others.get(mapped, usual)
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        if array.ndim == 2 and array.shape[1] % block == 0:
            yield mapped, blocks_of(array, kind, seed), kind
        else:
            yield mapped, array, Kind.F32
    if (config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        yield ROPE_FREQS, llama3_divisors(config), Kind.F32


def llama3_divisors(config: dict[str, Any]) -> NDArray[np.float32]:
    """As llama.cpp's convert_hf_to_gguf.py computes them, from wavelengths."""
    rope, dim = config["rope_parameters"], config["head_dim"]
    divisors = []
    for index in range(0, dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (index / dim)
        original = rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = (original / wavelength - low) / (high - low)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(rope["factor"])
        else:
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)


def add_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str = "gpt-2") -> None:
    """A byte-level tokenizer.json, its special tokens, and its chat template if there is one."""
    content = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    special = {token["content"]: token["special"] for token in content["added_tokens"]}
    vocabulary = {token["content"]: token["id"] for token in content["added_tokens"]} | content["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    assert [vocabulary[token] for token in tokens] == list(range(len(tokens)))
    kinds = [{True: 3, False: 4, None: 1}[special.get(token)] for token in tokens]
    merges = content["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(vocabulary[settings["bos_token"]])
    writer.add_eos_token_id(vocabulary[settings["eos_token"]])
    if "unk_token" in settings:
        writer.add_unk_token_id(vocabulary[settings["unk_token"]])
    writer.add_add_bos_token(settings.get("add_bos_token", False))
    if (folder / "chat_template.jinja").is_file():
        writer.add_chat_template((folder / "chat_template.jinja").read_text())


def edited(key: str, value: str | int | float | list[Any] | None) -> Callable[[gguf.GGUFWriter], None]:
    """An edit for `write_gguf`: another value of a key, or none."""

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        if value is not None:
            kinds = {str: "string", bool: "bool", int: "uint32", float: "float32", list: "array"}
            getattr(writer, f"add_{kinds[type(value)]}")(key, value)

    return edit


def settings_of(
    folder: Path, rope: dict[str, Any], arrays: dict[str, int], name: str = "llama", **more: Any
) -> dict[str, Any]:
    """What a config.json would say. rope: by keys after "rope."; arrays: by name, their lengths; of ones."""
    values: dict[str, Any] = {
        "embedding_length": 32,
        "attention.head_count": 4,
        "feed_forward_length": 48,
        "block_count": 1,
        "context_length": 4096,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **{f"rope.{key}": value for key, value in rope.items()},
        **more,
    }
    values = {f"{name}.{key}": value for key, value in values.items()} | {"general.architecture": name}
    tensors = {"token_embd.weight": Tensor(folder / "model.gguf", (8, 32), Kind.F32, 0, 1024)}
    factors = {array: np.ones(length, np.float32) for array, length in arrays.items()}
    found: dict[str, Any] = config_of(Metadata(folder, values), tensors, factors)
    return found
