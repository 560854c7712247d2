"""What a server counts about its requests, read by Prometheus' own parser."""

from __future__ import annotations

import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from draftwood.models.errors import ConfigError
from draftwood.runtime.decoding.stats import DraftCounts
from draftwood.runtime.requests.metrics import COUNTERS, GAUGES, HISTOGRAMS, ServingMetrics

NOW = dict(zip(GAUGES, (2.0, 1.0, 1.0, 2.0, 1.0), strict=True))
# Of the same records, as it was written before prometheus_client wrote it.
WRITTEN_BY_HAND = """\
# TYPE draftwood_requests_running gauge
draftwood_requests_running 2.0
# TYPE draftwood_requests_waiting gauge
draftwood_requests_waiting 1.0
# TYPE draftwood_engine_healthy gauge
draftwood_engine_healthy 1.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting 1.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 2
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 1
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total 2
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total 8
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total 3
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total 7
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total 3
# TYPE draftwood_prompt_tokens_total counter
draftwood_prompt_tokens_total 7
# TYPE draftwood_generation_tokens_total counter
draftwood_generation_tokens_total 5
# TYPE draftwood_requests_total counter
draftwood_requests_total{finish_reason="abort"} 1
draftwood_requests_total{finish_reason="stop"} 1
# TYPE draftwood_http_responses_total counter
draftwood_http_responses_total{status="429"} 2
# TYPE draftwood_time_to_first_token_seconds histogram
draftwood_time_to_first_token_seconds_bucket{le="0.001"} 0
draftwood_time_to_first_token_seconds_bucket{le="0.005"} 0
draftwood_time_to_first_token_seconds_bucket{le="0.01"} 0
draftwood_time_to_first_token_seconds_bucket{le="0.02"} 0
draftwood_time_to_first_token_seconds_bucket{le="0.04"} 1
draftwood_time_to_first_token_seconds_bucket{le="0.06"} 1
draftwood_time_to_first_token_seconds_bucket{le="0.08"} 1
draftwood_time_to_first_token_seconds_bucket{le="0.1"} 1
draftwood_time_to_first_token_seconds_bucket{le="0.25"} 1
draftwood_time_to_first_token_seconds_bucket{le="0.5"} 1
draftwood_time_to_first_token_seconds_bucket{le="0.75"} 1
draftwood_time_to_first_token_seconds_bucket{le="1.0"} 1
draftwood_time_to_first_token_seconds_bucket{le="2.5"} 1
draftwood_time_to_first_token_seconds_bucket{le="5.0"} 1
draftwood_time_to_first_token_seconds_bucket{le="7.5"} 1
draftwood_time_to_first_token_seconds_bucket{le="10.0"} 1
draftwood_time_to_first_token_seconds_bucket{le="+Inf"} 1
draftwood_time_to_first_token_seconds_sum 0.04
draftwood_time_to_first_token_seconds_count 1
# TYPE draftwood_inter_token_latency_seconds histogram
draftwood_inter_token_latency_seconds_bucket{le="0.001"} 0
draftwood_inter_token_latency_seconds_bucket{le="0.0025"} 0
draftwood_inter_token_latency_seconds_bucket{le="0.005"} 0
draftwood_inter_token_latency_seconds_bucket{le="0.01"} 3
draftwood_inter_token_latency_seconds_bucket{le="0.025"} 3
draftwood_inter_token_latency_seconds_bucket{le="0.05"} 3
draftwood_inter_token_latency_seconds_bucket{le="0.075"} 3
draftwood_inter_token_latency_seconds_bucket{le="0.1"} 3
draftwood_inter_token_latency_seconds_bucket{le="0.15"} 3
draftwood_inter_token_latency_seconds_bucket{le="0.2"} 3
draftwood_inter_token_latency_seconds_bucket{le="0.3"} 3
draftwood_inter_token_latency_seconds_bucket{le="0.4"} 3
draftwood_inter_token_latency_seconds_bucket{le="0.5"} 3
draftwood_inter_token_latency_seconds_bucket{le="0.75"} 3
draftwood_inter_token_latency_seconds_bucket{le="1.0"} 3
draftwood_inter_token_latency_seconds_bucket{le="2.5"} 3
draftwood_inter_token_latency_seconds_bucket{le="+Inf"} 3
draftwood_inter_token_latency_seconds_sum 0.03
draftwood_inter_token_latency_seconds_count 3
# TYPE draftwood_request_queue_seconds histogram
draftwood_request_queue_seconds_bucket{le="0.1"} 0
draftwood_request_queue_seconds_bucket{le="0.3"} 1
draftwood_request_queue_seconds_bucket{le="0.5"} 1
draftwood_request_queue_seconds_bucket{le="0.8"} 1
draftwood_request_queue_seconds_bucket{le="1.0"} 1
draftwood_request_queue_seconds_bucket{le="1.5"} 1
draftwood_request_queue_seconds_bucket{le="2.0"} 1
draftwood_request_queue_seconds_bucket{le="2.5"} 1
draftwood_request_queue_seconds_bucket{le="5.0"} 1
draftwood_request_queue_seconds_bucket{le="10.0"} 1
draftwood_request_queue_seconds_bucket{le="15.0"} 1
draftwood_request_queue_seconds_bucket{le="20.0"} 1
draftwood_request_queue_seconds_bucket{le="30.0"} 1
draftwood_request_queue_seconds_bucket{le="40.0"} 1
draftwood_request_queue_seconds_bucket{le="50.0"} 1
draftwood_request_queue_seconds_bucket{le="60.0"} 1
draftwood_request_queue_seconds_bucket{le="120.0"} 1
draftwood_request_queue_seconds_bucket{le="+Inf"} 1
draftwood_request_queue_seconds_sum 0.2
draftwood_request_queue_seconds_count 1
# TYPE draftwood_request_seconds histogram
draftwood_request_seconds_bucket{le="0.1"} 1
draftwood_request_seconds_bucket{le="0.3"} 1
draftwood_request_seconds_bucket{le="0.5"} 1
draftwood_request_seconds_bucket{le="0.8"} 1
draftwood_request_seconds_bucket{le="1.0"} 1
draftwood_request_seconds_bucket{le="1.5"} 1
draftwood_request_seconds_bucket{le="2.0"} 1
draftwood_request_seconds_bucket{le="2.5"} 1
draftwood_request_seconds_bucket{le="5.0"} 1
draftwood_request_seconds_bucket{le="10.0"} 1
draftwood_request_seconds_bucket{le="15.0"} 1
draftwood_request_seconds_bucket{le="20.0"} 1
draftwood_request_seconds_bucket{le="30.0"} 1
draftwood_request_seconds_bucket{le="40.0"} 1
draftwood_request_seconds_bucket{le="50.0"} 1
draftwood_request_seconds_bucket{le="60.0"} 1
draftwood_request_seconds_bucket{le="120.0"} 1
draftwood_request_seconds_bucket{le="+Inf"} 2
draftwood_request_seconds_sum 130.1
draftwood_request_seconds_count 2
"""


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


def test_a_scraper_reads_what_it_read_before_a_library_wrote_it(counted: ServingMetrics) -> None:
    assert parse(counted.to_prometheus(NOW)) == parse(WRITTEN_BY_HAND)


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


def test_a_boundary_belongs_to_its_bucket(counted: ServingMetrics) -> None:
    _, samples = parse(counted.to_prometheus({}))
    buckets = {
        dict(labels)["le"]: n for (name, labels), n in samples.items() if name == "draftwood_request_seconds_bucket"
    }
    assert (buckets["0.1"], buckets["120.0"], buckets["+Inf"]) == (1, 1, 2)
    assert samples["draftwood_inter_token_latency_seconds_count", frozenset()] == 3, "a token each"


def test_without_the_package_the_text_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting goes on without it: an AsyncLLM needs no server."""
    monkeypatch.delitem(sys.modules, "draftwood.runtime.requests.prometheus", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "prometheus_client"]:
        monkeypatch.setitem(sys.modules, name, None)
    metrics = ServingMetrics()
    metrics.record_end("stop", 1.0)
    with pytest.raises(ConfigError, match=r"prometheus_client.*: pip install .*\[serve\]'"):
        metrics.to_prometheus({})
