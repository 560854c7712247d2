"""Speed against quality: the native weight formats and llama.cpp's on one checkpoint.

    python -m benchmarks.precision.front --checkpoint DIR --prompts ../shared/data/prompts --work WORK \\
        --output benchmarks/results

Divergence is KL(fp32 || format) in nats per token, of the running engines, with the rounding of activations that each
does. The second half of every window of 1,024 tokens counts, as in llama-perplexity. llama.cpp is compared with its own
F32, the native formats with native fp32. Speed is plain greedy tokens per second after 64 tokens of prompt, all engines
in turn, medians. `benchmarks.peers.run` compares speeds with a draft.

Without --llama-cpp (made by benchmarks/peers/setup/llama.cpp.sh) its formats are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.special import log_softmax

from benchmarks.precision.llama_cpp import FORMATS as PEER_FORMATS
from benchmarks.precision.llama_cpp import Complete, Decoded, Divergence, LlamaCpp
from benchmarks.precision.texts import SCORED, WINDOW, Texts, read_texts
from benchmarks.tools.record import add_output, make_parser, write_results
from draftwood.cli.main import main as draftwood
from draftwood.models.bindings import TARGET
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.engines.backends import bits_of_weight
from draftwood.runtime.engines.base import Engine, TokenBatch
from draftwood.runtime.engines.passes import causal_batch, prefill

EXACT, CALIBRATED = "fp32", "int4 calibrated"
NATIVE = (EXACT, "bf16", "int8", "int4", CALIBRATED)
PROMPT_TOKENS, DECODED = 64, 64
Figures = dict[str, dict[str, Any]]  # by name of the format


class Settings(NamedTuple):
    # A Hugging Face folder.
    checkpoint: Path
    # For everything that is made.
    work: Path
    texts: Texts
    # Of each engine.
    threads: int
    llama_cpp: LlamaCpp | None


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR")
    parser.add_argument("--prompts", type=Path, required=True, metavar="DIR", help="folder of prompts, *.jsonl")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="for engines and texts")
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="build/peers/llama.cpp")
    parser.add_argument("--only", default="", metavar="FORMATS", help="int8,Q8_0,...; default: all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="of the speed")
    add_output(parser, "precision_front")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    peer = args.llama_cpp and LlamaCpp(args.llama_cpp, args.checkpoint, args.work, args.threads)
    settings = Settings(args.checkpoint, args.work, read_texts(args.prompts, args.checkpoint), args.threads, peer)
    formats = (*NATIVE, *(PEER_FORMATS if peer else ()))
    names = [name for name in formats if not args.only or name in args.only.split(",")]
    figures: Figures = defaultdict(dict)
    add_divergences(settings, names, figures)
    add_speeds(settings, names, figures, args.repeats)
    show(figures)
    write_results(args.output, args.name, {"threads": args.threads, "formats": figures})


def engine_of(settings: Settings, name: str) -> Engine:
    """One of NATIVE, built once. The text of a calibrated one is none of the evaluated ones."""
    folder, text = settings.work / name.replace(" ", "-"), settings.work / "calibration.txt"
    if not folder.is_dir():
        text.write_text(settings.texts.calibration, encoding="utf-8")
        calibrated = ["--calibration", str(text)] if name == CALIBRATED else []
        models = ["--target", str(settings.checkpoint), "--draft", "none", "--output", str(folder), *calibrated]
        precision = ["--precision", name.split()[0], "--max-length", str(WINDOW), "--no-profile"]
        if failed := draftwood(["build", *models, "--backend", "native", *precision]):
            raise SystemExit(failed)
    return EngineBundle.open(folder).open_engine(TARGET, settings.threads)


def add_divergences(settings: Settings, names: Sequence[str], figures: Figures) -> None:
    peer = settings.llama_cpp
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name in dict.fromkeys((EXACT, *(name for name in names if name in NATIVE))):
            engines[name] = engine_of(settings, name)
            stack.callback(engines[name].close)
            figures[name]["bits"] = round(bits_of_weight(engines[name].spec), 3)
        for text, windows in settings.texts.windows.items():
            scores: dict[str, list[Divergence]] = defaultdict(list)
            for window in track(windows, f"Reading {text} with {', '.join(engines)}"):
                reference = logprobs(engines[EXACT], window)
                for name, engine in engines.items():
                    scores[name].append(score(reference, logprobs(engine, window), window))
            for name in engines:
                figures[name][text] = mean(scores[name])
            for name in (name for name in names if peer is not None and name in PEER_FORMATS):
                assert peer is not None
                figures[name] |= {"bits": round(peer.bits(name), 3), text: peer.divergence(name, text, windows)}


def logprobs(engine: Engine, window: list[int]) -> NDArray[np.float32]:
    """Log-probabilities [scored, V] of the tokens after the scored ones of a window."""
    cache, logits, width = engine.new_cache(), list[NDArray[np.float32]](), engine.spec.max_width
    for start in range(0, len(window), width):
        chunk = window[start : start + width]
        rows = len(chunk)
        mask, positions = np.tri(rows, dtype=np.bool_), np.arange(start, start + rows)
        batch = TokenBatch.pad(chunk, positions, mask, engine.spec.width_for(rows))
        logits.append(engine.score(batch, cache).logits[:rows].copy())
        cache.commit(range(rows))
    return np.asarray(log_softmax(np.concatenate(logits)[SCORED], axis=-1), np.float32)


def score(exact: NDArray[np.float32], own: NDArray[np.float32], window: list[int]) -> Divergence:
    """KL(exact || own), share of equal best tokens, and loss: means over the scored positions."""
    divergence = (np.exp(exact) * (exact - own)).sum(-1, dtype=np.float64).mean()
    same = (exact.argmax(-1) == own.argmax(-1)).mean()
    following = np.array(window[SCORED.start + 1 : SCORED.stop + 1])
    return {"kl": divergence, "top": same, "loss": -own[np.arange(len(own)), following].mean()}


def mean(scores: list[Divergence]) -> Divergence:
    return {key: round(float(np.mean([each[key] for each in scores])), 5) for key in scores[0]}


def decode(engine: Engine, prompt: list[int], tokens: int) -> Decoded:
    """Greedy text after a prompt. The first token comes from the prompt's pass, and is not timed."""
    cache = engine.new_cache()
    last = prefill(engine, cache, prompt)
    assert last is not None
    text = [int(last.logits[0].argmax())]
    start = perf_counter()
    while len(text) < tokens:
        output = engine.score(causal_batch(engine.spec, text[-1:], cache.length), cache)
        cache.commit([0])
        text.append(int(output.logits[0].argmax()))
    return Decoded(text, (tokens - 1) / (perf_counter() - start))


