"""The texts that weight formats are compared on, as token ids of a checkpoint's own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from draftwood.runtime.text.tokenizer import Tokenizer

WINDOW = 1024  # tokens that are read from an empty cache
SCORED = slice(
    WINDOW // 2 - 1, WINDOW - 1
)  # positions of a window whose next token is scored, as llama-perplexity does
SIZES = {"prose": 4, "questions": 2}  # windows of each text
QUESTIONS = 60  # of GSM8K, the first ones


class Texts(NamedTuple):
    # By name of the text, each of WINDOW tokens.
    windows: dict[str, list[list[int]]]
    # Another text, of other documents.
    calibration: str


def read_texts(folder: Path, checkpoint: Path) -> Texts:
    """From a folder of prompts: prose is the articles that Spec-Bench asks to summarise; questions are GSM8K's first
    ones. Instructions, programs and later questions are for calibration."""
    rows = {file.stem: [json.loads(line) for line in file.open(encoding="utf-8")] for file in folder.glob("*.jsonl")}
    articles = [row["turns"][0] for row in rows["spec_bench"] if row["category"] == "summarization"]
    questions = [row["prompt"] for row in rows["gsm8k_test"]]
    evaluated = {"prose": "\n\n".join(articles), "questions": "\n\n".join(questions[:QUESTIONS])}
    instructions, programs = ([whole(row) for row in rows[name]] for name in ("self_instruct_seed_tasks", "humaneval"))
    calibration = "\n\n".join(mixed(instructions, questions[600:], programs, limit=400))
    with Tokenizer.load(checkpoint) as tokenizer:
        windows = {name: cut(tokenizer.encode(text, False), SIZES[name]) for name, text in evaluated.items()}
        return Texts(windows, calibration)


def cut(ids: list[int], windows: int) -> list[list[int]]:
    """The first windows of a text."""
    assert len(ids) >= windows * WINDOW, f"{len(ids)} tokens are too few"
    return [ids[at * WINDOW : (at + 1) * WINDOW] for at in range(windows)]


def whole(row: dict[str, Any]) -> str:
    """A prompt with its reference answer."""
    return f"{row['prompt']}\n{row['reference']}"


def mixed(*kinds: list[str], limit: int) -> list[str]:
    """One text of each kind in turn, up to `limit` of them."""
    rounds = zip(*(kind * (1 + limit // len(kind)) for kind in kinds), strict=False)
    return [text for each in rounds for text in each][:limit]
