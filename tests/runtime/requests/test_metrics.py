"""What a server counts about its requests, read by Prometheus' own parser."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from draftwood.models.errors import ConfigError
from draftwood.runtime.decoding.stats import DraftCounts
from draftwood.runtime.requests.metrics import COUNTERS, GAUGES, HISTOGRAMS, ServingMetrics

NOW = dict(zip(GAUGES, (2.0, 1.0, 1.0, 2.0, 1.0), strict=True))
SECONDS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0)
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
# What `counted` is, by the names that dashboards use: values, by labels where there are some; bounds and observations.
GAUGED = {
    "draftwood_requests_running": 2,
    "draftwood_requests_waiting": 1,
    "draftwood_engine_healthy": 1,
    "vllm:num_requests_running": 2,
    "vllm:num_requests_waiting": 1,
}
ADDED_UP: dict[str, dict[tuple[str, str] | None, float]] = {
    "vllm:spec_decode_num_accepted_tokens_per_pos": {("position", "0"): 2, ("position", "1"): 1},
    "vllm:spec_decode_num_drafts": {None: 2},
    "vllm:spec_decode_num_draft_tokens": {None: 8},
    "vllm:spec_decode_num_accepted_tokens": {None: 3},
    "vllm:prefix_cache_queries": {None: 7},
    "vllm:prefix_cache_hits": {None: 3},
    "draftwood_prompt_tokens": {None: 7},
    "draftwood_generation_tokens": {None: 5},
    "draftwood_requests": {("finish_reason", "abort"): 1, ("finish_reason", "stop"): 1},
    "draftwood_http_responses": {("status", "429"): 2},
}
OBSERVED: dict[str, tuple[tuple[float, ...], list[float]]] = {
    "draftwood_time_to_first_token_seconds": (FIRST, [0.04]),
    "draftwood_inter_token_latency_seconds": (BETWEEN, [0.01] * 3),  # once per token
    "draftwood_request_queue_seconds": (SECONDS, [0.2]),
    "draftwood_request_seconds": (SECONDS, [130.0, 0.1]),  # a boundary belongs to its bucket
}


@pytest.fixture
def counted() -> ServingMetrics:
    metrics = ServingMetrics()
    metrics.record_start(7, 0.2)
    metrics.record_prompt(7, 3)
    metrics.record_round(2, 0.04, True, DraftCounts(), DraftCounts(1, 4, 1))
    metrics.record_round(3, 0.03, False, DraftCounts(1, 4, 1), DraftCounts(2, 8, 3))
    metrics.record_round(0, 9.0, False, DraftCounts(2, 8, 3), DraftCounts(2, 8, 3))
    metrics.record_end("stop", 130.0)
    metrics.record_end("abort", 0.1)
    metrics.record_answer(429)
    metrics.record_answer(429)
    return metrics


def parse(text: str) -> tuple[dict[str, str], dict[tuple[str, frozenset[tuple[str, str]]], float]]:
    """Type by metric, and value by name and labels."""
    families = list(text_string_to_metric_families(text))
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }
    return {family.name: family.type for family in families}, samples


def test_a_scraper_reads_what_was_counted(counted: ServingMetrics) -> None:
    samples: dict[Any, float] = {(name, frozenset[Any]()): value for name, value in GAUGED.items()}
    samples |= {
        (f"{name}_total", frozenset([labels] if labels else [])): value
        for name, values in ADDED_UP.items()
        for labels, value in values.items()
    }
    for name, (bounds, seconds) in OBSERVED.items():
        for bound in (*bounds, float("inf")):
            le = str(bound).replace("inf", "+Inf")
            samples[f"{name}_bucket", frozenset({("le", le)})] = sum(each <= bound for each in seconds)
        samples |= {(f"{name}_sum", frozenset()): sum(seconds), (f"{name}_count", frozenset()): len(seconds)}
    types = dict.fromkeys(GAUGED, "gauge") | dict.fromkeys(ADDED_UP, "counter") | dict.fromkeys(OBSERVED, "histogram")
    found_types, found = parse(counted.to_prometheus(NOW))
    assert found_types == types and found == pytest.approx(samples)


def test_every_metric_is_described_and_there_from_the_start() -> None:
    text = ServingMetrics().to_prometheus(NOW)
    types, samples = parse(text)
    names = [*GAUGES, *COUNTERS, *HISTOGRAMS]
    assert text.count("# HELP ") == text.count("# TYPE ") == len(types) == len(names) + 3
    by_label = (
        "draftwood_requests_total",
        "draftwood_http_responses_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    )
    assert all(f"\n# TYPE {name} " in text for name in (*names[1:], *by_label))
    assert not any(name.endswith("_created") for name, _ in samples)


def test_without_the_package_the_text_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting goes on without it: an AsyncLLM needs no server."""
    monkeypatch.delitem(sys.modules, "draftwood.runtime.requests.prometheus", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "prometheus_client"]:
        monkeypatch.setitem(sys.modules, name, None)
    metrics = ServingMetrics()
    metrics.record_end("stop", 1.0)
    with pytest.raises(ConfigError, match="prometheus_client: pip install "):
        metrics.to_prometheus({})
