"""SpeculativeDecoder round by round, over models that are functions: I3, I5, I15, I16, and the statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from fakes import FakeEngine, Predict, mixture, random_head, random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftwood.models.bindings import TOP_IDS, TOP_LOGPROBS
from draftwood.models.errors import RequestError
from draftwood.runtime.decoding.chunk import TokenChunk
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.engines.base import ForwardOutput, KVCache, TokenBatch
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import RandomStreams, SeededStream, seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import SpeculativeConfig

V, PROMPT = 8, (0, 1)
CONFIGS = {
    "plain": None,
    "chain": SpeculativeConfig("chain", max_draft_len=4),
    "k-ary": SpeculativeConfig("k-ary", branching=(2, 2)),
    "topk merged": SpeculativeConfig("topk", merge="gsd", merge_ngram=1),
    "dyspec": SpeculativeConfig("dyspec"),
    "dyspec merged": SpeculativeConfig("dyspec-threshold", merge="gsd", merge_ngram=1),
    "specdec++": SpeculativeConfig("chain", stop_rule="specdec++"),
    "lookup": SpeculativeConfig("lookup", lookup_ngram=1),
}
SPECULATIVE = {name: config for name, config in CONFIGS.items() if config is not None}


def decode(
    config: SpeculativeConfig | None,
    params: SamplingParams,
    seed: int = 0,
    eos: Sequence[int] = (),
    max_length: int = 4096,
    prompt: Sequence[int] = PROMPT,
    twin: bool = False,
    streams: RandomStreams | None = None,
) -> tuple[list[TokenChunk], SpecDecodeStats]:
    """twin: the draft is the target itself, so that whole proposals are accepted."""
    truth = random_model(seed, V)
    guess = truth if twin else mixture(truth, random_model(seed + 1, V), 0.7)
    target, draft = FakeEngine(truth, V), FakeEngine(guess, V, "draft", accept=random_head(seed))
    stats = SpecDecodeStats()
    sampler = Sampler(params, prompt, eos, V)
    decoder = SpeculativeDecoder(target, draft, config, max_length, eos)
    return list(decoder.generate(prompt, sampler, streams or seeded_streams(seed), stats)), stats


def tokens_of(chunks: Sequence[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.mark.parametrize("name", SPECULATIVE)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_i3_a_round_adds_between_one_token_and_its_depth_and_one(name: str, temperature: float) -> None:
    config = SPECULATIVE[name]
    deepest = config.max_draft_len if name != "lookup" else max(config.max_draft_len, config.lookup_len)
    chunks, stats = decode(config, SamplingParams(max_tokens=60, temperature=temperature))
    assert all(1 <= len(chunk.token_ids) <= deepest + 1 for chunk in chunks)
    assert len(tokens_of(chunks)) == 60 == stats.num_tokens
    assert stats.target_passes == len(chunks)


@pytest.mark.parametrize("name", sorted(SPECULATIVE.keys() - {"lookup"}))
def test_i3_a_perfect_draft_is_accepted_whole_and_earns_the_bonus_token(name: str) -> None:
    chunks, stats = decode(SPECULATIVE[name], SamplingParams(max_tokens=60, temperature=0), twin=True)
    assert all(chunk.num_drafted == len(chunk.token_ids) - 1 for chunk in chunks[:-1])
    assert stats.mean_acceptance_length > 1.5


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=15)
@given(seed=st.integers(0, 500), eos=st.integers(0, V - 1))
def test_i15_the_end_of_text_cuts_an_accepted_path(name: str, seed: int, eos: int) -> None:
    """Greedy text is plain decoding's up to and with the first end of text, wherever a round's path crosses it."""
    params = SamplingParams(max_tokens=40, temperature=0)
    free, _ = decode(None, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True), seed, (eos,))
    expected = tokens_of(free)
    if eos in expected:
        expected = expected[: expected.index(eos) + 1]
    chunks, stats = decode(CONFIGS[name], params, seed, (eos,), twin=True)
    assert tokens_of(chunks) == expected
    assert chunks[-1].finish_reason == ("stop" if eos in expected else "length")
    assert stats.num_tokens == len(expected)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_i15_limits_of_length_cut_an_accepted_path(name: str, limit: int) -> None:
    for params, max_length in (
        (SamplingParams(max_tokens=limit, temperature=0), 4096),
        (SamplingParams(max_tokens=99, temperature=0), len(PROMPT) + limit),
    ):
        chunks, _ = decode(CONFIGS[name], params, twin=True, max_length=max_length)
        assert len(tokens_of(chunks)) == limit and chunks[-1].finish_reason == "length"


@pytest.mark.parametrize("name", CONFIGS)
def test_stop_tokens_and_ignore_eos(name: str) -> None:
    free = tokens_of(decode(None, SamplingParams(max_tokens=30, temperature=0))[0])
    stop = free[10]
    expected = free[: free.index(stop) + 1]
    stopped, _ = decode(CONFIGS[name], SamplingParams(max_tokens=30, temperature=0, stop_token_ids=(stop,)))
    assert tokens_of(stopped) == expected
    ignored, _ = decode(CONFIGS[name], SamplingParams(max_tokens=30, temperature=0, ignore_eos=True), eos=(stop,))
    assert tokens_of(ignored) == free


@pytest.mark.parametrize("name", CONFIGS)
def test_min_tokens_hold_back_the_end_of_text(name: str) -> None:
    for seed in range(5):
        params = SamplingParams(max_tokens=30, min_tokens=20, seed=seed)
        chunks, _ = decode(CONFIGS[name], params, seed, eos=(2, 3, 4))
        assert len(tokens_of(chunks)) >= 20 and not {2, 3, 4} & set(tokens_of(chunks)[:20])


class Watched(SeededStream):
    """Counts its draws and checks every distribution it is given (I5)."""

    draws = 0

    def categorical(self, probabilities: NDArray[np.float64]) -> int:
        self.draws += 1
        assert probabilities.min() >= 0 and abs(probabilities.sum() - 1) < 1e-9
        token = super().categorical(probabilities)
        assert probabilities[token] > 0
        return token

    def bernoulli(self, probability: float) -> bool:
        self.draws += 1
        assert 0 <= probability <= 1 + 1e-12
        return super().bernoulli(probability)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("params", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.05}])
def test_i5_every_draw_is_from_a_distribution(name: str, params: dict[str, float]) -> None:
    streams = RandomStreams(*(Watched(np.random.SeedSequence(index)) for index in range(3)))
    chunks, _ = decode(CONFIGS[name], SamplingParams(max_tokens=40, **params), streams=streams)  # type: ignore[arg-type]
    assert len(tokens_of(chunks)) == 40


def test_i16_each_part_draws_from_a_stream_of_its_own() -> None:
    """Plain decoding uses the target's stream only; how much the draft draws never moves the target's."""
    plain = RandomStreams(*(Watched(np.random.SeedSequence(index)) for index in range(3)))
    decode(None, SamplingParams(max_tokens=20), streams=plain)
    assert [stream.draws for stream in plain] == [0, 0, 20]  # type: ignore[attr-defined]
    texts = []
    for draft_seed in (1, 2):  # matching follows the target's own draws, whatever was drafted
        streams = RandomStreams(
            SeededStream(np.random.SeedSequence(draft_seed)),
            SeededStream(np.random.SeedSequence(7)),
            SeededStream(np.random.SeedSequence(8)),
        )
        config = SpeculativeConfig("chain", verify="match")
        texts.append(tokens_of(decode(config, SamplingParams(max_tokens=20), streams=streams)[0]))
    assert texts[0] == texts[1]


def test_statistics_are_vllms() -> None:
    config = SpeculativeConfig("chain", max_draft_len=3)
    chunks, stats = decode(config, SamplingParams(max_tokens=61, temperature=0, ignore_eos=True))
    rounds = [chunk for chunk in chunks if chunk.num_drafted or len(chunk.token_ids) == 1]
    assert stats.num_drafts <= len(rounds)
    assert sum(stats.accepted_per_round) == stats.num_drafts
    assert sum(j * count for j, count in enumerate(stats.accepted_per_round)) == stats.num_accepted_tokens
    assert stats.mean_acceptance_length == pytest.approx(1 + stats.num_accepted_tokens / stats.num_drafts)
    assert stats.acceptance_rate == pytest.approx(stats.num_accepted_tokens / stats.num_draft_tokens)
    assert stats.to_dict()["mean_acceptance_length"] == stats.mean_acceptance_length


def test_merged_tokens_are_counted() -> None:
    _, merged = decode(CONFIGS["topk merged"], SamplingParams(max_tokens=60, temperature=0))
    _, tree = decode(SpeculativeConfig("topk"), SamplingParams(max_tokens=60, temperature=0))
    assert merged.num_merged_tokens > 0 and tree.num_merged_tokens == 0


def test_logprobs_are_the_targets_own() -> None:
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=2)
    chunks, _ = decode(CONFIGS["topk merged"], params)
    context, model = list(PROMPT), random_model(0, V)
    for token, logprob in zip(tokens_of(chunks), (item for chunk in chunks for item in chunk.logprobs), strict=True):
        p = model(tuple(context))
        assert logprob.token_id == token and logprob.logprob == pytest.approx(np.log(p[token]))
        assert list(logprob.top) == np.argsort(-p)[:2].tolist()
        context.append(token)


def test_what_the_reader_does_with_a_chunk_is_not_decoding_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def ticking() -> float:
        nonlocal now
        now += 0.001  # between one look at the clock and the next
        return now

    monkeypatch.setattr("draftwood.runtime.speculation.stopwatch.perf_counter", ticking)
    engine, stats = FakeEngine(random_model(0, V), V), SpecDecodeStats()
    params = SamplingParams(max_tokens=5)
    for _ in SpeculativeDecoder(engine, None, None, 4096, ()).generate(
        PROMPT, Sampler(params, PROMPT, (), V), seeded_streams(0), stats
    ):
        now += 50
    assert 0 < stats.decode_seconds < 1


@pytest.mark.parametrize("penalty", [0.0, 5e-324, 1e-7, 1e7, float("inf"), float("nan")])
def test_a_repetition_penalty_under_which_logits_overflow_is_refused(penalty: float) -> None:
    with pytest.raises(RequestError, match="repetition_penalty must be between 1e-06 and 1e\\+06"):
        SamplingParams(repetition_penalty=penalty)


def certain(token: int) -> NDArray[np.float64]:
    return np.asarray(np.eye(V)[token])


def test_only_the_number_of_tokens_limits_the_depth_of_algorithm_1() -> None:
    """Where the draft is sure of each token, its tree is a path of all of them."""
    engines = [FakeEngine(lambda seen: certain((seen[-1] + 1) % 4), V, role) for role in ("target", "draft")]
    config = SpeculativeConfig("dyspec-heap", max_total_draft_tokens=5)
    decoder = SpeculativeDecoder(engines[0], engines[1], config, 4096, ())
    sampler = Sampler(SamplingParams(max_tokens=24, temperature=1), PROMPT, (), V)
    first = next(decoder.generate(PROMPT, sampler, seeded_streams(0), SpecDecodeStats()))
    assert first.token_ids == [2, 3, 0, 1, 2, 3]


class RankingEngine(FakeEngine):
    """Names the best token of each row. As with real engines, nobody may read the logits of such a pass."""

    def __init__(self, predict: Predict) -> None:
        super().__init__(predict, V)
        self.spec = replace(self.spec, outputs=(*self.spec.outputs, TOP_IDS.name, TOP_LOGPROBS.name))

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        output = super().score(batch, cache)
        best = np.argsort(-output.logits, axis=1, kind="stable")[:, :2]
        logits = np.full_like(output.logits, np.nan) if batch.ranking_only else output.logits
        return ForwardOutput(logits, best, np.take_along_axis(output.logits, best, 1))


@pytest.mark.parametrize("name", ["plain", "chain", "topk merged"])
def test_greedy_rounds_need_the_best_tokens_only(name: str) -> None:
    truth = random_model(5, V)
    params = SamplingParams(max_tokens=20, temperature=0)
    draft = FakeEngine(mixture(truth, random_model(6, V), 0.7), V, "draft")
    decoder = SpeculativeDecoder(RankingEngine(truth), draft, CONFIGS[name], 4096, ())
    chunks = list(decoder.generate(PROMPT, Sampler(params, PROMPT, (), V), seeded_streams(5), SpecDecodeStats()))
    assert tokens_of(chunks) == tokens_of(decode(None, params, seed=5)[0])
