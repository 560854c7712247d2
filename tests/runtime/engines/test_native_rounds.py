"""Rounds that the native kernels run as a whole: they use the numbers of the host's growers and verifiers, whose
exactness is proved by enumeration, and come to the same trees, the same accepted paths and the same texts."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from bundling import DEMO, built_native
from checkpoints import VOCAB_SIZE, edit_weights, write_checkpoint
from costs import table
from hypothesis import given, settings
from hypothesis import strategies as st
from native_parts import held, open_native, spec_of
from numpy.typing import NDArray

from draftwood.builder.options import BuildOptions
from draftwood.builder.pass_times import Pair as Measured
from draftwood.builder.pipeline import build
from draftwood.builder.profile import measure_host
from draftwood.models.bindings import DRAFT, TARGET
from draftwood.models.errors import EngineError
from draftwood.plugins.native.compile import SOURCE
from draftwood.plugins.native.round import MOST_KEPT, MOST_NODES, MOST_WIDTH, VERIFIERS
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.decoding.decoder import SpeculativeDecoder, count_one
from draftwood.runtime.decoding.job import Job
from draftwood.runtime.decoding.loop import drive
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.engines.native.engine import NativeEngine
from draftwood.runtime.engines.native.rounds import NativeRounds
from draftwood.runtime.engines.rounds import BEST, BLOCK, DrawSettings, RoundDraws, RoundShape
from draftwood.runtime.engines.shared.placement import PANEL
from draftwood.runtime.engines.shared.pool import PooledEngine
from draftwood.runtime.engines.shared.sequence import PooledKVCache
from draftwood.runtime.sampling import random
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.planning import calibration

Pair = tuple[NativeEngine, NativeEngine]
Pools = tuple[PooledEngine, PooledEngine]
TEXT = list(range(40, 60))
CHAIN = SpeculativeConfig("chain", max_draft_len=4, budget="fixed")
CHOSEN = SpeculativeConfig("topk", max_total_draft_tokens=9, max_draft_len=4, frontier_width=3, budget="fixed")
DRAWN = SpeculativeConfig("dyspec", max_total_draft_tokens=12, max_draft_len=5, frontier_width=3, budget="fixed")
PLANNED = SpeculativeConfig()
WHOLE = {  # what an engine runs as a whole
    "a chain": CHAIN,
    "a chain that must match": replace(CHAIN, verify="match"),
    "a chosen tree": CHOSEN,
    "a chosen chain": replace(CHOSEN, frontier_width=1, max_total_draft_tokens=4),
    "a deep tree of few tokens": replace(CHOSEN, max_total_draft_tokens=3, max_draft_len=8),
    "a drawn tree": DRAWN,
    "a drawn tree by rejection": replace(DRAWN, verify="rejection"),
    "a drawn tree that must match": replace(DRAWN, verify="match"),
}
OTHERS: dict[str, tuple[SpeculativeConfig, dict[str, Any]]] = {  # what the host runs pass by pass
    "a drawn tree of a fixed shape": (SpeculativeConfig("k-ary", budget="fixed"), {"temperature": 0.7}),
    "merges": (replace(CHOSEN, merge="gsd"), {"temperature": 0.0}),
    "a stop rule": (replace(CHAIN, stop_rule="confidence"), {"temperature": 0.0}),
    "penalties": (CHAIN, {"temperature": 0.0, "repetition_penalty": 1.2}),
    "log-probabilities": (CHAIN, {"temperature": 0.0, "logprobs": 1}),
}


SETTINGS: tuple[dict[str, Any], ...] = (  # at a temperature of 4 more than BLOCK tokens are likely
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 4.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.9999},
    {"temperature": 0.4, "top_k": 900},
    {"temperature": 0.7, "min_p": 0.05, "top_k": 40},
)


class Written(NamedTuple):
    """A text, and what was counted while it was written. whole: the rounds that an engine ran as a whole."""

    tokens: list[int]
    accepted: list[int]
    passes: tuple[int, int, int]
    whole: int


@pytest.fixture(scope="module", params=["a whole vocabulary", "a trimmed one"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("rounds") / "bundle"
    if request.param == "a trimmed one":
        options = BuildOptions(
            DEMO / "target", DEMO / "draft", folder, "native", "int8", draft_precision="int8", draft_vocabulary=700
        )
        build(options, lambda step: lambda: None)
    else:
        built_native(DEMO, folder, "int8")
    bundle = EngineBundle.open(folder)
    target, draft = bundle.open_engine(TARGET, 2), bundle.open_draft(1)
    assert isinstance(target, NativeEngine) and isinstance(draft, NativeEngine)
    yield target, draft
    target.close()
    draft.close()


@pytest.fixture(scope="module")
def pools(pair: Pair) -> Iterator[Pools]:
    """So small that they are compacted now and then."""
    target, draft = (PooledEngine(engine, 384) for engine in pair)
    for pool in (target, draft):
        pool.share_prefixes(128)
    yield target, draft
    target.close()
    draft.close()


def written(
    pair: Pair | Pools,
    config: SpeculativeConfig,
    setting: Mapping[str, Any],
    seed: int,
    by_host: bool = False,
    text: Sequence[int] = TEXT,
    sharing: Callable[[], int] = count_one,
    salt: str | None = None,
    look: Callable[[SpeculativeDecoder], None] = lambda decoder: None,
) -> Written:
    """by_host: whether the host runs all rounds. salt: of the text in a pool. look: at the decoder behind the text."""
    target, draft = pair
    params, stats = SamplingParams(max_tokens=24, ignore_eos=True, **setting), SpecDecodeStats()
    costs = table() if config.budget == "cost" else None
    decoder, whole = SpeculativeDecoder(target, draft, config, 256, (), costs, sharing), 0
    assert decoder._rounds is not None
    if by_host:
        decoder.run_pass_by_pass()
    rounds = decoder._rounds
    if isinstance(rounds, NativeRounds):
        run = rounds.run

        def counted() -> None:
            nonlocal whole
            run()
            whole += 1

        rounds.run = counted  # type: ignore[method-assign]
    sampler = Sampler(params, text, (), target.spec.model.vocab_size)
    steps = decoder.steps(text, sampler, seeded_streams(seed), stats)
    job = Job(steps=steps, write=lambda chunk: chunk, cache_salt=salt)
    tokens = [token for chunk in drive(job) for token in chunk.token_ids]
    look(decoder)
    decoder.close()
    passes = stats.target_passes, stats.draft_passes, stats.draft_rows
    return Written(tokens, stats.accepted_per_round, passes, whole)


def same_by_host(pair: Pair, config: SpeculativeConfig, setting: Mapping[str, Any], seed: int) -> Written:
    """What is written, which must be the same by the host's rounds."""
    found, expected = written(pair, config, setting, seed), written(pair, config, setting, seed, by_host=True)
    assert found[:3] == expected[:3]
    return found


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("name", WHOLE)
def test_texts_and_proposals_are_those_of_the_host(
    name: str, setting: dict[str, Any], pair: Pair, pools: Pools
) -> None:
    """The host runs the last rounds: no whole proposal fits there. In a pool it also runs those in which other texts
    share its passes."""
    every = [same_by_host(pair, WHOLE[name], setting, seed) for seed in range(3)]
    assert written(pools, WHOLE[name], setting, 0) == every[0]
    sharing = cycle((1, 1, 2, 1, 2, 2)).__next__
    found = written(pools, WHOLE[name], setting, 1, sharing=sharing)
    assert found.tokens == every[1].tokens and 0 < found.whole < every[1].whole
    assert all(found.whole > 3 for found in every)
    assert len({tuple(found.tokens) for found in every}) == (3 if setting["temperature"] else 1)


