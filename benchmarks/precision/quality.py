"""What each weight format costs in loss and in acceptance, on the held-out lines of the demo pair.

    python -m benchmarks.precision.quality --output benchmarks/results

The lines run through the engines, with the arithmetic of each. The torch reference shows what the rounding of weights
costs alone, also with other block sizes, and with a vocabulary projection that is not rounded.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.special import log_softmax
from tokenizers import Tokenizer

from benchmarks.precision.engines import KINDS, open_engines
from benchmarks.tools.record import add_output, write_results
from benchmarks.tools.torch_engine import TorchEngine
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.quantization.formats import QuantizedCheckpoint, WeightFormat
from draftwood.models.bindings import DRAFT, ROLES, TARGET, output_names
from draftwood.models.layers import HEAD_WEIGHT
from draftwood.runtime.engines.backends import BLOCKS
from draftwood.runtime.engines.base import Engine, EngineSpec, TokenBatch

PAIR = Path(__file__).resolve().parents[2] / "models" / "demo"
WIDTHS, CAPACITY = (2, 8, 32, 64), 1024
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser, "precision_quality")
    parser.add_argument("--lines", type=int, default=240, help="held-out lines to read")
    args = parser.parse_args()
    texts = read_held_out(args.lines)
    readings: dict[str, dict[str, Reading]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for role in ROLES:
            models = [*list_compiled(role, Path(folder)), *list_weights_only(role)]
            readings[role] = {
                name: score_texts(open_engine(), texts)
                for name, open_engine in track(models, f"Reading with the {role}")
            }
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
    both = {
        f"{backend} {precision}": round(readings[TARGET][f"{backend} {precision}"].overlap(draft), 4)
        for backend, precision in KINDS
        for draft in [readings[DRAFT][f"{'native' if backend == 'native' else 'onnxruntime'} {precision}"]]
    }
    tokens = sum(map(len, texts)) - len(texts)
    figures |= {"tokens": tokens, "acceptance, draft of the same precision": both}
    write_results(args.output, args.name, figures)


def read_held_out(limit: int) -> list[list[int]]:
    """Token ids of the first `limit` held-out lines, without those of a single token."""
    tokenizer = Tokenizer.from_file(str(PAIR / TARGET / "tokenizer.json"))
    lines = (PAIR / "held_out.jsonl").read_text(encoding="utf-8").splitlines()[:limit]
    encoded = [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
    return [ids for ids in encoded if len(ids) > 1]


def list_compiled(role: str, folder: Path) -> Iterator[tuple[str, Callable[[], Engine]]]:
    """Every engine that a build can make of one role, by name."""
    for backend, precision, engine in open_engines(PAIR / role, role, WIDTHS, CAPACITY, folder):
        yield f"{backend} {precision}", partial(identity, engine)


def identity(engine: Engine) -> Engine:
    return engine


def list_weights_only(role: str) -> Iterator[tuple[str, Callable[[], Engine]]]:
    """The torch reference on rounded weights, by name."""
    for bits in (8, 4):
        for block in BLOCKS:
            view = QuantizedCheckpoint(Checkpoint(PAIR / role), WeightFormat(bits, block))
            spec = make_spec(view, role, "torch", "fp32")
            name = f"weights only, int{bits}, blocks of {block}"
            yield name, partial(TorchEngine, view.tensor, spec)
            yield f"{name}, projection in fp32", partial(TorchEngine, partial(keep_projection, view), spec)


def keep_projection(view: QuantizedCheckpoint, name: str) -> NDArray[np.float32]:
    """A tensor of a rounded checkpoint; the vocabulary projection is not rounded."""
    return view.stored(name) if name == HEAD_WEIGHT else view.tensor(name)


def make_spec(weights: Checkpoint | QuantizedCheckpoint, role: str, backend: str, precision: str) -> EngineSpec:
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
