"""The load on servers: percentiles and ratios, texts that are not what they should be, and runs over real servers."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import fake_aiperf
import fake_completions
import pytest
from bundling import ROOT
from fake_aiperf import FIRST_MS, PER_TOKEN_MS, Sent
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load.serving import run, servers
from benchmarks.load.serving.aiperf import AIPerf, LoadResult, MeasuredAnswer, find_aiperf, read_load, write_inputs
from benchmarks.load.serving.figures import (
    ServerKey,
    ServerRow,
    ServerRun,
    median_throughput_ratio,
    summarise,
)
from benchmarks.load.serving.report import COLUMNS, to_markdown
from benchmarks.load.serving.servers import LLAMA_CPP, OURS, Server, llama_cpp_servers, prepare_llama_cpp, running
from benchmarks.peers.process import PeerError
from benchmarks.peers.protocol import PLAIN, PeerOptions
from benchmarks.tools.record import rows_to_json
from draftwood.models.errors import RequestError
from draftwood.runtime import LLM, SamplingParams

AIPERF = ROOT / "build" / "peers"
FAKE = Server(LLAMA_CPP, PLAIN, (sys.executable, fake_completions.__file__))


def runs_of(
    *speeds: float, answers: Sequence[MeasuredAnswer] = (MeasuredAnswer(0, "text", 5.0, 1.0),)
) -> list[ServerRun]:
    return [ServerRun(LoadResult(speed, list(answers), None), 0.0) for speed in speeds]


def chunk(text: str) -> str:
    return json.dumps({"choices": [{"text": text}]})


@given(st.lists(st.tuples(st.floats(1, 1e3), st.floats(1, 1e3)), min_size=1, max_size=9))
def test_ratios_are_taken_within_a_repeat(pairs: list[tuple[float, float]]) -> None:
    own, other = runs_of(*(a for a, _ in pairs)), runs_of(*(b for _, b in pairs))
    assert median_throughput_ratio(own, other) == pytest.approx(median(a / b for a, b in pairs))


def test_rows_compare_at_the_same_concurrency() -> None:
    runs = {
        ServerKey(OURS, PLAIN, 1): runs_of(10, 20),
        ServerKey(OURS, "speculative", 1): runs_of(30, 40),
        ServerKey(LLAMA_CPP, PLAIN, 1): runs_of(10, 10),
        ServerKey(LLAMA_CPP, "draft:3", 1): runs_of(5, 60),
        ServerKey(LLAMA_CPP, PLAIN, 2): runs_of(1, 1),
    }
    rows = {ServerKey(*row[:3]): row for row in summarise(runs, ["text"])}
    fast = rows[ServerKey(OURS, "speculative", 1)]
    assert (fast.tokens_per_second, fast.of_plain) == (35, 2.5)
    assert fast.of_best == pytest.approx((30 / 5 + 40 / 60) / 2)
    alone = {key: own for key, own in runs.items() if key.peer == OURS}
    assert summarise(alone, ["text"])[0].of_best is None


def test_latencies_are_over_all_requests_and_one_wrong_text_is_noticed() -> None:
    first = [MeasuredAnswer(0, "a", 1.0, 0.1), MeasuredAnswer(1, "b", 2.0, 0.2)]
    second = [MeasuredAnswer(0, "a", 3.0, 0.3), MeasuredAnswer(1, "a", 4.0, 0.4)]
    runs = {
        ServerKey(OURS, PLAIN, 2): [
            ServerRun(LoadResult(9, first, 2.0), 0.1),
            ServerRun(LoadResult(9, second, 3.0), 0.3),
        ]
    }
    row = summarise(runs, ["a", "b"])[0]
    assert (row.first_ms_p50, row.per_token_ms_p50) == pytest.approx((2.5, 0.25))
    assert (row.first_ms_p99, row.per_token_ms_p99) == pytest.approx((3.97, 0.397))
    assert (row.same_text, row.acceptance_length, row.others) == pytest.approx((0.75, 2.5, 0.2))


def test_exports_are_read_without_the_warm_up(tmp_path: Path) -> None:
    fake_aiperf.export(
        tmp_path,
        [
            Sent("warmup", "0", [chunk("warm"), "[DONE]"]),
            Sent("profiling", "1", [chunk("one"), chunk(" two"), json.dumps({"choices": [], "usage": {}}), "[DONE]"]),
        ],
    )
    assert read_load(tmp_path) == LoadResult(100.0, [MeasuredAnswer(1, "one two", 2 * FIRST_MS, PER_TOKEN_MS)], None)


def test_a_failed_request_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "aiperf"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    aiperf = AIPerf(program, tmp_path / "inputs.json", 2, tmp_path)
    fake_aiperf.export(tmp_path / "out", [Sent("profiling", "0", [chunk("a")]), Sent("profiling", "1", None)])
    with pytest.raises(PeerError, match=r"1 of 2 requests were answered; see .*screen\.txt"):
        aiperf.profile("http://127.0.0.1:1", 1, 1, tmp_path / "out")
    program.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(PeerError, match="aiperf ended with 3; see"):
        aiperf.profile("http://127.0.0.1:1", 1, 1, tmp_path / "out")
    monkeypatch.setattr("benchmarks.load.serving.aiperf.SECONDS_TO_RUN", 0.1)
    program.write_text("#!/bin/sh\nsleep 60\n")
    with pytest.raises(PeerError, match=r"aiperf did not end within 0\.1 s; see"):
        aiperf.profile("http://127.0.0.1:1", 1, 1, tmp_path / "out")


def test_what_is_missing_names_its_script(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"AIPerf is not set up: sh .*setup/aiperf\.sh"):
        find_aiperf(tmp_path)
    assert (ROOT / "benchmarks" / "load" / "serving" / "setup" / "aiperf.sh").is_file()
    with pytest.raises(PeerError, match=r"sh .*setup/llama\.cpp\.sh"):
        prepare_llama_cpp(PeerOptions(tmp_path, "fp32", tmp_path / "llama.cpp", 1, (3,)))
    with pytest.raises(RequestError, match=r"llama\.cpp has no fp16 weights: leave --pair out"):
        prepare_llama_cpp(PeerOptions(tmp_path, "fp16", tmp_path, 1, (3,)))


def test_a_slot_of_llama_cpp_has_room_for_a_whole_sequence(tmp_path: Path) -> None:
    for role in ("target", "draft"):
        (tmp_path / role).mkdir()
    options = PeerOptions(tmp_path, "fp32", tmp_path / "work", 2, (3, 5))
    with pytest.raises(PeerError, match="did not convert the pair"):
        llama_cpp_servers(options, 16, 1024)
    options.convert_once(lambda folder: None)
    found = {server.method: server.command for server in llama_cpp_servers(options, 16, 1024)}
    assert list(found) == [PLAIN, "draft:3", "draft:5"] and "-md" not in found[PLAIN]
    for method, command in found.items():
        assert command[command.index("-c") + 1] == str(16 * 1024) and "--no-cache-prompt" in command
        assert method == PLAIN or command[-1] == method[-1]


def test_a_server_that_ends_at_once_is_named() -> None:
    with (
        pytest.raises(PeerError, match=r"llama\.cpp plain: this server did not start"),
        running(Server(LLAMA_CPP, PLAIN, (sys.executable, "-c", "pass"))),
    ):
        pass


def test_the_table_groups_by_concurrency() -> None:
    runs = {ServerKey(peer, PLAIN, clients): runs_of(clients) for peer in (OURS, LLAMA_CPP) for clients in (1, 4)}
    rows = summarise(runs, ["text"])
    assert [ServerRow(**row) for row in json.loads(json.dumps(rows_to_json(rows)))] == rows
    lines = to_markdown(rows).splitlines()
    assert {line.count("|") for line in lines} == {len(COLUMNS) + 3}
    names = ["**1 at a time**", "**draftwood**", "llama.cpp", "**4 at a time**", "**draftwood**", "llama.cpp"]
    assert [line.split(" |")[0].strip("| ") for line in lines[2:]] == names


@pytest.fixture
def arguments(tiny_bundle: Path, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "a longer one"}\n', encoding="utf-8")
    given = ["--bundle", tiny_bundle, "--prompts", prompts, "--concurrency", "1,2", "--requests", 1, "--repeats", 2]
    given += ["--max-tokens", 8, "--threads", 1, "--work", tmp_path, "--output", tmp_path / "results"]
    return ["run.py", *map(str, given)]


def test_a_whole_load_over_real_servers(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "aiperf" / "venv" / "bin").mkdir(parents=True)
    fake_aiperf.install(tmp_path / "aiperf" / "venv" / "bin")
    monkeypatch.setattr(run, "prepare_llama_cpp", lambda options: "llama.cpp 1.0")
    monkeypatch.setattr(run, "llama_cpp_servers", lambda options, at_a_time, context: [FAKE])
    monkeypatch.setattr(sys, "argv", [*arguments, "--pair", str(tmp_path)])
    run.main()
    (file,) = (tmp_path / "results").glob("load_serving_20*.json")
    figures = json.loads(file.read_text())
    rows = {(row["peer"], row["method"], row["concurrency"]): row for row in figures["rows"]}
    assert {key[:2] for key in rows} == {(OURS, PLAIN), (OURS, "speculative"), (LLAMA_CPP, PLAIN)}
    for (peer, method, _), row in rows.items():
        assert row["same_text"] == (peer == OURS)
        assert (row["acceptance_length"] is not None) == (method == "speculative")
    assert figures["versions"] == {LLAMA_CPP: "llama.cpp 1.0", "aiperf": "fake 1.0"}
    assert figures["date"] and figures["processor"] and figures["cores"] >= 1
    assert "2 at a time" in capfd.readouterr().out


def test_a_wrong_answer_of_ours_ends_with_1_behind_the_figures(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "aiperf" / "venv" / "bin").mkdir(parents=True)
    fake_aiperf.install(tmp_path / "aiperf" / "venv" / "bin")
    fake = Server(OURS, PLAIN, FAKE.command)
    monkeypatch.setattr(run, "draftwood_servers", lambda bundle, at_a_time, threads: [fake])
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="answers differ from what the bundle writes plainly: plain at 1, plain at 2"):
        run.main()
    (file,) = (tmp_path / "results").glob("load_serving_20*.json")
    assert json.loads(file.read_text())["rows"][0]["same_text"] == 0


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--max-tokens", "1"], "--max-tokens 2: the first token has no inter-token latency"),
        (["--concurrency", "0"], "--concurrency must be at least 1"),
        (["--repeats", "0"], "at least 1, not '0'"),
        (["--max-tokens", "100000"], "give a shorter one or a smaller --max-tokens"),
        ([], "AIPerf is not set up: sh "),
    ],
)
def test_bad_input_ends_with_2_and_a_reason(
    extra: list[str],
    message: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "100000" in extra:
        (tmp_path / "aiperf" / "venv" / "bin").mkdir(parents=True)
        fake_aiperf.install(tmp_path / "aiperf" / "venv" / "bin")
    monkeypatch.setattr(sys, "argv", [*arguments, *extra])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_the_real_aiperf_shows_what_speculation_did(tiny_bundle: Path, tmp_path: Path) -> None:
    """Its table "Spec Decode" of a server that speculates, and none of one that does not."""
    if not (AIPERF / "aiperf" / "venv").exists():
        pytest.skip("AIPerf is not set up: benchmarks/load/serving/setup/aiperf.sh")
    with LLM(tiny_bundle) as llm:
        prompts = [llm.encode(text) for text in ("one", "a longer one")]
        params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        texts = [llm.generate(prompt, params)[0].text for prompt in prompts]
    write_inputs(tmp_path / "inputs.json", prompts, params.max_tokens)
    aiperf = AIPerf(find_aiperf(AIPERF), tmp_path / "inputs.json", len(prompts), tiny_bundle)
    for server in servers.draftwood_servers(tiny_bundle, 2, 1):
        always = (
            server
            if server.method == PLAIN
            else replace(server, command=(*server.command, "--speculative=budget=fixed"))
        )
        with running(always) as process:
            load = aiperf.profile(process.url, 2, 4, tmp_path / server.method)
        assert sorted(answer.prompt for answer in load.answers) == [0, 0, 1, 1]
        assert all(answer.text == texts[answer.prompt] and answer.first_ms > 0 for answer in load.answers)
        screen = (tmp_path / server.method / "screen.txt").read_text()
        assert (load.acceptance_length is None) == ("Spec Decode" not in screen) == (server.method == PLAIN)
        assert load.acceptance_length is None or 1 <= load.acceptance_length <= 24
