"""SentencePiece models as LLaMA's were trained, on a few sentences."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from draftwood.builder.tokenizer import SENTENCEPIECE

SENTENCES = [
    "Once upon a time there was a little girl named Lily.",
    "She liked to play with her red ball in the park, every day!",
    "def add(a, b):\n    return a + b  # 12345",
    "The quick brown fox jumps over the lazy dog; the dog sleeps.",
] * 20


def train(
    folder: Path, model_type: str = "bpe", sentences: Sequence[str] = SENTENCES, **rest: Any
) -> sentencepiece.SentencePieceProcessor:
    """Write the model's file into a folder, which is created. rest: of SentencePiece's trainer."""
    buffer = io.BytesIO()
    usual: dict[str, Any] = {"byte_fallback": True, "remove_extra_whitespaces": False, "split_digits": True}
    usual |= {"hard_vocab_limit": False, "character_coverage": 1.0, "normalization_rule_name": "identity"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=buffer,
        vocab_size=340,
        model_type=model_type,
        minloglevel=2,
        **{**usual, **rest},
    )
    folder.mkdir(exist_ok=True)
    (folder / SENTENCEPIECE).write_bytes(buffer.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=buffer.getvalue())
