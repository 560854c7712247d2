"""Rounds that run on the device as a whole, over a stand-in for TensorRT's package: the driver in libcuda's place
executes their kernels from their PTX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import pytest
from bundling import DEMO
from cuda_driver.machine import Machine
from engine_parts import random_text
from uniforms import uniform_streams

from draftwood.models import bindings
from draftwood.models.errors import EngineError
from draftwood.runtime import SamplingParams, SpecDecodeStats, SpeculativeConfig
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.round import Observer, Round
from draftwood.runtime.engines.rounds import MATCH, TRAVERSAL, RoundShape
from draftwood.runtime.engines.static.cuda import CudaDevice
from draftwood.runtime.engines.static.draws import Vocabulary
from draftwood.runtime.engines.static.engine import MOST_PAIRS, StaticEngine
from draftwood.runtime.engines.static.rounds import MOST_DRAWN, StaticRounds
from draftwood.runtime.sampling.random import RandomStreams, seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from tests.runtime.engines import test_tensorrt_engine as stand_in

machine = stand_in.machine
pytestmark = pytest.mark.usefixtures("no_faults")
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.7, max_tokens=9)
PROMPT = random_text(30)
CHAIN = SpeculativeConfig("chain", budget="fixed", max_draft_len=4)
TREE = SpeculativeConfig("topk", budget="fixed", max_total_draft_tokens=9, max_draft_len=3, frontier_width=3)
DEEP = replace(CHAIN, max_draft_len=6)
DRAWN_TREE = SpeculativeConfig("dyspec", budget="fixed", max_total_draft_tokens=5, max_draft_len=2, frontier_width=2)


class Pair:
    """Both engines of the demo on one GPU."""

    def __init__(self, machine: stand_in.HostMachine) -> None:
        self.target, self.draft = (machine.open(DEMO / role, role) for role in bindings.ROLES)

    def decoder(self, config: SpeculativeConfig | None, rounds: bool = True) -> SpeculativeDecoder:
        """rounds: whether the GPU is of a kind that runs them."""
        for engine in (self.target, self.draft):
            device_of(engine).compute_capability = "8.9" if rounds else "7.5"
        return SpeculativeDecoder(self.target, self.draft, config, 400, ())


def device_of(engine: StaticEngine) -> CudaDevice:
    assert isinstance(engine.device, CudaDevice)
    return engine.device


@pytest.fixture
def pair(machine: stand_in.HostMachine) -> Pair:
    return Pair(machine)


def generation(
    decoder: SpeculativeDecoder,
    params: SamplingParams = GREEDY,
    stats: SpecDecodeStats | None = None,
    observe: Observer | None = None,
    streams: RandomStreams | None = None,
) -> Iterator[list[int]]:
    """The tokens of each round."""
    sampler = Sampler(params, PROMPT, (), 2048)
    streams = streams or seeded_streams(0)
    for chunk in decoder.generate(PROMPT, sampler, streams, stats or SpecDecodeStats(), observe):
        yield chunk.token_ids


def text(*arguments: Any) -> list[int]:
    return [token for tokens in generation(*arguments) for token in tokens]


@pytest.mark.parametrize("config", [CHAIN, TREE], ids=["chain", "tree"])
def test_the_text_and_the_proposals_are_those_of_the_host(config: SpeculativeConfig, pair: Pair, gpu: Machine) -> None:
    """With one wait of the host and one copy each way for a round, once its graph is captured."""
    by_host, by_device = SpecDecodeStats(), SpecDecodeStats()
    expected = text(pair.decoder(config, rounds=False), GREEDY, by_host)
    tokens, rounds = list[int](), 0
    before = Counter(gpu.calls)
    for chunk in generation(pair.decoder(config), GREEDY, by_device):
        tokens += chunk
        asked = Counter(gpu.calls) - before
        before = Counter(gpu.calls)
        if gpu.ran["verify"] > rounds:
            rounds += 1
            if rounds > 1:
                assert asked == {"graph": 1, "wait": 1}
    assert tokens == expected and rounds > 2
    assert by_device.accepted_per_round == by_host.accepted_per_round
    assert (by_device.num_draft_tokens, by_device.target_passes) == (by_host.num_draft_tokens, by_host.target_passes)
    assert gpu.ran["pending_inputs"] == gpu.ran["verify"] == rounds


def test_rounds_of_two_texts_in_turn(pair: Pair, gpu: Machine) -> None:
    """They share the engines' executions, whose bindings the host's passes change in between; one text's first rounds
    run on the host, whose last commit of the draft is still queued when a round on the device begins."""
    expected = text(pair.decoder(CHAIN, rounds=False))
    decoders = pair.decoder(CHAIN), pair.decoder(TREE)
    found: list[list[int]] = [[], []]
    for tokens in zip_longest(*map(generation, decoders), fillvalue=[]):
        for each, more in zip(found, tokens, strict=True):
            each += more
    assert found == [expected, expected]
    once = decoders[0]
    host_first = text(once, replace(GREEDY, logprobs=1, max_tokens=9))
    before = gpu.ran["verify"]
    assert [host_first, text(once)] == [expected[:9], expected] and gpu.ran["verify"] > before


def test_a_round_that_cannot_be_captured_is_queued(
    pair: Pair, gpu: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = text(pair.decoder(CHAIN, rounds=False))
    monkeypatch.setattr(gpu, "captures", False)
    assert text(pair.decoder(DEEP)) == expected
    assert sum("a round of" in message for message in caplog.messages) == 1
    assert [launched.name for launched in gpu.launches].count("verify") == gpu.ran["verify"] > 1


DRAWN = {
    "a drawn chain": (CHAIN, SAMPLED),
    "a drawn chain that must match": (replace(CHAIN, verify="match"), replace(SAMPLED, min_p=0.05)),
    "a chosen tree": (TREE, replace(SAMPLED, top_k=40)),
    "a drawn tree": (DRAWN_TREE, SAMPLED),
    "a drawn tree by rejection": (replace(DRAWN_TREE, verify="rejection"), replace(SAMPLED, top_k=20, top_p=0.9)),
}
LONG = ("a drawn chain that must match", "a drawn tree by rejection")
OTHERS = {
    "a drawn tree of a fixed shape": (SpeculativeConfig("k-ary", budget="fixed"), SAMPLED),
    "a drawn tree by the draft's own estimates": (replace(DRAWN_TREE, key="draft"), SAMPLED),
    "a chain verified by rejection": (replace(CHAIN, verify="rejection"), SAMPLED),
    "log-probabilities": (CHAIN, replace(GREEDY, logprobs=2)),
    "penalties": (CHAIN, replace(GREEDY, repetition_penalty=1.2)),
    "merges": (replace(TREE, merge="gsd"), GREEDY),
    "a lookup": (replace(TREE, lookup_ngram=2), GREEDY),
    "a fixed shape": (SpeculativeConfig("k-ary", budget="fixed"), GREEDY),
    "a stop rule": (replace(CHAIN, stop_rule="confidence"), GREEDY),
    "pruning": (replace(TREE, leaf_share=0.1), GREEDY),
    "a chain that is too deep for the text": (replace(CHAIN, max_draft_len=9), replace(GREEDY, max_tokens=9)),
    "a tree that mostly ends before its depth": (replace(TREE, max_draft_len=6), GREEDY),
    "no speculation": (None, GREEDY),
}


@pytest.mark.parametrize("name", [pytest.param(each, marks=pytest.mark.full if each in LONG else ()) for each in DRAWN])
def test_sampled_text_is_that_of_the_host(name: str, pair: Pair, gpu: Machine) -> None:
    """With the same uniform numbers; the last tokens are of the host's rounds, which use the streams further."""
    config, params = DRAWN[name]
    by_host, by_device = SpecDecodeStats(), SpecDecodeStats()
    expected = text(pair.decoder(config, rounds=False), params, by_host, None, uniform_streams(1))
    assert text(pair.decoder(config), params, by_device, None, uniform_streams(1)) == expected
    assert by_device.accepted_per_round == by_host.accepted_per_round and by_device.num_accepted_tokens
    assert gpu.ran["verify"] > 1


