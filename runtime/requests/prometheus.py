"""Conversion of the metrics into Prometheus' text format with prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .metrics import COUNTERS, GAUGES, HISTOGRAMS, LABELLED, Values


class MetricSnapshot(list[Metric], Collector):
    """The values of all metrics at one time, as a collector of prometheus_client."""

    def collect(self) -> Iterable[Metric]:
        return self


def to_text(models: Mapping[str | None, Values]) -> str:
    """See `metrics.written`; without the `_created` series that prometheus_client's counters would add."""
    own = [] if None in models else ["model"]
    labelled = [([] if model is None else [model], values) for model, values in models.items()]
    families = MetricSnapshot()
    for name, description in GAUGES.items():
        gauge = GaugeMetricFamily(name, description, labels=own)
        for labels, values in labelled:
            if name in values.gauges:
                gauge.add_metric(labels, values.gauges[name])
        families += [gauge] if gauge.samples else []
    for name in (*COUNTERS, *LABELLED):
        description, label = LABELLED.get(name) or (COUNTERS[name], "")
        counter = CounterMetricFamily(name, description, labels=[*own, label] if label else own)
        for labels, values in labelled:
            for value, number in sorted(values.counts[name].items()):
                counter.add_metric([*labels, str(value)] if label else labels, number)
        families.append(counter)
    for name, (description, _) in HISTOGRAMS.items():
        family = HistogramMetricFamily(name, description, labels=own)
        for labels, values in labelled:
            histogram = values.times[name]
            boundaries = (*map(str, histogram.boundaries), "+Inf")
            buckets = list(zip(boundaries, accumulate(histogram.counts), strict=True))
            family.add_metric(labels, buckets, histogram.sum)
        families.append(family)
    return generate_latest(families).decode()
