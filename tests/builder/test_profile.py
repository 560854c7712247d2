"""draftwood profile: every pass is measured, the table lands in the bundle, and the next request plans by it."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from controllers import CHAIN
from costs import table
from disk import largest_file
from fakes import FakeEngine, random_model
from steps import counted, quiet

from draftwood.builder.pass_times import Pair, thinned_out
from draftwood.builder.profile import CONTEXTS, TURNS, brief_contexts, measure
from draftwood.cli.main import main
from draftwood.models.bindings import DRAFT, ROLES, TARGET
from draftwood.models.errors import ConfigError
from draftwood.runtime import LLM, SamplingParams
from draftwood.runtime.bundle.bundle import COSTS, EngineBundle
from draftwood.runtime.bundle.costs import fingerprint, read_costs, write_costs
from draftwood.runtime.engines.base import ForwardOutput, TokenBatch
from draftwood.runtime.speculation.planning.controller import Controller
from draftwood.runtime.speculation.planning.cost import HostCosts


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def test_every_width_is_measured_behind_every_context_that_fits(tiny_bundle: Path) -> None:
    bundle, left = EngineBundle.open(tiny_bundle), dict[str, int]()
    engines = {role: bundle.open_engine(role, threads=1) for role in ROLES}
    longest = bundle.manifest.max_length
    costs = measure(Pair(engines, longest, {"threads": 1}), counted(left), contexts=(16, 8, 16, longest + 1), repeats=2)
    for role, passes in zip(ROLES, (costs.target, costs.draft), strict=True):
        assert passes is not None and passes.widths == engines[role].spec.widths and passes.contexts == (8, 16)
        assert all(list(row) == sorted(row) and row[0] > 0 for row in passes.seconds)
    assert costs.machine == {"threads": 1} and costs.spread is not None and costs.spread >= 1
    assert costs.greedy.round > 0 or costs.greedy.token > 0
    assert len(left) == 3 and set(left.values()) == {0}


def test_a_build_measures_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything once, where the time is up at once, and the host in one turn; the shortest and the longest context."""
    assert [brief_contexts(length) for length in (10, 64, 1024)] == [(64,), (64,), (64, 512)]
    assert [brief_contexts(length) for length in (2048, 8000, 9000)] == [(64, 2048), (64, 1536, 8000), (64, 1536, 8192)]
    engines = {role: Counting(random_model(0, 8), 8, role) for role in ROLES}
    left = dict[str, int]()
    turns: dict[Any, list[float]] = {}
    monkeypatch.setattr("draftwood.builder.profile.host_rounds", lambda *of: turns.setdefault(of[2:], [1.0]))
    for seconds, repeats, passes in ((0, 9, 1), (0, 1, 1), (math.inf, 4, 5)):
        turns.clear()
        for engine in engines.values():
            engine.seen.clear()
        costs = measure(Pair(engines, 200, {}), counted(left), (64,), repeats, seconds)
        assert costs.target.contexts == (64,) and costs.target.widths == engines[TARGET].spec.widths
        for engine in engines.values():
            before = [width for length, width in engine.seen if length == 64]
            assert before.count(engine.spec.max_width) == passes * (2 if engine.spec.role == DRAFT else 1)
        assert {turn for _, turn, *_ in turns} == set(range(1 if seconds == 0 else TURNS))
    assert left and not any(left.values())


def test_behind_further_contexts_a_build_measures_few_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are between them. Here rows cost more, the longer the context is."""
    engines = {role: FakeEngine(random_model(0, 64), 64, role) for role in ROLES}
    seen = dict[tuple[str, int], set[int]]()

    def timed(engine: FakeEngine, cache: Any, width: int) -> float:
        seen.setdefault((engine.spec.role, cache.length), set()).add(width)
        return 1 + 0.1 * width + 0.001 * width * float(cache.length)

    monkeypatch.setattr("draftwood.builder.pass_times.time_pass", timed)
    costs = measure(Pair(engines, 200, {}), quiet, (8, 100), 2, 1.0)
    assert costs.draft is not None and costs.further is not None
    for role, costs_of in ((TARGET, costs.target), (DRAFT, costs.draft), (DRAFT, costs.further)):
        widths = engines[role].spec.widths
        assert costs_of.widths == widths and seen[role, 8] == set(widths) > seen[role, 100] == set(thinned_out(widths))
        expected = [1 + 0.2 * width for width in widths]
        assert costs_of.seconds[1] == pytest.approx(expected, rel=0.05)
    measure(Pair(engines, 200, {}), quiet, (8, 101), 2)
    assert seen[TARGET, 101] == seen[TARGET, 8]


def test_a_plan_behind_a_long_text_uses_what_was_measured_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 1,536 tokens rows cost nothing, behind 8,000 each costs more than a pass: a line would not say so."""
    engines = {role: FakeEngine(random_model(0, 8), 8, role) for role in ROLES}

    def timed(engine: FakeEngine, cache: Any, width: int) -> float:
        if engine.spec.role == DRAFT:
            return 0.01
        return 1.0 + float(cache.length) / 8000 + 3 * width * bool(cache.length > 4000)

    monkeypatch.setattr("draftwood.builder.pass_times.time_pass", timed)
    pair = Pair(engines, 8000, {})
    whole = measure(pair, quiet, repeats=1)
    short = measure(pair, quiet, CONTEXTS, repeats=1)
    assert whole.target.contexts == (*CONTEXTS, 8000) and whole.target.at(4, 8000) == pytest.approx(14.0)
    assert short.target.at(4, 8000) == pytest.approx(2.0)
    free = HostCosts(0.0, 0.0, 0.0)
    plans = [
        Controller(replace(costs, greedy=free), CHAIN, greedy=True).plan(context, 100)
        for costs, context in ((short, 8000), (whole, 8000), (whole, 1024))
    ]
    assert [plan.depth > 0 for plan in plans] == [True, False, True]


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
    costs = measure(Pair(engines, 200, {}), quiet, contexts=(8,), repeats=1)
    assert not costs.target.padded and costs.draft is not None and costs.draft.padded


def test_no_context_that_fits_is_an_error(tiny_bundle: Path) -> None:
    bundle = EngineBundle.open(tiny_bundle)
    engines = {role: bundle.open_engine(role) for role in ROLES}
    with pytest.raises(ConfigError, match="name shorter ones"):
        measure(Pair(engines, bundle.manifest.max_length, {}), quiet, contexts=(10**6,))


def test_the_command_stores_what_generate_then_reads(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    bundle: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("draftwood.cli.profile.BUSY", busy)
    assert main(["profile", str(bundle), "--contexts", "8", "--json"]) == 0
    shown, error = capsys.readouterr()
    assert json.loads(shown)["spread"] > 1 and ("The machine was busy" in error) == told


def test_a_damaged_table_is_one_clear_line(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bundle / COSTS).write_text("{}")
    assert main(["generate", str(bundle), "--prompt", "hello", "--max-tokens", "4"]) == 2
    assert "draftwood profile" in capsys.readouterr().err


def test_costs_of_another_bundle_or_machine_are_noticed(
    bundle: Path,
    no_bos_bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def served(*_: object) -> bool:
        return True

    other = fingerprint(EngineBundle.open(no_bos_bundle).manifest, "cpu", 0, 0)  # of one architecture
    write_costs(replace(table(), machine=other), bundle)
    with LLM(bundle) as llm:
        assert len(llm.stale_costs) == 1 and llm.stale_costs[0].startswith("bundle ")
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
