"""Speed against quality: every weight format of this project, llama.cpp and OpenVINO GenAI on one checkpoint.

    python -m benchmarks.precision.front --checkpoint DIR --prompts ../shared/data/prompts --work WORK \\
        --output benchmarks/results

Three parts, each of which may be run by itself (--parts) and on some formats alone (--only); figures are added to
WORK/figures.json, and the last call writes them with a picture.

divergence: KL(fp32 || format) in nats per token, how often both have the same best token, and loss, of the running
engines, with the rounding of activations that each of them does. The second half of every window of 1,024 tokens
counts, as llama-perplexity has it; llama.cpp is compared with its own F32, everything else with ours.
speed: plain greedy tokens per second behind 64 tokens of prompt, all engines in turn, medians; with --draft also those
of our formats with this draft, behind the questions of --questions.
texts: how many tokens of greedy text pass before it leaves fp32's, over many prompts: quartiles, and how many texts are
the same to their end.

Without --llama-cpp or --openvino (made by the scripts in benchmarks/peers/setup) their formats are left out.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
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

from benchmarks.precision.front_llama_cpp import LlamaCpp
from benchmarks.precision.front_openvino import OpenVino
from benchmarks.precision.front_peer import Complete, Decoded, Divergence, Peer, mean, score
from benchmarks.precision.front_speculation import SUFFIX, Pair
from benchmarks.precision.quality import score_chunks
from benchmarks.precision.texts import LONGEST_PROMPT, SCORED, WINDOW, Texts, read_texts
from benchmarks.tools.record import add_output, write_results
from benchmarks.tools.svg import new_figure, save_svg
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.make import Source
from draftwood.builder.engines.native import write_weights
from draftwood.builder.quantization.calibration import calibrate, read_windows
from draftwood.builder.quantization.formats import FORMATS, QuantizedCheckpoint
from draftwood.models.bindings import TARGET, output_names
from draftwood.runtime.engines.backends import BACKENDS, Opening, bits_of_weight
from draftwood.runtime.engines.base import Engine, EngineSpec
from draftwood.runtime.engines.passes import causal_batch, prefill
from draftwood.runtime.text.tokenizer import Tokenizer

EXACT, CALIBRATED = "fp32", "int4 calibrated"
OURS = (EXACT, "bf16", "int8", "int4", CALIBRATED)
QUESTIONS = Path(__file__).parents[2] / "models" / "demo" / "smollm2" / "prompts.jsonl"
PARTS = ("divergence", "speed", "texts")
PROMPT_TOKENS, DECODED = 64, 64  # of the speed
FIRST_TOKENS = (12, 36)  # of a peer's text, before all of it
WIDTHS = (1, 64)
Figures = dict[str, dict[str, Any]]  # by name of the format


class Settings(NamedTuple):
    """checkpoint: a Hugging Face folder. work: for everything that is made. threads: of each engine. peers: by the
    names of their formats."""

    checkpoint: Path
    work: Path
    texts: Texts
    threads: int
    peers: dict[str, Peer]
    pair: Pair | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR")
    parser.add_argument("--prompts", type=Path, required=True, metavar="DIR", help="folder of prompts, *.jsonl")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="for engines, texts and figures")
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="build/peers/llama.cpp")
    parser.add_argument("--openvino", type=Path, metavar="DIR", help="build/peers/openvino-genai")
    parser.add_argument("--draft", type=Path, metavar="DIR", help="also decode speculatively with this draft")
    parser.add_argument("--questions", type=Path, default=QUESTIONS, metavar="FILE", help="default: %(default)s")
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--only", default="", metavar="FORMATS", help="int8,Q8_0,...; default: all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="of the speed")
    parser.add_argument("--texts", type=int, default=200, help="prompts whose greedy texts are compared")
    parser.add_argument("--tokens", type=int, default=96, help="of each of these texts")
    add_output(parser, "precision_front")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    texts = read_texts(args.prompts, args.checkpoint, args.texts)
    found: list[Peer] = []
    if args.llama_cpp is not None:
        found.append(LlamaCpp(args.llama_cpp, args.checkpoint, args.work, args.threads))
    if args.openvino is not None:
        found.append(OpenVino(args.openvino, args.checkpoint, args.work, args.threads))
    peers = {name: peer for peer in found for name in peer.formats}
    pair = Pair(args.checkpoint, args.draft, args.questions, args.work, args.threads) if args.draft else None
    settings = Settings(args.checkpoint, args.work, texts, args.threads, peers, pair)
    names = [name for name in (*OURS, *peers) if not args.only or name in args.only.split(",")]
    file = figures_of(settings)
    figures: Figures = defaultdict(dict, json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {})
    parts: dict[str, Callable[[], object]] = {
        "divergence": partial(add_divergences, settings, names, figures),
        "speed": partial(add_speeds, settings, names, figures, args.repeats),
        "texts": partial(add_lengths, settings, names, figures, args.tokens),
    }
    for part in args.parts.split(","):
        parts[part]()
        save(settings, figures)
    show(figures)
    written = write_results(args.output, args.name, {"threads": args.threads, "formats": figures})
    draw(figures, found, written.with_suffix(".svg"))


def figures_of(settings: Settings) -> Path:
    return settings.work / "figures.json"


def save(settings: Settings, figures: Figures) -> None:
    figures_of(settings).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def spec_of(settings: Settings, name: str) -> EngineSpec:
    precision = name.split()[0]
    model = Source(Checkpoint(settings.checkpoint), TARGET, None, "native", precision).weights.config
    return EngineSpec(TARGET, "native", "", model, WIDTHS, WINDOW + WIDTHS[-1], precision, output_names(TARGET))


def engine_of(settings: Settings, name: str) -> Engine:
    """One of OURS, packed once. What that took lies beside it."""
    spec, file = spec_of(settings, name), file_of(settings, name)
    if not file.is_file():
        start = perf_counter()
        checkpoint = Checkpoint(settings.checkpoint)
        plain = Source(checkpoint, TARGET, None, "native", spec.precision).weights
        unfinished = file.with_suffix(".unfinished")
        write_weights(calibrated(settings, checkpoint) if name == CALIBRATED else plain, spec.capacity, unfinished)
        file.with_suffix(".seconds").write_text(f"{perf_counter() - start:.1f}", encoding="utf-8")
        unfinished.rename(file)
    return BACKENDS["native"].open(file, spec, Opening(settings.threads))


def file_of(settings: Settings, name: str) -> Path:
    return settings.work / f"{name.replace(' ', '-')}.weights"


def calibrated(settings: Settings, checkpoint: Checkpoint) -> QuantizedCheckpoint:
    """int4, rounded with a text in view that is none of the evaluated ones."""
    text = settings.work / "calibration.txt"
    text.write_text(settings.texts.calibration, encoding="utf-8")
    form = FORMATS["native", "int4"]
    view = QuantizedCheckpoint(checkpoint, form)
    with Tokenizer.load(settings.checkpoint) as tokenizer:
        windows = read_windows(text, tokenizer, checkpoint.config.max_position)
    return QuantizedCheckpoint(checkpoint, form, calibrate(view, windows, lambda: None))


def bits_of(settings: Settings, name: str) -> float:
    """Bits of a weight in the matrices of a pass."""
    return bits_of_weight(spec_of(settings, name)) if name in OURS else settings.peers[name].bits(name)


def add_divergences(settings: Settings, names: Sequence[str], figures: Figures) -> None:
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name in dict.fromkeys((EXACT, *(name for name in names if name in OURS))):
            engines[name] = engine_of(settings, name)
            stack.callback(engines[name].close)
        exact = partial(logprobs, engines[EXACT])
        for text, windows in settings.texts.windows.items():
            scores: dict[str, list[Divergence]] = defaultdict(list)
            for window in track(windows, f"Reading {text} with {', '.join(engines)}"):
                reference = exact(window)
                for name, engine in engines.items():
                    scores[name].append(score(reference, logprobs(engine, window), window))
            for name in engines:
                figures[name][text] = mean(scores[name])
            for name in track([name for name in names if name in settings.peers], f"Reading {text} with others"):
                figures[name][text] = settings.peers[name].divergence(name, text, windows, exact)
    for name in names:
        figures[name]["bits"] = round(bits_of(settings, name), 3)
        if (seconds := file_of(settings, name).with_suffix(".seconds")).is_file():
            figures[name]["packing_seconds"] = float(seconds.read_text(encoding="utf-8"))


def logprobs(engine: Engine, window: list[int]) -> NDArray[np.float32]:
    """[scored, V]: of the tokens after the scored ones of a window."""
    logits = np.concatenate(list(score_chunks(engine, engine.new_cache(), window)))
    return np.asarray(log_softmax(logits[SCORED], axis=-1), np.float32)


def decode(engine: Engine, prompt: list[int], tokens: int) -> Decoded:
    """Greedy text behind a prompt; the first token comes from the prompt's pass, and is not timed."""
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
    """Every engine once in a round, `repeats` rounds and one before them that does not count."""
    prompt = settings.texts.windows["prose"][0][:PROMPT_TOKENS]
    speeds: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        decoders: dict[str, Complete] = {}
        for name in names:
            if name in OURS:
                engine = engine_of(settings, name)
                stack.callback(engine.close)
                decoders[name] = partial(decode, engine)
                if settings.pair is not None and name != CALIBRATED:
                    decoders[name + SUFFIX] = stack.enter_context(settings.pair.decoder(name))
            else:
                decoders[name] = stack.enter_context(settings.peers[name].decoder(name))
        for turn in track(range(repeats + 1), "Decoding in turn"):
            for name, complete in decoders.items():
                speed = complete(prompt, DECODED).speed
                if turn:
                    speeds[name].append(speed)
    for name in names:
        figures[name]["tokens_per_second"] = round(median(speeds[name]), 1)
        if name + SUFFIX in speeds:
            figures[name]["speculative_tokens_per_second"] = round(median(speeds[name + SUFFIX]), 1)


