"""draftwood profile: every pass is measured, the table lands in the bundle, and the next request plans by it."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from controllers import CHAIN
from costs import table
from disk import largest_file
from fakes import FakeEngine, random_model

from draftwood.builder.profile import (
    CONTEXTS,
    HOST_ROUNDS,
    HOST_TURNS,
    Pair,
    brief_contexts,
    filled_cache,
    host,
    measure,
    measure_after,
    smoothed,
    spread,
)
from draftwood.builder.progress import Step
from draftwood.cli.main import main
from draftwood.models.bindings import DRAFT, ROLES, TARGET
from draftwood.models.errors import ConfigError, EngineError
from draftwood.runtime import LLM, SamplingParams
from draftwood.runtime.bundle.bundle import COSTS, EngineBundle
from draftwood.runtime.bundle.costs import fingerprint, read_costs, write_costs
from draftwood.runtime.engines.base import ForwardOutput, TokenBatch
from draftwood.runtime.speculation.planning.controller import Controller
from draftwood.runtime.speculation.planning.cost import HostCosts


def test_every_width_is_measured_behind_every_context_that_fits(tiny_bundle: Path) -> None:
    bundle, units = EngineBundle.open(tiny_bundle), dict[str, int]()

    def begin(step: Step) -> Callable[[], None]:
        units[step.title] = step.units

        def advance() -> None:
            units[step.title] -= 1

        return advance

    engines = {role: bundle.open_engine(role, threads=1) for role in ROLES}
    longest = bundle.manifest.max_length
    costs = measure(Pair(engines, longest, {"threads": 1}), begin, contexts=(16, 8, 16, longest + 1), repeats=2)
    for role, passes in zip(ROLES, (costs.target, costs.draft), strict=True):
        assert passes is not None and passes.widths == engines[role].spec.widths and passes.contexts == (8, 16)
        assert all(list(row) == sorted(row) and row[0] > 0 for row in passes.seconds)
    assert costs.machine == {"threads": 1} and costs.spread is not None and costs.spread >= 1
    assert costs.greedy.round > 0 or costs.greedy.token > 0
    assert len(units) == 3 and set(units.values()) == {0}


def test_a_build_measures_briefly() -> None:
    """Two repeats of everything, where the time is up at once; and the shortest and the longest context."""
    assert [brief_contexts(length) for length in (10, 64, 1024)] == [(64,), (64,), (64, 512)]
    assert [brief_contexts(length) for length in (2048, 8000, 9000)] == [(64, 2048), (64, 1536, 8000), (64, 1536, 8192)]
    engines = {role: Counting(random_model(0, 8), 8, role) for role in ROLES}
    units: list[int] = []

    def begin(step: Step) -> Callable[[], None]:
        units.append(step.units)

        def advance() -> None:
            units[-1] -= 1

        return advance

    for seconds, repeats, passes in ((0, 9, 2), (0, 1, 2), (math.inf, 4, 5)):
        for engine in engines.values():
            engine.seen.clear()
        costs = measure(Pair(engines, 200, {}), begin, (64,), repeats, seconds)
        assert costs.target.contexts == (64,) and costs.target.widths == engines[TARGET].spec.widths
        for engine in engines.values():
            before = [width for length, width in engine.seen if length == 64]
            assert before.count(engine.spec.max_width) == passes * (2 if engine.spec.role == DRAFT else 1)
    assert not any(units)


def test_long_passes_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, clock, turns = {TARGET: Counting(random_model(0, 8), 8, TARGET)}, count(1.0), dict[Any, list[float]]()
    monkeypatch.setattr("draftwood.builder.profile.perf_counter", lambda: next(clock))
    monkeypatch.setattr("draftwood.builder.profile.host_rounds", lambda *of: turns.setdefault(of[2:], [next(clock)]))
    spread_of_plain = measure(Pair(engines, 200, {}), lambda step: lambda: None, (64,), 9, 3.0).spread
    assert {engines[TARGET].seen.count((64, width)) for width in engines[TARGET].spec.widths[1:]} == {1}
    assert spread_of_plain == 1.0 and {turn for _, turn, *_ in turns} == {0}


def test_a_plan_behind_a_long_text_uses_what_was_measured_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 1,536 tokens rows cost nothing, behind 8,000 each costs more than a pass: a line would not say so."""
    engines = {role: FakeEngine(random_model(0, 8), 8, role) for role in ROLES}

    def timed(engine: FakeEngine, cache: Any, width: int) -> float:
        if engine.spec.role == DRAFT:
            return 0.01
        return 1.0 + float(cache.length) / 8000 + 3 * width * bool(cache.length > 4000)

    monkeypatch.setattr("draftwood.builder.profile.time_pass", timed)
    pair = Pair(engines, 8000, {})
    whole = measure(pair, lambda step: lambda: None, repeats=1)
    short = measure(pair, lambda step: lambda: None, CONTEXTS, repeats=1)
    assert whole.target.contexts == (*CONTEXTS, 8000) and whole.target.at(4, 8000) == pytest.approx(14.0)
    assert short.target.at(4, 8000) == pytest.approx(2.0)
    free = HostCosts(0.0, 0.0, 0.0)
    plans = [
        Controller(replace(costs, greedy=free), CHAIN, greedy=True).plan(context, 100)
        for costs, context in ((short, 8000), (whole, 8000), (whole, 1024))
    ]
    assert [plan.depth > 0 for plan in plans] == [True, False, True]


