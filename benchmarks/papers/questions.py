"""Tokens a target pass with a draft, by kind of question: how general what a draft has learned is.

    python -m benchmarks.papers.questions bundles/smollm2 --prompts ../shared/data/prompts --output benchmarks/results

PROMPTS holds files of JSON lines, one for each kind, each line with a "prompt" or "turns". Of each file NUM questions
are taken at equal distances, and asked by the bundle's chat template. Chains of 4 are verified in each pass, so that
the figures depend on no cost table; they depend on no clock either.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.tools.questions import choose_questions
from benchmarks.tools.record import add_output, write_results
from draftwood.runtime import LLM, SamplingParams, SpeculativeConfig

CHAIN = SpeculativeConfig("chain", max_draft_len=4, budget="fixed")
TEMPERATURES = (0.0, 0.7)
SEED = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, metavar="DIR")
    parser.add_argument("--num", type=int, default=10, help="questions of each kind (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer (default %(default)s)")
    add_output(parser, "papers_questions")
    args = parser.parse_args()
    llm = LLM(args.bundle, CHAIN)
    table = Table("questions", *(f"T = {temperature:g}" for temperature in TEMPERATURES), title="tokens a target pass")
    figures: dict[str, Any] = {}
    for path in sorted(args.prompts.glob("*.jsonl")):
        questions = choose_questions(path, args.num)
        found = {f"{each:g}": round(tokens_a_pass(llm, questions, each, args.max_tokens), 3) for each in TEMPERATURES}
        table.add_row(path.stem, *map(str, found.values()))
        figures[path.stem] = {"questions": len(questions), "tokens_a_pass": found}
    Console().print(table)
    settings = {"bundle": args.bundle.name, "max_tokens": args.max_tokens, "chain": CHAIN.max_draft_len, "seed": SEED}
    write_results(args.output, args.name, {**settings, "kinds": figures})


def tokens_a_pass(llm: LLM, questions: list[str], temperature: float, max_tokens: int) -> float:
    """Of the verified rounds of all answers: 1 + accepted tokens / rounds."""
    rounds = accepted = 0
    for question in questions:
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=SEED)
        (output,) = llm.chat([{"role": "user", "content": question}], sampling)
        rounds += output.stats.num_drafts
        accepted += output.stats.num_accepted_tokens
    return 1 + accepted / rounds


if __name__ == "__main__":
    main()
