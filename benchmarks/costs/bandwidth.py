"""Time of a pass of a LLaMA that is larger than the processor's caches, against the floor: bytes over bandwidth.

python -m benchmarks.costs.bandwidth --output benchmarks/results
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.tools.record import add_output, write_results
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.export import export
from draftwood.models.bindings import TARGET, output_names
from draftwood.models.layers import num_parameters
from draftwood.runtime.engines.base import EngineSpec, TokenBatch
from draftwood.runtime.engines.onnx.onnxruntime import OnnxRuntimeEngine
from draftwood.runtime.engines.passes import prefill

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32)
CONTEXT, REPEATS = 256, 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser, "costs_bandwidth")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = make_random_engine(Path(folder))
        bandwidth, passes = measure(engine)
    config = engine.spec.model
    # A pass reads a few rows of the embedding, and every other weight once.
    streamed = 4 * (num_parameters(config) - config.vocab_size * config.hidden_size)
    floor = streamed / bandwidth
    table = Table("rows per pass", "ms", "passes/s", "of the floor", "cost of a pass\nof one row")
    for width, seconds in passes.items():
        share, ratio = f"{floor / seconds:.0%}", f"{seconds / passes[1]:.2f}"
        table.add_row(str(width), f"{1e3 * seconds:.1f}", f"{1 / seconds:.1f}", share, ratio)
    Console().print(f"{streamed / 1e6:.0f} MB of weights at {bandwidth / 1e9:.1f} GB/s: {1e3 * floor:.1f} ms a pass")
    Console().print(table)
    figures: dict[str, Any] = {
        "weights_mb": round(streamed / 1e6, 1),
        "bandwidth_gb_per_s": round(bandwidth / 1e9, 2),
        "floor_ms": round(1e3 * floor, 3),
        "pass_ms": {str(width): round(1e3 * seconds, 3) for width, seconds in passes.items()},
    }
    write_results(args.output, args.name, figures)


def make_random_engine(folder: Path) -> OnnxRuntimeEngine:
    """An engine of about 90M random parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 8192}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 1024}
    LlamaForCausalLM(LlamaConfig.from_dict(shape | heads)).save_pretrained(folder / "checkpoint")
    checkpoint = Checkpoint(folder / "checkpoint")
    file = folder / "target.onnx"
    export(checkpoint, TARGET, 1024, file, lambda name: None)
    widths = (*WIDTHS, 64)
    spec = EngineSpec(TARGET, "onnxruntime", file.name, checkpoint.config, widths, 1024, "fp32", output_names(TARGET))
    return OnnxRuntimeEngine(file, spec)


def measure(engine: OnnxRuntimeEngine) -> tuple[float, dict[int, float]]:
    """Bytes per second that all cores read, and the median seconds of a pass by width. Widths are measured in turn."""
    rng = np.random.default_rng(0)
    cache = engine.new_cache()
    prefill(engine, cache, rng.integers(0, 8192, CONTEXT).tolist())
    memory = torch.ones(100_000_000)
    batches = {}
    for width in WIDTHS:
        positions = np.arange(CONTEXT, CONTEXT + width)
        tokens = rng.integers(0, 8192, width)
        batches[width] = TokenBatch.pad(tokens, positions, np.tri(width, dtype=np.bool_), width)
    reads = []
    for _ in range(REPEATS):
        start = perf_counter()
        memory.sum()
        reads.append(perf_counter() - start)
    sleep(1)  # torch's threads go on spinning for a while and would take cores from the first passes
    passes = {width: list[float]() for width in WIDTHS}
    for _ in range(REPEATS):
        for width, batch in batches.items():
            start = perf_counter()
            engine.score(batch, cache)
            passes[width].append(perf_counter() - start)
            cache.commit([])
    return 4 * len(memory) / min(reads), {width: median(seconds) for width, seconds in passes.items()}


if __name__ == "__main__":
    main()