def test_a_long_context_is_filled_without_computing_it(tiny_bundle: Path) -> None:
    engine = EngineBundle.open(tiny_bundle).open_engine(TARGET, threads=1)
    width = engine.spec.max_width
    cache = filled_cache(engine, width + 7)
    rows = cache.buffer[..., : width + 7, :]
    assert cache.length == width + 7 and rows[..., :width, :].any()
    assert (rows[..., width:, :] == rows[..., :7, :]).all()
    with pytest.raises(EngineError, match="cache slots"):
        cache.repeat(engine.spec.capacity + 1)
    cache.truncate(0)
    with pytest.raises(EngineError, match="at least one"):
        cache.repeat(8)


def test_draft_passes_behind_another_one_are_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one of a round finds the caches full of the target's weights."""
    engines = {role: FakeEngine(random_model(0, 8), 8, role) for role in ROLES}
    before = [""]

    def timed(engine: FakeEngine, cache: Any, width: int) -> float:
        cold, before[0] = before[0] != engine.spec.role, engine.spec.role
        return (0.2 if cold else 0.1) * (1.0 if engine.spec.role == DRAFT else 50.0)

    monkeypatch.setattr("draftwood.builder.profile.time_pass", timed)
    costs = measure(Pair(engines, 200, {}), lambda step: lambda: None, (64,), repeats=3)
    assert costs.draft is not None and costs.further is not None
    assert {*costs.draft.seconds[0]} == {0.2} and {*costs.further.seconds[0]} == {0.1}


class Counting(FakeEngine):
    """Remembers the tokens before each pass, and its rows."""

    def score(self, batch: TokenBatch, cache: Any) -> ForwardOutput:
        self.seen.append((cache.length, batch.num_tokens))
        return super().score(batch, cache)

    @cached_property
    def seen(self) -> list[tuple[int, int]]:
        return []


def test_a_table_knows_whether_passes_are_filled_up_to_a_width() -> None:
    engines = {role: FakeEngine(random_model(0, 8), 8, role) for role in ROLES}
    for engine, backend in zip(engines.values(), ("native", "onnxruntime"), strict=True):
        engine.spec = replace(engine.spec, backend=backend)
    costs = measure(Pair(engines, 200, {}), lambda step: lambda: None, contexts=(8,), repeats=1)
    assert not costs.target.padded and costs.draft is not None and costs.draft.padded


