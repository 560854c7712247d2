"""The comparisons with other programs run, their arithmetic is right, and what fails is named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import fake_aiperf
import fake_completions
import pytest
from answering import answering
from bundling import ROOT

from benchmarks import versus
from benchmarks.peers import aiperf, divergence, run
from benchmarks.peers.client import Answer, Asked, Batch, ask
from benchmarks.peers.comparison import Entry, Turn
from benchmarks.peers.figures import summarise
from benchmarks.peers.inside import served
from benchmarks.peers.program import PLAIN, Conditions, Program, Setting, SetupError
from benchmarks.peers.programs import MAKERS, draftwood, llama_cpp, make_program
from benchmarks.peers.server import Server, ServerError
from benchmarks.peers.texts import OWN, TRIAL, Prompt, make_batches, read_prompts
from draftwood.models.errors import RequestError

FAKE = (sys.executable, fake_completions.__file__)
FAST, MANY_TOKENS = ("claimed", 1_000_000), ("claimed", 2_000_000_000)


def fake(name: str, *settings: Setting) -> Program:
    def mix(draft: Setting, lookup: Setting) -> Setting:
        return Setting(f"{draft.name} + {lookup.name}", body=(*draft.body, MANY_TOKENS), lookups=True)

    return Program(name, "file", "1.0", FAKE, (Setting(PLAIN), *settings), mixed=mix)


OURS = fake("draftwood", Setting("default", body=(FAST, ("says", "another text"))))
THEIRS = fake(
    "llama.cpp",
    Setting("draft:3", ("--draft", "3"), (FAST,)),
    Setting("draft:4", ("--draft", "4"), (("broken", True),)),
    Setting("ngram", body=(("claimed", 5),), lookups=True),
)
Compare = Callable[..., dict[str, Any]]


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """Runs the comparison of the fake programs. Returns the figures that it writes."""
    (tmp_path / "model.gguf").touch()
    quick = {program.name: replace(program, rest=0.0) for program in (OURS, THEIRS)}

    def made(key: str, conditions: Conditions) -> Program:
        return quick.get(key) or make_program(key, conditions)

    monkeypatch.setattr(run, "make_program", made)

    def compare(*arguments: object) -> dict[str, Any]:
        given = [tmp_path / "model.gguf", "--work", tmp_path / "work", "--output", tmp_path / "results", *arguments]
        monkeypatch.setattr(sys, "argv", ["run.py", *map(str, given)])
        run.main()
        (file,) = (tmp_path / "results").glob("peers_model_*.json")
        figures: dict[str, Any] = json.loads(file.read_text())
        return figures

    return compare


def test_each_program_runs_at_its_best_and_plainly(compare: Compare, tmp_path: Path) -> None:
    programs = ["--programs", "draftwood,llama.cpp,vllm/bf16", "--repeats", 2]
    figures = compare(*programs, "--kinds", "coding,prose", "--limit", 1, "--max-tokens", 7)
    rows = {(row["kind"], row["program"], row["setting"]): row for row in figures["rows"]}
    best = "draft:3 + ngram"
    chosen = {
        ("draftwood", PLAIN),
        ("draftwood", "default"),
        *(("llama.cpp", name) for name in (PLAIN, "draft:3", best)),
    }
    assert set(rows) == {(kind, *each) for kind in ("all", "coding", "prose") for each in chosen}
    assert rows["all", "llama.cpp", best]["lookups"] and rows["all", "llama.cpp", PLAIN]["tokens_per_pass"] == 7 / 4
    assert (
        rows["all", "draftwood", "default"]["same_as_plain"] == 0 == 1 - rows["all", "llama.cpp", best]["same_as_plain"]
    )
    assert rows["all", "llama.cpp", best]["of_best"] == [1, 1, 1]
    assert (
        figures["trial"]["llama.cpp/file"]["draft:4"] == "no such draft" == figures["failed"]["llama.cpp/file draft:4"]
    )
    assert "sh benchmarks/peers/setup/vllm.sh" in figures["failed"]["vllm/bf16"]
    known = tmp_path / "work" / "trials.json"
    stored = known.read_text().replace('"no such draft"', "9e9")  # a trial that is known is not run again
    known.write_text(stored)
    assert "llama.cpp/file draft:4" in compare(*programs, "--kinds", "coding", "--at-a-time", 2, "--limit", 2)["failed"]
    assert compare(*programs, "--kinds", "coding", "--limit", 1)["trial"]["llama.cpp/file"]["draft:4"] == 9e9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--programs", "sglang/bf16"], "'sglang' is not a program; choose of draftwood, llama.cpp, ik_llama.cpp"),
        (["--programs", "vllm/int4"], "vLLM runs here at bf16 or fp32, not 'int4'"),
        (["--programs", "vllm/bf16,llama.cpp/file"], "no program is installed: "),
        (["--repeats", "101"], "--repeats must be from 0 to 100"),
        (["--temperature", "-1"], "--temperature must be from 0 to 2"),
        (["--draft", "nowhere.gguf"], "nowhere.gguf is no file: python -m benchmarks.tools.real_pair"),
        (["--kinds", "poems"], "has no prompts of poems"),
        (["--at-a-time", "99", "--limit", "1"], "99 texts at a time need more prompts than 7: a higher --limit"),
    ],
)
def test_bad_input_ends_with_2_and_a_reason(
    arguments: list[str], message: str, compare: Compare, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(run, "make_program", make_program)
    with pytest.raises(SystemExit) as ended:
        compare(*arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_every_script_that_an_error_names_is_there() -> None:
    scripts = {file.stem for file in (ROOT / "benchmarks" / "peers" / "setup").glob("*.sh")}
    assert scripts == {*MAKERS, "aiperf", "avx2"} - {"draftwood"}


# Prompts


def test_rows_of_speed_bench_are_conversations_kind_by_kind(tmp_path: Path) -> None:
    file, row = tmp_path / "qualitative.jsonl", {"sub_category": "x", "source": "y", "multiturn": True}
    rows = [
        row | {"question_id": f"{kind}{n}", "category": kind, "turns": [f"{kind} {n}", "and then"]}
        for kind in ("math", "roleplay")
        for n in range(3)
    ]
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    found = read_prompts(file, 2)
    assert [prompt.turns[0] for prompt in found] == ["math 0", "roleplay 0", "math 1", "roleplay 1"]
    with answering(ThreadingHTTPServer(("127.0.0.1", 0), fake_completions.Handler)) as url:
        answer = ask(url, "model", found[0], Asked(5, 0.7), {})
        assert (answer.text, answer.tokens, answer.drafted, answer.accepted) == ("always this\nalways this", 10, 10, 4)
        assert answer.first is not None and answer.first <= answer.seconds
        with pytest.raises(ServerError, match="no such draft"):
            ask(url, "model", found[0], Asked(5, 0), {"broken": True})
    assert read_prompts(file, 9, ["math"])[-1].turns[0] == "math 2"
    own = {prompt.kind for prompt in read_prompts(OWN, 9)}
    assert len(own) == 7 and TRIAL not in own and len(make_batches(read_prompts(OWN, 8), 16)) == 2
    for line, message in (
        ('{"category": "math", "turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM"]}', "with NVIDIA's prepare.py"),
        ('{"category": "math", "turns": []}', 'line 1: expected an object with a "category" and "turns"'),
        ('{"category": 3, "prompt": "x"}', "line 1: expected"),
        ("[", "line 1: expected"),
        ("", "has no prompts of any kind"),
    ):
        file.write_text(line)
        with pytest.raises(RequestError, match=message):
            read_prompts(file, 1)
    with pytest.raises(RequestError, match="cannot be read"):
        read_prompts(tmp_path, 1)


# Programs


HELP = {
    "llama.cpp": "--spec-type [none,ngram-simple] --spec-draft-n-max N --no-cache-prompt --jinja",
    "ik_llama.cpp": "--spec-type Name [none | ngram - cache] --run-time-repack --spec-autotune",
    "older": "--draft-max N",
}


@pytest.mark.parametrize("name", HELP)
def test_settings_of_a_llama_server_are_those_that_its_help_tells(name: str, tmp_path: Path) -> None:
    server = tmp_path / "llama-server"
    # ik_llama.cpp's --help ends with an error.
    end = "[ $1 != --help ]" if name == "ik_llama.cpp" else "exit 0"
    server.write_text(f"#!/bin/sh\necho '{HELP[name]}'\necho 'version: 7 (abc)' >&2\n{end}\n")
    server.chmod(0o755)
    conditions = Conditions(tmp_path / "t.gguf", tmp_path / "d.gguf", tmp_path, 2, 4, 512, False)
    program = llama_cpp.make_program(name, server, "file", conditions)
    names = {setting.name for setting in program.settings}
    assert program.version == f"{name} 7 (abc)" and {PLAIN, "draft:3"} <= names
    assert ("ngram-mod" in names) == (name != "older") and ("draft:8 autotune" in names) == (name == "ik_llama.cpp")
    assert " -c 2048 " in " ".join(program.command) and ("-rtr" in program.command) == (name == "ik_llama.cpp")
    assert all((("cache_prompt", False) in each.body) == (name != "llama.cpp") for each in program.settings)
    for mixture in program.mixtures():
        kinds = [mixture.start[at + 1] for at, part in enumerate(mixture.start) if part == "--spec-type"]
        assert mixture.lookups and len(kinds) == 1 and "-md" in mixture.start
        assert all(("-no-fa" in each) == (name == "ik_llama.cpp") for each in (mixture.start, program.command))
        assert ("," in kinds[0]) == (name == "llama.cpp")
    server.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(SetupError, match=r"llama-server cannot be run: .*status 3"):
        llama_cpp.make_program(name, server, "file", conditions)
    bin_folder = tmp_path / "llama.cpp" / "build" / "bin"
    bin_folder.mkdir(parents=True)
    server.rename(bin_folder / "llama-server")
    with pytest.raises(SetupError, match=r"libggml-cpu.so is missing: sh benchmarks/peers/setup/llama.cpp.sh .* avx2"):
        make_program("llama.cpp/file", conditions._replace(avx2=True))
    alone = draftwood.make("int4", conditions._replace(draft=None, avx2=True))
    assert [setting.name for setting in alone.settings] == [PLAIN, "default", "lookup:8"] and alone.environment


def test_a_library_without_a_server_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    class Echo:
        def render(self, messages: list[dict[str, str]]) -> str:
            return " ".join(message["content"] for message in messages)

        def write(self, prompt: str, body: dict[str, Any]) -> served.Written:
            if body.get("broken"):
                raise MemoryError("too small a machine")
            return served.Written(prompt, body["max_tokens"], 3, 2)

    servers = list[ThreadingHTTPServer]()

    class Kept(ThreadingHTTPServer):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            servers.append(self)

        def handle_error(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(served, "ThreadingHTTPServer", Kept)
    thread = Thread(target=served.serve, args=(Echo(), "127.0.0.1", 0))
    thread.start()
    while not servers:
        thread.join(0.01)
    url = f"http://127.0.0.1:{servers[0].server_address[1]}"
    answer = ask(url, "model", Prompt("", ("two words",), raw=False), Asked(5, 0), {})
    assert answer[:2] == ("two words", 5) and answer[3:] == (None, 3, 2), "it came in one chunk"
    assert ask(url, "model", Prompt("", ("more",), raw=True), Asked(5, 0), {}).text == "more"
    with pytest.raises(ServerError, match="MemoryError: too small a machine"):
        ask(url, "model", Prompt("", ("x",), raw=True), Asked(5, 0), {"broken": True})
    servers[0].shutdown()
    thread.join()
    servers[0].server_close()


def test_a_server_that_ends_is_named_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"ended with 3; see .*log\.txt"):
        Server([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log.txt")


def turns_of(program: str, setting: str, *seconds: float, text: str = "") -> list[Turn]:
    entry = Entry(Program(program, "file", "", (), (Setting(PLAIN),)), Setting(setting))
    answers = (Answer(text, 10, each, 0.5, 8, 5) for each in seconds)
    return [
        Turn(entry, repeat, 0, "prose", Batch([answer], answer.seconds), 0.1, 7 << 20)
        for repeat, answer in enumerate(answers)
    ]


def test_medians_and_ratios_within_a_repeat() -> None:
    ours = [*turns_of("draftwood", PLAIN, 2, 4, 8), *turns_of("draftwood", "default", 1, 1, 4, text="x")]
    rows = summarise([*ours, *turns_of("llama.cpp", PLAIN, 1, 3, 2), *turns_of("vllm", PLAIN, 9, 9, 9)])
    plain, fast, best, slow = rows
    assert [row.tokens_per_second for row in rows] == pytest.approx([2.5, 10, 5, 10 / 9])
    assert fast.of_plain == (2, 2, 4) and fast.of_best == (1, 0.5, 3) and best.of_best == (1, 1, 1)
    assert plain.same_as_plain == 1 and fast.same_as_plain == 0 and slow.first_ms == 500 and fast.tokens_per_pass == 2
    second = [*turns_of("draftwood", PLAIN, 2), *turns_of("draftwood", "default", 4)]
    assert fast.slowest == 2 and summarise([*ours, *(turn._replace(batch=1) for turn in second)])[1].slowest == 0.5


def test_divergence_of_a_program_from_the_file_s_weights(
    compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert divergence.kl({"a": 0.5, "b": 0.25}, {"a": 0.5, "b": 0.25}) == pytest.approx(0)
    assert divergence.kl({"a": 0.5, "b": 0.5}, {"a": 0.25, "c": 0.75}) == pytest.approx(
        0.5 * 0.6931 + 0.5 * -0.4055, abs=1e-3
    )
    content = [{"token": "a", "logprob": -1, "top_logprobs": [{"token": "a", "logprob": -1}]}]
    assert divergence.read_distribution({"choices": [{"logprobs": {"content": content}}]}) == {
        "a": pytest.approx(0.3679, abs=1e-4)
    }
    models = tmp_path / "work" / "models"
    models.mkdir(parents=True)
    (models / "model-reference.json").write_text(
        json.dumps([[[" a", 0.9], [" b", 0.05]]] * len(divergence.make_contexts()))
    )
    given = ["--programs", "draftwood", "--kinds", "coding", "--limit", 1, "--repeats", 1, "--divergence"]
    assert 0 < compare(*given)["divergence"]["draftwood/file"] < 0.01
    (models / "model-reference.json").write_text("[]")
    assert "is of other texts: remove it" in compare(*given)["failed"]["divergence"]


# What users run


def test_versus_compares_an_installed_llama_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    model, server = tmp_path / "model.gguf", tmp_path / "llama-server"
    model.touch()
    arguments = [str(model), "--max-tokens", "5"]
    monkeypatch.setenv("PATH", "")
    for more, message in (
        ([], "llama-server is not on the PATH: install llama.cpp, or name it with --llama-server PATH"),
        (["--llama-server", str(server)], "llama-server is no file"),
        (["--llama-server", str(model), "--max-tokens", "1"], "--max-tokens from 2 to 1024"),
    ):
        monkeypatch.setattr(sys, "argv", ["versus.py", *arguments, *more])
        with pytest.raises(SystemExit, match="2"):
            versus.main()
        assert message in capsys.readouterr().err
    server.touch()
    monkeypatch.setattr(draftwood, "make", lambda *_: replace(OURS, rest=0.0))
    monkeypatch.setattr(llama_cpp, "make_program", lambda *_: replace(THEIRS, rest=0.0))
    monkeypatch.setattr(sys, "argv", ["versus.py", *arguments, "--llama-server", str(server), "--json"])
    versus.main()
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["program"], row["setting"]) for row in rows} == {
        ("draftwood", PLAIN),
        ("draftwood", "default"),
        ("llama.cpp", PLAIN),
        ("llama.cpp", "draft:3"),
    }


def test_aiperf_reports_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with answering(ThreadingHTTPServer(("127.0.0.1", 0), fake_completions.Handler)) as url:
        given = [
            url,
            "--tokenizer",
            tmp_path,
            "--work",
            tmp_path,
            "--output",
            tmp_path,
            "--limit",
            2,
            "--at-a-time",
            "1,4",
        ]
        monkeypatch.setattr(sys, "argv", ["aiperf.py", *map(str, given)])
        with pytest.raises(SystemExit, match="2"):
            aiperf.main()
        assert "AIPerf is not set up: sh benchmarks/peers/setup/aiperf.sh" in capsys.readouterr().err
        (tmp_path / "aiperf" / "venv" / "bin").mkdir(parents=True)
        fake_aiperf.install(tmp_path / "aiperf" / "venv" / "bin")
        aiperf.main()
    (file,) = tmp_path.glob("aiperf_*.json")
    rows = json.loads(file.read_text())["rows"]
    assert {(row["kind"], row["at_a_time"]) for row in rows} == {
        (kind, number) for kind in ("coding", "languages", "forms", "editing") for number in (1, 4)
    }
    assert rows[0]["acceptance_length"] == 2.5 and rows[0]["first_ms"] == [10, 20]
