"""The comparisons with peers run, their arithmetic is right, and a text that is not plain decoding's is noticed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import fake_aiperf
import fake_completions
import pytest
from bundling import ROOT

from benchmarks.load.serving import run as serving
from benchmarks.load.serving.servers import LLAMA_CPP, OURS, Server
from benchmarks.peers import comparison, process, run
from benchmarks.peers.figures import MethodKey, MethodRun, make_row, share_of_same_texts, summarise
from benchmarks.peers.process import PROGRAMS, Entry, PeerError, PeerProcess, make_command
from benchmarks.peers.protocol import PLAIN, Generation, PeerOptions
from benchmarks.tools.pair import SIZES, write_pair
from draftwood.runtime.text.tokenizer import Tokenizer

# Counts upwards from the prompt's last token. "draft:5" goes wrong on long prompts, "draft:3" fails.
FAKE = """
import os
from benchmarks.peers.protocol import Generation, serve
class Fake:
    version = "fake 1.0"
    def __init__(self, options):
        os.write(1, b"a library that prints\\n")
        if options.precision == "int4":
            raise MemoryError("too small a machine")
        self.methods, self.at_a_time = options.methods("draft"), 4 if options.precision == "bf16" else 1
    def generate(self, method, prompts, max_tokens):
        print("noise between answers")
        if method == "draft:3":
            raise ValueError("no such draft")
        if method == "draft:7":
            os._exit(1)
        texts = [[prompt[-1] + step for step in range(1, max_tokens + 1)] for prompt in prompts]
        seconds = (0.002 if method == "draft:6" else 0.001) * max_tokens
        if method == "draft:5" and len(prompts[0]) > 5:
            texts[0][-1] = 0
        counters = {"accepted": max_tokens // 2, "drafted": max_tokens}
        return Generation(texts, seconds, counters if method != "plain" else {})
serve(Fake)
"""
Compare = Callable[..., dict[str, Any]]


def fake_command(entry: Entry, options: PeerOptions) -> list[str]:
    return [sys.executable, "-c", FAKE, *options.to_arguments()]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("pair") / "tiny"
    write_pair(SIZES["tiny"], 0.8, 0.5, 0, output)
    return output


def test_a_program_answers_in_spite_of_what_it_prints_and_says_what_fails(tiny: Path, tmp_path: Path) -> None:
    options, log = PeerOptions(tiny, "fp32", tmp_path / "work", 1, (3, 5)), tmp_path / "log.txt"
    peer = PeerProcess(fake_command(Entry("fake", "fp32"), options), log)
    assert (peer.version, peer.methods) == ("fake 1.0", [PLAIN, "draft:3", "draft:5"])
    assert peer.generate(PLAIN, [[4, 7], [1]], 3) == Generation([[8, 9, 10], [2, 3, 4]], 0.003, {})
    with pytest.raises(PeerError, match="no such draft"):
        peer.generate("draft:3", [[7]], 3)
    for _ in range(2):  # the second request meets a program that has ended
        with pytest.raises(PeerError, match=r"ended without an answer; see .*log\.txt"):
            peer.generate("draft:7", [[1]], 1)
    peer.close()
    with pytest.raises(PeerError, match="MemoryError: too small a machine"):
        PeerProcess(fake_command(Entry("fake", "int4"), replace(options, precision="int4")), log)
    for name, program in PROGRAMS.items():
        assert (process.SETUP.parent / "programs" / f"{program.module}.py").is_file()
        if name != "draftwood":
            with pytest.raises(PeerError, match=rf"sh .*setup/{name}\.sh"):
                make_command(Entry(name, "fp32"), options)


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """Runs the comparison of the fake programs. Returns the figures that it writes."""
    monkeypatch.setattr(comparison, "make_command", fake_command)
    monkeypatch.setattr(comparison, "REST", 0.0)

    def compare(*arguments: object) -> dict[str, Any]:
        common = ["--work", tmp_path, "--output", tmp_path / "results", "--max-tokens", 4, "--repeats", 2]
        monkeypatch.setattr(sys, "argv", ["run.py", *map(str, [*common, *arguments])])
        run.main()
        (file,) = (tmp_path / "results").glob("peers_*.json")
        figures: dict[str, Any] = json.loads(file.read_text())
        return figures

    return compare


def test_a_whole_comparison(tiny: Path, tmp_path: Path, compare: Compare) -> None:
    """A text that is not plain decoding's is noticed, and what fails is left out."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "a longer one"}\n', encoding="utf-8")
    pair = ["--pair", tiny, "--prompts", prompts, "--draft-tokens", "3,5,6"]
    figures = compare(*pair, "--peers", "draftwood,llama.cpp", "--precisions", "fp32,int4")
    same = {(row["peer"], row["method"]): row["same_as_plain"] for row in figures["rows"]}
    shares = {PLAIN: 1, "draft:5": 0.5, "draft:6": 1}
    assert same == {(peer, method): share for peer in ("draftwood", "llama.cpp") for method, share in shares.items()}
    assert figures["failed"]["draftwood int4"].startswith("MemoryError: too small a machine; see ")
    assert figures["failed"]["llama.cpp fp32 draft:3"].startswith("ValueError: no such draft; see ")


