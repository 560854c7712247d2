"""The methods of the papers, compared on one pair: acceptance, draft work, and a modelled speed-up.

    python -m benchmarks.papers.methods bundles/demo --prompts models/demo/prompts.jsonl --output benchmarks/results

All figures are counts of tokens and passes, which do not depend on the load of the machine. The modelled speed-up is
tokens / (target passes + c * draft passes), where c is the cost of a draft pass in target passes. The papers give
c = 0.2 for the pair of SpecDec++, 0.02 for a draft of 68M and a target of 7B, and 0.005 for a draft of 7B and an
offloaded target of 70B. A pass counts as one whatever its width, as in the papers. "measured" in place of c takes the
seconds of passes of these widths from the cost table beside the bundle.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track
from scipy.stats import bootstrap

from benchmarks.papers.sequoia import sequoia
from benchmarks.tools.record import add_output, make_parser, write_results
from draftwood.cli.bench import add_chat, encode_prompts, read_prompts
from draftwood.models.bindings import DRAFT, TARGET
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.bundle.costs import read_costs
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.round import Outcome
from draftwood.runtime.decoding.state import RequestState
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.engines.base import Engine
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.planning.cost import CostModel
from draftwood.runtime.text.tokenizer import Tokenizer

TEMPERATURES = (0.0, 0.6, 1.0)
BUDGETS = {8: 5, 16: 6, 32: 8, 63: 10}  # tokens of a tree, and its depth
BRANCHING = {8: (2, 1, 1, 1), 16: (2, 2, 1, 1), 32: (4, 2, 1, 1), 63: (4, 4, 1, 1)}
RATIOS = (0.2, 0.02, 0.005)
WIDTH = 8
RANKS = 8  # children of a node; Sequoia's tree is computed from the acceptance of each
RESAMPLES = 1000
COUNTS = (
    "num_tokens", "target_passes", "draft_passes", "draft_rows", "num_draft_tokens", "num_accepted_tokens",
    "num_merged_tokens"
)  # fmt: skip


class RankRecorder(SpeculativeDecoder):
    """A decoder that records which child of the root was accepted in each round; RANKS: none of them."""

    ranks: list[int]

    def _record(self, stats: SpecDecodeStats, request: RequestState, outcome: Outcome) -> None:
        rows = outcome.acceptance.rows
        self.ranks.append(rows[0] - 1 if rows else RANKS)
        super()._record(stats, request, outcome)


class PairBenchmark:
    """Runs configurations on one pair of engines, over the same prompts."""

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

    def run(self, config: SpeculativeConfig, temperature: float) -> list[SpecDecodeStats]:
        decoder = SpeculativeDecoder(*self.engines, config, self.bundle.manifest.max_length, ())
        return list(self.decode(decoder, temperature))

    def acceptance_by_rank(self, temperature: float) -> list[float]:
        """Share of rounds in which the first, second, ... drawn child of the root was accepted."""
        config = SpeculativeConfig("static", topology=(0,) * RANKS, max_total_draft_tokens=RANKS, verify="rejection")
        decoder = RankRecorder(*self.engines, config, self.bundle.manifest.max_length, ())
        decoder.ranks = []
        for _ in self.decode(decoder, temperature):
            pass
        counts = np.bincount(decoder.ranks, minlength=RANKS + 1)[:RANKS]
        return [float(share) for share in counts / len(decoder.ranks)]


def make_configurations(budget: int, acceptance: Sequence[float], head: bool) -> dict[str, SpeculativeConfig]:
    """Every method with one budget of draft tokens. head: the draft has an acceptance head."""
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


def summarise(texts: Sequence[SpecDecodeStats], kinds: Sequence[str], costs: CostModel | None) -> dict[str, Any]:
    """Rates over all prompts, with a 95 % bootstrap interval over prompts for the tokens per target pass. kinds: of the
    prompts. costs: None if nothing was measured."""
    table = np.array([[getattr(stats, name) for name in COUNTS] for stats in texts], np.float64)
    tokens, target, draft, drafted, proposed, accepted, merged = table.sum(0)
    low = high = tokens / target
    if len(table) > 1:  # one prompt says nothing about others
        low, high = bootstrap(
            (table[:, 0], table[:, 1]),
            lambda tokens, passes, axis: tokens.sum(axis) / passes.sum(axis),
            paired=True,
            n_resamples=RESAMPLES,
            method="percentile",
            rng=0,
        ).confidence_interval
    return {
        "tokens_per_target_pass": round(tokens / target, 3),
        "interval_95": [round(float(low), 3), round(float(high), 3)],
        "draft_passes_per_round": round(draft / target, 3),
        "draft_tokens_per_round": round(drafted / target, 3),
        "discard_rate": round((proposed - accepted) / max(1.0, tokens), 3),
        "verification_rate": round(target / tokens, 3),
        "merged_share": round(merged / max(1.0, proposed), 3),
        "modelled_speed_up": {str(c): round(tokens / (target + c * draft), 3) for c in RATIOS}
        | ({} if costs is None else {"measured": round(speed_up(table.sum(0), costs), 3)}),
        "tokens_per_target_pass_by_kind": {
            kind: round(float(np.divide(*table[np.array(kinds) == kind][:, :2].sum(0))), 3)
            for kind in dict.fromkeys(kinds)
        },
    }


def speed_up(counts: NDArray[np.float64], costs: CostModel) -> float:
    """Over plain decoding, where every pass has the mean width. counts: in the order of COUNTS."""
    tokens, target, draft, drafted, proposed, _, _ = counts
    assert costs.draft is not None
    target_rows, draft_rows = np.array([1, 1 + proposed / target]), np.array([drafted / max(1.0, draft)])
    plain, verified = np.interp(target_rows, costs.target.widths, costs.target.seconds[0])
    drafting = float(np.interp(draft_rows, costs.draft.widths, costs.draft.seconds[0])[0])
    return float(tokens * plain / (target * verified + draft * drafting))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with a prompt and, if wanted, its kind")
    add_chat(parser)
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--budgets", type=int, nargs="*", default=list(BUDGETS))
    parser.add_argument("--temperatures", type=float, nargs="*", default=list(TEMPERATURES))
    parser.add_argument("--methods", nargs="*", help="beginnings of the names of those wanted (default: all)")
    add_output(parser, "papers_methods")
    args = parser.parse_args()
    bundle = EngineBundle.open(args.bundle)
    tokenizer = Tokenizer.load(bundle.folder)
    prompts = encode_prompts(tokenizer, read_prompts(args.prompts)[: args.limit], args.chat)
    prompts = [prompt if args.chat else prompt[-200:] for prompt in prompts]
    lines = args.prompts.read_text(encoding="utf-8").splitlines()[: args.limit]
    kinds = [json.loads(line).get("kind", "all") for line in lines]
    costs = read_costs(bundle.folder)
    bench = PairBenchmark(bundle, prompts, args.max_tokens)
    head = "acceptance" in bundle.manifest.engines[DRAFT].outputs
    results: dict[str, Any] = {}
    figures = {"prompts": args.prompts.name, "number_of_prompts": len(prompts), "max_tokens": args.max_tokens}
    for temperature in args.temperatures:
        acceptance = bench.acceptance_by_rank(temperature)
        for budget in args.budgets:
            rows = {}
            configs = make_configurations(budget, acceptance, head)
            if args.methods:
                configs = {name: each for name, each in configs.items() if name.startswith(tuple(args.methods))}
            label = f"temperature {temperature}, {budget} tokens"
            for name, config in track(configs.items(), label, transient=True):
                rows[name] = summarise(bench.run(config, temperature), kinds, costs)
            results[label] = rows
            for name, row in rows.items():
                print(f"{label}, {name}: {row}")
            write_results(args.output, args.name, figures | {"results": results})  # the next table takes minutes


if __name__ == "__main__":
    main()
