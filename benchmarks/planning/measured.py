"""Speed over plain decoding against acceptance: proposals planned by cost, and chains of every fixed length.

    python -m benchmarks.planning.measured bundles/demo-110m \\
        --prompts models/demo/prompts.jsonl --output benchmarks/results

The engines and their costs are real; only the output of the draft is steered. The text of plain decoding is known
beforehand. After each of its tokens, the steered draft ranks the right next token first with the chosen probability,
and second in half of the other cases. One pair thereby shows every acceptance from 0.3 to 0.95, at temperature 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.tools.record import add_output, write_results
from benchmarks.tools.svg import new_figure, save_svg
from draftwood.cli.bench import read_prompts
from draftwood.models.bindings import DRAFT, TARGET
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.bundle.costs import read_costs
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.engines.base import Engine, ForwardOutput, KVCache, SoloEngine, TokenBatch
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.planning.cost import CostModel, assumed
from draftwood.runtime.text.tokenizer import Tokenizer

ACCEPTANCES = (0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 0.95)
LENGTHS = (1, 2, 3, 4, 6, 8, 12)
PLAIN_EVERY = 3  # configurations between two measurements of plain decoding: the machine's speed varies
SECOND_SHARE = 0.5  # of the cases in which the first guess is wrong: the second guess is right


class SteeredDraft(SoloEngine):
    """An engine with the passes of the draft, and a chosen share of right answers.

    text: prompt and output of plain decoding. ranks: at each position, the rank of the right next token.
    """

    def __init__(self, engine: Engine, acceptance: float) -> None:
        self.engine, self.acceptance, self.spec = engine, acceptance, engine.spec
        self.text: NDArray[np.int64] = np.zeros(0, np.int64)
        self.ranks: NDArray[np.int64] = np.zeros(0, np.int64)

    def new_cache(self, salt: str | None = None) -> KVCache:
        return self.engine.new_cache()

    def close(self) -> None:
        self.engine.close()

    def steer(self, text: Sequence[int], seed: int) -> None:
        """Set the text of the next request. The draft is right at the same positions for every configuration."""
        rng = np.random.default_rng(seed)
        self.text = np.asarray(text, np.int64)
        first, second = rng.random(len(text)) < self.acceptance, rng.random(len(text)) < SECOND_SHARE
        self.ranks = np.where(first, 0, np.where(second, 1, 2))

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        output = self.engine.score(batch, cache)
        if output.top_ids is None or output.top_logprobs is None:
            raise TypeError("only a draft can be steered")
        rows = batch.output_rows
        output.top_logprobs[:] = np.log((1 - self.acceptance) / output.top_ids.shape[1])
        output.top_logprobs[:, 0] = np.log(self.acceptance)
        output.top_logprobs[:, 1] = np.log((1 - self.acceptance) * SECOND_SHARE)
        for index, (position, token) in enumerate(zip(batch.position_ids[rows], batch.token_ids[rows], strict=True)):
            if position + 1 < len(self.text) and self.text[position] == token:
                place_at_rank(output.top_ids[index], int(self.text[position + 1]), int(self.ranks[position]))
        return output


def place_at_rank(ids: NDArray[np.int64], right: int, rank: int) -> None:
    """Move the right token to its rank; the other tokens keep their order."""
    others = [token for token in ids.tolist() if token != right][: len(ids) - 1]
    ids[:] = [*others[:rank], right, *others[rank:]]


def decode(decoder: SpeculativeDecoder, prompt: list[int], tokens: int, vocab_size: int) -> tuple[list[int], float]:
    """Returns the output tokens and the seconds per token."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    sampler, stats = Sampler(params, prompt, (), vocab_size), SpecDecodeStats()
    for _ in decoder.generate(prompt, sampler, seeded_streams(0), stats):
        pass
    return sampler.output, stats.decode_seconds / stats.num_tokens