@pytest.mark.parametrize("contexts", [(0,), (8, -5)])
def test_contexts_are_numbers_of_tokens(contexts: tuple[int, ...]) -> None:
    engines = {role: FakeEngine(random_model(0, 8), 8, role) for role in ROLES}
    with pytest.raises(ConfigError, match="contexts must be at least 1"):
        measure(Pair(engines, 200, {}), lambda step: lambda: None, contexts)


def test_an_interruption_does_not_change_the_time_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program takes the processor for a long time, once, at any moment: the tree's tokens keep their price."""
    engines = {role: FakeEngine(random_model(0, 8), 8, role) for role in ROLES}

    def measured(interrupted: int) -> HostCosts:
        reads = count()

        def clock() -> int:
            read = next(reads)
            return read + 1000 * (read > interrupted)

        monkeypatch.setattr("draftwood.runtime.speculation.stopwatch.perf_counter", clock)
        return host(Pair(engines, 200, {}), 1, 12, lambda: None)[0]

    undisturbed = measured(10**9)
    assert undisturbed.round > undisturbed.plain > 0 and undisturbed.by_pass is None
    assert all(measured(moment) == undisturbed for moment in range(10, 200, 7))


def test_kinds_of_rounds_meet_the_same_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host that becomes slower all the time, to five times as slow: rounds above temperature 0 cost as much more
    than those at 0 as on a steady one."""
    engines = {role: FakeEngine(random_model(0, 8), 8, role) for role in ROLES}

    def ratio(slower: float) -> float:
        steps = count()

        def clock() -> float:
            step = next(steps)
            return step + slower * step * step

        monkeypatch.setattr("draftwood.runtime.speculation.stopwatch.perf_counter", clock)
        greedy, sampled = host(Pair(engines, 200, {}), HOST_TURNS, HOST_ROUNDS, lambda: None)
        assert next(steps) > 1000
        return sampled.round / greedy.round

    assert ratio(0.001) == pytest.approx(ratio(0.0), rel=0.2)


def test_how_far_repeats_spread() -> None:
    assert spread([2.0]) == 1 and spread([4.0, 1.0, 2.0, 3.0, 1.0]) == 3


def test_what_rows_cost_does_not_depend_on_the_minute_of_their_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that becomes slower all the time, by a factor of two and more in the end."""
    engines = {role: FakeEngine(random_model(0, 8), 8, role) for role in ROLES}
    passes = count()

    def timed(engine: FakeEngine, cache: Any, width: int) -> float:
        return (1 + 0.01 * next(passes)) * (10 + width)

    monkeypatch.setattr("draftwood.builder.profile.time_pass", timed)
    found = measure_after(Pair(engines, 200, {}), 8, engines[TARGET].spec.widths, 9, lambda: None)[TARGET].seconds
    assert next(passes) > 150
    for width, seconds in zip(engines[TARGET].spec.widths, found, strict=True):
        assert seconds / found[0] == pytest.approx((10 + width) / 11, rel=0.03)


def test_no_context_that_fits_is_an_error(tiny_bundle: Path) -> None:
    bundle = EngineBundle.open(tiny_bundle)
    engines = {role: bundle.open_engine(role) for role in ROLES}
    with pytest.raises(ConfigError, match="name shorter ones"):
        measure(Pair(engines, bundle.manifest.max_length, {}), lambda step: lambda: None, contexts=(10**6,))


def test_noise_makes_no_pass_cheaper_than_it_can_be() -> None:
    assert smoothed([1, 2, 4], [3.0, 2.0, 4.0]) == (2.5, 2.5, 4.0)  # a wider pass
    # 16 rows keep the cores busy, so 24 cannot take as long: they are taken to compute as many rows a second.
    assert smoothed([1, 8, 16, 24, 32, 64], [12, 20, 40, 40, 85, 160]) == (12, 20, 40, 60, 85, 160)
    assert smoothed([16, 24, 32, 48, 64], [40, 60, 80, 120, 320]) == (40, 60, 80, 120, 320)  # the widest one was slow
    assert smoothed([1, 16, 64], [10, 10.5, 11]) == (10, 10.5, 11)  # rows cost nothing where memory decides


