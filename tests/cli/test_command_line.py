"""What every command shares: errors of one line, silence on request, completion; and what inspect and bench report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from bundling import resigned
from rich.console import Console
from serving import CHAT_TEMPLATE, with_chat_template

from draftwood.builder.progress import Step
from draftwood.cli.main import main
from draftwood.cli.progress import progress
from draftwood.plugins.installation import install
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.inspection.speeds import interval

GREEDY = ["--temperature", "0", "--max-tokens", "12", "--ignore-eos"]


def test_quiet_commands_print_their_result_alone(
    tiny_bundle: Path, tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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


def test_inspect_shows_formats_memory_and_the_chat_template(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_bench_reports_intervals_that_hold_its_medians(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{name}"}}\n' for name in ("one", "two", "three")))
    bench = ["bench", str(tiny_bundle), "--prompts", str(prompts), "--configs", "plain,chain:2", "--json", *GREEDY]
    assert main([*bench, "--repeats", "1"]) == 0
    for row in json.loads(capsys.readouterr().out)["rows"]:
        for name in ("speed", "tokens_per_second"):
            low, high = row[f"{name}_interval"]
            assert low <= row[name] <= high
    assert main([*bench, "--repeats", "2", "--limit", "1"]) == 0
    assert {row["speed_interval"] for row in json.loads(capsys.readouterr().out)["rows"]} == {None}


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


def completed(script: str, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    given = " ".join(f"'{word}'" for word in ("draftwood", *words))
    asked = f"COMP_WORDS=({given}); COMP_CWORD={len(words)}; _shtab_draftwood"
    lines = f"{script}\n{asked}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    return subprocess.run(["bash", "-c", lines], capture_output=True, text=True, check=True).stdout.split()


def test_brackets_in_the_name_of_a_folder_are_no_markup(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, shown = tmp_path / "a[bold]b[" / "x]", StringIO()
    with progress(Console(file=shown, width=300)) as begin:
        begin(Step(f"Replacing {folder}", 1))()
    assert f"Replacing {folder}" in shown.getvalue()
    assert main(["triton", str(tiny_bundle), "--output", str(folder)]) == 0
    assert f"Model written to {folder}" in capsys.readouterr().out


def test_bash_completes_commands_options_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_completion_without_its_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 2
    assert f"{install('completion')}" in capsys.readouterr().err


def test_generate_writes_the_form_that_is_asked_for(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
