"""What a round asks of the driver: launches, copies, bytes and waits, as the driver in libcuda's place counts them.

`docs/gpu.md` has the same table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from bundling import ROOT
from cuda_driver.machine import Machine
from tensorrt_bundles import OpenLLM, demo_bundles

from draftwood.runtime import SamplingParams, SpeculativeConfig

pytestmark = pytest.mark.usefixtures("no_faults")

PROMPT, SHORT, LONG = "def fibonacci(n):\n", 12, 84
CONFIGS = {
    "plain": None,
    "chain of 4": SpeculativeConfig("chain", budget="fixed", max_draft_len=4),
    "tree of 15, depth 5": SpeculativeConfig("topk", budget="fixed", max_total_draft_tokens=15, max_draft_len=5),
    "drawn tree of 15": SpeculativeConfig("dyspec", budget="fixed", max_total_draft_tokens=15, max_draft_len=5),
    "DAG of 24, depth 6": SpeculativeConfig(
        "topk", merge="gsd", budget="fixed", max_total_draft_tokens=24, max_draft_len=6
    ),
}


class Round(NamedTuple):
    """Mean counts of a round of all requests together. bytes: to the device and back."""

    passes: float
    moves: float
    copies: float
    waits: float
    up: float
    down: float

    def row(self) -> str:
        numbers = " | ".join(f"{value:.1f}" for value in self[:4])
        return f"{numbers} | {self.up / 1000:.1f} | {self.down / 1000:.1f}"


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, gpu: Machine) -> Iterator[OpenLLM]:
    with demo_bundles(tmp_path_factory.mktemp("bundles"), gpu) as open_llm:
        yield open_llm


def count(opened: OpenLLM, gpu: Machine, name: str, temperature: float, requests: int) -> Round:
    """Between a short text and a longer one, so that no prompt counts. A pass that is not captured yet has the same
    counts."""

    def generated(tokens: int) -> tuple[int, dict[str, int]]:
        params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=3, ignore_eos=True)
        gpu.counts.clear()
        outputs = llm.generate([PROMPT] * requests, params)
        return max(each.stats.num_drafts or each.stats.num_tokens for each in outputs), dict(gpu.counts)

    with opened(requests, CONFIGS[name]) as llm:
        (few, before), (many, after) = generated(SHORT), generated(LONG)

    def per_round(*names: str) -> float:
        return sum(after.get(name, 0) - before.get(name, 0) for name in names) / (many - few)

    copies = per_round("graph", "upload", "download")  # a graph contains the copy of its inputs
    return Round(
        per_round("graph", "enqueue"),
        per_round("launch"),
        copies,
        per_round("wait"),
        per_round("upload bytes"),
        per_round("download bytes"),
    )


CASES = [
    (name, temperature, requests)
    for requests in (1, 8)
    for temperature in (0.0, 0.6)
    for name in CONFIGS
    if (name != "drawn tree of 15" or temperature) and (name != "DAG of 24, depth 6" or not temperature)
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "temperature", "requests"), CASES)
def test_the_documented_counts(name: str, temperature: float, requests: int, opened: OpenLLM, gpu: Machine) -> None:
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    label = f"| {name} | {temperature:g} | {requests} | "
    found = re.search(re.escape(label) + r"(.*) \|", text)
    expected = count(opened, gpu, name, temperature, requests)
    assert found is not None and found[1] == expected.row(), label + expected.row()


def test_a_chain_waits_once_for_each_pass(opened: OpenLLM, gpu: Machine) -> None:
    """No pass needs more than a launch, a copy each way and a wait."""
    found = count(opened, gpu, "chain of 4", 0.0, 1)
    assert found.passes == found.waits == found.copies / 2 and found.moves == 0