def test_the_command_stores_what_generate_then_reads(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    (bundle / COSTS).unlink(missing_ok=True)
    assert main(["profile", str(bundle), "--contexts", "8", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert all(f"A pass of the {role}:" in out for role in ("target", "draft", "draft, after another one"))
    assert main(["profile", str(bundle), "--contexts", "8,32", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    costs = read_costs(bundle)
    assert costs is not None and shown["target"]["contexts"] == [8, 32] == list(costs.target.contexts)
    with LLM(bundle) as llm:
        stats = llm.generate("hello", SamplingParams(max_tokens=20, ignore_eos=True))[0].stats
    plain = costs.target.at(1, 8)
    assert stats.expected_seconds >= stats.target_passes * plain * 0.5
    EngineBundle.open(bundle)  # the table is no part of what is sealed


def test_what_cannot_be_stored_is_not_measured(
    tiny_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was measured for minutes, and then lost."""
    monkeypatch.setattr(EngineBundle, "open_engine", None)
    before = sorted(tiny_bundle.iterdir())
    with largest_file(0):
        code = main(["profile", str(tiny_bundle)])
    assert code == 2 and "the costs cannot be stored" in capsys.readouterr().err
    assert sorted(tiny_bundle.iterdir()) == before


@pytest.mark.parametrize(("busy", "told"), [(1.0, True), (1e9, False)])
def test_a_table_that_a_busy_machine_gave_is_told(
    busy: float,
    told: bool,
    tiny_bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    monkeypatch.setattr("draftwood.cli.profile.BUSY", busy)
    assert main(["profile", str(bundle), "--contexts", "8", "--json"]) == 0
    shown, error = capsys.readouterr()
    assert json.loads(shown)["spread"] > 1 and ("The machine was busy" in error) == told


def test_a_table_of_another_bundle_is_noticed(tiny_bundle: Path, no_bos_bundle: Path, tmp_path: Path) -> None:
    """Of one architecture: a table that fits would not show it."""
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    machine = fingerprint(EngineBundle.open(no_bos_bundle).manifest, "cpu", 0, 0)
    write_costs(replace(table(), machine=machine), bundle)
    with LLM(bundle) as llm:
        assert len(llm.stale_costs) == 1 and llm.stale_costs[0].startswith("bundle ")


def test_a_damaged_table_is_one_clear_line(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    (bundle / COSTS).write_text("{}")
    assert main(["generate", str(bundle), "--prompt", "hello", "--max-tokens", "4"]) == 2
    assert "draftwood profile" in capsys.readouterr().err


def test_costs_from_another_machine_are_noticed(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def served(*_: object) -> bool:
        return True

    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    foreign = {**fingerprint(EngineBundle.open(bundle).manifest, "cpu", 0, 0), "processor": "abacus"}
    write_costs(replace(table(), machine=foreign), bundle)
    with LLM(bundle) as llm:
        assert len(llm.stale_costs) == 1 and "abacus" in llm.stale_costs[0]
    assert main(["generate", str(bundle), "--prompt", "hello", "--max-tokens", "4"]) == 0
    assert "measured elsewhere" in capsys.readouterr().err
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}')
    assert main(["bench", str(bundle), "--prompts", str(prompts), "--configs", "auto", "--max-tokens", "4"]) == 0
    assert "measured elsewhere (processor" in capsys.readouterr().err
    assert main(["inspect", str(bundle), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["costs"]
    assert shown["source"] == "measured elsewhere" and "abacus there" in shown["differences"][0]
    assert main(["inspect", str(bundle)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"costs .* measured elsewhere", text) and "draftwood profile measures" in text
    assert f"Costs were measured elsewhere: {shown['differences'][0]}." in text
    monkeypatch.setattr("draftwood.runtime.serving.http.server.serve", served)
    assert main(["serve", str(bundle), "--port", "0"]) == 0
    assert "measured elsewhere" in capsys.readouterr().err
    assert main(["profile", str(bundle), "--contexts", "8"]) == 0
    with LLM(bundle) as llm:
        assert llm.stale_costs == []
