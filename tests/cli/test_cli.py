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
