"""TritonMetrics: a model's own figures on Triton's /metrics page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..metrics import SpecDecodeStats
from .metrics import FIRST_TOKEN_BUCKETS, INTER_TOKEN_BUCKETS, REQUEST_BUCKETS

COUNTERS = {
    "draftwood_prompt_tokens_total": "Tokens of prompts",
    "draftwood_generation_tokens_total": "Tokens generated",
    "vllm:prefix_cache_queries_total": "Tokens of prompts, read or not",
    "vllm:prefix_cache_hits_total": "Tokens of prompts that another request had read",
    "vllm:spec_decode_num_drafts_total": "Proposals verified",
    "vllm:spec_decode_num_draft_tokens_total": "Draft tokens proposed",
    "vllm:spec_decode_num_accepted_tokens_total": "Draft tokens accepted",
}
GAUGES = {
    "draftwood_requests_running": "Requests being decoded",
    "draftwood_requests_waiting": "Requests waiting for a place",
    "draftwood_engine_healthy": "1, or 0 when nobody can expect a text",
}
HISTOGRAMS = {
    "draftwood_time_to_first_token_seconds": ("From arrival to the first response", FIRST_TOKEN_BUCKETS),
    "draftwood_inter_token_latency_seconds": ("Between responses, per token", INTER_TOKEN_BUCKETS),
    "draftwood_request_seconds": ("From arrival to the last response", REQUEST_BUCKETS),
}
ENDED = "draftwood_requests_total"
REASONS = ("stop", "length", "abort", "deadline", "refused", "error")


class TritonMetrics:
    """Named and defined as ServingMetrics. Not to be used from two threads at a time."""

    def __init__(self, family: Any, labels: Mapping[str, str]) -> None:
        """family: Triton's MetricFamily class. labels: what tells this instance of the model from others."""
        described = [
            (COUNTERS, family.COUNTER),
            ({ENDED: "Requests by their end"}, family.COUNTER),
            (GAUGES, family.GAUGE),
        ]
        self._families = {
            name: family(name=name, description=text, kind=kind)
            for names, kind in described
            for name, text in names.items()
        }
        self._metrics = {name: self._families[name].Metric(labels=labels) for name in (*COUNTERS, *GAUGES)}
        for name, (text, buckets) in HISTOGRAMS.items():
            self._families[name] = family(name=name, description=text, kind=family.HISTOGRAM)
            self._metrics[name] = self._families[name].Metric(labels=labels, buckets=list(buckets))
        self._ended = {
            reason: self._families[ENDED].Metric(labels={**labels, "finish_reason": reason}) for reason in REASONS
        }
        self._now: tuple[int, ...] = ()

    def record_now(self, running: int, waiting: int, healthy: bool) -> None:
        """What is true at the moment: how many requests there are, and whether any can expect a text."""
        now = (running, waiting, int(healthy))
        if now != self._now:
            self._now = now
            for name, value in zip(GAUGES, now, strict=True):
                self._metrics[name].set(value)

    def record_start(self, prompt_tokens: int) -> None:
        """A request was taken."""
        self._metrics["draftwood_prompt_tokens_total"].increment(prompt_tokens)
        self._metrics["vllm:prefix_cache_queries_total"].increment(prompt_tokens)

    def record_round(self, tokens: int, seconds: float, first: bool) -> None:
        """One round emitted `tokens`, so many seconds after the request's arrival, or after its last round."""
        self._metrics["draftwood_generation_tokens_total"].increment(tokens)
        if first:
            self._metrics["draftwood_time_to_first_token_seconds"].observe(seconds)
        elif tokens:
            self._metrics["draftwood_inter_token_latency_seconds"].observe(seconds / tokens)

    def record_end(self, reason: str, seconds: float, stats: SpecDecodeStats) -> None:
        """A request ended, so many seconds after its arrival. reason: one of REASONS."""
        self._ended[reason].increment(1)
        self._metrics["draftwood_request_seconds"].observe(seconds)
        self._metrics["vllm:prefix_cache_hits_total"].increment(stats.num_cached_tokens)
        self._metrics["vllm:spec_decode_num_drafts_total"].increment(stats.num_drafts)
        self._metrics["vllm:spec_decode_num_draft_tokens_total"].increment(stats.num_draft_tokens)
        self._metrics["vllm:spec_decode_num_accepted_tokens_total"].increment(stats.num_accepted_tokens)
