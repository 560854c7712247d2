"""What front.py asks of another engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.precision.texts import SCORED


class Decoded(NamedTuple):
    """Greedy text, and its tokens per second after the prompt."""

    tokens: list[int]
    speed: float


Complete = Callable[[list[int], int], Decoded]  # prompt, tokens
LogProbs = Callable[[list[int]], NDArray[np.float32]]  # a window -> [scored, V]
Divergence = dict[str, float]  # kl, top, loss: see `score`


class Peer(Protocol):
    """One installation and one checkpoint. formats: of weights. label, marker: in the picture."""

    @property
    def formats(self) -> tuple[str, ...]: ...

    @property
    def label(self) -> str: ...

    @property
    def marker(self) -> str: ...

    def bits(self, form: str) -> float:
        """Bits of a weight in the matrices of a pass."""
        ...

    def divergence(self, form: str, name: str, windows: list[list[int]], exact: LogProbs) -> Divergence:
        """From fp32 over the windows of the text called `name`."""
        ...

    def decoder(self, form: str) -> AbstractContextManager[Complete]: ...


def score(exact: NDArray[np.float32], own: NDArray[np.float32], window: list[int]) -> Divergence:
    """KL(exact || own), share of equal best tokens, and loss: means over the scored positions."""
    divergence = (np.exp(exact) * (exact - own)).sum(-1, dtype=np.float64).mean()
    same = (exact.argmax(-1) == own.argmax(-1)).mean()
    following = np.array(window[SCORED.start + 1 : SCORED.stop + 1])
    return {"kl": divergence, "top": same, "loss": -own[np.arange(len(own)), following].mean()}


def mean(scores: list[Divergence]) -> Divergence:
    return {key: round(float(np.mean([each[key] for each in scores])), 5) for key in scores[0]}
