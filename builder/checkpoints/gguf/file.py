"""A GGUF file, or all parts of a sharded one: configuration, weights and tokenizer of one model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf.quants
import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from ....models.config import LlamaConfig
from ....models.errors import CheckpointError
from ....models.fields import MOST
from ....models.plain_files import open_plain
from ....runtime.text.tokenizer import Tokenizer
from ..source import Blocks, Stored
from ..views import tensors_needed
from .config import FACTORS, FAMILIES, config_of, hugging_face_names, unpermuted, unused_tensor
from .header import AGAIN, Header, Metadata, Tensor, read_header
from .tokenizer import ends_of_text, write_tokenizer

PLAIN: dict[int, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
CHUNK = 1 << 22  # numbers that are read and dequantised together
MAX_SHARDS = 1024
SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)


class GgufFile:
    """The ModelFiles of a `.gguf` file. Any part stands for a whole sharded model. Raises CheckpointError."""

    notes: tuple[str, ...] = ()

    def __init__(self, path: Path) -> None:
        header = read_shards(path)
        self._metadata = Metadata(path, header.metadata)
        self.tensors = GgufTensors(path, header.tensors)
        factors = {name: self.tensors.factors(name) for name in FACTORS if name in header.tensors}
        described = config_of(self._metadata, header.tensors, factors)
        try:
            self.config = LlamaConfig.from_hf(described)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: its metadata, read as a config.json, is refused: {error}") from error
        family = FAMILIES[self._metadata.need("general.architecture", str)]
        names = hugging_face_names(self._metadata, family, self.config.num_layers, header.tensors)
        if unused := names.keys() - tensors_needed(self.config, names):
            raise unused_tensor(self._metadata, family, names[min(unused)])
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads} if family.permuted else {}
        self.tensors.rename(names, heads)

    def more_eos_ids(self) -> tuple[int, ...]:
        """Ids that GGUF has a key for, and ids of control tokens whose names mark the end of a turn or a text."""
        return ends_of_text(self._metadata)

    def sampling(self) -> Mapping[str, Any]:
        """The keys of newer files, by their names in a generation_config.json."""
        return {
            name: self._metadata.get(f"general.sampling.{key}", int if key == "top_k" else float)
            for name, key in SAMPLING.items()
        }

    def write_tokenizer(self, destination: Path) -> Tokenizer:
        return write_tokenizer(self._metadata, destination)


class GgufTensors:
    """The BlockSource of GGUF files. The gguf package dequantises block formats to fp32."""

    def __init__(self, path: Path, tensors: dict[str, Tensor]) -> None:
        self._path, self._tensors = path, tensors
        self._names: dict[str, str] = {}
        self._heads: dict[str, int] = {}

    def rename(self, names: dict[str, str], heads: dict[str, int]) -> None:
        """Set the names by which tensors are read. names: GGUF's names, by Hugging Face's. heads: number of heads of
        the modules whose rows are permuted, by the last part of their names."""
        self._names, self._heads = names, heads

    def stored(self, name: str) -> Stored | None:
        """Raises CheckpointError for a type that the gguf package does not dequantise."""
        if name not in self._names:
            return None
        tensor = self._tensors[self._names[name]]
        if not is_read(tensor.kind):
            raise CheckpointError(
                f"{self._path}: the tensor {self._names[name]} is {tensor.dtype}, which is not read: requantise the "
                "model with llama.cpp's llama-quantize, for instance to Q8_0 or Q4_K_M"
            )
        return Stored(tensor.shape, tensor.dtype)

    def tensor(self, name: str) -> NDArray[Any]:
        array = read(self._tensors[self._names[name]])
        heads = self._heads.get(name.split(".")[-2])
        return array if heads is None else unpermuted(array, heads)

    def blocks(self, name: str) -> Blocks | None:
        """See BlockSource.blocks. The types of BLOCK_TYPES are stored in blocks of 32, and of 16 in Q6_K."""
        tensor = self._tensors[self._names[name]]
        if tensor.kind not in BLOCK_TYPES or len(tensor.shape) != 2:
            return None
        content = np.concatenate([rows for _, rows in raw_rows(tensor)])
        content = content.reshape(*tensor.shape[:-1], -1, GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)][1])
        blocks = BLOCK_TYPES[tensor.kind](content)
        heads = self._heads.get(name.split(".")[-2])
        if heads is None:
            return blocks
        return blocks.each(lambda array: unpermuted(array, heads))

    def factors(self, name: str) -> NDArray[Any]:
        """Read a tensor that belongs to the configuration, fp32 [n], by GGUF's name. Raises CheckpointError."""
        tensor = self._tensors[name]
        if len(tensor.shape) != 1 or tensor.shape[0] > MOST["head_dim"] or tensor.kind != GGMLQuantizationType.F32:
            raise CheckpointError(f"{self._path}: {name} is no short list of fp32 numbers; {AGAIN}")
        return read(tensor)


