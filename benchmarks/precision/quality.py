"""What each weight format costs in loss and in acceptance, on the held-out lines of the demo pair.

    python -m benchmarks.precision.quality --output benchmarks/results

The lines run through every engine that a build can make for a CPU, with the arithmetic of each.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.special import log_softmax
from tokenizers import Tokenizer

from benchmarks.tools.record import add_output, make_parser, write_results
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.export import export
from draftwood.builder.engines.make import Source
from draftwood.builder.engines.native import write_weights
from draftwood.builder.quantization.formats import QuantizedCheckpoint, RoundedCheckpoint
from draftwood.models.bindings import DRAFT, ROLES, TARGET, output_names
from draftwood.runtime.engines.backends import BACKENDS, WEIGHTS, Opening
from draftwood.runtime.engines.base import Engine, EngineSpec, TokenBatch

PAIR = Path(__file__).resolve().parents[2] / "models" / "demo"
WIDTHS, CAPACITY = (2, 8, 32, 64), 1024
KINDS = [(each.name, kind) for each in BACKENDS.values() if not each.is_compiled for kind in each.precisions]
REFERENCE = "onnxruntime fp32"  # the other engines are compared with this one


class Reading(NamedTuple):
    """Scores of one model on the lines.

    loss: nats per token. probs: float32 [tokens, V], after every token but the last one of each line.
    """

    loss: float
    probs: NDArray[np.float32]

    def overlap(self, other: Reading) -> float:
        """Mean of Σ min(p, q): the probability that one model accepts a token that the other drew."""
        return float(np.minimum(self.probs, other.probs).sum(-1).mean())


def main() -> None:
    parser = make_parser(__doc__)
    add_output(parser, "precision_quality")
    parser.add_argument("--lines", type=int, default=240, help="held-out lines to read")
    args = parser.parse_args()
    texts = read_held_out(args.lines)
    readings: dict[str, dict[str, Reading]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for role in ROLES:
            engines = track(list_engines(role, Path(folder)), f"Reading with the {role}", total=len(KINDS))
            readings[role] = {name: score_texts(engine, texts) for name, engine in engines}
    figures: dict[str, Any] = {}
    table = Table("", "loss", "perplexity", "best token as fp32", "overlap with fp32", "acceptance")
    for role, other in ((TARGET, DRAFT), (DRAFT, TARGET)):
        rows = {
            name: compare(own, readings[role][REFERENCE], readings[other][REFERENCE])
            for name, own in readings[role].items()
        }
        for name, row in rows.items():
            table.add_row(f"{role}, {name}", *(f"{value:.4f}" for value in row.values()))
        figures[role] = rows
    Console(width=130).print(table)
    tokens = sum(map(len, texts)) - len(texts)
    figures["tokens"] = tokens
    write_results(args.output, args.name, figures)


def read_held_out(limit: int) -> list[list[int]]:
    """Token ids of the first `limit` held-out lines, without those of a single token."""
    tokenizer = Tokenizer.from_file(str(PAIR / TARGET / "tokenizer.json"))
    lines = (PAIR / "held_out.jsonl").read_text(encoding="utf-8").splitlines()[:limit]
    encoded = [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
    return [ids for ids in encoded if len(ids) > 1]


def list_engines(role: str, folder: Path) -> Iterator[tuple[str, Engine]]:
    """Every engine that a build can make of one role, by name. folder: for the files."""
    for backend, precision in KINDS:
        weights = Source(Checkpoint(PAIR / role), role, None, backend, precision).weights
        file = folder / f"{role}-{backend}-{precision}.onnx"
        spec = replace(make_spec(weights, role, backend, precision), file=file.name)
        if BACKENDS[backend].file == WEIGHTS:
            write_weights(weights, CAPACITY, file)
        else:
            assert not isinstance(weights, RoundedCheckpoint)  # a graph on a CPU holds fp32, int8 or int4
            export(weights, role, CAPACITY, file, lambda name: None)
        yield f"{backend} {precision}", BACKENDS[backend].open(file, spec, Opening(0))


def make_spec(
    weights: Checkpoint | QuantizedCheckpoint | RoundedCheckpoint, role: str, backend: str, precision: str
) -> EngineSpec:
    return EngineSpec(role, backend, "", weights.config, WIDTHS, CAPACITY, precision, output_names(role))


def score_texts(engine: Engine, texts: Sequence[Sequence[int]]) -> Reading:
    """Score every token of every line, in passes of up to 64 rows, and close the engine."""
    probs, losses = [], []
    for text in texts:
        cache = engine.new_cache()
        logits = np.concatenate(list(score_chunks(engine, cache, text[:-1])))
        logprobs = log_softmax(logits, axis=-1)
        losses.append(-logprobs[np.arange(len(text) - 1), text[1:]])
        probs.append(np.exp(logprobs))
    engine.close()
    return Reading(float(np.concatenate(losses).mean()), np.concatenate(probs))


def score_chunks(engine: Engine, cache: Any, text: Sequence[int]) -> Iterator[NDArray[np.float32]]:
    """Logits after every token of a text."""
    for start in range(0, len(text), engine.spec.max_width):
        chunk = text[start : start + engine.spec.max_width]
        rows = len(chunk)
        positions = np.arange(start, start + rows)
        batch = TokenBatch.pad(chunk, positions, np.tri(rows, dtype=np.bool_), engine.spec.width_for(rows))
        yield engine.score(batch, cache).logits[:rows].copy()
        cache.commit(range(rows))


def compare(own: Reading, exact: Reading, other: Reading) -> dict[str, float]:
    """Figures of one model. exact: the same model in fp32. other: the other model of the pair in fp32."""
    row = {
        "loss": own.loss,
        "perplexity": float(np.exp(own.loss)),
        "best_token_as_fp32": float((own.probs.argmax(-1) == exact.probs.argmax(-1)).mean()),
        "overlap_with_fp32": own.overlap(exact),
        "acceptance": own.overlap(other),
    }
    return {name: round(value, 4) for name, value in row.items()}


if __name__ == "__main__":
    main()
