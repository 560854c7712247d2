"""The comparison with peers: the protocol, the arithmetic, and that a text which is not plain decoding's is noticed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest

from benchmarks.peers import comparison, process, run
from benchmarks.peers.process import (
    PROGRAMS,
    Entry,
    PeerError,
    PeerProcess,
    make_command,
    parse_entries,
)
from benchmarks.peers.programs import draftwood
from benchmarks.peers.protocol import PLAIN, Generation, PeerOptions, split_method
from benchmarks.tools.pair import SIZES, write_pair
from draftwood.runtime.text.tokenizer import Tokenizer

# Counts upwards from the prompt's last token. "draft:5" goes wrong on long prompts, "draft:3" fails.
LONG = 5
FAKE = (
    f"LONG = {LONG}"
    + """
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
        if method == "draft:5" and len(prompts[0]) > LONG:
            texts[0][-1] = 0
        counters = {"accepted": max_tokens // 2, "drafted": max_tokens}
        return Generation(texts, seconds, counters if method != "plain" else {})

serve(Fake)
"""
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("pair") / "tiny"
    write_pair(SIZES["tiny"], 0.8, 0.5, 0, output)
    return output


@pytest.fixture
def options(tiny: Path, tmp_path: Path) -> PeerOptions:
    return PeerOptions(tiny, "fp32", tmp_path / "work", 1, (3, 5))


def fake_command(entry: Entry, options: PeerOptions) -> list[str]:
    return [sys.executable, "-c", FAKE, *options.to_arguments()]


def test_options_survive_the_command_line(options: PeerOptions) -> None:
    for each in (options, replace(options, variant="native", draft_tokens=(7,))):
        assert PeerOptions.parse(each.to_arguments()) == each
    assert options.methods("draft", "lookup") == [PLAIN, "draft:3", "draft:5", "lookup:3", "lookup:5"]
    assert split_method("draft:5") == ("draft", 5) and split_method(PLAIN) == (PLAIN, 0)


def test_a_conversion_happens_once_per_pair_and_whole(options: PeerOptions, tiny: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError

    with pytest.raises(RuntimeError):
        options.convert_once(fail)
    done = options.convert_once(lambda folder: (folder / "model").touch())
    assert [file.name for file in done.iterdir()] == ["model"]
    assert options.convert_once(fail) == done
    assert replace(options, precision="int8").convert_once(lambda folder: None) != done
    (tiny / "draft" / "generation_config.json").write_text("{} ", encoding="utf-8")
    assert options.convert_once(lambda folder: None) != done


def test_draftwood_builds_anew_when_the_code_has_changed_and_loads_the_trimmed_draft(
    options: PeerOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[object] = []

    def build(*arguments: object) -> None:
        built.append(arguments[arguments.index("--draft") + 1])
        Path(str(arguments[arguments.index("--output") + 1])).mkdir()

    monkeypatch.setattr(draftwood, "run_draftwood", build)
    pair = tmp_path / "pair"
    pair.mkdir()
    for role in ("target", "draft", "draft-full"):
        (pair / role).symlink_to(options.pair / "draft")
    own = replace(options, pair=pair)
    assert own.checkpoints == {"target": pair / "target", "draft": pair / "draft-full"}  # for other programs
    folder = draftwood.build_bundle(own, "native")
    assert draftwood.build_bundle(own, "native") == folder and built == [pair / "draft"]
    monkeypatch.setattr(draftwood, "digest_files", lambda files: "another digest")
    assert draftwood.build_bundle(own, "native") != folder and len(built) == 2


def test_a_program_answers_in_spite_of_what_it_prints_and_says_what_fails(options: PeerOptions, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    peer = PeerProcess(fake_command(Entry("fake", "fp32"), options), log)
    assert (peer.version, peer.methods) == ("fake 1.0", [PLAIN, "draft:3", "draft:5"])
    assert peer.generate(PLAIN, [[4, 7], [1]], 3) == Generation([[8, 9, 10], [2, 3, 4]], 0.003, {})
    with pytest.raises(PeerError, match="no such draft"):
        peer.generate("draft:3", [[7]], 3)
    assert peer.generate("draft:5", [[1]], 1).texts == [[2]]  # an error ends nothing
    assert peer.processor_seconds() > 0
    for _ in range(2):  # the second request meets a program that has ended
        with pytest.raises(PeerError, match=r"ended without an answer; see .*log\.txt"):
            peer.generate("draft:7", [[1]], 1)
    peer.close()
    assert "a library that prints" in log.read_text()
    with pytest.raises(PeerError, match="MemoryError: too small a machine"):
        PeerProcess(fake_command(Entry("fake", "int4"), replace(options, precision="int4")), log)


def test_every_program_is_there_and_names_the_script_that_sets_it_up(options: PeerOptions) -> None:
    for name, program in PROGRAMS.items():
        assert (process.SETUP.parent / "programs" / f"{program.module}.py").is_file()
        if name != "draftwood":
            with pytest.raises(PeerError, match=rf"sh .*setup/{name}\.sh"):
                make_command(Entry(name, "fp32"), options)
            assert (process.SETUP / f"{name}.sh").is_file()
    assert make_command(Entry("draftwood/native", "fp32"), options)[0] == sys.executable
    native = [Entry("draftwood/native", precision) for precision in ("fp32", "int4")]
    found = parse_entries(["huggingface", "draftwood/native"], ["fp32", "int4"])
    assert found == [Entry("huggingface", "fp32"), *native]


@pytest.fixture
def compare(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
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


def test_a_whole_comparison(tiny: Path, tmp_path: Path, compare: Callable[..., dict[str, Any]]) -> None:
    """A text that is not plain decoding's is noticed, and what fails is left out."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "a longer one"}\n', encoding="utf-8")
    pair = ["--pair", tiny, "--prompts", prompts, "--draft-tokens", "3,5,6"]
    figures = compare(*pair, "--peers", "draftwood,llama.cpp", "--precisions", "fp32,int4")
    rows = {(row["peer"], row["method"]): row for row in figures["rows"]}
    same = {PLAIN: 1, "draft:5": 0.5, "draft:6": 1}
    assert {key: row["same_as_plain"] for key, row in rows.items()} == {
        (peer, method): share for peer in ("draftwood", "llama.cpp") for method, share in same.items()
    }
    assert {row["tokens_per_second"] for row in rows.values()} == {500.0, 1000.0}
    assert figures["failed"]["draftwood int4"].startswith("MemoryError: too small a machine; see ")
    assert figures["failed"]["llama.cpp fp32 draft:3"].startswith("ValueError: no such draft; see ")