def q8_0(content: NDArray[np.uint8]) -> Blocks:
    """Split blocks of Q8_0, uint8 [N, K / 32, 34]: an fp16 scale and 32 signed codes of 8 bits."""
    scales, codes = halves(content[..., :2]), np.ascontiguousarray(content[..., 2:]).view(np.int8)
    return Blocks(8, codes.reshape(len(content), -1), scales, np.zeros_like(scales))


def q4_0(content: NDArray[np.uint8]) -> Blocks:
    """Split Q4_0, uint8 [N, K / 32, 18]: an fp16 scale and 32 codes of 4 bits; weight = (code - 8) * scale."""
    scales = halves(content[..., :2])
    return Blocks(4, nibbles(content[..., 2:]), scales, -8 * scales)


def q4_1(content: NDArray[np.uint8]) -> Blocks:
    """Split blocks of Q4_1, uint8 [N, K / 32, 20]: an fp16 scale, an fp16 offset and 32 codes of 4 bits."""
    return Blocks(4, nibbles(content[..., 4:]), halves(content[..., :2]), halves(content[..., 2:4]))


def q4_k(content: NDArray[np.uint8]) -> Blocks:
    """Split super-blocks of Q4_K, uint8 [N, K / 256, 144]: two fp16 numbers, by which the 6-bit scales and minima of 8
    blocks are multiplied, and codes of 4 bits. The products, which have up to 17 bits, are exact."""
    factors = halves(content[..., :4].reshape(*content.shape[:-1], 2, 2)) * np.array([1, -1], np.float32)
    integers = gguf.quants.Q4_K.get_scale_min(content[..., 4:16].reshape(-1, 12))
    shape = (len(content), -1)
    scales, offsets = (
        (factors[..., at, None] * each.reshape(*content.shape[:-1], 8)).reshape(shape)
        for at, each in enumerate(integers)
    )
    return Blocks(4, nibbles(content[..., 16:].reshape(*shape, 32)), scales, offsets, factors)


def q5_0(content: NDArray[np.uint8]) -> Blocks:
    """Split Q5_0, uint8 [N, K / 32, 22]: an fp16 scale, 32 upper bits, lower halves; weight = (code - 16) * scale."""
    scales = halves(content[..., :2])
    return Blocks(5, fifth_bits(content[..., 2:6]) | nibbles(content[..., 6:]), scales, -16 * scales)


def q5_1(content: NDArray[np.uint8]) -> Blocks:
    """Split blocks of Q5_1, uint8 [N, K / 32, 24]: the same with an fp16 offset after the scale."""
    codes = fifth_bits(content[..., 4:8]) | nibbles(content[..., 8:])
    return Blocks(5, codes, halves(content[..., :2]), halves(content[..., 2:4]))


