"""Speed, memory and acceptance by context: a bundle, plain and speculative, beside llama.cpp on a GGUF.

    python -m benchmarks.costs.contexts BUNDLE --gguf FILE --llama-cpp build/peers/llama.cpp --prompts FILE.jsonl \\
        --contexts 512,2048,4096,8000 --output benchmarks/results

A prompt of each length is read and followed by greedy text, by all contestants in turn; figures are medians over
prompts and repeats. The floor of a prompt is the larger of its bytes over the memory bandwidth and its products over
the arithmetic speed, in one pass; that of decoding is one row's (`growth`). acceptance: how often the draft's first
choice behind the prompt and a part of the target's text is the target's next token. memory: private and mapped
megabytes behind the text; ours without what the process held before it opened the bundle.

Without --gguf the bundle runs alone. --repeats 0 measures acceptance alone, which a busy machine does not change.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.costs.growth import SpeedMeter, Speeds, compute_floor
from benchmarks.peers.programs.llama_cpp import post, start_server
from benchmarks.peers.settings import encode_chats
from benchmarks.tools.record import add_output, write_results
from draftwood.cli.bench import read_prompts
from draftwood.cli.options import integers
from draftwood.models.bindings import TARGET
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.bundle.costs import read_costs
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.engines.base import Engine, TokenBatch
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.text.tokenizer import Tokenizer

ROOM = 64  # slots beyond prompt and text
PLAIN, SPECULATIVE, PEER = "plain", "speculative", "llama.cpp"


class Run(NamedTuple):
    """One text. reading, decoding: tokens per second of the prompt, and of the text behind it. passes: of the target.
    memory: private and mapped megabytes."""

    text: list[int]
    reading: float
    decoding: float
    passes: int
    memory: tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines; joined and cut to each length")
    parser.add_argument("--contexts", type=integers, default=(512, 2048, 4096, 8000), metavar="LENGTHS")
    parser.add_argument("--gguf", type=Path, help="the same weights for llama.cpp")
    parser.add_argument("--llama-cpp", type=Path, default=Path("build/peers/llama.cpp"), metavar="DIR")
    parser.add_argument("--texts", type=int, default=1, help="prompts of each length (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=48, help="of each text (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="of each text (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--untemplated", action="store_true", help="prompts without the chat template")
    add_output(parser, "costs_contexts")
    args = parser.parse_args()
    speeds = measure_speeds() if args.repeats else None
    before = memory(os.getpid())
    bundle = EngineBundle.open(args.bundle)
    target, draft = bundle.open_engine(TARGET, args.threads), bundle.open_draft(args.threads)
    ours = Ours(bundle, target, draft, before)
    prompts = {length: list(islice(prompts_of(args, bundle, length), args.texts)) for length in args.contexts}
    figures: dict[str, Any] = {}
    with server(args, max(args.contexts)) as peer:
        for length, texts in prompts.items():
            runs: dict[str, list[Run]] = {PLAIN: [], SPECULATIVE: [], PEER: []}
            accepted: list[float] = []
            for prompt in texts:
                for _ in range(args.repeats):
                    runs[PLAIN].append(ours.write(prompt, args.max_tokens, None))
                    runs[SPECULATIVE].append(ours.write(prompt, args.max_tokens, SpeculativeConfig()))
                    if runs[PLAIN][-1].text != runs[SPECULATIVE][-1].text:
                        raise AssertionError("speculation changed the text")
                    if peer is not None:
                        runs[PEER].append(asked(*peer, prompt, args.max_tokens))
                text = runs[PLAIN][-1].text if args.repeats else ours.write(prompt, args.max_tokens, None).text
                accepted.append(first_choices(draft, prompt, text))
            figures[str(length)] = {name: described(each) for name, each in runs.items() if each}
            figures[str(length)]["acceptance"] = round(fmean(accepted), 4)
            if speeds is not None:
                reading = length / compute_floor(target.spec, length, 0, speeds, scored=1)
                decoding = 1 / compute_floor(target.spec, 1, length, speeds)
                figures[str(length)]["floor"] = {"reading": round(reading, 1), "decoding": round(decoding, 1)}
    show(figures)
    names = ("texts", "max_tokens", "repeats", "threads")
    found = {"bundle": args.bundle.name, "gguf": args.gguf and args.gguf.name} | {n: getattr(args, n) for n in names}
    machine = {} if speeds is None else {"speeds": {name: round(value) for name, value in speeds._asdict().items()}}
    write_results(args.output, args.name, found | machine | {"load": os.getloadavg()[0], "contexts": figures})


def measure_speeds() -> Speeds:
    """In a process of its own, whose memory then does not count."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(speeds_here)


def speeds_here() -> Speeds:
    return SpeedMeter().measure()


def prompts_of(args: argparse.Namespace, bundle: EngineBundle, length: int) -> Iterator[list[int]]:
    """Prompts of exactly this length."""
    texts = read_prompts(args.prompts)
    with Tokenizer.load(bundle.folder) as tokenizer:
        if not args.untemplated:
            yield from (each for each in encode_chats(tokenizer, texts, length) if len(each) == length)
            return
        ids = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]
        yield from ([ids[(at + step) % len(ids)] for step in range(length)] for at in range(0, len(ids), length))