def add_lengths(settings: Settings, names: Sequence[str], figures: Figures, tokens: int) -> None:
    """fp32's texts are written once. An engine of ours reads them: the first token that it would not have written is
    where its own text leaves, for a row has the same bits in a pass of any width. A peer writes its own texts. A text
    that is the same to its end counts as `tokens`, and texts that fp32 ends at once count nothing."""
    prompts = settings.texts.prompts
    exact_file = settings.work / f"greedy-{tokens}-{LONGEST_PROMPT}.json"
    if not exact_file.is_file():
        exact = engine_of(settings, EXACT)
        written = [decode(exact, prompt, tokens).tokens for prompt in track(prompts, "Writing fp32's texts")]
        exact.close()
        exact_file.write_text(json.dumps(written), encoding="utf-8")
    ends = Checkpoint(settings.checkpoint).eos_token_ids()
    texts = [until(ends, text) for text in json.loads(exact_file.read_text(encoding="utf-8"))[: len(prompts)]]
    pairs = [(prompt, text) for prompt, text in zip(prompts, texts, strict=True) if text]
    for name in names:
        both = track(pairs, f"Comparing the texts of {name}")
        if name in OURS:
            engine = engine_of(settings, name)
            lengths = [agreement(engine, prompt, text) for prompt, text in both]
            engine.close()
        else:
            with settings.peers[name].decoder(name) as complete:
                lengths = [written_alike(complete, prompt, text) for prompt, text in both]
        is_whole = [same == len(text) for same, (_, text) in zip(lengths, pairs, strict=True)]
        until_left = [tokens if whole else same for same, whole in zip(lengths, is_whole, strict=True)]
        figures[name]["same_tokens"] = {
            "quartiles": np.percentile(until_left, (25, 50, 75)).round(1).tolist(),
            "whole_texts": sum(is_whole),
            "texts": len(pairs),
        }
        save(settings, figures)  # the texts of one format take minutes


