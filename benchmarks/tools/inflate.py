"""Rewrite a trained checkpoint in the shape of a real LLaMA, so that it computes the same function.

    python -m benchmarks.tools.inflate --checkpoint models/demo/target --shape 110m --output inflated/target

A small model has unrealistic costs, and a random one an unrealistic acceptance. The result has the acceptance of the
trained model and the costs of the real shape, in files that every peer loads. Where the shape is larger, weights are
random, and their results are multiplied by zeros of random signs, so that no two matrices are equal.

Residual stream. The wider stream X of width W holds k copies of the source's x of width H side by side; the rest of X
is zero. So mean(X²) = (kH/W) mean(x²). With ε' = (kH/W) ε an RMSNorm divides by √(kH/W) times the source's divisor, and
its weight is the source's times √(kH/W) on the first copy, zero elsewhere. k is the smallest number that makes √(kH/W)
a power of two, so that no weight is rounded, not even in bf16. If there is no such k, k is 1 and the norms round.

Heads. Rotary frequencies depend on the size of a head, so heads keep their size, and the result has as many as fill the
shape's widths. Query head h reads key/value head h // G. If g > G query heads share one in the source, that one is
repeated ⌈g/G⌉ times. Columns of `o_proj` and `down_proj` that read additional heads and channels are zero, and an
additional layer adds zero. The vocabulary stays the source's.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from rich.progress import track
from safetensors.numpy import save_file

from benchmarks.tools.record import make_parser
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.checkpoints.source import read_json
from draftwood.models.config import LlamaConfig
from draftwood.models.errors import CheckpointError, ConfigError, DraftwoodError
from draftwood.models.layers import Network, network_of, num_parameters
from draftwood.runtime.bundle.staging import staging_folder

WEIGHTS = "model.safetensors"
COPIED = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*")
# Kinds of axes. READ, WRITE: the axis reads or writes the residual stream.
READ, WRITE, QUERY, KV, INNER, VOCABULARY = "read", "write", "query", "kv", "inner", "vocabulary"
# Axes of a matrix by its name: outputs of each part, and inputs. A bias has the outputs; a norm reads.
AXES = {
    "embedding": ((VOCABULARY,), WRITE),
    "qkv": ((QUERY, KV, KV), READ),
    "output": ((WRITE,), QUERY),
    "gate_up": ((INNER, INNER), READ),
    "down": ((WRITE,), INNER),
    "head": ((VOCABULARY,), READ),
}


@dataclass(frozen=True, slots=True)
class InflatedShape:
    """The sizes of a real LLaMA. query_size, kv_size: widths of all heads together."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    query_size: int
    kv_size: int


SHAPES = {
    "110m": InflatedShape(768, 2048, 12, 768, 768),
    "1.1b": InflatedShape(2048, 5632, 22, 2048, 256),  # TinyLlama
}


class Placement(NamedTuple):
    """One axis: entry `taken[i]` of the source's tensor stands at `placed[i]` of the result's."""

    placed: NDArray[np.int64]
    taken: NDArray[np.int64]


class Inflation:
    """A checkpoint in another shape. Raises ConfigError when it does not fit. config: the result's."""

    def __init__(self, source: Checkpoint, shape: InflatedShape) -> None:
        self.source = source
        refuse_misfit(source.config, shape)
        narrow = network_of(source.config)
        copies = count_residual_copies(source.config.hidden_size, shape.hidden_size)
        share = copies * source.config.hidden_size / shape.hidden_size
        self.norm_gain = math.sqrt(share)
        self.fields = read_json(source.path / "config.json") | {
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.query_size // source.config.head_dim,
            "num_key_value_heads": shape.kv_size // source.config.head_dim,
            "head_dim": source.config.head_dim,
            "rms_norm_eps": source.config.norm_eps * share,
        }
        self.config = LlamaConfig.from_hf(self.fields)
        wide = network_of(self.config)
        self.shapes, self._axes = wide.tensors(), name_axes(wide)
        # An additional layer has the norms of the source's last layer, and random matrices at that layer's scale.
        self._twins = {
            name: twin
            for layer in wide.layers[len(narrow.layers) :]
            for name, twin in zip(layer.tensors(), narrow.layers[-1].tensors(), strict=True)
        }
        self._placements = place_axes(source.config, self.config, copies)

    def tensor(self, name: str) -> NDArray[Any]:
        """One tensor of the result, in the dtype of the source's and always the same. Raises CheckpointError when that
        one is damaged."""
        twin, norm = self._twins.get(name, name), name not in self._axes
        own = self.source.tensor(twin)
        weight = own.astype(np.float32)
        shape, axes = self.shapes[name], self._axes.get(name, (READ,))
        result = np.zeros(shape, np.float32)
        if not norm:
            draws = np.random.default_rng(crc32(name.encode())).standard_normal(shape, np.float32)
            # Zeros of random signs: OpenVINO stores equal matrices only once, and would read less than other peers.
            result = np.copysign(result, draws) if WRITE in axes else draws * np.sqrt(np.square(weight).mean())
        if norm or twin == name:
            places = [self._placements[axis] for axis in axes]
            source = weight[np.ix_(*(place.taken for place in places))]
            result[np.ix_(*(place.placed for place in places))] = source * self.norm_gain if norm else source
        return result.astype(own.dtype, copy=False)