def test_settings_have_lengths_and_texts_at_the_same_time(tiny: Path, tmp_path: Path, compare: Compare) -> None:
    pair = shutil.copytree(tiny, tmp_path / "chat")
    for role in ("target", "draft"):
        template = "<s>{% for message in messages %}{{ message['content'] }}{% endfor %}</s>"
        (pair / role / "chat_template.jinja").write_text(template, encoding="utf-8")
    prompts = [{"prompt": f"{word} and more words"} for word in ascii_lowercase]
    (pair / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in prompts), encoding="utf-8")
    methods = ["--draft-tokens", "5,6", "--methods", "draft:6,auto", "--peers", "llama.cpp"]
    lengths = ["--precisions", "bf16,fp32", "--prompt-tokens", "6,12", "--at-a-time", "1,4", "--limit", 2]
    rows = compare("--pair", pair, *methods, *lengths)["rows"]
    speeds = {(row["setting"], row["precision"], row["method"]): row["tokens_per_second"] for row in rows}
    alone = ("prompts of 6 tokens", "prompts of 12 tokens")
    # At fp32 the fake peer writes one text at a time, so it has no turn in the last setting.
    groups = [(setting, precision) for setting in alone for precision in ("bf16", "fp32")] + [("4 at a time", "bf16")]
    assert set(speeds) == {(*group, method) for group in groups for method in (PLAIN, "draft:6")}
    assert speeds[alone[0], "bf16", PLAIN] == 1000.0 and speeds["4 at a time", "bf16", PLAIN] == 4000.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "has no checkpoint named target: python -m benchmarks.tools.pair"),
        (["--peers", "sglang"], "'sglang' is not a peer; choose of draftwood, huggingface, llama.cpp"),
        (["--repeats", "0"], "--repeats must be at least 1, not 0"),
        (["--at-a-time", "1,0"], "--at-a-time must be from 1 to 256"),
        (["--at-a-time", "4"], "--at-a-time needs --prompt-tokens or --chat"),
        (["--chat", "--prompt-tokens", "64"], "leave --prompt-tokens out"),
    ],
)
def test_bad_input_ends_with_2_and_a_reason(
    arguments: list[str], message: str, tmp_path: Path, compare: Compare, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        compare("--pair", tmp_path, *arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.full
def test_transformers_writes_what_draftwood_writes(tiny: Path, tmp_path: Path) -> None:
    """The two programs that run in the project's own environment, on real models."""
    prompt, texts = Tokenizer.load(tiny / "target").encode("abcdefgh"), list[list[int]]()
    for module in ("draftwood", "huggingface"):
        command = [sys.executable, "-m", f"benchmarks.peers.programs.{module}"]
        peer = PeerProcess([*command, *PeerOptions(tiny, "fp32", tmp_path, 1, (3,)).to_arguments()], tmp_path / "log")
        texts += [peer.generate(method, [prompt], 80).texts[0] for method in peer.methods]
        peer.close()
    assert len(set(map(tuple, texts))) == 1 and len(texts[0]) == 80


# Arithmetic


def runs_of(*seconds: float, tokens: tuple[int, ...] = (1, 2)) -> list[MethodRun]:
    return [MethodRun(0, repeat, Generation([[*tokens]], each, {}), 0.0) for repeat, each in enumerate(seconds)]


def test_medians_quartiles_and_ratios_and_one_different_token() -> None:
    """The fastest method of another peer at the same precision and setting is what a row is compared with."""
    plain, fast = (MethodKey("fp32", "draftwood", method) for method in (PLAIN, "topk:7"))
    other = MethodKey("fp32", "llama.cpp", PLAIN)
    runs = {plain: runs_of(0.2, 0.4, 0.8), fast: runs_of(0.1, 0.1, 0.4), other: runs_of(0.1, 0.3, 0.2)}
    row = make_row(fast, runs, runs[plain])
    assert row.tokens_per_second == pytest.approx(20) and (row.low, row.high) == pytest.approx((12.5, 20))
    assert row.of_plain == pytest.approx(2) and row.of_best == pytest.approx(1)
    draft, rounded = other._replace(method="draft:3"), other._replace(precision="int8")
    rows = summarise(runs | {draft: runs_of(0.05, 0.15, 0.1), rounded: runs_of(1)})
    assert [row.of_best for row in rows] == pytest.approx([0.25, 0.5, 0.5, 1, 1])
    for tokens in ((1, 3), (1,)):
        drifted = [*runs[plain][:2], *runs_of(1, tokens=tokens)]
        drifted[2] = drifted[2]._replace(repeat=2)
        assert share_of_same_texts(drifted, runs[plain]) < 1 == share_of_same_texts(runs[plain], runs[plain])


# Load on servers


def test_a_whole_load_over_real_servers(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Draftwood's servers, and stand-ins for llama.cpp's and for AIPerf; then one of ours that answers wrongly."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "a longer one"}\n', encoding="utf-8")
    given = ["--bundle", tiny_bundle, "--prompts", prompts, "--concurrency", "1,2", "--requests", 1, "--repeats", 2]
    given += ["--max-tokens", 8, "--threads", 1, "--work", tmp_path, "--output", tmp_path / "results"]
    arguments = ["run.py", *map(str, given)]
    for extra, message in (
        (["--max-tokens", "1"], "--max-tokens 2: the first token has no inter-token latency"),
        (["--concurrency", "0"], "--concurrency must be at least 1"),
        ([], "AIPerf is not set up: sh "),
    ):
        monkeypatch.setattr(sys, "argv", [*arguments, *extra])
        with pytest.raises(SystemExit, match="2"):
            serving.main()
        assert message in capsys.readouterr().err
    assert (ROOT / "benchmarks" / "load" / "serving" / "setup" / "aiperf.sh").is_file()
    (tmp_path / "aiperf" / "venv" / "bin").mkdir(parents=True)
    fake_aiperf.install(tmp_path / "aiperf" / "venv" / "bin")
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)  # the servers write there
    fake = Server(LLAMA_CPP, PLAIN, (sys.executable, fake_completions.__file__))
    monkeypatch.setattr(serving, "prepare_llama_cpp", lambda options: "llama.cpp 1.0")
    monkeypatch.setattr(serving, "llama_cpp_servers", lambda options, at_a_time, context: [fake])
    monkeypatch.setattr(sys, "argv", [*arguments, "--pair", str(tmp_path)])
    serving.main()
    (file,) = (tmp_path / "results").glob("load_serving_20*.json")
    rows = json.loads(file.read_text())["rows"]
    assert {(row["peer"], row["method"]) for row in rows} == {(OURS, PLAIN), (OURS, "speculative"), (LLAMA_CPP, PLAIN)}
    assert all(row["same_text"] == (row["peer"] == OURS) for row in rows)
    wrong = Server(OURS, PLAIN, fake.command)
    monkeypatch.setattr(serving, "draftwood_servers", lambda bundle, at_a_time, threads: [wrong])
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="answers differ from what the bundle writes plainly: plain at 1, plain at 2"):
        serving.main()
