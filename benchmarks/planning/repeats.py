"""How often what a prompt lookup finds is right, by the length of the repeated n-gram and by depth.

    python -m benchmarks.planning.repeats bundles/smollm2 --prompts ../shared/data/prompts --output benchmarks/results

The target answers questions of every kind without a draft; PROMPTS and NUM are those of `papers/questions.py`. Before
each token of an answer the longest n-gram of `LENGTHS` that occurred before is looked up. These shares are the first
guesses of `planning/lookups.py`.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.tools.questions import choose_questions
from benchmarks.tools.record import add_output, write_results
from draftwood.runtime import LLM, SamplingParams
from draftwood.runtime.speculation.growers.lookup import LENGTHS, PromptLookup

TEMPERATURES = (0.0, 0.7, 1.0)
DEPTHS = 8
SEED = 5


class Counts:
    """Of lookups of one length. places: at which it was the longest. tried, right: [DEPTHS]."""

    def __init__(self) -> None:
        self.places = 0
        self.tried: NDArray[np.int64] = np.zeros(DEPTHS, np.int64)
        self.right: NDArray[np.int64] = np.zeros(DEPTHS, np.int64)


def count(counts: dict[int, Counts], prompt: Sequence[int], answer: Sequence[int]) -> int:
    """Add one answer; returns its places."""
    lookup = PromptLookup(LENGTHS, DEPTHS)
    text = list(prompt)
    for place, token in enumerate(answer):
        ngram, found = lookup.propose(text)
        if found:
            counts[ngram].places += 1
        for depth, (proposed, follows) in enumerate(zip(found, answer[place:], strict=False)):
            counts[ngram].tried[depth] += 1
            if proposed != follows:
                break
            counts[ngram].right[depth] += 1
        text.append(token)
    return len(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, metavar="DIR")
    parser.add_argument("--num", type=int, default=10, help="questions of each kind (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer (default %(default)s)")
    add_output(parser, "planning_repeats")
    args = parser.parse_args()
    questions = [
        question for path in sorted(args.prompts.glob("*.jsonl")) for question in choose_questions(path, args.num)
    ]
    table = Table("T", "n", "share of places", *(f"token {depth + 1}" for depth in range(DEPTHS)))
    figures = {}
    with LLM(args.bundle, speculative=None) as llm:
        for temperature in TEMPERATURES:
            sampling = SamplingParams(temperature=temperature, max_tokens=args.max_tokens, seed=SEED)
            counts: dict[int, Counts] = defaultdict(Counts)
            places = 0
            for question in questions:
                text = llm.tokenizer.apply_chat_template([{"role": "user", "content": question}])
                prompt = llm.tokenizer.encode(text, add_special_tokens=False)
                places += count(counts, prompt, llm.generate([prompt], sampling)[0].token_ids)
            figures[f"{temperature:g}"] = {
                n: {
                    "places": round(each.places / places, 3),
                    "right": (each.right / np.maximum(each.tried, 1)).round(3).tolist(),
                }
                for n, each in sorted(counts.items())
            }
            for n, row in figures[f"{temperature:g}"].items():
                table.add_row(
                    f"{temperature:g}", str(n), f"{row['places']:.2f}", *(f"{share:.2f}" for share in row["right"])
                )
    Console().print(table)
    settings = {"bundle": args.bundle.name, "max_tokens": args.max_tokens, "questions": len(questions), "seed": SEED}
    write_results(args.output, args.name, {**settings, "temperatures": figures})


if __name__ == "__main__":
    main()
