"""PrefillLimit: how long running texts wait for the prompts of others, in the seconds of measured passes."""

from __future__ import annotations

from collections.abc import Sequence

from ...models.bindings import DRAFT
from ...models.errors import ConfigError
from ..engines.base import EngineSpec
from ..engines.rounds import Work
from ..speculation.planning.cost import CostModel, PassCosts

MAX_PAUSE_MS = 100.0  # default
# Assumed time of the host for the log-probabilities of a row, per token of the vocabulary: 1.0 ms of 49,152 on a Zen 3.
SCORE_SECONDS = 20e-9
MIN_ROWS = 2.0  # passes of one row: a shorter pause would make prompts take as long as texts


def check_pause(milliseconds: float) -> None:
    """Raises ConfigError for a pause that is no positive number."""
    if not milliseconds > 0:
        raise ConfigError(f"max_pause_ms must be above 0, not {milliseconds!r}")


class PrefillLimit:
    """Between two chunks of a text, passes over prompts of others take at most so long, by the cost model: prompts are
    read in chunks that fit, and wait where no time is left. So does a draft that begins to read a running text. Where
    two passes of one row take longer, a chunk may take that long.

    It depends on the cost model alone, never on a clock."""

    def __init__(self, costs: CostModel, milliseconds: float) -> None:
        """Raises as `check_pause` does."""
        check_pause(milliseconds)
        self._costs = costs
        self._seconds = milliseconds / 1000

    def most_rows(self, spec: EngineSpec, context: int) -> int:
        """Rows of the widest pass over a prompt after `context` tokens that keeps the pause."""
        passes = self._passes(spec.role)
        if passes is None:
            return spec.max_width
        allowed = max(self._seconds, MIN_ROWS * passes.at(1, context))
        fitting = (width for width in spec.widths if passes.at(width, context) <= allowed)
        return max(fitting, default=spec.widths[0])

    def added(self, texts: Sequence[Work], prompts: Sequence[Work]) -> float:
        """Seconds that passes over prompts add to a pass, or take alone."""
        if not prompts:
            return 0.0
        passes = self._passes(prompts[0].engine.spec.role)
        if passes is None:
            return 0.0
        texts = [each for each in texts if each.engine is prompts[0].engine]
        context = max(each.cache.length for each in (*texts, *prompts))
        alone = count_rows(texts)
        scored = [each for each in prompts if each.num_outputs > 1]
        host = score_seconds(prompts[0].engine.spec) * count_rows(scored)
        return host + passes.at(alone + count_rows(prompts), context) - (passes.at(alone, context) if alone else 0.0)

    def admit(self, waiting: Sequence[tuple[Work, bool]], waited: float) -> list[bool]:
        """Whether each of these passes may be part of the next one. waiting: with each, whether it is one of a running
        text that reads no prompt. waited: the most seconds since such a text's last chunk."""
        texts = [work for work, writes in waiting if writes]
        admitted: list[bool] = []
        prompts: list[Work] = []
        for work, writes in waiting:
            fits = writes or waited + self.added(texts, [*prompts, work]) <= self._seconds
            if not fits and not waited and True not in admitted:
                # Its turn, and too long beside texts: a chunk has at most `most_rows`.
                return [each is work for each, _ in waiting]
            if fits and not writes:
                prompts.append(work)
            admitted.append(fits)
        return admitted

    def _passes(self, role: str) -> PassCosts | None:
        return self._costs.draft if role == DRAFT else self._costs.target


def score_seconds(spec: EngineSpec) -> float:
    """Seconds of the host for the log-probabilities of one row."""
    return SCORE_SECONDS * spec.model.vocab_size


def count_rows(passes: Sequence[Work]) -> int:
    return sum(each.num_rows for each in passes)
