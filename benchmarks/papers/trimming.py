"""What a trimmed vocabulary costs: how often a draft's first token is accepted, by the number of tokens that it keeps.

    python -m benchmarks.papers.trimming bundles/demo-native --text code.txt --output benchmarks/results

The target writes a text behind each prompt. Both engines of one untrimmed bundle then read the text, and the columns
that a trimmed draft would lack are left out of q. A token drawn from q is accepted with probability Σ min(p, q); at
temperature 0 the most probable kept token is accepted if it is the target's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.tools.record import add_output, write_results
from draftwood.builder.kept_tokens import most_frequent
from draftwood.cli.bench import read_prompts
from draftwood.models.bindings import TARGET
from draftwood.runtime import LLM, SamplingParams
from draftwood.runtime.engines.base import Engine, TokenBatch

SHARES = (1, 2, 4, 8)  # of the vocabulary, as divisors
TEMPERATURES = (0.0, 0.7, 1.0)


class Reading(NamedTuple):
    """A text's tokens int64 [T] behind its prompt, and the logits float32 [T, V] of both engines before each."""

    tokens: NDArray[np.int64]
    target: NDArray[np.float32]
    draft: NDArray[np.float32]


def read(engine: Engine, text: Sequence[int]) -> NDArray[np.float32]:
    """Logits [T, V] after each token of a text."""
    rows, cache, width = [], engine.new_cache(), engine.spec.max_width
    for start in range(0, len(text), width):
        part = list(text[start : start + width])
        positions, mask = np.arange(start, start + len(part)), np.tri(len(part), dtype=np.bool_)
        batch = TokenBatch.pad(part, positions, mask, engine.spec.width_for(len(part)))
        rows.append(engine.score(batch, cache).logits[: len(part)].copy())
        cache.commit(range(len(part)))
    cache.close()
    return np.concatenate(rows)


def readings(llm: LLM, draft: Engine, prompts: Sequence[str], temperature: float, tokens: int) -> Iterator[Reading]:
    """The target's own text behind each prompt, read by both engines."""
    for seed, prompt in enumerate(prompts):
        encoded = llm.encode(prompt)
        params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed, ignore_eos=True)
        written = llm.generate(encoded, params)[0].token_ids
        text = [*encoded, *written][:-1]
        both = (read(engine, text)[-len(written) :] for engine in (llm.target, draft))
        yield Reading(np.array(written), *both)


def softmax(logits: NDArray[np.floating[Any]], temperature: float) -> NDArray[np.float64]:
    scores = logits.astype(np.float64) / temperature
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def acceptance(reading: Reading, kept: NDArray[np.int64], temperature: float) -> NDArray[np.float64]:
    """The probability [T] that the draft's first token is accepted."""
    if not temperature:
        return np.asarray(kept[reading.draft[:, kept].argmax(-1)] == reading.target.argmax(-1), np.float64)
    p, q = softmax(reading.target, temperature)[:, kept], softmax(reading.draft[:, kept], temperature)
    return np.asarray(np.minimum(p, q).sum(-1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, help="with an untrimmed draft")
    parser.add_argument("--prompts", type=Path, default=Path("models/demo/held_out.jsonl"))
    parser.add_argument("--text", type=Path, required=True, help="in which tokens are counted")
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=64)
    add_output(parser, "papers_trimming")
    args = parser.parse_args()
    prompts = list(islice(read_prompts(args.prompts), args.limit))
    rows: list[dict[str, Any]] = []
    with LLM(args.bundle, None) as llm:
        draft = llm.bundle.open_draft()
        vocab_size, eos = llm.bundle.manifest.engines[TARGET].model.vocab_size, llm.bundle.manifest.eos_token_ids
        texts = {each: list(readings(llm, draft, prompts, each, args.max_tokens)) for each in TEMPERATURES}
        for divisor in SHARES:
            for source in (args.text, None) if divisor > 1 else (None,):
                count = vocab_size // divisor
                kept = np.arange(vocab_size)
                if divisor > 1:
                    kept = most_frequent(llm.tokenizer, count, vocab_size, source, eos)
                written = np.concatenate([reading.tokens for reading in texts[1.0]])
                row: dict[str, Any] = {"kept": count, "by": "all" if divisor == 1 else "text" if source else "ids"}
                row["coverage"] = round(float(np.isin(written, kept).mean()), 4)
                for temperature, read_texts in texts.items():
                    chances = np.concatenate([acceptance(each, kept, temperature) for each in read_texts])
                    row[f"T = {temperature:g}"] = round(float(chances.mean()), 4)
                rows.append(row)
        draft.close()
    table = Table(*rows[0], title="first tokens accepted")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    content = {"prompts": len(prompts), "tokens": args.max_tokens, "vocabulary": vocab_size, "rows": rows}
    write_results(args.output, args.name, content)


if __name__ == "__main__":
    main()
