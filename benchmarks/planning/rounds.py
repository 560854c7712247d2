"""What rounds take in real decoding, by part, beside what the cost table says of them. Where the two differ, plans are
wrong.

    python -m benchmarks.planning.rounds bundles/smollm2 --prompts PROMPTS.jsonl --output benchmarks/results

Configurations take turns text by text, on the same engines. Each part is the median over all rounds, since other
programs interrupt some. "planned" is the default: its rounds differ, so its parts are means, and of the table there is
the sum of its plans.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.tools.record import add_output, write_results
from draftwood.cli.bench import read_prompts
from draftwood.models.bindings import TARGET
from draftwood.models.errors import BundleError
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.bundle.costs import read_costs
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.planning.cost import CostModel
from draftwood.runtime.text.tokenizer import Tokenizer

LENGTHS = (1, 2, 3, 4)
PLAIN, PLANNED = "plain", "planned"
PARTS = ("target", "draft", "host")


class RoundTimes(NamedTuple):
    """Seconds of a round by part."""

    target: float
    draft: float
    host: float


def make_configurations() -> dict[str, SpeculativeConfig | None]:
    chains = {f"chain of {k}": SpeculativeConfig("chain", max_draft_len=k, budget="fixed") for k in LENGTHS}
    return {PLAIN: None, **chains, PLANNED: SpeculativeConfig()}


def expect(costs: CostModel, name: str, context: int) -> RoundTimes | None:
    """By the table, behind so many tokens; None for rounds of many sizes."""
    assert costs.draft is not None and costs.following is not None
    if name == PLAIN:
        return RoundTimes(costs.target.at(1, context), 0.0, costs.greedy.plain)
    if name == PLANNED:
        return None
    length = int(name.split()[-1])
    drafting = costs.draft.at(2, context) + (length - 1) * costs.following.at(1, context)
    host = costs.greedy.round + length * costs.greedy.token
    return RoundTimes(costs.target.at(length + 1, context), drafting, host)


def decode(decoder: SpeculativeDecoder, prompt: list[int], tokens: int, vocab: int) -> tuple[SpecDecodeStats, Any]:
    """One text; its counts, and the times of its rounds."""
    params, stats = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True), SpecDecodeStats()
    rounds, before = [], (0.0, 0.0, 0.0)
    for _ in decoder.generate(prompt, Sampler(params, prompt, (), vocab), seeded_streams(0), stats):
        now = stats.target_seconds, stats.draft_seconds, stats.host_seconds
        rounds.append(RoundTimes(*(after - earlier for after, earlier in zip(now, before, strict=True))))
        before = now
    return stats, rounds


def measure(folder: Path, texts: list[str], tokens: int, repeats: int, threads: int) -> dict[str, dict[str, Any]]:
    bundle, costs, tokenizer = EngineBundle.open(folder), read_costs(folder), Tokenizer.load(folder)
    if costs is None or costs.draft is None:
        raise BundleError(f"{folder} has no costs of a pair: run draftwood profile first")
    chats = (tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts)
    prompts = [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
    names = make_configurations()
    counts = {name: SpecDecodeStats() for name in names}
    rounds: dict[str, list[RoundTimes]] = {name: [] for name in names}
    with closing(bundle.open_engine(TARGET, threads)) as target, closing(bundle.open_draft(threads)) as draft:
        decoders = {
            name: SpeculativeDecoder(target, draft, config, bundle.manifest.max_length, (), costs)
            for name, config in names.items()
        }
        for repeat in track(range(repeats + 1), "Measuring", transient=True):
            for prompt in prompts:
                for name, decoder in decoders.items():
                    stats, times = decode(decoder, prompt, tokens, target.spec.model.vocab_size)
                    if repeat:  # the first one binds buffers
                        counts[name].add(stats)
                        rounds[name] += times[:-1]  # the last one of a text is cut short
    context = int(np.mean([len(prompt) for prompt in prompts])) + tokens // 2
    found = {}
    for name, stats in counts.items():
        expected = expect(costs, name, context)
        middle: Callable[[list[float]], Any] = np.mean if expected is None else median
        row = {part: round(1e3 * float(middle([getattr(each, part) for each in rounds[name]])), 3) for part in PARTS}
        told = 1e3 * (sum(expected) if expected is not None else stats.expected_seconds / stats.target_passes)
        found[name] = {
            "tokens_per_round": round(stats.num_tokens / stats.target_passes, 3),
            "tokens_per_second": round(stats.tokens_per_second, 1),
            "milliseconds": row,
            "table": None if expected is None else {p: round(1e3 * getattr(expected, p), 3) for p in PARTS},
            "round": round(sum(row.values()), 3),
            "round_by_table": round(told, 3),
        }
    return found


def make_table(found: dict[str, dict[str, Any]]) -> Table:
    result = Table("", "tokens a round", "tokens/s", *(f"{part} (table), ms" for part in PARTS), "round (table), ms")
    for name, row in found.items():
        told = row["table"] or dict.fromkeys(PARTS)
        cells = [f"{row['milliseconds'][part]:.2f} ({told[part]})" for part in PARTS]
        result.add_row(
            name,
            f"{row['tokens_per_round']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            *cells,
            f"{row['round']:.2f} ({row['round_by_table']:.2f})",
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0)
    add_output(parser, "planning_rounds", required=False)
    args = parser.parse_args()
    texts = read_prompts(args.prompts)[: args.limit]
    found = measure(args.bundle, texts, args.max_tokens, args.repeats, args.threads)
    Console(width=140).print(make_table(found))
    if args.output is not None:
        settings = {"bundle": args.bundle.name, "texts": len(texts), "tokens": args.max_tokens, "threads": args.threads}
        write_results(args.output, args.name, settings | {"configurations": found})


if __name__ == "__main__":
    main()
