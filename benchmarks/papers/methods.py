"""The papers' methods against each other on one pair: acceptance, draft work, and the speed-up a cost model gives.

    python -m benchmarks.papers.methods bundles/demo --prompts models/demo/prompts.jsonl --output benchmarks/results

Counts do not depend on how busy the machine is. Modelled speed-up: tokens / (target passes + c * draft passes), where c
is the cost of a draft pass in target passes: 0.2 in SpecDec++'s pair, 0.02 for 68M drafting for 7B, 0.005 for 7B
drafting for an offloaded 70B (papers' own figures). A pass is counted as one whatever its width, as the papers do.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.papers.plot import draw
from benchmarks.tools.record import add_output, write_results
from draftwood.cli.bench import read_prompts
from draftwood.models.bindings import DRAFT, TARGET
from draftwood.runtime.bundle import EngineBundle
from draftwood.runtime.decoder import SpeculativeDecoder
from draftwood.runtime.engines.base import Engine
from draftwood.runtime.metrics import SpecDecodeStats
from draftwood.runtime.random import seeded_streams
from draftwood.runtime.sampling import Sampler, SamplingParams
from draftwood.runtime.speculation.baseline import sequoia
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.token_tree import TokenTree
from draftwood.runtime.speculation.verifier import Acceptance
from draftwood.runtime.tokenizer import Tokenizer

TEMPERATURES = (0.0, 0.6, 1.0)
BUDGETS = {8: 5, 16: 6, 32: 8, 63: 10}  # tokens of a tree, and its depth
BRANCHING = {8: (2, 1, 1, 1), 16: (2, 2, 1, 1), 32: (4, 2, 1, 1), 63: (4, 4, 1, 1)}
RATIOS = (0.2, 0.02, 0.005)
WIDTH = 8
RANKS = 8  # children whose acceptance Sequoia's shape is computed from
RESAMPLES = 1000


class Counts(NamedTuple):
    """What one configuration did for one prompt."""

    tokens: int
    target_passes: int
    draft_passes: int
    drafted: int  # tokens the draft scored or proposed
    proposed: int
    accepted: int


class Ranks(SpeculativeDecoder):
    """Notes which child of the root is accepted."""

    seen: list[int]

    def _commit(self, tree: TokenTree, acceptance: Acceptance) -> None:
        self.seen.append(acceptance.rows[0] - 1 if acceptance.rows else RANKS)
        super()._commit(tree, acceptance)


class Bench:
    """One pair of engines and the prompts they answer."""

    def __init__(self, bundle: EngineBundle, prompts: Sequence[list[int]], max_tokens: int) -> None:
        self.bundle, self.prompts, self.max_tokens = bundle, prompts, max_tokens
        self.engines: tuple[Engine, Engine] = (bundle.open_engine(TARGET), bundle.open_draft())

    def decode(self, decoder: SpeculativeDecoder, temperature: float) -> Iterator[SpecDecodeStats]:
        vocab_size = self.engines[0].spec.model.vocab_size
        for index, prompt in enumerate(self.prompts):
            params = SamplingParams(max_tokens=self.max_tokens, temperature=temperature, ignore_eos=True)
            stats = SpecDecodeStats()
            sampler = Sampler(params, prompt, (), vocab_size)
            for _ in decoder.generate(prompt, sampler, seeded_streams(index), stats):
                pass
            yield stats

    def run(self, config: SpeculativeConfig, temperature: float) -> list[Counts]:
        decoder = SpeculativeDecoder(*self.engines, config, self.bundle.manifest.max_length, ())
        return [
            Counts(
                stats.num_tokens,
                stats.target_passes,
                stats.draft_passes,
                stats.draft_rows,
                stats.num_draft_tokens,
                stats.num_accepted_tokens,
            )
            for stats in self.decode(decoder, temperature)
        ]

    def acceptance_by_rank(self, temperature: float) -> list[float]:
        """The share of rounds in which each child of the root is the accepted one, by draw order."""
        config = SpeculativeConfig("static", topology=(0,) * RANKS, max_total_draft_tokens=RANKS, verify="rejection")
        decoder = Ranks(*self.engines, config, self.bundle.manifest.max_length, ())
        decoder.seen = []
        for _ in self.decode(decoder, temperature):
            pass
        counts = np.bincount(decoder.seen, minlength=RANKS + 1)[:RANKS]
        return [float(share) for share in counts / len(decoder.seen)]


def configurations(budget: int, acceptance: Sequence[float], head: bool) -> dict[str, SpeculativeConfig]:
    """Every method at one budget of verified tokens."""
    depth = BUDGETS[budget]
    tree = SpeculativeConfig(
        "topk", max_total_draft_tokens=budget, max_draft_len=depth, frontier_width=min(WIDTH, budget)
    )
    longest = min(budget, 20)
    chain = SpeculativeConfig("chain", max_draft_len=longest)
    shape = sequoia(acceptance, budget, depth)
    found = {f"chain {length}": replace(chain, max_draft_len=length) for length in (2, 4, 6, 8) if length <= budget}
    found |= {
        "k-ary": replace(tree, grow="k-ary", branching=BRANCHING[budget]),
        "Sequoia": replace(tree, grow="static", topology=shape),
        "top-k": tree,
        "top-k + GSD": replace(tree, merge="gsd"),
        "DySpec": replace(tree, grow="dyspec", key="draft"),
        "DySpec calibrated": replace(tree, grow="dyspec", key="calibrated"),
        "DySpec calibrated + GSD": replace(tree, grow="dyspec", merge="gsd"),
        "DySpec threshold": replace(tree, grow="dyspec-threshold", key="draft", draft_threshold=1 / budget),
        "DySpec threshold calibrated": replace(tree, grow="dyspec-threshold", draft_threshold=1 / budget),
        "DySpec threshold calibrated + GSD": replace(
            tree, grow="dyspec-threshold", merge="gsd", draft_threshold=1 / budget
        ),
        "confidence": replace(chain, stop_rule="confidence"),
        "entropy": replace(chain, stop_rule="entropy"),
    }
    if budget <= 16:
        found["DySpec heap"] = replace(tree, grow="dyspec-heap", key="draft")
    if head:
        for h in (0.3, 0.5, 0.7):
            found[f"SpecDec++ {h}"] = replace(chain, stop_rule="specdec++", rejection_threshold=h)
        found["DySpec by head"] = replace(tree, grow="dyspec", key="head")
        found["DySpec by head + SpecDec++"] = replace(
            tree, grow="dyspec", key="head", stop_rule="specdec++", rejection_threshold=0.9
        )
    return found


def summary(counts: Sequence[Counts]) -> dict[str, Any]:
    """Totals as rates, with a 95 % bootstrap interval over prompts for tokens per target pass."""
    table = np.array(counts, np.float64)
    tokens, target, draft, drafted, proposed, accepted = table.sum(0)
    picks = np.random.default_rng(0).integers(len(table), size=(RESAMPLES, len(table)))
    resampled = table[picks].sum(1)
    low, high = np.percentile(resampled[:, 0] / resampled[:, 1], (2.5, 97.5))
    return {
        "tokens_per_target_pass": round(tokens / target, 3),
        "interval_95": [round(float(low), 3), round(float(high), 3)],
        "draft_passes_per_round": round(draft / target, 3),
        "draft_tokens_per_round": round(drafted / target, 3),
        "discard_rate": round((proposed - accepted) / max(1.0, tokens), 3),
        "verification_rate": round(target / tokens, 3),
        "modelled_speed_up": {str(c): round(tokens / (target + c * draft), 3) for c in RATIOS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--budgets", type=int, nargs="*", default=list(BUDGETS))
    add_output(parser, "papers_methods")
    args = parser.parse_args()
    bundle = EngineBundle.open(args.bundle)
    tokenizer = Tokenizer.load(bundle.folder)
    prompts = [tokenizer.encode(text)[-200:] for text in read_prompts(args.prompts)[: args.limit]]
    bench = Bench(bundle, prompts, args.max_tokens)
    head = "acceptance" in bundle.manifest.engines[DRAFT].outputs
    console = Console()
    results: dict[str, Any] = {}
    for temperature in TEMPERATURES:
        acceptance = bench.acceptance_by_rank(temperature)
        for budget in args.budgets:
            rows = {}
            configs = configurations(budget, acceptance, head)
            label = f"temperature {temperature}, {budget} tokens"
            for name, config in track(configs.items(), label, console=console, transient=True):
                rows[name] = summary(bench.run(config, temperature))
            results[label] = rows
            console.print(table(label, rows))
    figures = {"prompts": args.prompts.name, "number_of_prompts": len(prompts), "max_tokens": args.max_tokens}
    file = write_results(args.output, args.name, figures | {"results": results})
    draw(results, file.with_suffix(".svg"))


def table(title: str, rows: dict[str, Any]) -> Table:
    columns = ["", "tokens per pass", "95 %", "draft passes", "draft tokens", "discarded", "verified"]
    result = Table(*columns, *(f"speed, c = {c}" for c in RATIOS), title=title, title_justify="left")
    for name, row in rows.items():
        low, high = row["interval_95"]
        cells = [name, f"{row['tokens_per_target_pass']:.2f}", f"{low:.2f}-{high:.2f}"]
        cells += [f"{row['draft_passes_per_round']:.1f}", f"{row['draft_tokens_per_round']:.1f}"]
        cells += [f"{row['discard_rate']:.2f}", f"{row['verification_rate']:.3f}"]
        result.add_row(*cells, *(f"{row['modelled_speed_up'][str(c)]:.2f}" for c in RATIOS))
    return result


if __name__ == "__main__":
    main()
