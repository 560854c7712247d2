"""The comparison with peers: the protocol, the arithmetic, and that a text which is not plain decoding's is noticed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pair import SIZES, write_pair
from peers import process, run
from peers.figures import Key, Row, Run, row_of, same_texts, summarise, times_as_fast, to_json, tokens_per_pass
from peers.process import PROGRAMS, Entry, PeerError, PeerProcess, command_for, entries
from peers.protocol import PLAIN, Generation, Options, split_method
from peers.report import markdown

from draftwood.models.errors import RequestError
from draftwood.runtime.tokenizer import Tokenizer

# Counts upwards from the prompt's last token. "draft:5" goes wrong on long prompts, "draft:3" fails.
LONG = 5
FAKE = (
    f"LONG = {LONG}"
    + """
import os
from peers.protocol import Generation, serve

class Fake:
    version = "fake 1.0"

    def __init__(self, options):
        os.write(1, b"a library that prints\\n")
        if options.precision == "int4":
            raise MemoryError("too small a machine")
        self.methods = options.methods("draft")

    def generate(self, method, prompt, max_tokens):
        print("noise between answers")
        if method == "draft:3":
            raise ValueError("no such draft")
        tokens = [prompt[-1] + step for step in range(1, max_tokens + 1)]
        if method == "draft:5" and len(prompt) > LONG:
            tokens[-1] = 0
        return Generation(tokens, 0.001 * max_tokens, {"accepted": max_tokens // 2})

serve(Fake)
"""
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("pair") / "tiny"
    write_pair(SIZES["tiny"], 0.8, 0.5, 0, output)
    return output


@pytest.fixture
def options(tiny: Path, tmp_path: Path) -> Options:
    return Options(tiny, "fp32", tmp_path / "work", 1, (3, 5))


def fake_command(entry: Entry, options: Options) -> list[str]:
    return [sys.executable, "-c", FAKE, *options.to_arguments()]


def generation(seconds: float, tokens: tuple[int, ...] = (1, 2), **counters: float) -> Generation:
    return Generation(list(tokens), seconds, counters)


def runs_of(*seconds: float, tokens: tuple[int, ...] = (1, 2)) -> list[Run]:
    return [Run(0, repeat, generation(each, tokens), 0.0) for repeat, each in enumerate(seconds)]


def test_options_survive_the_command_line(options: Options) -> None:
    for each in (options, replace(options, variant="openvino", draft_tokens=(7,))):
        assert Options.parse(each.to_arguments()) == each
    assert options.methods("draft", "lookup") == [PLAIN, "draft:3", "draft:5", "lookup:3", "lookup:5"]
    assert split_method("draft:5") == ("draft", 5) and split_method(PLAIN) == (PLAIN, 0)


def test_a_conversion_happens_once_per_pair_and_whole(options: Options, tiny: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError

    with pytest.raises(RuntimeError):
        options.converted(fail)
    done = options.converted(lambda folder: (folder / "model").touch())
    assert [file.name for file in done.iterdir()] == ["model"]
    assert options.converted(fail) == done
    assert replace(options, precision="int8").converted(lambda folder: None) != done
    (tiny / "draft" / "generation_config.json").write_text("{} ", encoding="utf-8")
    assert options.converted(lambda folder: None) != done


def test_a_program_answers_in_spite_of_what_it_prints(options: Options, tmp_path: Path) -> None:
    peer = PeerProcess(fake_command(Entry("fake", "fp32"), options), tmp_path / "log.txt")
    try:
        assert (peer.version, peer.methods) == ("fake 1.0", [PLAIN, "draft:3", "draft:5"])
        assert peer.generate(PLAIN, [4, 7], 3) == Generation([8, 9, 10], 0.003, {"accepted": 1})
        with pytest.raises(PeerError, match="no such draft"):
            peer.generate("draft:3", [7], 3)
        assert peer.generate("draft:5", [1], 1).tokens == [2]  # an error ends nothing
        assert peer.processor_seconds() > 0
    finally:
        peer.close()
    assert "a library that prints" in (tmp_path / "log.txt").read_text()


def test_a_program_that_cannot_load_says_why(options: Options, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="MemoryError: too small a machine"):
        PeerProcess(fake_command(Entry("fake", "int4"), replace(options, precision="int4")), tmp_path / "log.txt")
    with pytest.raises(PeerError, match=r"ended without an answer; see .*log\.txt"):
        PeerProcess([sys.executable, "-c", "pass"], tmp_path / "log.txt")


def test_a_peer_without_its_environment_names_the_script(options: Options) -> None:
    for name in PROGRAMS:
        if name != "draftwood":
            with pytest.raises(PeerError, match=rf"sh .*setup/{name}\.sh"):
                command_for(Entry(name, "fp32"), options)
            assert (process.BENCHMARKS / "peers" / "setup" / f"{name}.sh").is_file()
    assert command_for(Entry("draftwood/openvino", "fp32"), options)[0] == sys.executable


def test_every_program_is_there_and_unknown_ones_are_refused() -> None:
    for program in PROGRAMS.values():
        assert (process.BENCHMARKS / "peers" / f"{program.module}.py").is_file()
    assert entries(["huggingface", "draftwood/openvino"], ["fp32", "int4"]) == [
        Entry("huggingface", "fp32"),
        Entry("draftwood/openvino", "fp32"),
        Entry("draftwood/openvino", "int4"),
    ]
    with pytest.raises(RequestError, match=r"'vllm' is not a peer; choose of draftwood, huggingface, llama\.cpp"):
        entries(["vllm"], ["fp32"])


def test_medians_quartiles_and_ratios() -> None:
    plain, fast, other = (
        Key("fp32", "draftwood", PLAIN),
        Key("fp32", "draftwood", "topk:7"),
        Key("fp32", "llama.cpp", PLAIN),
    )
    runs = {plain: runs_of(0.2, 0.4, 0.8), fast: runs_of(0.1, 0.1, 0.4), other: runs_of(0.1, 0.3, 0.2)}
    row = row_of(fast, runs, runs[plain])
    assert row.tokens_per_second == pytest.approx(20) and (row.low, row.high) == pytest.approx((12.5, 20))
    assert row.of_plain == pytest.approx(2) and row.of_best == pytest.approx(1)
    assert (row.same_as_plain, row.same_as_first, row.tokens_per_pass) == (1, 1, None)
    best = Key("int8", "draftwood", PLAIN)
    assert row_of(best, runs | {best: runs_of(1.0)}, runs[plain]).of_best is None


def test_the_best_other_peer_is_the_fastest_method_of_the_same_precision() -> None:
    runs = {
        Key("fp32", "draftwood/openvino", PLAIN): runs_of(0.1),
        Key("fp32", "llama.cpp", PLAIN): runs_of(0.4),
        Key("fp32", "llama.cpp", "draft:3"): runs_of(0.2),
        Key("int4", "llama.cpp", PLAIN): runs_of(0.05),
    }
    assert [row.of_best for row in summarise(runs)] == pytest.approx([2, 0.5, 1, 1])


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=9))
def test_ratios_are_taken_within_a_repeat(pairs: list[tuple[float, float]]) -> None:
    own, other = runs_of(*(a for a, _ in pairs)), runs_of(*(b for _, b in pairs))
    assert times_as_fast(own, other) == pytest.approx(median(b / a for a, b in pairs))
    # A machine that is slower in some repeats slows both.
    slowed = (
        [run._replace(generation=generation(run.generation.seconds * (1 + run.repeat))) for run in side]
        for side in (own, other)
    )
    assert times_as_fast(*slowed) == pytest.approx(times_as_fast(own, other))


def test_one_different_token_is_noticed() -> None:
    plain = [Run(prompt, repeat, generation(1), 0.0) for prompt in range(4) for repeat in range(2)]
    drifted = [*plain[:-1], plain[-1]._replace(generation=generation(1, (1, 3)))]
    assert same_texts(plain, plain) == 1
    assert same_texts(drifted, plain) == same_texts(plain, drifted) == 0.75
    assert same_texts(plain, [*plain[:-1], plain[-1]._replace(generation=generation(1, (1,)))]) == 0.75


def test_tokens_per_pass_from_either_counter() -> None:
    def counted(**counters: float) -> list[Run]:
        return [Run(0, 0, generation(1, (1,) * 12, **counters), 0.0)] * 2

    assert tokens_per_pass(counted(target_passes=4)) == tokens_per_pass(counted(accepted=8)) == 3
    assert tokens_per_pass(counted(drafted=8)) is None


def test_an_empty_text_is_no_measurement() -> None:
    with pytest.raises(ValueError, match="llama"):
        summarise({Key("fp32", "llama.cpp", PLAIN): runs_of(0.1, tokens=())})


def test_a_whole_comparison(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "command_for", fake_command)
    monkeypatch.setattr(run, "REST", 0.0)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "a longer one"}\n', encoding="utf-8")
    arguments = ["--pair", tiny, "--prompts", prompts, "--peers", "draftwood,llama.cpp", "--precisions", "fp32,int4"]
    arguments += ["--max-tokens", 4, "--repeats", 2, "--work", tmp_path, "--output", tmp_path / "peers_tiny.json"]
    monkeypatch.setattr(sys, "argv", ["run.py", *map(str, arguments)])
    run.main()
    short, long = (len(Tokenizer.load(tiny / "target").encode(text)) for text in ("one", "a longer one"))
    assert short <= LONG < long
    figures = json.loads((tmp_path / "peers_tiny.json").read_text())
    rows = {(row["peer"], row["method"]): row for row in figures["rows"]}
    assert set(rows) == {(peer, method) for peer in ("draftwood", "llama.cpp") for method in (PLAIN, "draft:5")}
    assert {row["same_as_plain"] for row in rows.values() if row["method"] == PLAIN} == {1}
    assert {row["same_as_plain"] for row in rows.values() if row["method"] == "draft:5"} == {0.5}
    assert {row["tokens_per_second"] for row in rows.values()} == {1000.0}
    assert figures["failed"]["draftwood int4"].startswith("MemoryError: too small a machine; see ")
    assert figures["failed"]["llama.cpp fp32 draft:3"].startswith("ValueError: no such draft; see ")
    assert "Left out: draftwood int4" in capsys.readouterr().out
    assert (tmp_path / "peers_tiny.svg").read_text().startswith("<?xml")


def test_without_a_single_peer_there_is_no_result(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "command_for", fake_command)
    arguments = ["--pair", tiny, "--peers", "llama.cpp", "--precisions", "int4"]
    output = ["--work", tmp_path, "--output", tmp_path / "x.json"]
    monkeypatch.setattr(sys, "argv", ["run.py", *map(str, [*arguments, *output])])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 2 and "no peer could run" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "has no checkpoint named target: benchmarks/pair.py"),
        (["--peers", "vllm"], "'vllm' is not a peer"),
        (["--repeats", "0"], "--repeats must be at least 1, not 0"),
    ],
)
def test_bad_input_ends_with_2_and_a_reason(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["run.py", "--pair", str(tmp_path), "--output", str(tmp_path / "x.json"), *arguments]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_the_tables_group_by_precision_and_begin_with_the_fastest() -> None:
    speeds = {("fp32", "llama.cpp"): 0.4, ("fp32", "draftwood"): 0.2, ("int4", "draftwood/openvino"): 0.1}
    runs = {Key(*names, PLAIN): runs_of(seconds) for names, seconds in speeds.items()}
    lines = markdown(summarise(runs)).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    names = [line.split(" | ")[0].strip("| ") for line in lines[2:]]
    assert names == ["**fp32**", "**draftwood**", "llama.cpp", "**int4**", "**draftwood/openvino**"]
    assert lines[3].split(" | ")[2:6] == ["10", "10-10", "1.00", "2.00"]


def test_rows_are_json() -> None:
    rows = summarise({Key("fp32", "draftwood", PLAIN): runs_of(0.123456)})
    assert Row(**json.loads(json.dumps(to_json(rows)))[0]) == rows[0]._replace(
        tokens_per_second=16.2, low=16.2, high=16.2
    )


def test_transformers_writes_what_draftwood_writes(tiny: Path, tmp_path: Path) -> None:
    """The two programs that run in the project's own environment, on real models."""
    prompt = Tokenizer.load(tiny / "target").encode("abcdefgh")
    texts, passes = {}, {}
    for module in ("draftwood", "huggingface"):
        command = [sys.executable, "-m", f"peers.{module}"]
        options = Options(tiny, "fp32", tmp_path, 1, (3,))
        peer = PeerProcess([*command, *options.to_arguments()], tmp_path / "log.txt")
        try:
            for method in peer.methods:
                answer = peer.generate(method, prompt, 80)
                texts[module, method] = answer.tokens
                passes[module, method] = len(answer.tokens) / answer.counters["target_passes"]
        finally:
            peer.close()
    assert len(set(map(tuple, texts.values()))) == 1 and len(texts["draftwood", PLAIN]) == 80
    assert passes["draftwood", PLAIN] == passes["huggingface", PLAIN] == 1
    # (1 - a^4) / (1 - a) = 2.95 tokens per pass are expected of chains of 3 at a = 0.8.
    assert passes["draftwood", "chain:3"] == pytest.approx(2.95, abs=0.5)
    assert passes["huggingface", "draft:3"] == pytest.approx(2.95, abs=0.5)