def fifth_bits(content: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Of each byte, uint8 [N, parts, 4], the bits as 16, the lowest first: int8 [N, 32 * parts]."""
    return (np.unpackbits(content.reshape(len(content), -1), axis=1, bitorder="little") << 4).astype(np.int8)


def q5_k(content: NDArray[np.uint8]) -> Blocks:
    """Split super-blocks of Q5_K, uint8 [N, K / 256, 176]: as Q4_K, and before the codes their fifth bits: of a byte of
    32, the lowest belongs to the first of 8 blocks."""
    blocks = q4_k(np.concatenate((content[..., :16], content[..., 48:]), -1))
    upper = content[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return blocks._replace(bits=5, codes=blocks.codes | (upper << 4).astype(np.int8).reshape(blocks.codes.shape))


def q6_k(content: NDArray[np.uint8]) -> Blocks:
    """Split super-blocks of Q6_K, uint8 [N, K / 256, 210]: the lower halves of 256 codes, their upper two bits, 16
    signed scales of 8 bits and an fp16 number by which these are multiplied; weight = (code - 32) * scale. The
    products, of up to 18 bits, are exact."""
    shape = (len(content), -1)
    lower = nibbles(content[..., :128].reshape(*shape, 64))
    upper = content[..., 128:192].reshape(*shape, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    signed = np.ascontiguousarray(content[..., 192:208]).view(np.int8).astype(np.float32)
    factors = halves(content[..., 208:210])[..., None]
    scales = (factors * signed).reshape(shape)
    return Blocks(6, lower | (upper << 4).astype(np.int8).reshape(shape), scales, -32 * scales, factors)


def halves(content: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Read pairs of bytes, uint8 [..., 2], as fp16 numbers; returns float32 [...]."""
    numbers: NDArray[np.float32] = np.ascontiguousarray(content).view("<f2")[..., 0].astype(np.float32)
    return numbers


def nibbles(content: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Split bytes, uint8 [N, parts, n], into codes of 4 bits, int8 [N, 2 * n * parts]: of a part, low halves first."""
    codes: NDArray[np.int8] = np.concatenate((content & 15, content >> 4), axis=-1).astype(np.int8)
    return codes.reshape(len(content), -1)


BLOCK_TYPES: dict[int, Callable[[NDArray[np.uint8]], Blocks]] = {
    GGMLQuantizationType.Q8_0: q8_0,
    GGMLQuantizationType.Q4_0: q4_0,
    GGMLQuantizationType.Q4_1: q4_1,
    GGMLQuantizationType.Q4_K: q4_k,
    GGMLQuantizationType.Q5_0: q5_0,
    GGMLQuantizationType.Q5_1: q5_1,
    GGMLQuantizationType.Q5_K: q5_k,
    GGMLQuantizationType.Q6_K: q6_k,
}


def read_shards(path: Path) -> Header:
    """Read the header of a file, or the headers of all parts of a sharded model, whose metadata is in the first part.
    Raises CheckpointError."""
    part = PART.fullmatch(path.name)
    if part is None:
        header = read_header(path)
        parts = Metadata(path, header.metadata).get("split.count", int) or 1
        if parts != 1:
            raise CheckpointError(
                f"{path} is one of {parts} parts, which are found by their names: give them back their names, such "
                f"as {path.stem}-00001-of-{parts:05}.gguf"
            )
        return header
    stem, _, count, suffix = part.groups()
    if not 0 < int(count) <= MAX_SHARDS:
        raise CheckpointError(f"{path} is one of {int(count)} parts, and 1 to {MAX_SHARDS} are read: merge them")
    files = [path.with_name(f"{stem}-{number:05}-of-{count}{suffix}") for number in range(1, int(count) + 1)]
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, Any] = {}
    for number, file in enumerate(files):
        header = read_header(file)
        metadata = metadata or header.metadata
        told = Metadata(file, header.metadata)
        found = [told.get(key, int) for key in ("split.no", "split.count")]
        if found != [number, int(count)]:
            raise CheckpointError(f"{file} says that it is part {found[0]!r} of {found[1]!r}: copy the right one there")
        if again := tensors.keys() & header.tensors.keys():
            raise CheckpointError(f"{file} repeats the tensor {min(again)!r} of another part: download the parts again")
        tensors |= header.tensors
    if Metadata(path, metadata).get("split.tensors.count", int) not in (None, len(tensors)):
        raise CheckpointError(f"{path}: its parts hold {len(tensors)} tensors, not as many as they should: copy all")
    return Header(metadata, tensors)


def is_read(kind: int) -> bool:
    """Whether the gguf package can dequantise a type. A block of zeros is the test, because it has no list of them."""
    if kind in PLAIN:
        return True
    if kind not in GGML_QUANT_SIZES:
        return False
    known = GGMLQuantizationType(kind)
    try:
        gguf.quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[known][1]), np.uint8), known)
    except NotImplementedError:
        return False
    return True


def read(tensor: Tensor) -> NDArray[Any]:
    """Read a tensor in its stored type, or dequantised to fp32, a chunk at a time. Raises CheckpointError."""
    kind = GGMLQuantizationType(tensor.kind)
    array: NDArray[Any] = np.empty((math.prod(tensor.shape[:-1]), tensor.shape[-1]), PLAIN.get(kind, np.float32))
    for first, content in raw_rows(tensor):
        array[first : first + len(content)] = numbers(content, kind)
    return array.reshape(tensor.shape)


def raw_rows(tensor: Tensor) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """A tensor's rows in chunks: the first row's number, and uint8 [rows, bytes of a row]. Raises CheckpointError."""
    rows = math.prod(tensor.shape[:-1])
    row_bytes, step = tensor.nbytes // rows, max(1, CHUNK // tensor.shape[-1])
    try:
        with open_plain(tensor.file) as handle:
            handle.seek(tensor.begin)
            for first in range(0, rows, step):
                count = min(step, rows - first)
                yield first, np.frombuffer(handle.read(count * row_bytes), np.uint8).reshape(count, row_bytes)
    except (OSError, ValueError) as error:  # it changed since its header was read
        raise CheckpointError(f"{tensor.file} cannot be read ({error}): leave it alone during a build") from error


def numbers(content: NDArray[np.uint8], kind: GGMLQuantizationType) -> NDArray[Any]:
    """Decode rows of bytes, uint8 [rows, bytes of a row], into rows of numbers."""
    if kind in PLAIN:
        return content.view(PLAIN[kind])
    with np.errstate(all="ignore"):  # damaged scales overflow; Checkpoint.tensor refuses infinity
        dequantized: NDArray[np.float32] = gguf.quants.dequantize(content, kind)
    return dequantized
