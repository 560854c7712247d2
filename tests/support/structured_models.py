"""Model: which texts structured outputs take, by a tokenizer without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from draftwood.runtime.sampling.structured import StructuredOutput
from draftwood.runtime.structured.grammars import Grammars, MatcherConstraint
from draftwood.runtime.text.tokenizer import Tokenizer


class Model:
    """A tokenizer, and what compiles its grammars."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.load(folder)
        self.eos = min(self.tokenizer.special_token_ids)
        self._grammars = Grammars(self.tokenizer, self.tokenizer.vocab_size, (self.eos,))

    def start(self, schema: dict[str, Any] | StructuredOutput) -> MatcherConstraint:
        form = schema if isinstance(schema, StructuredOutput) else StructuredOutput(json=schema)
        return self._grammars.compile(form).start()

    def takes(self, schema: dict[str, Any] | StructuredOutput, text: str) -> bool:
        """Whether a text may be a whole answer. Masks and advances agree on the way, also after going back."""
        constraint = self.start(schema)
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            if constraint.ended:
                return False
            mask = constraint.allowed()
            assert constraint.advance(token) == mask[token]
            if not mask[token]:
                return False
            constraint.roll_back(1)
            assert np.array_equal(constraint.allowed(), mask) and constraint.advance(token)
        return constraint.ended or bool(constraint.allowed()[self.eos])

    def drawn(self, schema: dict[str, Any], seed: int) -> str | None:
        """A random text of a schema; None for one that does not end soon."""
        constraint, draws, tokens = self.start(schema), np.random.default_rng(seed), list[int]()
        while not constraint.ended and len(tokens) < 200:
            mask = constraint.allowed()
            if mask[self.eos] and (mask.sum() == 1 or draws.random() < 0.3):
                break
            mask[self.eos] = False
            closing = [token for token in np.flatnonzero(mask) if len(tokens) > 60 and self._closes(int(token))]
            tokens.append(int(draws.choice(closing or np.flatnonzero(mask))))
            assert constraint.advance(tokens[-1])
        complete = constraint.ended or constraint.allowed()[self.eos]
        return self.tokenizer.decode(tokens) if complete else None

    def _closes(self, token: int) -> bool:
        return self.tokenizer.decode([token]).strip() in ('"', "}", "]")

    def close(self) -> None:
        self._grammars.close()
        self.tokenizer.close()
