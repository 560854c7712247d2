"""ServingMetrics: counters and histograms of an AsyncLLM's requests.

prometheus_client writes the text format, but it does not keep the counts. Its metrics would take one lock each in every
round, and its histograms accept one observation at a time. An AsyncLLM without a server also needs no further package.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from threading import Lock
from typing import Any, NamedTuple

from ...models.errors import ConfigError
from ...plugins.installation import lacking
from ..decoding.stats import DraftCounts

# vLLM's boundaries, in seconds.
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
REQUEST_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0)

# Every metric of the OpenAI-compatible server and of Triton's model, with its description.
GAUGES = {
    "draftwood_requests_running": "Requests being decoded",
    "draftwood_requests_waiting": "Requests waiting for a place",
    "draftwood_engine_healthy": "1 while the engine serves requests, else 0",
    "vllm:num_requests_running": "Requests being decoded, by vLLM's name",
    "vllm:num_requests_waiting": "Requests waiting for a place, by vLLM's name",
}
PROMPT_TOKENS, GENERATION_TOKENS = "draftwood_prompt_tokens_total", "draftwood_generation_tokens_total"
PREFIX_QUERIES, PREFIX_HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
DRAFTS, DRAFT_TOKENS = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens_total"
COUNTERS = {
    DRAFTS: "Proposals verified",
    DRAFT_TOKENS: "Draft tokens proposed",
    ACCEPTED_TOKENS: "Draft tokens accepted",
    PREFIX_QUERIES: "Tokens of prompts, read or not",
    PREFIX_HITS: "Tokens of prompts that another request had read",
    PROMPT_TOKENS: "Tokens of prompts",
    GENERATION_TOKENS: "Tokens generated",
}
ENDED, ANSWERED = "draftwood_requests_total", "draftwood_http_responses_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
LABELLED = {  # counters of each value of a label: their descriptions, and the label
    ENDED: ("Requests by their end", "finish_reason"),
    ANSWERED: ("Answers of the HTTP server by status, refusals included", "status"),
    ACCEPTED_AT: ("Proposals accepted up to a depth", "position"),
}
FIRST_TOKEN, INTER_TOKEN = "draftwood_time_to_first_token_seconds", "draftwood_inter_token_latency_seconds"
QUEUE, REQUEST = "draftwood_request_queue_seconds", "draftwood_request_seconds"
HISTOGRAMS = {
    FIRST_TOKEN: ("From arrival to the first response", FIRST_TOKEN_BUCKETS),
    INTER_TOKEN: ("Between responses, per token", INTER_TOKEN_BUCKETS),
    QUEUE: ("From arrival to a place among the running requests", REQUEST_BUCKETS),
    REQUEST: ("From arrival to the last response", REQUEST_BUCKETS),
}


class Histogram:
    """Numbers of observations by upper boundary, in seconds."""

    def __init__(self, boundaries: Sequence[float]) -> None:
        self.boundaries = tuple(boundaries)
        self.counts = [0] * (len(boundaries) + 1)  # the last one counts observations above all boundaries
        self.sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(self.boundaries, seconds)] += times
        self.sum += seconds * times


class ServingMetrics:
    """Counters and histograms over all requests since the start. Usable from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts = {name: Counter[Any]({None: 0}) for name in COUNTERS}  # by the value of the label
        self._counts |= {name: Counter[Any]() for name in LABELLED}
        self._times = {name: Histogram(boundaries) for name, (_, boundaries) in HISTOGRAMS.items()}

    def record_start(self, prompt_tokens: int, queue_seconds: float) -> None:
        with self._lock:
            self._add(PROMPT_TOKENS, prompt_tokens)
            self._observe(QUEUE, queue_seconds)

    def record_prompt(self, tokens: int, cached_tokens: int) -> None:
        """Count the tokens of a prompt. cached_tokens: those whose rows came from another request."""
        with self._lock:
            self._add(PREFIX_QUERIES, tokens)
            self._add(PREFIX_HITS, cached_tokens)

    def record_round(self, tokens: int, seconds: float, first: bool, before: DraftCounts, after: DraftCounts) -> None:
        """Count a round with `tokens` output tokens. seconds: since the request's arrival for its first round, else
        since its previous round; these are divided among the tokens. before, after: the draft counts of the request,
        which differ by one proposal at most."""
        with self._lock:
            self._add(GENERATION_TOKENS, tokens)
            for name, old, new in zip((DRAFTS, DRAFT_TOKENS, ACCEPTED_TOKENS), before, after, strict=True):
                self._add(name, new - old)
            for position in range(after.num_accepted_tokens - before.num_accepted_tokens):
                self._add(ACCEPTED_AT, 1, position)
            if first:
                self._observe(FIRST_TOKEN, seconds)
            elif tokens:
                self._observe(INTER_TOKEN, seconds / tokens, tokens)

    def record_end(self, reason: str, seconds: float) -> None:
        """Count an ended request. reason: the finish_reason, "abort", "deadline" or "error". seconds: since arrival."""
        with self._lock:
            self._add(ENDED, 1, reason)
            self._observe(REQUEST, seconds)

    def record_answer(self, status: int) -> None:
        """Count an answer of the HTTP server to a request of its API."""
        with self._lock:
            self._add(ANSWERED, 1, status)

    def _add(self, name: str, number: int, label: Any = None) -> None:
        self._counts[name][label] += number

    def _observe(self, name: str, seconds: float, times: int = 1) -> None:
        self._times[name].observe(seconds, times)

    def values(self, gauges: Mapping[str, float]) -> Values:
        """All metrics. gauges: the present values, by names of GAUGES."""
        with self._lock:
            return Values(gauges, deepcopy(self._counts), deepcopy(self._times))

    def to_prometheus(self, gauges: Mapping[str, float]) -> str:
        """The same as text, see `written`."""
        return written({None: self.values(gauges)})


class Values(NamedTuple):
    gauges: Mapping[str, float]
    counts: Mapping[str, Mapping[Any, int]]  # of each counter, by the values of its label; without one, by None
    times: Mapping[str, Histogram]


def written(models: Mapping[str | None, Values]) -> str:
    """The metrics of models in Prometheus' text format 0.0.4, by the label `model`; None for a model alone, without it.
    Raises ConfigError without prometheus_client."""
    try:
        from .prometheus import to_text
    except ModuleNotFoundError as error:
        raise ConfigError(f"metrics as text need {lacking(error)}") from error
    return to_text(models)
