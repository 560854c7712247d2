"""A small target, and distillations of it that count calls of a clock instead of seconds."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import write_checkpoint, write_tokenizer
from steps import quiet

from draftwood.builder.distillation.distill import DistillResult, Watch, distill
from draftwood.builder.distillation.options import DistillOptions
from draftwood.builder.distillation.state import ANSWER, QUESTION, WrittenText
from draftwood.builder.distillation.text import TextLimits

CHATML = (
    "{% for message in messages %}{{ '<s>' + message['role'] + ':' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"
)
LIMITS = TextLimits(question=16, answer=24, opening=6)
COLUMNS = 32


def write_target(folder: Path, template: str | None = None, add_bos: bool = True) -> Path:
    """A random target that knows 320 tokens."""
    write_checkpoint(folder, "gqa", vocab_size=320, tie_word_embeddings=True, eos_token_id=2, bos_token_id=1)
    write_tokenizer(folder, 320, add_bos)
    if template is not None:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    if not add_bos:
        file = folder / "tokenizer_config.json"
        content = {name: value for name, value in json.loads(file.read_text()).items() if name != "bos_token"}
        file.write_text(json.dumps(content))
    return folder


def options(target: Path, output: Path, **changed: Any) -> DistillOptions:
    """Sizes with which each step takes milliseconds. A minute is 60 calls of the clock."""
    sizes = {"requests": 16, "context": 32, "batch": 2, "hidden": 32, "vocabulary": 64, "threads": 1}
    return replace(DistillOptions(target, output, minutes=8, text_minutes=6), **sizes | changed)


def watch(**changed: Any) -> Watch:
    """Counts calls of the clock instead of seconds."""
    calls = itertools.count()
    return Watch(clock=lambda: float(next(calls)), measured=60.0, limits=LIMITS)._replace(**changed)


def distilled(given: DistillOptions, **changed: Any) -> DistillResult:
    return distill(given, quiet, watch(**changed))


def written(number: int, question: int, length: int = 20, vocab_size: int = 320) -> WrittenText:
    """A text of random tokens with random distributions over the first COLUMNS ids."""
    rng = np.random.default_rng(number)
    logits = -np.sort(rng.exponential(2, (length, COLUMNS)))
    logprobs = np.minimum(logits - np.log(np.exp(logits).sum(-1, keepdims=True)) - 0.1, 0).astype(np.float16)
    ids = np.argsort(rng.random((length, vocab_size)))[:, :COLUMNS].astype(np.uint16)
    kinds = np.full(length, ANSWER + number % 3, np.uint8)
    kinds[: length // 4], kinds[length // 4 : length // 2] = 0, QUESTION
    tails = (1 - np.exp(logprobs.astype(np.float64)).sum(-1)).clip(0, 1).astype(np.float16)
    tokens = rng.integers(3, vocab_size, length).astype(np.uint32)
    return WrittenText(number, question, tokens, kinds, ids, logprobs, tails, np.zeros((length, 0), np.float16))