class Ours:
    """A bundle. before: the memory that this process held."""

    def __init__(self, bundle: EngineBundle, target: Engine, draft: Engine, before: tuple[float, float]) -> None:
        self.target, self.draft, self.before = target, draft, before
        self.longest, self.costs = bundle.manifest.max_length, read_costs(bundle.folder)

    def write(self, prompt: list[int], tokens: int, config: SpeculativeConfig | None) -> Run:
        """Greedy text from empty caches."""
        draft = None if config is None else self.draft
        decoder = SpeculativeDecoder(self.target, draft, config, self.longest, (), self.costs)
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        sampler, stats = Sampler(params, prompt, (), self.target.spec.model.vocab_size), SpecDecodeStats()
        for _ in decoder.generate(prompt, sampler, seeded_streams(0), stats):
            pass
        private, mapped = (now - old for now, old in zip(memory(os.getpid()), self.before, strict=True))
        reading = len(prompt) / stats.prompt_seconds
        return Run(list(sampler.output), reading, stats.tokens_per_second, stats.target_passes, (private, mapped))


def first_choices(draft: Engine, prompt: list[int], text: list[int]) -> float:
    """The share of a text's tokens that the draft would have proposed first."""
    most = draft.spec.model.draft_context
    prompt = prompt if most is None or len(prompt) <= most else prompt[-(most // 2) :]
    cache, whole, right = draft.new_cache(), [*prompt, *text], 0
    tokens = draft.spec.kept_tokens or range(draft.spec.model.vocab_size)
    for start in range(0, len(whole) - 1, draft.spec.max_width):
        chunk = whole[start : start + draft.spec.max_width]
        rows = np.arange(len(chunk))
        mask = np.tri(len(chunk), dtype=np.bool_)
        batch = TokenBatch.pad(chunk, start + rows, mask, draft.spec.width_for(len(chunk)))
        ids = draft.score(batch, cache).top_ids
        assert ids is not None, "only a draft ranks tokens"
        right += sum(
            int(tokens[ids[row, 0]]) == whole[start + row + 1]
            for row in rows
            if len(prompt) - 1 <= start + row < len(whole) - 1
        )
        cache.commit(range(len(chunk)))
    cache.close()
    return right / len(text)


@contextmanager
def server(args: argparse.Namespace, longest: int) -> Iterator[tuple[http.client.HTTPConnection, int] | None]:
    """llama.cpp's server and its process; None without a GGUF."""
    if args.gguf is None or not args.repeats:
        yield None
        return
    slots, threads = longest + args.max_tokens + ROOM, args.threads
    arguments = ["-m", args.gguf, "-c", slots, "-np", 1, "-t", threads, "-tb", threads, "--log-disable"]
    connection, process = start_server([args.llama_cpp / "build" / "bin" / "llama-server", *arguments])
    try:
        yield connection, process.pid
    finally:
        process.terminate()
        process.wait()


def asked(connection: http.client.HTTPConnection, process: int, prompt: list[int], tokens: int) -> Run:
    """llama.cpp's greedy text, and the figures of its own clock."""
    request = {"prompt": prompt, "n_predict": tokens, "temperature": 0.0, "samplers": ["temperature"]}
    request |= {"cache_prompt": False, "return_tokens": True, "ignore_eos": True}
    connection.close()  # the server closes idle connections
    connection.connect()
    reply = post(connection, "/completion", json.dumps(request))
    timings = reply["timings"]
    reading, decoding = timings["prompt_per_second"], timings["predicted_per_second"]
    return Run(reply["tokens"], reading, decoding, len(reply["tokens"]), memory(process))


def memory(process: int) -> tuple[float, float]:
    """Private and mapped megabytes that a process has in memory."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    kilobytes = {
        name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if "Rss" in name
    }
    return kilobytes["RssAnon"] / 1e3, kilobytes["RssFile"] / 1e3


def described(runs: list[Run]) -> dict[str, Any]:
    """Medians of tokens per second and of megabytes; tokens of a pass of the target."""
    return {
        "reading": round(median(run.reading for run in runs), 1),
        "decoding": round(median(run.decoding for run in runs), 1),
        "tokens_per_pass": round(sum(len(run.text) for run in runs) / sum(run.passes for run in runs), 2),
        "private_mb": round(median(run.memory[0] for run in runs)),
        "mapped_mb": round(median(run.memory[1] for run in runs)),
    }


def show(figures: dict[str, Any]) -> None:
    columns = ("prompt tokens/s", "floor", "text tokens/s", "floor", "tokens a pass", "private MB", "mapped MB")
    table = Table("context", "", *columns, "acceptance")
    for length, rows in figures.items():
        floor = rows.get("floor", {"reading": 0.0, "decoding": 0.0})
        for name in (PLAIN, SPECULATIVE, PEER):
            if name in rows:
                row = rows[name]
                speeds = (row["reading"], floor["reading"], row["decoding"], floor["decoding"])
                rest = (row["tokens_per_pass"], row["private_mb"], row["mapped_mb"], rows["acceptance"])
                table.add_row(length, name, *map(str, (*speeds, *rest)))
        if PLAIN not in rows:
            table.add_row(length, *[""] * (len(columns) + 1), str(rows["acceptance"]))
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
