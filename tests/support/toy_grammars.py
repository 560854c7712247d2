"""Grammars over a few tokens, with the protocol of a Constraint. A grammar is a table of states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from enumeration import PROMPT, Distribution
from fakes import Predict
from numpy.typing import NDArray

END = "end"  # nothing can follow
Table = Mapping[str, Mapping[int, str]]  # state -> allowed token -> next state
EOS = 2

TABLES: dict[str, Table] = {
    # 0 opens and 1 closes, at most two levels; EOS only after whole pairs. A node's mask depends on its depth.
    "brackets": {
        "start": {0: "open"},
        "open": {0: "deep", 1: "closed"},
        "deep": {1: "open"},
        "closed": {0: "open", EOS: END},
    },
    # Complete after three tokens, without EOS; 1 must follow 0.
    "three": {
        "start": {0: "one must", 1: "two left"},
        "one must": {1: "one left"},
        "two left": {0: "last must", 1: "one left"},
        "last must": {1: END},
        "one left": {0: END, 1: END, EOS: END},
    },
    # At most one 1 in the whole text: paths with the same last tokens have different masks.
    "one of a kind": {"start": {0: "start", 1: "used", EOS: END}, "used": {0: "used", EOS: END}},
    "anything": {"start": {0: "start", 1: "start", EOS: END}},
}


class ToyGrammar:
    """A Constraint over the states of a table. `work` counts the tokens that were appended and removed."""

    def __init__(self, name: str, vocab_size: int = 3) -> None:
        self._table, self._vocab_size = TABLES[name], vocab_size
        self._states = ["start"]
        self.work = 0

    @property
    def ended(self) -> bool:
        return self._states[-1] == END

    def allowed(self) -> NDArray[np.bool_]:
        mask = np.zeros(self._vocab_size, np.bool_)
        mask[list(self._table[self._states[-1]])] = True
        return mask

    def advance(self, token: int) -> bool:
        following = self._table[self._states[-1]].get(token)
        if following is not None:
            self._states.append(following)
            self.work += 1
        return following is not None

    def forced(self) -> list[int]:
        """Tokens without an alternative, and then guesses: the first of several options, three times at most."""
        run, state, guesses = list[int](), self._states[-1], 3
        while state != END and guesses:
            options = self._table[state]
            guesses -= len(options) > 1
            run.append(min(options))
            state = options[run[-1]]
        return run

    def roll_back(self, count: int) -> None:
        assert 0 < count < len(self._states)
        del self._states[-count:]
        self.work += count


def constrained(predict: Predict, name: str, max_tokens: int) -> Distribution:
    """The distribution of plain constrained decoding, from its definition: at each token the model's distribution over
    the allowed tokens."""
    texts: Distribution = defaultdict(float)
    open_texts: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while open_texts:
        text, probability = open_texts.pop()
        grammar = ToyGrammar(name)
        for token in text:
            assert grammar.advance(token)
        if grammar.ended or len(text) == max_tokens:
            texts[text] += probability
            continue
        p = predict((*PROMPT, *text)) * grammar.allowed()
        open_texts += [((*text, token), probability * p[token] / p.sum()) for token in np.flatnonzero(p).tolist()]
    return texts
