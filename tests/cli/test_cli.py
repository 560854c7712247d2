"""The command line: what people see, what programs read, and exit code 2 with a clear line for every mistake."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import pty
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from bundling import ROOT

from draftwood.cli.main import main
from draftwood.models.errors import EngineError
from draftwood.plugins.native.compile import CompilerError
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.engines import backends
from draftwood.runtime.engines.backends import Choice
from draftwood.runtime.engines.comparison import Comparison

GREEDY = ["--temperature", "0", "--max-tokens", "12", "--ignore-eos"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello"}\n{"turns": ["two turns", "second"]}\n')
    return file


def test_build_inspect_generate(tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / ("bundle of " + "a" * 80)
    pair = ["--target", str(tiny_pair / "target"), "--draft", str(tiny_pair / "draft")]
    options = ["--backend", "onnxruntime", "--precision", "fp32", "--max-length", "200", "--widths", "1,4,16"]
    assert main(["build", *pair, "--output", str(bundle), *options]) == 0
    shown = capsys.readouterr().out
    assert f"Next: draftwood generate '{bundle}' --prompt" in shown, "a line that can be copied"
    assert "Comparing the draft" in shown and "Passes behind 64 tokens" in shown
    assert re.search(r"costs .* measured here", shown)
    manifest = EngineBundle.open(bundle).manifest
    assert manifest.max_length == 200 and manifest.engines["target"].widths == (1, 4, 16)
    assert main(["inspect", str(bundle)]) == 0
    shown = capsys.readouterr().out
    assert "The draft engine fits this machine." in shown and re.search(r"bits per weight\W+32.00\W+32.00", shown)
    assert main(["inspect", str(bundle), "--open"]) == 0
    assert "The draft engine runs here." in capsys.readouterr().out
    assert main(["inspect", str(bundle), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["bits_per_weight"] == {"target": 32, "draft": 32}
    assert shown["max_length"] == 200 and shown["obstacles"] == {"target": None, "draft": None}
    assert (shown["costs"]["source"], shown["costs"]["differences"]) == ("measured here", [])
    assert main(["generate", str(bundle), "--prompt", "hello", "--speculative", "budget=fixed", *GREEDY]) == 0
    text, summary = capsys.readouterr()
    assert text.endswith("\n") and "acceptance" in summary


def test_a_build_chooses_its_backend_and_says_so(
    tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["build", "--target", str(tiny_pair / "target"), "--draft", str(tiny_pair / "draft"), "--no-profile"]
    chosen = (Choice("onnxruntime", "it rains"), Choice("native", "the sun shines"))
    for backend, reason in chosen:
        monkeypatch.setattr("draftwood.cli.build.choose_backend", lambda compared: Choice(backend, reason))  # noqa: B023
        assert main([*command, "--output", str(tmp_path / backend)]) == 0
        assert f"Backend {backend}: {reason}\n" in capsys.readouterr().out
        manifest = EngineBundle.open(tmp_path / backend).manifest
        assert {spec.backend for spec in manifest.engines.values()} == {backend}
    assert main([*command, "--output", str(tmp_path / "said"), "--backend", "onnxruntime"]) == 0
    assert "Backend" not in capsys.readouterr().out


def test_the_choice_depends_on_processor_and_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler() -> None:
        raise CompilerError("no compiler: pip install ziglang")

    def not_asked() -> Comparison:
        raise AssertionError("the kernels are known to be fast on x86")

    def not_there() -> Comparison:
        raise EngineError("onnx_ir is not installed")

    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(backends, "available", lambda wanted: {"avx", "avx2"})
    assert backends.choose_backend(not_asked) == ("onnxruntime", "this processor has no f16c, fma")
    monkeypatch.setattr(backends, "available", lambda wanted: {"avx", "avx2", "f16c", "fma"})
    monkeypatch.setattr(backends, "check_available", lambda: None)
    assert backends.choose_backend(not_asked).backend == "native"
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    for own, backend in ((1.1, "native"), (1.2, "onnxruntime")):
        found = Comparison("native fp32", "onnxruntime fp32", (1, 8), (0.5, own), (1.0, 1.0))
        chosen = backends.choose_backend(lambda: found)  # noqa: B023
        assert chosen == (backend, f"measured here, {found.described}") and f"0.50 at 1 row, {own:.2f} at" in chosen[1]
    backend, reason = backends.choose_backend(not_there)
    assert backend == "onnxruntime" and "cannot be compared" in reason and "onnx_ir is not installed" in reason
    monkeypatch.setattr(backends, "check_available", no_compiler)
    backend, reason = backends.choose_backend(not_asked)
    assert backend == "onnxruntime" and "(no compiler: pip install ziglang)" in reason


def test_json_is_one_object_and_speculation_changes_nothing(
    tiny_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for extra in (
        ["--no-speculation"],
        ["--speculative", '{"budget": "fixed"}'],
        [],
        ["--grow", "chain", "--max-draft-len", "3"],
        ["--speculative", "gsd"],
    ):
        assert main(["generate", str(tiny_bundle), "--prompt", "hello", "--json", *GREEDY, *extra]) == 0
        outputs.append(json.loads(capsys.readouterr().out))
    assert len({tuple(output["token_ids"]) for output in outputs}) == 1
    assert outputs[0]["finish_reason"] == "length" and outputs[0]["stats"]["num_drafts"] == 0
    assert outputs[1]["stats"]["num_drafts"] > 0


def test_a_prompt_from_a_file_or_a_pipe(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("hello")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    texts = []
    for source in (["--prompt", "hello"], ["--prompt-file", str(tmp_path / "prompt.txt")], ["--prompt-file", "-"]):
        assert main(["generate", str(tiny_bundle), *source, "--json", *GREEDY]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1] == texts[2]


def test_bench_compares_and_finds_the_same_text(
    tiny_bundle: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = "plain,chain:3,topk:8/merge=gsd,dyspec:6/frontier_width=2,k-ary/branching=2-1"
    arguments = ["bench", str(tiny_bundle), "--prompts", str(prompts), "--configs", configs, "--repeats", "1", *GREEDY]
    assert main([*arguments, "--json", "--output", str(tmp_path / "figures.json")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "figures.json").read_text()) == report
    assert [row["config"] for row in report["rows"]] == configs.split(",")
    assert all(row["same_text"] == 1 for row in report["rows"])
    plain = report["rows"][0]
    assert plain["speed"] == plain["speed_whole"] == plain["target_passes_per_token"] == 1
    assert report["date"] and report["machine"]["processor"] and report["temperature"] == 0
    assert main(arguments) == 0
    assert "tokens/s" in capsys.readouterr().out


def test_bench_counts_every_request_from_zero(
    tiny_bundle: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", str(tiny_bundle), "--prompts", str(prompts), "--configs", "chain:3", "--json", *GREEDY]
    passes = []
    for repeats in ("1", "3"):
        assert main([*command, "--repeats", repeats]) == 0
        passes.append(json.loads(capsys.readouterr().out)["rows"][1]["draft_passes_per_token"])
    assert passes[0] == pytest.approx(passes[1])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("generate nowhere --prompt x", "give the folder of a bundle"),
        ("generate BUNDLE --prompt x --temperature -1", "temperature"),
        ("generate BUNDLE --prompt x --max-tokens 0", "max_tokens"),
        ("generate BUNDLE --prompt x --top-p 1.5", "top_p"),
        ("generate BUNDLE --prompt x --top-p 0", "top_p"),
        ("generate BUNDLE --prompt x --min-p 2", "min_p"),
        ("generate BUNDLE --prompt x --stop-token-ids 99999", "stop_token_ids"),
        ("generate BUNDLE --prompt x --max-draft-len 0", "max_draft_len"),
        ("generate BUNDLE --prompt x --max-total-draft-tokens 500", "widest pass"),
        ("generate BUNDLE --prompt x --provider cuda", "onnxruntime-gpu"),
        ("generate BUNDLE --prompt x --threads -3", "threads of the target must be 0 (the backend chooses) to 1024"),
        ("generate BUNDLE --prompt x --draft-threads 100000", "threads of the draft"),
        ("profile BUNDLE --contexts=-5", "contexts must be at least 1"),
        ("profile BUNDLE --contexts 64,0", "contexts must be at least 1"),
        ("generate BUNDLE --prompt-file missing.txt", "missing.txt"),
        ("generate BUNDLE --chat hello", "no chat template, which --chat needs: use --prompt"),
        ("generate nowhere --prompt x", "nor a model"),
        ('generate BUNDLE --prompt x --speculative {"topology":[-1]}', "topology must hold numbers from 0"),
        ("generate BUNDLE --prompt x --speculative gsd --grow topk", "write both into --speculative"),
        ("generate BUNDLE --prompt x --grow chian", "did you mean chain?"),
        ("generate BUNDLE --prompt x --precision int8", "precision is a choice of the build, and BUNDLE is a bundle"),
        ("serve BUNDLE --draft x", "draft is a choice of the build"),
        ("generate BUNDLE --prompt x --stop-token-ids -1,-2", "stop_token_ids"),
        ("profile BUNDLE --contexts -5,64", "contexts must be at least 1"),
        ("build --target PAIR/target --draft PAIR/draft --output OUT --widths -1,4", "widths must ascend from 1"),
        ("generate BUNDLE --prompt x --no-speculation --max-draft-len 4", "--no-speculation makes --max-draft-len use"),
        ("chat BUNDLE --grow chain --no-speculation", "--no-speculation makes --grow useless"),
        ("chat BUNDLE --draft-threads 2 --no-speculation", "--no-speculation makes --draft-threads useless"),
        ("serve BUNDLE --speculative gsd --no-speculation --port 0", "--no-speculation makes --speculative useless"),
        ("generate BUNDLE --prompt x --logprobs 2", "--logprobs needs --json"),
        ("bench BUNDLE --prompts PROMPTS --stop x", "use --stop-token-ids or --max-tokens"),
        ("inspect BUNDLE --chat-template --json", "leave it out, or --json"),
        ("inspect BUNDLE --chat-template --open", "leave it out, or --open"),
        ("inspect nowhere", "neither a bundle nor a model"),
        ("inspect model.gguf", "model.gguf is a model: its first use, such as draftwood chat, builds a bundle"),
        ("bench BUNDLE --prompts missing.jsonl", "missing.jsonl"),
        ("bench BUNDLE --prompts PROMPTS --output OUT/figures.json", "--output"),
        ("bench BUNDLE --prompts PROMPTS --configs spiral:4", "configuration 'spiral:4': grow must be one of"),
        ("bench BUNDLE --prompts PROMPTS --configs auto,", "chain:4"),
        ("build --target nowhere --draft nowhere --output OUT", "checkpoint folder"),
        ("build --target PAIR/target --draft PAIR/draft --output OUT --backend abacus", "abacus"),
        ("build --target PAIR/target --draft PAIR/draft --output OUT --max-length 99999", "ask for at most"),
        ("build --target PAIR/target --draft PAIR/draft --output OUT --widths 2,4", "widths"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(
    arguments: str,
    named: str,
    tiny_bundle: Path,
    tiny_pair: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {"BUNDLE": tiny_bundle, "PAIR": tiny_pair, "PROMPTS": prompts, "OUT": tmp_path / "out"}
    for name, path in names.items():
        arguments, named = arguments.replace(name, str(path)), named.replace(name, str(path))
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("draftwood: error: ") and named in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", [("--logprobs", "1"), ("--stop", "x")])
def test_bench_refuses_what_changes_no_figure(
    tiny_bundle: Path, prompts: Path, option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(tiny_bundle), "--prompts", str(prompts), *option]) == 2
    assert option[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "no prompts"),
        ("{", "line 1"),
        ('{"prompt": "x\u2028y"}\n\n[]', "line 3"),  # JSON may hold what else ends a line in Python
        ('{"text": "x"}', "line 1"),
        ('{"prompt": "x"}\n{"prompt": null}', "line 2"),
        ('{"turns": [5]}', "line 1"),
        pytest.param("[" * 100_000, "line 1", id="deep"),
        (json.dumps({"prompt": 9999 * "x"}), "shorten it"),
    ],
)
def test_prompt_files_are_checked(
    tiny_bundle: Path, prompts: Path, content: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts.write_text(content)
    assert main(["bench", str(tiny_bundle), "--prompts", str(prompts)]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["run", "x"], "there is no command 'run'; write draftwood chat MODEL"),
        (["m.gguf"], "there is no command 'm.gguf'; write draftwood chat m.gguf"),
        (["-m", "org/name"], "there is no command 'org/name'; write draftwood chat org/name"),
        (["fly"], "invalid choice: 'fly'"),
        (["genrate"], "did you mean generate?"),
        (["generate", "x", "-p", "y", "--merge", "gsd"], "write --speculative merge=..."),
        (["generate", "-m", "x", "-p", "y"], "write the model without -m"),
        (["genera\x1b[2Jte"], "invalid choice: 'genera\\x1b[2Jte'"),
        (["generate"], "required: MODEL"),
        (["generate", "x"], "--prompt"),
        (["build", "--widths", "1,x"], "whole numbers separated by commas, such as 1,2,4, not '1,x'"),
        (["bench", "x", "--prompts", "y", "--repeats", "0"], "--repeats: write a whole number, at least 1, not '0'"),
        (["bench", "x", "--prompts", "y", "--limit", "two"], "--limit: write a whole number, at least 1, not 'two'"),
        (["serve", "x", "--drain-timeout", "-1"], "write a number of seconds above 0, not '-1'"),
    ],
)
def test_arguments_that_cannot_be_parsed_end_with_code_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and named in capsys.readouterr().err


def test_options_of_a_build_are_checked_before_anything_heavy_is_imported() -> None:
    program = (
        "import sys; from draftwood.cli.main import main; "
        "options = ['--target', 'x', '--draft', 'y', '--output', 'z', '--backend', 'onnxruntime']; "
        "code = main(['build', *options, '--precision', 'q4']); "
        "heavy = {'torch', 'onnx', 'onnx_ir', 'onnxruntime', 'safetensors'} & set(sys.modules); "
        "sys.exit(99 if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "precision 'q4' is not available for onnxruntime; choose fp32, int8, int4" in done.stderr


def test_the_version_names_the_backends(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    own, onnxruntime = version("draftwood"), version("onnxruntime")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"draftwood {own} with onnxruntime {onnxruntime}")


def test_triton_is_looked_for_before_anything_is_written(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["triton", str(tiny_bundle), "--output", str(tmp_path / "models"), "--run"]) == 2
    assert "Triton Inference Server is not installed" in capsys.readouterr().err
    assert not (tmp_path / "models").exists()


def test_the_script_of_the_readme_builds_a_bundle(tiny_pair: Path, tmp_path: Path) -> None:
    pair = ["--target", str(tiny_pair / "target"), "--draft", str(tiny_pair / "draft")]
    options = ["--output", str(tmp_path / "bundle"), "--no-profile"]
    command = [sys.executable, str(ROOT / "build_engines.py"), *pair, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    EngineBundle.open(tmp_path / "bundle")
    assert re.search(r"costs .* assumed", done.stdout) and "draftwood profile measures" in done.stdout


def test_a_reader_that_goes_away_is_no_error(tiny_bundle: Path) -> None:
    generate = f"{sys.executable} -m draftwood generate {tiny_bundle} --prompt x --temperature 0 --ignore-eos"
    command = f"{generate} | head -c 1 >/dev/null"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in done.stderr


def test_a_terminal_shows_who_wrote_what(tiny_bundle: Path) -> None:
    """A real pseudo-terminal: accepted draft tokens are green, and no escape sequence of the text gets through."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "draftwood", "generate", str(tiny_bundle), "--prompt", "hi\x1b[31m there"]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen([*command, *GREEDY], stdout=terminal, stderr=subprocess.PIPE, env=environment) as process:
        os.close(terminal)
        shown = b""
        try:
            while block := os.read(controller, 4096):
                shown += block
        except OSError:  # Linux reports the end of a pseudo-terminal as an error
            pass
        assert process.wait() == 0
    assert b"tokens/s" in shown
    assert b"\x1b[31m" not in shown and b"hi" in shown