def test_settings_have_lengths_and_texts_at_the_same_time(
    tiny: Path, tmp_path: Path, compare: Callable[..., dict[str, Any]]
) -> None:
    pair = shutil.copytree(tiny, tmp_path / "chat")
    for role in ("target", "draft"):
        template = "<s>{% for message in messages %}{{ message['content'] }}{% endfor %}</s>"
        (pair / role / "chat_template.jinja").write_text(template, encoding="utf-8")
    prompts = [{"prompt": f"{word} and more words"} for word in ascii_lowercase]
    (pair / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in prompts), encoding="utf-8")
    methods = ["--draft-tokens", "5,6", "--methods", "draft:6,auto", "--peers", "llama.cpp"]
    lengths = ["--precisions", "bf16,fp32", "--prompt-tokens", "6,12", "--at-a-time", "1,4", "--limit", 2]
    found = compare("--pair", pair, *methods, *lengths)["rows"]
    rows = {(row["setting"], row["precision"], row["method"]): row["tokens_per_second"] for row in found}
    alone = ("prompts of 6 tokens", "prompts of 12 tokens")
    # At fp32 the fake peer writes one text at a time, so it has no turn in the last setting.
    groups = [(setting, precision) for setting in alone for precision in ("bf16", "fp32")] + [("4 at a time", "bf16")]
    assert set(rows) == {(*group, method) for group in groups for method in (PLAIN, "draft:6")}
    assert rows[alone[0], "bf16", PLAIN] == 1000.0 and rows["4 at a time", "bf16", PLAIN] == 4000.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "has no checkpoint named target: python -m benchmarks.tools.pair"),
        (["--peers", "sglang"], "'sglang' is not a peer; choose of draftwood, huggingface, llama.cpp"),
        (["--repeats", "0"], "--repeats must be at least 1, not 0"),
        (["--at-a-time", "1,0"], "--at-a-time must be from 1 to 256"),
        (["--at-a-time", "4"], "--at-a-time needs --prompt-tokens or --chat"),
        (["--chat", "--prompt-tokens", "64"], "leave --prompt-tokens out"),
        (["--peers", "llama.cpp", "--precisions", "int4"], "no peer could run"),
    ],
)
def test_bad_input_ends_with_2_and_a_reason(
    arguments: list[str],
    message: str,
    tiny: Path,
    tmp_path: Path,
    compare: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        compare("--pair", tiny if "int4" in arguments else tmp_path, *arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err and not (tmp_path / "results").exists()


@pytest.mark.full
def test_transformers_writes_what_draftwood_writes(tiny: Path, tmp_path: Path) -> None:
    """The two programs that run in the project's own environment, on real models."""
    prompt = Tokenizer.load(tiny / "target").encode("abcdefgh")
    texts, passes = {}, {}
    for module in ("draftwood", "huggingface"):
        command = [sys.executable, "-m", f"benchmarks.peers.programs.{module}"]
        peer = PeerProcess([*command, *PeerOptions(tiny, "fp32", tmp_path, 1, (3,)).to_arguments()], tmp_path / "log")
        for method in peer.methods:
            answer = peer.generate(method, [prompt], 80)
            (texts[module, method],) = answer.texts
            passes[module, method] = answer.num_tokens / answer.counters["target_passes"]
            if peer.at_a_time > 1:
                assert peer.generate(method, [prompt, [5, 9], prompt], 80).texts[::2] == [answer.texts[0]] * 2
        peer.close()
    assert len(set(map(tuple, texts.values()))) == 1 and len(texts["draftwood", PLAIN]) == 80
    assert passes["draftwood", PLAIN] == passes["huggingface", PLAIN] == 1
    # (1 - a^4) / (1 - a) = 2.95 tokens per pass are expected of chains of 3 at a = 0.8.
    assert passes["draftwood", "chain:3"] == pytest.approx(2.95, abs=0.5)
    assert passes["huggingface", "draft:3"] == pytest.approx(2.95, abs=0.5)
