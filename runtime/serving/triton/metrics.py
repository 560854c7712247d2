"""TritonMetrics: a model's own figures on Triton's /metrics page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...decoding.stats import SpecDecodeStats
from ...requests import metrics

REASONS = ("stop", "length", "abort", "deadline", "refused", "error")


class TritonMetrics:
    """The metrics of ServingMetrics, with the same names. Must not be used from two threads at a time."""

    def __init__(self, family: Any, labels: Mapping[str, str]) -> None:
        """family: Triton's MetricFamily class. labels: distinguish this instance of the model from others."""
        described = [
            (metrics.COUNTERS, family.COUNTER),
            ({metrics.ENDED: metrics.ENDED_TEXT}, family.COUNTER),
            (metrics.GAUGES, family.GAUGE),
        ]
        self._families = {
            name: family(name=name, description=text, kind=kind)
            for names, kind in described
            for name, text in names.items()
        }
        self._metrics = {
            name: self._families[name].Metric(labels=labels) for name in (*metrics.COUNTERS, *metrics.GAUGES)
        }
        for name, (text, buckets) in metrics.HISTOGRAMS.items():
            if name == metrics.QUEUE:  # this class does not know when a request leaves the queue
                continue
            self._families[name] = family(name=name, description=text, kind=family.HISTOGRAM)
            self._metrics[name] = self._families[name].Metric(labels=labels, buckets=list(buckets))
        self._ended = {
            reason: self._families[metrics.ENDED].Metric(labels={**labels, "finish_reason": reason})
            for reason in REASONS
        }
        self._now: tuple[int, ...] = ()

    def record_now(self, running: int, waiting: int, healthy: bool) -> None:
        """Set the gauges: the numbers of requests, and whether the model can answer requests."""
        now = (running, waiting, int(healthy), running, waiting)
        if now != self._now:
            self._now = now
            for name, value in zip(metrics.GAUGES, now, strict=True):
                self._metrics[name].set(value)

    def record_start(self, prompt_tokens: int) -> None:
        """Count an accepted request."""
        self._metrics[metrics.PROMPT_TOKENS].increment(prompt_tokens)
        self._metrics[metrics.PREFIX_QUERIES].increment(prompt_tokens)

    def record_round(self, tokens: int, seconds: float, first: bool) -> None:
        """Count a round of `tokens` output tokens. seconds: since the arrival if `first`, else since the last round."""
        self._metrics[metrics.GENERATION_TOKENS].increment(tokens)
        if first:
            self._metrics[metrics.FIRST_TOKEN].observe(seconds)
        elif tokens:
            self._metrics[metrics.INTER_TOKEN].observe(seconds / tokens)

    def record_end(self, reason: str, seconds: float, stats: SpecDecodeStats) -> None:
        """Count a request that ended. seconds: since its arrival. reason: one of REASONS."""
        self._ended[reason].increment(1)
        self._metrics[metrics.REQUEST].observe(seconds)
        self._metrics[metrics.PREFIX_HITS].increment(stats.num_cached_tokens)
        self._metrics[metrics.DRAFTS].increment(stats.num_drafts)
        self._metrics[metrics.DRAFT_TOKENS].increment(stats.num_draft_tokens)
        self._metrics[metrics.ACCEPTED_TOKENS].increment(stats.num_accepted_tokens)