def name_axes(network: Network) -> dict[str, tuple[str, ...]]:
    """Kinds of the axes of every matrix and bias by the tensor's name; norms are left out."""
    axes: dict[str, tuple[str, ...]] = {}
    layers = (matrix for layer in network.layers for matrix in layer.matrices)
    for matrix in (network.head, network.embedding, *layers):  # the embedding's axes replace those of a tied head
        outputs, inputs = AXES[matrix.name.split(".")[-1]]
        for source, output in zip(matrix.sources, outputs, strict=True):
            axes |= {f"{source}.weight": (output, inputs), f"{source}.bias": (output,)}
    return axes


def refuse_misfit(source: LlamaConfig, shape: InflatedShape) -> None:
    """Raises ConfigError that names the first size of the shape into which the source does not fit."""
    if others := source.variant.differences:
        raise ConfigError(f"only LLaMAs are inflated, and this model's layers have {', '.join(others)}: choose another")
    for size, width in (("query", shape.query_size), ("key and value", shape.kv_size)):
        if width % source.head_dim:
            raise ConfigError(
                f"heads of {source.head_dim} do not fill the shape's {size} width of {width}: heads keep their size, "
                f"so choose a shape whose widths are multiples of it"
            )
    heads, kv_heads = shape.query_size // source.head_dim, shape.kv_size // source.head_dim
    if heads % kv_heads:
        raise ConfigError(f"the shape's query width {shape.query_size} is no multiple of its key width {shape.kv_size}")
    needed = {
        "hidden_size": (source.hidden_size, shape.hidden_size),
        "intermediate_size": (source.intermediate_size, shape.intermediate_size),
        "layers": (source.num_layers, shape.num_layers),
        "heads": (source.num_heads, heads),
        "key/value heads": (source.num_kv_heads * count_kv_copies(source, heads // kv_heads), kv_heads),
    }
    for size, (need, room) in needed.items():
        if need > room:
            raise ConfigError(
                f"the checkpoint needs {need} {size} and the shape has {room}: choose a larger shape, one of "
                f"{', '.join(SHAPES)}, or a smaller checkpoint"
            )


def count_kv_copies(source: LlamaConfig, group: int) -> int:
    """Number of key/value heads, each for `group` query heads, that replace one of the source's."""
    return math.ceil(source.num_heads // source.num_kv_heads / group)


def count_residual_copies(narrow: int, wide: int) -> int:
    """The smallest k for which wide / (k narrow) is a power of four; 1 if there is none."""
    for copies in range(1, wide // narrow + 1):
        ratio, rest = divmod(wide, copies * narrow)
        root = math.isqrt(ratio)
        if not rest and root * root == ratio and root & (root - 1) == 0:
            return copies
    return 1


def place_axes(source: LlamaConfig, result: LlamaConfig, copies: int) -> dict[str, Placement]:
    """Where the source's entries stand on each kind of axis."""
    own, shared = source.num_heads // source.num_kv_heads, result.num_heads // result.num_kv_heads
    repeats = count_kv_copies(source, shared)
    query_heads = np.arange(source.num_heads)
    kv_head, member = np.divmod(query_heads, own)
    hidden = np.arange(source.hidden_size)

    def whole(size: int) -> Placement:
        return Placement(np.arange(size), np.arange(size))

    def rows(heads: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of q_proj, k_proj or v_proj that compute these heads."""
        return (heads[:, None] * source.head_dim + np.arange(source.head_dim)).ravel()

    return {
        READ: whole(source.hidden_size),
        WRITE: Placement(np.arange(copies * source.hidden_size), np.tile(hidden, copies)),
        # The repeats of key/value head j begin at repeats * j, the query heads that read them at shared times that.
        QUERY: Placement(rows(kv_head * repeats * shared + member), rows(query_heads)),
        KV: Placement(
            rows(np.arange(source.num_kv_heads * repeats)), rows(np.arange(source.num_kv_heads).repeat(repeats))
        ),
        INNER: whole(source.intermediate_size),
        VOCABULARY: whole(source.vocab_size),
    }


def write_inflated(inflation: Inflation, output: Path) -> None:
    """Write the result's folder, or nothing: configuration, tokenizer and weights.

    Raises CheckpointError when `output` exists or a tensor cannot be made.
    """
    if output.exists():
        raise CheckpointError(f"{output} exists: choose another --output, or remove it yourself")
    with staging_folder(output, WEIGHTS, CheckpointError) as staging:
        for file in (file for pattern in COPIED for file in inflation.source.path.glob(pattern)):
            shutil.copyfile(file, staging / file.name)
        tensors = {name: inflation.tensor(name) for name in track(inflation.shapes, "Inflating")}
        save_file(tensors, staging / WEIGHTS, metadata={"format": "pt"})
        (staging / "config.json").write_text(json.dumps(inflation.fields, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a LLaMA's Hugging Face folder")
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--output", type=Path, required=True, help="the folder to write, which must not exist")
    args = parser.parse_args()
    try:
        inflation = Inflation(Checkpoint(args.checkpoint), SHAPES[args.shape])
        write_inflated(inflation, args.output)
    except DraftwoodError as error:
        parser.error(str(error))
    config = inflation.config
    print(
        f"{args.output}: {num_parameters(config) / 1e6:,.0f}M parameters, {config.num_layers} layers of "
        f"{config.hidden_size}, {config.num_heads} heads of {config.head_dim} with {config.num_kv_heads} for keys and "
        f"values, {config.vocab_size} tokens"
    )


if __name__ == "__main__":
    main()
