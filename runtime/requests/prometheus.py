"""Conversion of the metrics into Prometheus' text format with prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .metrics import COUNTERS, GAUGES, HISTOGRAMS, Histogram


class MetricSnapshot(list[Metric], Collector):
    """The values of all metrics at one time, as a collector of prometheus_client."""

    def collect(self) -> Iterable[Metric]:
        return self


def to_text(
    gauges: Mapping[str, float],
    counters: Mapping[str, float],
    labelled: Mapping[tuple[str, str, str], Mapping[Any, int]],
    histograms: Mapping[str, Histogram],
) -> str:
    """The metrics in text format 0.0.4, without the `_created` series that prometheus_client's counters would add.
    labelled: counters by the values of a label; their keys are name, description and label."""
    families = MetricSnapshot(GaugeMetricFamily(name, GAUGES[name], value) for name, value in gauges.items())
    families += [CounterMetricFamily(name, COUNTERS[name], value) for name, value in counters.items()]
    for (name, description, label), numbers in labelled.items():
        family = CounterMetricFamily(name, description, labels=[label])
        for value, number in sorted(numbers.items()):
            family.add_metric([str(value)], number)
        families.append(family)
    for name, histogram in histograms.items():
        boundaries = (*map(str, histogram.boundaries), "+Inf")
        buckets = list(zip(boundaries, accumulate(histogram.counts), strict=True))
        families.append(HistogramMetricFamily(name, HISTOGRAMS[name][0], buckets, histogram.sum))
    return generate_latest(families).decode()
