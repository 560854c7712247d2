"""What the rounding of weights for a GPU costs: the divergence of a model with rounded matrices, on a CPU.

    python -m benchmarks.gpu.weight_formats --model SmolLM2-135M --output benchmarks/results

The torch reference computes in fp32 with the weights that a plan stores, dequantised; norms, embedding and activations
are not rounded. NVFP4 is emulated here: no backend offers it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax

from benchmarks.tools.record import add_output, write_results
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.parity import Rows
from draftwood.builder.quantization.formats import FORMATS, LARGEST_E4M3, Quantized, QuantizedCheckpoint
from draftwood.builder.reference import score_rows
from draftwood.models.bindings import LOW_BIT
from draftwood.runtime.text.tokenizer import Tokenizer

TEXT = Path(__file__).resolve().parents[2] / "docs" / "concepts.md"
BLOCK = 16  # inputs that share a scale in NVFP4
LARGEST_E2M1 = np.float32(6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint of the LLaMA family")
    parser.add_argument("--tokens", type=int, default=512, help="of docs/concepts.md (default %(default)s)")
    add_output(parser, "gpu_weight_formats", required=False)
    args = parser.parse_args()
    checkpoint = Checkpoint(args.model)
    tokens = np.array(Tokenizer.load(args.model).encode(TEXT.read_text(encoding="utf-8"))[: args.tokens])
    count = len(tokens)
    rows = Rows(tokens, np.arange(count), np.tri(count, dtype=np.bool_))
    exact = log_softmax(score_rows(checkpoint.tensor, checkpoint.config, rows).logits, axis=-1)
    found = {}
    for name, weights in rounded(checkpoint).items():
        logits = score_rows(weights.tensor, weights.config, rows).logits
        found[name] = figures(exact, log_softmax(logits, axis=-1), tokens)
        print(name, found[name], flush=True)
    if args.output is not None:
        setup = {"hidden": checkpoint.config.hidden_size, "layers": checkpoint.config.num_layers, "tokens": count}
        write_results(args.output, args.name, setup | {"formats": found})


def rounded(checkpoint: Checkpoint) -> Mapping[str, QuantizedCheckpoint]:
    """The checkpoint in each format of TensorRT, and in NVFP4."""
    found = {name: QuantizedCheckpoint(checkpoint, FORMATS["tensorrt-rtx", name]) for name in LOW_BIT}
    return found | {"nvfp4": Nvfp4Checkpoint(checkpoint, FORMATS["tensorrt-rtx", "int4"])}


class Nvfp4Checkpoint(QuantizedCheckpoint):
    """The same view with NVFP4 in place of its format: a scale is an E4M3 number times one number for the matrix."""

    def quantized(self, name: str) -> Quantized:
        stored = self.stored(name)
        e2m1, e4m3 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn
        blocks = stored.reshape(len(stored), -1, BLOCK)
        peaks = np.abs(blocks).max(-1)
        common = max(peaks.max() / (LARGEST_E2M1 * LARGEST_E4M3), np.finfo(np.float32).tiny)
        scales = (peaks / LARGEST_E2M1 / common).astype(e4m3).astype(np.float32) * common
        safe = np.where(scales > 0, scales, 1)[..., None]
        codes = np.clip(blocks / safe, -LARGEST_E2M1, LARGEST_E2M1).astype(e2m1).astype(np.float32)
        return Quantized(codes.reshape(stored.shape), scales.astype(np.float32))


def figures(exact: NDArray[Any], other: NDArray[Any], tokens: NDArray[np.int64]) -> dict[str, float]:
    """divergence: mean KL in nats of a token's distribution; loss: how much more the text costs; best: share of
    tokens with the same most probable successor; accepted: mean of sum min(p, q)."""
    p, q = np.exp(exact), np.exp(other)
    following = (np.arange(len(tokens) - 1), tokens[1:])
    return {
        "divergence": round(float((p * (exact - other)).sum(-1).mean()), 5),
        "loss": round(float((exact[:-1][following] - other[:-1][following]).mean()), 5),
        "best": round(float((exact.argmax(-1) == other.argmax(-1)).mean()), 4),
        "accepted": round(float(np.minimum(p, q).sum(-1).mean()), 4),
    }


if __name__ == "__main__":
    main()
