"""The load on servers: percentiles and ratios, texts that are not what they should be, and runs over real servers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fake_aiperf
import fake_completions
import pytest
from bundling import ROOT
from fake_aiperf import FIRST_MS, PER_TOKEN_MS, Sent

from benchmarks.load.serving import run
from benchmarks.load.serving.aiperf import AIPerf, LoadResult, MeasuredAnswer, read_load
from benchmarks.load.serving.figures import COLUMNS, ServerKey, ServerRow, summarise, to_markdown
from benchmarks.load.serving.servers import LLAMA_CPP, OURS, Server, prepare_llama_cpp, running
from benchmarks.peers.process import PeerError
from benchmarks.peers.protocol import PLAIN, PeerOptions
from benchmarks.tools.record import rows_to_json
from draftwood.models.errors import RequestError

FAKE = Server(LLAMA_CPP, PLAIN, (sys.executable, fake_completions.__file__))


def run_of(speed: float, *answers: MeasuredAnswer, acceptance: float | None = None) -> LoadResult:
    return LoadResult(speed, [*answers] or [MeasuredAnswer(0, "a", 5.0, 1.0)], acceptance)


def chunk(text: str) -> str:
    return json.dumps({"choices": [{"text": text}]})


def test_rows_compare_at_the_same_concurrency_and_one_wrong_text_is_noticed() -> None:
    first = [MeasuredAnswer(0, "a", 1.0, 0.1), MeasuredAnswer(1, "b", 2.0, 0.2)]
    second = [MeasuredAnswer(0, "a", 3.0, 0.3), MeasuredAnswer(1, "a", 4.0, 0.4)]
    runs = {
        ServerKey(OURS, PLAIN, 1): [run_of(10), run_of(20)],
        ServerKey(OURS, "speculative", 1): [run_of(30, *first, acceptance=2.0), run_of(40, *second, acceptance=3.0)],
        ServerKey(LLAMA_CPP, PLAIN, 1): [run_of(10), run_of(10)],
        ServerKey(LLAMA_CPP, "draft:3", 1): [run_of(5), run_of(60)],
        ServerKey(OURS, PLAIN, 2): [run_of(1), run_of(1)],
    }
    rows = summarise(runs, ["a", "b"])
    fast = rows[1]
    assert (fast.tokens_per_second, fast.of_plain) == (35, 2.5)
    assert fast.of_best == pytest.approx((30 / 5 + 40 / 60) / 2) and rows[4].of_best is None
    assert (fast.first_ms_p50, fast.per_token_ms_p50) == pytest.approx((2.5, 0.25))
    assert (fast.first_ms_p99, fast.per_token_ms_p99) == pytest.approx((3.97, 0.397))
    assert (fast.same_text, fast.acceptance_length) == pytest.approx((0.75, 2.5))
    stored = json.loads(json.dumps(rows_to_json(rows)))
    assert [ServerRow(**row).tokens_per_second for row in stored] == [row.tokens_per_second for row in rows]
    lines = to_markdown(rows).splitlines()
    assert {line.count("|") for line in lines} == {len(COLUMNS) + 3} and "**2 at a time**" in lines[-2]


def test_exports_are_read_without_the_warm_up_and_a_failed_request_is_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = json.dumps({"choices": [], "usage": {}})
    whole = [chunk("one"), chunk(" two"), usage, "[DONE]"]
    fake_aiperf.export(tmp_path, [Sent("warmup", "0", [chunk("warm"), "[DONE]"]), Sent("profiling", "1", whole)])
    assert read_load(tmp_path) == LoadResult(100.0, [MeasuredAnswer(1, "one two", 2 * FIRST_MS, PER_TOKEN_MS)], None)
    program = tmp_path / "aiperf"
    aiperf = AIPerf(program, tmp_path / "inputs.json", 2, tmp_path)
    fake_aiperf.export(tmp_path / "out", [Sent("profiling", "0", [chunk("a")]), Sent("profiling", "1", None)])
    monkeypatch.setattr("benchmarks.load.serving.aiperf.SECONDS_TO_RUN", 0.5)
    for script, message in (
        ("", r"1 of 2 requests were answered; see .*screen\.txt"),
        ("exit 3", "aiperf ended with 3; see"),
        ("sleep 60", r"aiperf did not end within 0\.5 s; see"),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        with pytest.raises(PeerError, match=message):
            aiperf.profile("http://127.0.0.1:1", 1, 1, tmp_path / "out")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"sh .*setup/llama\.cpp\.sh"):
        prepare_llama_cpp(PeerOptions(tmp_path, "fp32", tmp_path / "llama.cpp", 1, (3,)))
    with pytest.raises(RequestError, match=r"llama\.cpp has no fp16 weights: leave --pair out"):
        prepare_llama_cpp(PeerOptions(tmp_path, "fp16", tmp_path, 1, (3,)))
    broken = Server(LLAMA_CPP, PLAIN, (sys.executable, "-c", "pass"))
    with pytest.raises(PeerError, match=r"llama\.cpp plain: this server did not start"), running(broken):
        pass


@pytest.fixture
def arguments(tiny_bundle: Path, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "a longer one"}\n', encoding="utf-8")
    given = ["--bundle", tiny_bundle, "--prompts", prompts, "--concurrency", "1,2", "--requests", 1, "--repeats", 2]
    given += ["--max-tokens", 8, "--threads", 1, "--work", tmp_path, "--output", tmp_path / "results"]
    return ["run.py", *map(str, given)]


def test_a_whole_load_over_real_servers(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draftwood's servers, and stand-ins for llama.cpp's and for AIPerf; then one of ours that answers wrongly."""
    (tmp_path / "aiperf" / "venv" / "bin").mkdir(parents=True)
    fake_aiperf.install(tmp_path / "aiperf" / "venv" / "bin")
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)  # the servers write there
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
    wrong = Server(OURS, PLAIN, FAKE.command)
    monkeypatch.setattr(run, "draftwood_servers", lambda bundle, at_a_time, threads: [wrong])
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="answers differ from what the bundle writes plainly: plain at 1, plain at 2"):
        run.main()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--max-tokens", "1"], "--max-tokens 2: the first token has no inter-token latency"),
        (["--concurrency", "0"], "--concurrency must be at least 1"),
        ([], "AIPerf is not set up: sh "),
    ],
)
def test_bad_input_ends_with_2_and_a_reason(
    extra: list[str],
    message: str,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [*arguments, *extra])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 2 and message in capsys.readouterr().err
    assert (ROOT / "benchmarks" / "load" / "serving" / "setup" / "aiperf.sh").is_file()