@pytest.mark.parametrize("name", OTHERS)
def test_other_rounds_stay_on_the_host(name: str, pair: Pair, gpu: Machine) -> None:
    config, params = OTHERS[name]
    expected = text(pair.decoder(config, rounds=False), params)
    assert text(pair.decoder(config), params) == expected
    assert gpu.ran["verify"] == 0


def test_an_observer_gets_its_rounds_from_the_host(pair: Pair, gpu: Machine) -> None:
    seen: list[Round] = []
    text(pair.decoder(CHAIN), GREEDY, SpecDecodeStats(), seen.append)
    assert seen and gpu.ran["verify"] == 0


def test_a_round_has_room_in_masks_and_caches(pair: Pair) -> None:
    caches = pair.target.new_cache(), pair.draft.new_cache()
    rounds = pair.target.rounds(caches[0], pair.draft, caches[1])
    assert rounds is not None and rounds.fits(RoundShape(4, 4, 1), 1)
    assert rounds.fits(RoundShape(2, 20, 17, TRAVERSAL, True, is_tree=True), 1)
    many = RoundShape(2, 250, 7, TRAVERSAL, True, is_tree=True)
    for shape in (RoundShape(4, 32, 4), RoundShape(2, 20, 17), RoundShape(34, 31, 4), RoundShape(4, 256, 2), many):
        assert not rounds.fits(shape, 1), shape
    assert not rounds.fits(RoundShape(4, 4, 1), 2) and not rounds.fits(RoundShape(4, 4, 1), 0)
    caches[0].length, caches[1].length = 595, 595  # type: ignore[misc]
    assert not rounds.fits(RoundShape(4, 8, 2), 1) and rounds.fits(RoundShape(3, 3, 1), 1)
    pair.draft.close()
    with pytest.raises(EngineError, match="the draft engine was closed"):
        rounds.round(RoundShape(3, 3, 1), [1]).run()