def until(ends: Sequence[int], text: list[int]) -> list[int]:
    """A text up to its first end of text, which a peer does not return."""
    return text[: next((at for at, token in enumerate(text) if token in ends), len(text))]


def agreement(engine: Engine, prompt: list[int], text: list[int]) -> int:
    """Tokens of a text that an engine would have written, too."""
    logits = np.concatenate(list(score_chunks(engine, engine.new_cache(), [*prompt, *text])))
    return common(logits[len(prompt) - 1 :].argmax(-1).tolist(), text)


def written_alike(complete: Complete, prompt: list[int], text: list[int]) -> int:
    """Tokens of a text that a peer writes, too. Most texts part early, so it is asked for a few tokens first."""
    same = 0
    for tokens in (*FIRST_TOKENS, len(text)):
        same = common(complete(prompt, tokens).tokens, text)
        if same < tokens:
            break
    return same


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    same = [one == other for one, other in zip(first, second, strict=False)]
    return same.index(False) if False in same else len(same)


def show(figures: Figures) -> None:
    table = Table("format", "bits", "KL prose", "KL questions", "best token", "perplexity", "tokens/s")
    table.add_column("speculative")
    table.add_column("same tokens")
    keys = ("tokens_per_second", "speculative_tokens_per_second", "same_tokens")
    for name, row in figures.items():
        prose, questions = (row.get(text, {}) for text in ("prose", "questions"))
        kinds = [f"{row.get('bits', 0):.2f}", *(f"{text.get('kl', np.nan):.4f}" for text in (prose, questions))]
        kinds += [f"{prose.get('top', np.nan):.3f}", f"{np.exp(prose.get('loss', np.nan)):.2f}"]
        table.add_row(name, *kinds, *(str(row.get(key, "")) for key in keys))
    Console(width=150).print(table)


def draw(figures: Figures, peers: Sequence[Peer], picture: Path) -> None:
    """Every format that has both figures; true bits of a weight beside it."""
    canvas = new_figure(6, 4)
    axes = canvas.subplots()
    groups = [("draftwood, plain", "o", OURS), *((peer.label, peer.marker, peer.formats) for peer in peers)]
    for label, marker, forms in groups:
        points = sorted(
            (row["prose"]["kl"], row["tokens_per_second"], f"{name}, {row['bits']:.2f}")
            for name, row in figures.items()
            if name in forms and row.get("prose", {}).get("kl", 0) > 0 and "tokens_per_second" in row
        )
        axes.plot(*zip(*[point[:2] for point in points], strict=True), marker, label=label) if points else None
        for index, (divergence, speed, text) in enumerate(points):
            offset = (4, -11) if index % 2 else (4, 4)  # neighbours do not cover each other
            axes.annotate(text, (divergence, speed), xytext=offset, textcoords="offset points", fontsize="small")
    faster = [
        (row["prose"]["kl"], row["speculative_tokens_per_second"])
        for row in figures.values()
        if row.get("prose", {}).get("kl", 0) > 0 and "speculative_tokens_per_second" in row
    ]
    axes.plot(*zip(*sorted(faster), strict=True), "*", label="draftwood, speculative") if faster else None
    axes.set_xlabel("KL divergence to fp32, nats per token of prose")
    axes.set_ylabel("tokens per second")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.15)  # room for the last one's text
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    save_svg(canvas, picture)


if __name__ == "__main__":
    main()
