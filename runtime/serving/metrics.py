"""ServingMetrics: what a server counts about its requests, as Prometheus text."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import NamedTuple

from ..metrics import SpecDecodeStats

# vLLM's boundaries, in seconds.
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
REQUEST_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0)


class Histogram:
    """Counts of observed seconds by upper boundary."""

    def __init__(self, boundaries: Sequence[float]) -> None:
        self.boundaries = tuple(boundaries)
        self.counts = [0] * (len(boundaries) + 1)  # the last one: above every boundary
        self.sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(self.boundaries, seconds)] += times
        self.sum += seconds * times

    def samples(self, name: str) -> Iterator[str]:
        """Prometheus' cumulative buckets, sum and count."""
        total = 0
        for boundary, count in zip((*self.boundaries, "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{boundary}"}} {total}'
        yield f"{name}_sum {self.sum}"
        yield f"{name}_count {total}"


class Drafted(NamedTuple):
    """What a request's speculation had done by some round; see SpecDecodeStats."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @classmethod
    def of(cls, stats: SpecDecodeStats) -> Drafted:
        return cls(stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens)


class ServingMetrics:
    """Counters and histograms over all requests since the start. Usable from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._finished: Counter[str] = Counter()  # by reason
        self._drafted = Drafted()
        self._prompt_tokens = self._prefix_queries = self._prefix_hits = 0
        self._generation_tokens = 0
        self._first_token = Histogram(FIRST_TOKEN_BUCKETS)
        self._inter_token = Histogram(INTER_TOKEN_BUCKETS)
        self._queue = Histogram(REQUEST_BUCKETS)
        self._request = Histogram(REQUEST_BUCKETS)

    def record_start(self, prompt_tokens: int, queue_seconds: float) -> None:
        """A request left the queue."""
        with self._lock:
            self._prompt_tokens += prompt_tokens
            self._queue.observe(queue_seconds)

    def record_prompt(self, tokens: int, cached_tokens: int) -> None:
        """A prompt was read, except for so many tokens that another request had read."""
        with self._lock:
            self._prefix_queries += tokens
            self._prefix_hits += cached_tokens

    def record_round(self, tokens: int, seconds: float, first: bool, before: Drafted, after: Drafted) -> None:
        """One round emitted `tokens`. seconds: since the request arrived if it was its first round, since its last
        round otherwise, which every token of this one shares."""
        with self._lock:
            self._generation_tokens += tokens
            self._drafted = Drafted(
                *(total + new - old for total, new, old in zip(self._drafted, after, before, strict=True))
            )
            if first:
                self._first_token.observe(seconds)
            elif tokens:
                self._inter_token.observe(seconds / tokens, tokens)

    def record_end(self, reason: str, seconds: float) -> None:
        """A request ended. reason: its finish_reason, "abort", "deadline" or "error". seconds: since it arrived."""
        with self._lock:
            self._finished[reason] += 1
            self._request.observe(seconds)

    def to_prometheus(self, gauges: Mapping[str, float]) -> str:
        """Everything in Prometheus' text format 0.0.4. gauges: name -> value, what is true right now."""
        with self._lock:
            counters = {
                "vllm:spec_decode_num_drafts_total": self._drafted.num_drafts,
                "vllm:spec_decode_num_draft_tokens_total": self._drafted.num_draft_tokens,
                "vllm:spec_decode_num_accepted_tokens_total": self._drafted.num_accepted_tokens,
                "vllm:prefix_cache_queries_total": self._prefix_queries,
                "vllm:prefix_cache_hits_total": self._prefix_hits,
                "draftwood_prompt_tokens_total": self._prompt_tokens,
                "draftwood_generation_tokens_total": self._generation_tokens,
            }
            histograms = {
                "draftwood_time_to_first_token_seconds": self._first_token,
                "draftwood_inter_token_latency_seconds": self._inter_token,
                "draftwood_request_queue_seconds": self._queue,
                "draftwood_request_seconds": self._request,
            }
            lines = []
            for name, value in gauges.items():
                lines += [f"# TYPE {name} gauge", f"{name} {value}"]
            for name, value in counters.items():
                lines += [f"# TYPE {name} counter", f"{name} {value}"]
            lines.append("# TYPE draftwood_requests_total counter")
            lines += [f'draftwood_requests_total{{finish_reason="{r}"}} {n}' for r, n in sorted(self._finished.items())]
            for name, histogram in histograms.items():
                lines += [f"# TYPE {name} histogram", *histogram.samples(name)]
        return "\n".join(lines) + "\n"