def add_speeds(settings: Settings, names: Sequence[str], figures: Figures, repeats: int) -> None:
    """Every engine once in a round: `repeats` rounds, and one before them that does not count."""
    prompt = settings.texts.windows["prose"][0][:PROMPT_TOKENS]
    speeds: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        decoders: dict[str, Complete] = {}
        for name in names:
            if name in NATIVE:
                engine = engine_of(settings, name)
                stack.callback(engine.close)
                decoders[name] = partial(decode, engine)
            elif settings.llama_cpp is not None:
                decoders[name] = stack.enter_context(settings.llama_cpp.decoder(name))
        for turn in track(range(repeats + 1), "Decoding in turn"):
            for name, complete in decoders.items():
                speed = complete(prompt, DECODED).speed
                if turn:
                    speeds[name].append(speed)
    for name, own in speeds.items():
        figures[name]["tokens_per_second"] = round(median(own), 1)


def show(figures: Figures) -> None:
    table = Table("format", "bits", "KL prose", "KL questions", "best token", "perplexity", "tokens/s")
    for name, row in figures.items():
        prose, questions = row["prose"], row["questions"]
        cells = [f"{row['bits']:.2f}", f"{prose['kl']:.4f}", f"{questions['kl']:.4f}", f"{prose['top']:.3f}"]
        table.add_row(name, *cells, f"{np.exp(prose['loss']):.2f}", str(row.get("tokens_per_second", "")))
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
