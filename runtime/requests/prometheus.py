"""Conversion of the metrics into Prometheus' text format with prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .metrics import COUNTERS, ENDED, ENDED_TEXT, GAUGES, HISTOGRAMS, Histogram


class MetricSnapshot(list[Metric], Collector):
    """The values of all metrics at one time, as a collector of prometheus_client."""

    def collect(self) -> Iterable[Metric]:
        return self


def to_text(
    gauges: Mapping[str, float],
    counters: Mapping[str, float],
    ended: Mapping[str, int],
    histograms: Mapping[str, Histogram],
) -> str:
    """The metrics in text format 0.0.4, without the `_created` series that prometheus_client's counters would add."""
    families = MetricSnapshot(GaugeMetricFamily(name, GAUGES[name], value) for name, value in gauges.items())
    families += [CounterMetricFamily(name, COUNTERS[name], value) for name, value in counters.items()]
    by_reason = CounterMetricFamily(ENDED, ENDED_TEXT, labels=["finish_reason"])
    for reason, number in sorted(ended.items()):
        by_reason.add_metric([reason], number)
    families.append(by_reason)
    for name, histogram in histograms.items():
        boundaries = (*map(str, histogram.boundaries), "+Inf")
        buckets = list(zip(boundaries, accumulate(histogram.counts), strict=True))
        families.append(HistogramMetricFamily(name, HISTOGRAMS[name][0], buckets, histogram.sum))
    return generate_latest(families).decode()