def test_few_rounds_above_temperature_0_are_kept(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their buffers are large. They do not take the place of rounds at temperature 0."""
    rounds = pair.target.rounds(pair.target.new_cache(), pair.draft, pair.draft.new_cache())
    assert isinstance(rounds, StaticRounds)
    shared = rounds._shared
    monkeypatch.setattr(shared, "_made", lambda shape, texts: object())
    greedy = [RoundShape(depth, depth, 1) for depth in range(1, MOST_DRAWN + 3)]
    drawn = [shape._replace(verify=MATCH, is_drawn=True) for shape in greedy]
    for shape in (*greedy, *drawn, drawn[-1]):
        shared._round(shape, 1)
    assert list(shared._rounds) == [(shape, 1) for shape in (*greedy, *drawn[-MOST_DRAWN:])]


def test_few_pairs_of_memories_keep_their_rounds(pair: Pair) -> None:
    """A closed cache's memory is the next one's, with its graphs; of many at a time the latest pairs stay."""
    for count in (1, MOST_PAIRS + 2, 1):
        opened = [(pair.target.new_cache(), pair.draft.new_cache()) for _ in range(count)]
        rounds = [pair.target.rounds(cache, pair.draft, other) for cache, other in opened]
        for cache in (each for both in opened for each in both):
            cache.close()
        if count > 1:
            latest = rounds[-1]
    assert len(pair.target._rounds) == MOST_PAIRS
    assert isinstance(latest, StaticRounds) and isinstance(rounds[0], StaticRounds)
    assert rounds[0]._shared is latest._shared


def test_vocabularies_that_are_drawn_from() -> None:
    """A draft of the target's vocabulary or a trimmed one, of at most 262,144 tokens."""
    assert Vocabulary(262144, 262144, 0, 0).fits and Vocabulary(700, 350, 8, 350).fits
    assert not Vocabulary(262145, 262145, 0, 0).fits and not Vocabulary(700, 704, 0, 0).fits


def test_engines_on_different_devices_run_no_rounds(pair: Pair) -> None:
    caches = pair.target.new_cache(), pair.draft.new_cache()
    assert pair.target.rounds(caches[0], pair.draft, caches[1]) is not None
    device_of(pair.draft).number = 1
    assert pair.target.rounds(caches[0], pair.draft, caches[1]) is None
