"""The command line: what people see and what programs read, silence on request, completion, figures of bench."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from importlib.metadata import version
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from bundling import ROOT, resigned
from rich.console import Console
from serving import CHAT_TEMPLATE, with_chat_template

from draftwood.builder.progress import Step
from draftwood.cli.main import main
from draftwood.cli.progress import progress
from draftwood.models.errors import EngineError
from draftwood.plugins.installation import install
from draftwood.plugins.native.compile import CompilerError
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.engines import backends
from draftwood.runtime.engines.backends import Choice
from draftwood.runtime.engines.comparison import Comparison
from draftwood.runtime.inspection.speeds import interval

Output = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

GREEDY = ["--temperature", "0", "--max-tokens", "12", "--ignore-eos"]


def test_build_inspect_generate(tiny_pair: Path, tmp_path: Path, capsys: Output) -> None:
    bundle = tmp_path / ("bundle of " + "a" * 80)
    pair = ["--target", str(tiny_pair / "target"), "--draft", str(tiny_pair / "draft")]
    options = ["--backend", "onnxruntime", "--precision", "fp32", "--max-length", "200", "--widths", "1,4,16"]
    assert main(["build", *pair, "--output", str(bundle), *options]) == 0
    shown = capsys.readouterr().out
    assert f"Next: draftwood generate '{bundle}' --prompt" in shown, "a line that can be copied"
    assert "Comparing the draft" in shown and "Passes after 64 tokens" in shown
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


def test_the_version_names_the_backends(capsys: Output) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    own, onnxruntime = version("draftwood"), version("onnxruntime")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"draftwood {own} with onnxruntime {onnxruntime}")


def test_a_build_chooses_its_backend_and_says_so(
    tiny_pair: Path, tmp_path: Path, capsys: Output, monkeypatch: Patch
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


def test_the_choice_depends_on_processor_and_compiler(monkeypatch: Patch) -> None:
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
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"ziglang\), and onnxruntime is not installed: pip install"):
        backends.choose_backend(not_asked)


def test_json_is_one_object_and_speculation_changes_nothing(tiny_bundle: Path, capsys: Output) -> None:
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


def test_the_script_of_the_readme_builds_a_bundle(tiny_pair: Path, tmp_path: Path) -> None:
    pair = ["--target", str(tiny_pair / "target"), "--draft", str(tiny_pair / "draft")]
    command = [sys.executable, str(ROOT / "build_engines.py"), *pair, "--output", "bundle", "--no-profile"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    EngineBundle.open(tmp_path / "bundle")
    assert re.search(r"costs .* assumed", done.stdout) and "draftwood profile measures" in done.stdout


def test_a_prompt_from_a_file_or_a_pipe(tiny_bundle: Path, tmp_path: Path, capsys: Output, monkeypatch: Patch) -> None:
    (tmp_path / "prompt.txt").write_text("hello")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    texts = []
    for source in (["--prompt", "hello"], ["--prompt-file", str(tmp_path / "prompt.txt")], ["--prompt-file", "-"]):
        assert main(["generate", str(tiny_bundle), *source, "--json", *GREEDY]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1] == texts[2]


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


def test_quiet_commands_print_their_result_alone(
    tiny_bundle: Path, tiny_pair: Path, tmp_path: Path, capsys: Output
) -> None:
    pair = ["--target", str(tiny_pair / "target"), "--draft", str(tiny_pair / "draft"), "--backend", "onnxruntime"]
    assert main(["build", *pair, "--output", str(tmp_path / "bundle"), "--no-profile", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "") and EngineBundle.open(tmp_path / "bundle")
    generate = ["generate", str(tiny_bundle), "--prompt", "hello", *GREEDY]
    assert main(generate) == 0
    text, notes = capsys.readouterr()
    assert "tokens/s" in notes
    assert main([*generate, "--quiet", "--explain", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr() == (text, "")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    bench = ["bench", str(tiny_bundle), "--prompts", str(prompts), "--configs", "plain", "--repeats", "1", *GREEDY]
    assert main([*bench, "-q"]) == 0
    out, err = capsys.readouterr()
    assert "tokens/s" in out and err == ""


def test_inspect_shows_formats_memory_and_the_chat_template(tiny_bundle: Path, tmp_path: Path, capsys: Output) -> None:
    bundle = with_chat_template(tiny_bundle, tmp_path)
    found = {}
    for requests in (1, 3):
        assert main(["inspect", str(bundle), "--json", "--requests", str(requests)]) == 0
        found[requests] = json.loads(capsys.readouterr().out)
    one, three = (found[requests]["memory_of_requests"] for requests in (1, 3))
    manifest = EngineBundle.open(bundle).manifest
    for role, spec in manifest.engines.items():
        cache = 2 * spec.model.num_layers * spec.model.num_kv_heads * spec.model.head_dim * spec.capacity * 4
        assert three[role] - one[role] == 2 * cache and one[role] - cache == manifest.engine_bytes(role)
    assert found[1]["chat_template"] == CHAT_TEMPLATE and found[1]["formats"] == {"target": "fp32", "draft": "fp32"}
    assert found[1]["draft_vocabulary"] == manifest.engines["draft"].model.num_logits
    assert main(["inspect", str(bundle), "--requests", "3"]) == 0
    shown = capsys.readouterr().out
    assert "memory of 3 requests" in shown and f"chat template of {len(CHAT_TEMPLATE)} characters" in shown
    assert main(["inspect", str(bundle), "--chat-template"]) == 0
    assert capsys.readouterr().out == f"{CHAT_TEMPLATE}\n"
    settings = {"chat_template": [{"name": name, "template": name} for name in ("default", "tool_use")]}
    (bundle / "tokenizer_config.json").write_text(json.dumps(settings))
    (bundle / "chat_template.jinja").unlink()
    assert main(["inspect", str(resigned(bundle)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chat_templates"] == {"default": "default", "tool_use": "tool_use"}
    assert main(["inspect", str(bundle)]) == 0
    assert "chat template of 8 characters, tool_use" in capsys.readouterr().out
    assert main(["inspect", str(tiny_bundle), "--chat-template"]) == 2
    assert "has no chat template" in capsys.readouterr().err
    assert main(["inspect", str(tiny_bundle)]) == 0
    assert "no chat template" in capsys.readouterr().out


def completed(script: str, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    given = " ".join(f"'{word}'" for word in ("draftwood", *words))
    asked = f"COMP_WORDS=({given}); COMP_CWORD={len(words)}; _shtab_draftwood"
    lines = f"{script}\n{asked}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    return subprocess.run(["bash", "-c", lines], capture_output=True, text=True, check=True).stdout.split()


def test_brackets_in_the_name_of_a_folder_are_no_markup(tiny_bundle: Path, tmp_path: Path, capsys: Output) -> None:
    folder, shown = tmp_path / "a[bold]b[" / "x]", StringIO()
    with progress(Console(file=shown, width=300)) as begin:
        begin(Step(f"Replacing {folder}", 1))()
    assert f"Replacing {folder}" in shown.getvalue()
    assert main(["triton", str(tiny_bundle), "--output", str(folder)]) == 0
    assert f"Model written to {folder}" in capsys.readouterr().out


def test_bash_completes_commands_options_and_choices(capsys: Output, monkeypatch: Patch) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "bash"])
    script = capsys.readouterr().out
    assert ended.value.code == 0
    assert completed(script, "gen") == ["generate"]
    assert completed(script, "generate", "--json-") == ["--json-schema"]
    assert set(completed(script, "generate", "--provider", "")) >= {"cpu", "cuda"}
    for shell in ("zsh", "tcsh"):
        with pytest.raises(SystemExit):
            main(["--print-completion", shell])
        assert "draftwood" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 2
    assert f"{install('completion')}" in capsys.readouterr().err


def test_generate_writes_the_form_that_is_asked_for(tiny_bundle: Path, tmp_path: Path, capsys: Output) -> None:
    generate = ["generate", str(tiny_bundle), "--prompt", "x", "--seed", "1", "--max-tokens", "60", "-q"]
    assert main([*generate, "--regex", "[0-9]{3}-[ab]"]) == 0
    assert re.fullmatch("[0-9]{3}-[ab]\n", capsys.readouterr().out)
    schema = tmp_path / "schema.json"
    schema.write_text(
        '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": false}'
    )
    assert main([*generate, "--json-schema", str(schema)]) == 0
    assert json.loads(capsys.readouterr().out)["a"] in (1, 2)
    grammar = tmp_path / "grammar.lark"
    grammar.write_text('start: "yes" | "no"\n')
    assert main([*generate, "--grammar", str(grammar)]) == 0
    assert capsys.readouterr().out in ("yes\n", "no\n")
    assert main([*generate, "--regex", "[ab]", "--json", "--logprobs", "3"]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    (alternatives,) = json.loads(capsys.readouterr().out, parse_constant=refuse)["logprobs"]
    assert [each["logprob"] == -9999 for each in alternatives.values()].count(True) == 1, "only two tokens may come"
    schema.write_text("[")
    assert main([*generate, "--json-schema", str(schema)]) == 2
    assert "no valid JSON" in capsys.readouterr().err
    assert main([*generate, "--json-schema", str(tmp_path / "missing")]) == 2
    assert "--json-schema" in capsys.readouterr().err


def test_bench_compares_and_finds_the_same_text(tiny_bundle: Path, tmp_path: Path, capsys: Output) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"turns": ["two turns", "second"]}\n{"prompt": "three"}\n')
    configs = "plain,chain:3,topk:8/merge=gsd,dyspec:6/frontier_width=2,k-ary/branching=2-1"
    arguments = ["bench", str(tiny_bundle), "--prompts", str(prompts), "--configs", configs, *GREEDY]
    assert main([*arguments, "--json", "--repeats", "1", "--output", str(tmp_path / "figures.json")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "figures.json").read_text()) == report
    assert [row["config"] for row in report["rows"]] == configs.split(",")
    for row in report["rows"]:
        assert row["same_text"] == 1
        for name in ("speed", "tokens_per_second"):
            low, high = row[f"{name}_interval"]
            assert low <= row[name] <= high
    plain = report["rows"][0]
    assert plain["speed"] == plain["speed_whole"] == plain["target_passes_per_token"] == 1
    assert report["date"] and report["machine"]["processor"] and report["temperature"] == 0
    assert main([*arguments, "--json", "--repeats", "2"]) == 0
    again = json.loads(capsys.readouterr().out)["rows"][1]["draft_passes_per_token"]
    assert again == pytest.approx(report["rows"][1]["draft_passes_per_token"]), "each request counts from zero"
    assert main([*arguments, "--limit", "1"]) == 0
    out, notes = capsys.readouterr()
    assert "tokens/s" in out and "Measuring 5 settings, 3 × 1 texts" in notes, "who has no terminal sees no bar"


def test_an_interval_holds_the_median_as_often_as_it_says() -> None:
    """100 samples of 24 prompts with two repeats each, from a known distribution. Repeats of a prompt are alike."""
    draw = np.random.default_rng(5)
    held, widths = 0, []
    for _ in range(100):
        prompt = draw.lognormal(0.0, 0.4, 24)
        values = np.concatenate([prompt * draw.lognormal(0, 0.01, 24) for _ in range(2)])
        ends = interval(values.tolist(), 24)
        assert ends is not None
        held += ends[0] <= 1.0 <= ends[1]  # the median of the prompts' distribution
        widths.append(ends[1] - ends[0])
    assert 88 <= held <= 99
    assert interval([1.0, 2.0], 1) is None and 0.2 < np.mean(widths) < 0.6
