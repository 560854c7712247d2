"""Figures of `draftwood bench`: configurations of speculation beside plain decoding, on the same prompts in turn."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..decoding.stats import SpecDecodeStats

RESAMPLES = 2000  # of the bootstrap


class Run(NamedTuple):
    token_ids: list[int]
    stats: SpecDecodeStats

    @property
    def seconds(self) -> float:
        """Seconds per token, without the prompt."""
        return self.stats.decode_seconds / self.stats.num_tokens

    @property
    def seconds_whole(self) -> float:
        return (self.stats.prompt_seconds + self.stats.decode_seconds) / self.stats.num_tokens


class Row(NamedTuple):
    config: str
    mean_acceptance_length: float
    acceptance_rate: float
    target_passes_per_token: float
    draft_passes_per_token: float
    tokens_per_second: float
    # Seconds per token of plain decoding divided by this configuration's, without the time of the prompt: the median
    # over prompts and repeats, which are measured alternately.
    speed: float
    speed_whole: float  # the same with the time of the prompt, which is longer with a draft
    same_text: float  # share of outputs equal to plain decoding's
    speed_interval: tuple[float, float] | None  # see `interval`
    tokens_per_second_interval: tuple[float, float] | None


def interval(values: Sequence[float], prompts: int) -> tuple[float, float] | None:
    """The 95 % confidence interval of the median, by the bootstrap over prompts (percentiles). values: one per repeat
    and prompt, the prompts of a repeat one after another. The repeats of a prompt are drawn together, because they are
    alike. None for a single prompt, which says nothing about others."""
    if prompts == 1:
        return None
    table: NDArray[np.float64] = np.asarray(values).reshape(-1, prompts)
    drawn = np.random.default_rng(0).integers(prompts, size=(RESAMPLES, prompts))
    low, high = np.percentile(np.median(table[:, drawn], axis=(0, 2)), [2.5, 97.5])
    return float(low), float(high)


def summarise(name: str, runs: Sequence[Run], plain: Sequence[Run], prompts: int) -> Row:
    """One configuration's row. runs[i] and plain[i] are of the same prompt, one after the other."""
    tokens = sum(run.stats.num_tokens for run in runs)
    both = list(zip(plain, runs, strict=True))
    drafts = sum(run.stats.num_drafts for run in runs)
    accepted = sum(run.stats.num_accepted_tokens for run in runs)
    proposed = sum(run.stats.num_draft_tokens for run in runs)
    speeds = [base.seconds / run.seconds for base, run in both]
    return Row(
        config=name,
        mean_acceptance_length=1 + accepted / drafts if drafts else 1.0,
        acceptance_rate=accepted / proposed if proposed else 0.0,
        target_passes_per_token=sum(run.stats.target_passes for run in runs) / tokens,
        draft_passes_per_token=sum(run.stats.draft_passes for run in runs) / tokens,
        tokens_per_second=median(1 / run.seconds for run in runs),
        speed=median(speeds),
        speed_whole=median(base.seconds_whole / run.seconds_whole for base, run in both),
        same_text=mean(run.token_ids == base.token_ids for base, run in both),
        speed_interval=interval(speeds, prompts),
        tokens_per_second_interval=interval([1 / run.seconds for run in runs], prompts),
    )
