"""TritonMetrics: a model's own figures on Triton's /metrics page, with the names of the HTTP server's."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from ...requests.metrics import COUNTERS, ENDED, GAUGES, HISTOGRAMS, LABELLED, ServingMetrics

REASONS = ("stop", "length", "abort", "deadline", "refused", "error")


class TritonMetrics(ServingMetrics):
    """Counts in any thread. `publish` tells Triton, always in one thread: two at a time crash the whole server (seen
    with 24.10)."""

    def __init__(self, family: Any, labels: Mapping[str, str]) -> None:
        """family: Triton's MetricFamily class. labels: distinguish this instance of the model from others."""
        super().__init__()
        self._families = list[Any]()  # Triton forgets a metric whose family is gone

        def made(name: str, text: str, kind: Any) -> Any:
            self._families.append(family(name=name, description=text, kind=kind))
            return self._families[-1]

        counters = {name: made(name, text, family.COUNTER).Metric(labels=labels) for name, text in COUNTERS.items()}
        ended = made(ENDED, LABELLED[ENDED][0], family.COUNTER)
        ends = {reason: ended.Metric(labels={**labels, "finish_reason": reason}) for reason in REASONS}
        self._counters = {(name, None): metric for name, metric in counters.items()} | {
            (ENDED, reason): metric for reason, metric in ends.items()
        }
        self._gauges = [made(name, text, family.GAUGE).Metric(labels=labels) for name, text in GAUGES.items()]
        self._histograms = {
            name: made(name, text, family.HISTOGRAM).Metric(labels=labels, buckets=list(buckets))
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._added = deque[tuple[str, Any, int]]()
        self._observed = deque[tuple[str, float]]()
        self._now: tuple[int, ...] = ()

    def publish(self, running: int, waiting: int, healthy: bool) -> None:
        """Tell Triton what was counted, and the present values of the gauges."""
        while self._added:
            name, label, number = self._added.popleft()
            if (name, label) in self._counters:
                self._counters[name, label].increment(number)
        while self._observed:
            name, seconds = self._observed.popleft()
            self._histograms[name].observe(seconds)
        now = (running, waiting, int(healthy), running, waiting)
        if now != self._now:
            self._now = now
            for metric, value in zip(self._gauges, now, strict=True):
                metric.set(value)

    def _add(self, name: str, number: int, label: Any = None) -> None:
        super()._add(name, number, label)
        self._added.append((name, label, number))

    def _observe(self, name: str, seconds: float, times: int = 1) -> None:
        super()._observe(name, seconds, times)
        self._observed.extend([(name, seconds)] * times)
