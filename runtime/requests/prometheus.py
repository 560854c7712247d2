"""Conversion of the metrics into Prometheus' text format with prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .metrics import COUNTERS, GAUGES, HISTOGRAMS, LABELLED, Histogram


class MetricSnapshot(list[Metric], Collector):
    """The values of all metrics at one time, as a collector of prometheus_client."""

    def collect(self) -> Iterable[Metric]:
        return self


def to_text(
    gauges: Mapping[str, float], counts: Mapping[str, Mapping[Any, int]], histograms: Mapping[str, Histogram]
) -> str:
    """The metrics in text format 0.0.4, without the `_created` series that prometheus_client's counters would add.
    counts: of each counter, by the values of its label; of one without a label, by None."""
    families = MetricSnapshot(GaugeMetricFamily(name, GAUGES[name], value) for name, value in gauges.items())
    for name, numbers in counts.items():
        description, label = LABELLED.get(name) or (COUNTERS[name], "")
        family = CounterMetricFamily(name, description, labels=[label] if label else [])
        for value, number in sorted(numbers.items()):
            family.add_metric([str(value)] if label else [], number)
        families.append(family)
    for name, histogram in histograms.items():
        boundaries = (*map(str, histogram.boundaries), "+Inf")
        buckets = list(zip(boundaries, accumulate(histogram.counts), strict=True))
        families.append(HistogramMetricFamily(name, HISTOGRAMS[name][0], buckets, histogram.sum))
    return generate_latest(families).decode()