def rows_in(decoder: SpeculativeDecoder) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Keys and values of the text's rows, of target and draft."""
    assert decoder._proposer is not None
    found = []
    for cache in (decoder._cache, decoder._proposer._cache):
        storage: Any = cache._pool._storage if isinstance(cache, PooledKVCache) else cache
        slots = cache.slots if isinstance(cache, PooledKVCache) else np.arange(cache.length)
        found.append((storage.keys[:, :, slots // PANEL, :, slots % PANEL], storage.values[:, :, :, slots]))
    return found


@pytest.mark.parametrize("name", ["a chain", "a drawn tree"])
def test_rows_of_whole_rounds_in_a_pool(name: str, pair: Pair, pools: Pools) -> None:
    """They are those of a text with caches of its own, and later texts find them: only those of its own salt, which the
    loop tells the target's sequence. The draft reads the prompt in a round."""
    rows: list[list[tuple[NDArray[Any], NDArray[Any]]]] = []
    for engines in (pair, pools):
        look = lambda decoder: rows.append(rows_in(decoder))  # noqa: E731
        found = written(engines, WHOLE[name], {"temperature": 0.7}, 7, text=TEXT[:1], salt=name, look=look)
    for pool, *both in zip(pools, *rows, strict=True):
        for own, shared in zip(*both, strict=True):
            np.testing.assert_array_equal(own, shared)
        assert pool.prefixes is not None
        text, salted, other = [*TEXT[:1], *found.tokens], *map(pool.prefixes.empty_text, (name, "another"))
        assert len(pool.prefixes.find(salted, text)) == both[0][1].shape[3] > 16
        assert not pool.prefixes.find(other, text)


@settings(max_examples=40)
@given(
    grow=st.sampled_from(["chain", "topk", "dyspec"]),
    verify=st.sampled_from(["auto", "match", "rejection"]),
    size=st.integers(1, 15),
    depth=st.integers(1, 7),
    width=st.integers(1, 5),
    setting=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0, 4.0]),
            "top_p": st.sampled_from([1.0, 1e-6, 0.3, 0.9, 0.95, 0.9999]),
            "top_k": st.sampled_from([0, 1, 2, 5, 40, 600, 1 << 20]),
            "min_p": st.sampled_from([0.0, 1e-9, 0.05, 0.5]),
        }
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_shapes_and_settings(
    pair: Pair, grow: str, verify: str, size: int, depth: int, width: int, setting: dict[str, Any], seed: int
) -> None:
    if grow != "dyspec" and verify == "rejection":
        verify = "match"
    config = SpeculativeConfig(
        grow,
        verify=verify,
        max_total_draft_tokens=max(size, depth),
        max_draft_len=depth,
        frontier_width=width,
        budget="fixed",
    )
    assert same_by_host(pair, config, setting, seed).whole


@pytest.mark.parametrize("name", ["a chain", "a drawn tree", "a chosen tree"])
def test_of_equal_logits_the_first_are_kept(name: str, tmp_path: Path) -> None:
    """The rows of the projection are copies of eight: every logit is there many times."""
    folder = write_checkpoint(tmp_path, "mha")
    copied = np.random.default_rng(0).integers(0, 8, VOCAB_SIZE)
    edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"][copied].clone()}))
    weights = held(folder, "fp32")
    target, draft = (
        open_native(weights, spec_of(weights, role, "fp32", (1, 4, 16), 256), folder) for role in (TARGET, DRAFT)
    )
    for cuts in ({"top_k": 5}, {"top_p": 0.5}, {"top_k": 50, "top_p": 0.3}, {"top_k": 30, "min_p": 0.01}):
        for seed in range(4):
            assert same_by_host((target, draft), WHOLE[name], {"temperature": 0.7, **cuts}, seed).whole
    target.close()
    draft.close()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_planned_rounds(temperature: float, pair: Pair) -> None:
    """The plans of a seeded text, which never depend on a clock."""
    assert same_by_host(pair, PLANNED, {"temperature": temperature, "seed": 5}, 5).whole


def test_a_draft_that_reads_only_the_end_of_the_text(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host runs the rounds in which it begins anew."""
    spec = pair[1].spec
    monkeypatch.setattr(pair[1], "spec", replace(spec, model=replace(spec.model, draft_context=24)))
    for config in (CHAIN, CHOSEN, DRAWN):
        assert same_by_host(pair, config, {"temperature": 0.7}, 2).whole > 3


@pytest.mark.parametrize("name", OTHERS)
def test_other_proposals_are_left_to_the_host(name: str, pair: Pair) -> None:
    config, setting = OTHERS[name]
    assert not same_by_host(pair, config, setting, 1).whole


def test_the_host_is_measured_by_pass_as_well(pair: Pair) -> None:
    """Requests that share passes have such rounds."""
    engines = dict(zip((TARGET, DRAFT), pair, strict=True))
    for found in measure_host(Measured(engines, 256, {}), 1, 6, lambda: None):
        assert found.by_pass is not None and found.by_pass.by_pass is None
        assert found.plain == found.by_pass.plain and found.shared.round == 2 * found.by_pass.round


def test_the_kernels_have_the_numbers_of_the_runtime() -> None:
    source = "".join((SOURCE.parent / name).read_text() for name in ("tree.h", "verification.h"))
    names = {"MOST_NODES": MOST_NODES, "MOST_KEPT": MOST_KEPT, "MOST_WIDTH": MOST_WIDTH}
    names |= {"MOST_CATEGORIES": random.BLOCK, "RANKS": calibration.RANKS, "BINS": calibration.BINS}
    assert {name: int(re.findall(rf"#define {name} +(\d+)", source)[0]) for name in names} == names
    known = re.findall(r"enum verify \{(.*)\}", source)[0].lower().replace("best_token", "best")
    assert tuple(known.replace("blockwise", "block").replace(" ", "").split(",")) == VERIFIERS


def rounds_of(pair: Pair) -> tuple[NativeRounds, Sequence[Any]]:
    caches = [engine.new_cache() for engine in pair]
    rounds = pair[0].rounds(caches[0], pair[1], caches[1])
    assert isinstance(rounds, NativeRounds)
    return rounds, caches


def test_what_fits(pair: Pair) -> None:
    """No more than a pass, the kernels and the caches have room for."""
    rounds, caches = rounds_of(pair)
    widest, most = pair[0].spec.max_width, pair[1].spec.max_width
    chain = RoundShape(4, 4, 1)
    assert rounds.fits(chain, 1) and not rounds.fits(chain, 0) and not rounds.fits(chain, min(most, 64) + 1)
    assert rounds.fits(RoundShape(4, widest - 1, 3), 1) and not rounds.fits(RoundShape(4, widest, 3), 1)
    assert not rounds.fits(RoundShape(4, 4, most + 1, is_drawn=True, is_tree=True), 1)
    assert not rounds.fits(RoundShape(1000, 15, 1), 1)
    caches[0].length = caches[1].length = pair[0].spec.capacity - 4
    assert rounds.fits(RoundShape(3, 3, 1), 1) and not rounds.fits(chain, 1)
    caches[0].length = caches[1].length = 0
    assert pair[0].rounds(caches[0], pair[0], pair[0].new_cache()) is None
    rounds.close()
    with pytest.raises(EngineError, match="closed"):
        rounds.run()


@pytest.mark.parametrize(
    ("role", "temperature", "top_p", "top_k"),
    [(0, 0.0, 1.0, 0), (0, 0.7, 1.0, 0), (0, 0.7, 0.9, 0), (0, 0.7, 1.0, 3), (1, 0.7, 1.0, 0), (1, 0.7, 0.9, 3)],
)
def test_logits_that_are_no_numbers_are_an_error(
    role: int, temperature: float, top_p: float, top_k: int, pair: Pair
) -> None:
    rounds, caches = rounds_of(pair)
    for cache in caches:
        cache.open_block(1)
        cache.append([0])
    caches[role].values[...] = np.nan
    shape = RoundShape(2, 2, 1, BLOCK if temperature else BEST, is_drawn=bool(temperature))
    draft, tests, last = (array("d", [0.5] * count) for count in rounds.most_draws(shape))
    settings = DrawSettings(temperature, 1e-4, 0.0, top_p, top_k)
    draws = RoundDraws(settings, draft, tests, last, array("d")) if temperature else None
    assert rounds.fits(shape, 1)
    with pytest.raises(EngineError, match="NaN or infinite"):
        rounds.prepare(shape, [7], draws).run()
    assert [cache.length for cache in caches] == [1, 1]
