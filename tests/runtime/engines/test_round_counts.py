"""What a round asks of a GPU: passes, kernels, launches, copies, bytes and waits, counted by the driver in libcuda's
place.

`docs/internals/gpu.md` has the same table.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
from bundling import ROOT
from cuda_driver.machine import Machine
from tensorrt_bundles import OpenLLM, demo_bundles

from draftwood.plugins.device_round.images import KERNELS
from draftwood.runtime import SamplingParams, SpeculativeConfig
from draftwood.runtime.engines.static.cuda import CudaDevice

pytestmark = pytest.mark.usefixtures("no_faults")

PROMPT, SHORT, LONG = "def fibonacci(n):\n", 12, 84
HOST, DEVICE = "host", "device"
ON_THE_DEVICE = ("chain of 4", "tree of 15, depth 5", "drawn tree of 15")
CONFIGS = {
    "plain": None,
    "chain of 4": SpeculativeConfig("chain", budget="fixed", max_draft_len=4),
    "tree of 15, depth 5": SpeculativeConfig("topk", budget="fixed", max_total_draft_tokens=15, max_draft_len=5),
    "drawn tree of 15": SpeculativeConfig("dyspec", budget="fixed", max_total_draft_tokens=15, max_draft_len=5),
    "DAG of 24, depth 6": SpeculativeConfig(
        "topk", merge="gsd", budget="fixed", max_total_draft_tokens=24, max_draft_len=6
    ),
}
PROGRAM, COPIES = "a program", ("an upload", "a download")


class Case(NamedTuple):
    """A proposal of CONFIGS. by: which of host and device runs the rounds."""

    name: str
    temperature: float
    requests: int
    by: str


class Round(NamedTuple):
    """Mean counts of a round of all requests together, with what captured graphs contain. launches: calls that queue a
    pass or a graph. waits: of the host. up, down: bytes to the device and back."""

    passes: float
    kernels: float
    launches: float
    copies: float
    waits: float
    up: float
    down: float

    def row(self) -> str:
        numbers = " | ".join(f"{value:.1f}" for value in self[:5])
        return f"{numbers} | {self.up / 1000:.1f} | {self.down / 1000:.1f}"


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, gpu: Machine) -> Iterator[OpenLLM]:
    with demo_bundles(tmp_path_factory.mktemp("bundles"), gpu) as open_llm:
        yield open_llm


def count(opened: OpenLLM, gpu: Machine, case: Case, long: int = LONG) -> Round:
    """Between a short text and a longer one, so that no prompt counts. A pass that is not captured yet has the same
    counts; a round has not, so a first text is not counted."""
    name, temperature, requests, by = case

    def generated(tokens: int) -> tuple[int, Counter[str]]:
        gpu.counts.clear()
        gpu.ran.clear()
        outputs = llm.generate([PROMPT] * requests, settings(temperature, tokens))
        return max(each.stats.num_drafts or each.stats.num_tokens for each in outputs), gpu.counts + gpu.ran

    with pytest.MonkeyPatch.context() as patch, opened(requests, CONFIGS[name]) as llm:
        if by == HOST:
            patch.setattr(CudaDevice, "runs_rounds", False)
        _, (few, before), (many, after) = generated(SHORT), generated(SHORT), generated(long)
    return means(after - before, many - few)


def count_replays(opened: OpenLLM, gpu: Machine, case: Case) -> Round:
    """The rounds of a text that one graph runs on the device. At a temperature above 0 the last rounds of a text, which
    are the host's, would outweigh them: their logits come to the host."""
    found, rounds = Counter[str](), 0
    with opened(case.requests, CONFIGS[case.name]) as llm:
        gpu.counts.clear()
        gpu.ran.clear()
        for _ in llm.stream(PROMPT, settings(case.temperature, SHORT + 28)):
            asked = gpu.counts + gpu.ran
            if asked["verify"] and asked["graph"] == asked["wait"] == 1:
                found, rounds = found + asked, rounds + 1
            gpu.counts.clear()
            gpu.ran.clear()
    assert rounds > 3
    return means(found, rounds)


def settings(temperature: float, tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=temperature, seed=3, ignore_eos=True)


def means(counts: Counter[str], rounds: int) -> Round:
    """A context that is set up for a new shape, which is awaited once, does not count."""
    counts = counts - Counter({name: counts["a profile"] for name in ("enqueue", "wait")})

    calls = (PROGRAM,), (*KERNELS, "move_rows"), ("graph", "enqueue"), COPIES, ("wait",)
    names: list[Sequence[str]] = [*calls, ("upload bytes",), ("download bytes",)]
    return Round(*(sum(counts[name] for name in each) / rounds for each in names))


CASES = [
    Case(name, temperature, requests, by)
    for requests in (1, 8)
    for temperature in (0.0, 0.6)
    for name in CONFIGS
    if (name != "drawn tree of 15" or temperature) and (name != "DAG of 24, depth 6" or not temperature)
    for by in (HOST, DEVICE)
    if by == HOST or (name in ON_THE_DEVICE and (requests == 1 or not temperature))
]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_documented_counts(case: Case, opened: OpenLLM, gpu: Machine) -> None:
    text = (ROOT / "docs" / "internals" / "gpu.md").read_text(encoding="utf-8")
    label = f"| {case.name} | {case.temperature:g} | {case.requests} | {case.by} | "
    found = re.search(re.escape(label) + r"(.*) \|", text)
    replayed = case.by == DEVICE and case.temperature
    expected = count_replays(opened, gpu, case) if replayed else count(opened, gpu, case)
    assert found is not None and found[1] == expected.row(), label + expected.row()


def test_the_host_waits_once_for_each_pass_or_once_for_each_round(opened: OpenLLM, gpu: Machine) -> None:
    """Rounds of a chain. Neither needs more than a launch, a copy each way and a wait. A text's last rounds, which are
    shorter than the chain, are the host's."""
    by_host, by_device = (count(opened, gpu, Case("chain of 4", 0.0, 1, by), SHORT + 28) for by in (HOST, DEVICE))
    assert by_host.passes == by_host.launches == by_host.waits == by_host.copies / 2 > 4 and by_host.kernels == 0
    assert by_device.launches == by_device.waits == by_device.copies / 2 < 1.2
    assert by_device.passes > 4 and by_device.kernels > 10