def make_configurations() -> dict[str, SpeculativeConfig]:
    """Chains of every fixed length, chains whose length is planned by cost, and the default, which plans all by
    cost."""
    chain = SpeculativeConfig("chain", max_draft_len=max(LENGTHS))
    fixed = {f"K = {length}": replace(chain, max_draft_len=length, budget="fixed") for length in LENGTHS}
    return fixed | {"chain by cost": chain, "auto": SpeculativeConfig()}


def measure(bundle: EngineBundle, costs: CostModel, prompts: Sequence[list[int]], args: argparse.Namespace) -> Any:
    """Speed over plain decoding by acceptance and configuration.

    The speed is a mean over all texts, each against a plain run shortly before. A median would compare different texts,
    since the draft is right at other positions in each.
    """
    tokens: int = args.max_tokens
    target, draft = bundle.open_engine(TARGET), SteeredDraft(bundle.open_draft(), 0.5)
    longest, vocab_size = bundle.manifest.max_length, target.spec.model.vocab_size
    plain = SpeculativeDecoder(target, None, None, longest, ())
    decoders = {
        name: SpeculativeDecoder(target, draft, config, longest, (), costs)
        for name, config in make_configurations().items()
    }
    texts = [decode(plain, prompt, tokens + 1, vocab_size)[0] for prompt in prompts]
    speeds: dict[str, dict[str, list[float]]] = {}
    for acceptance in track(args.acceptances, "Measuring", transient=True):
        draft.acceptance = acceptance
        found = speeds.setdefault(str(acceptance), {name: [] for name in decoders})
        for repeat in range(args.repeats):
            for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
                draft.steer([*prompt, *text], seed=len(prompts) * repeat + index)
                for number, (name, decoder) in enumerate(decoders.items()):
                    if number % PLAIN_EVERY == 0:
                        base = decode(plain, prompt, tokens, vocab_size)[1]
                    output, seconds = decode(decoder, prompt, tokens, vocab_size)
                    if output != text[:tokens]:
                        raise AssertionError(f"{name} changed the text")
                    found[name].append(seconds / base)
    return {level: {name: round(1 / fmean(times), 3) for name, times in rows.items()} for level, rows in speeds.items()}


def make_table(speeds: Mapping[str, Mapping[str, float]]) -> Table:
    """One line per acceptance. The last column divides the default's speed by that of the best fixed length."""
    result = Table("acceptance", *make_configurations(), "auto / best fixed", title="speed over plain decoding")
    for level, row in speeds.items():
        best = max(1.0, *(speed for name, speed in row.items() if name.startswith("K")))
        result.add_row(level, *(f"{speed:.2f}" for speed in row.values()), f"{row['auto'] / best:.2f}")
    return result


def plot(speeds: Mapping[str, Mapping[str, float]], file: Path) -> None:
    """Speed against acceptance, one line per configuration."""
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    levels = [float(level) for level in speeds]
    for name in make_configurations():
        by_cost = not name.startswith("K")
        speed = [row[name] for row in speeds.values()]
        axes.plot(levels, speed, label=name, linewidth=2.5 if by_cost else 1, alpha=1 if by_cost else 0.6)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("acceptance of the draft's first guess")
    axes.set_ylabel("speed over plain decoding")
    axes.legend()
    save_svg(figure, file)


def parse_numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=1, help="of every text, with other right positions")
    parser.add_argument("--acceptances", type=parse_numbers, default=ACCEPTANCES, help="separated by commas")
    add_output(parser, "planning_measured")
    args = parser.parse_args()
    bundle = EngineBundle.open(args.bundle)
    tokenizer = Tokenizer.load(bundle.folder)
    prompts = [tokenizer.encode(text) for text in read_prompts(args.prompts)[: args.limit]]
    models = [bundle.manifest.engines[role].model for role in (TARGET, DRAFT)]
    costs = read_costs(bundle.folder) or assumed(*models)
    speeds = measure(bundle, costs, prompts, args)
    Console().print(make_table(speeds))
    measured = {"bundle": args.bundle.name, "texts": len(prompts) * args.repeats, "tokens": args.max_tokens}
    file = write_results(args.output, args.name, measured | {"speed_over_plain": speeds})
    plot(speeds, file.with_suffix(".svg"))


if __name__ == "__main__":
    main()
