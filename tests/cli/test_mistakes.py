"""Every mistake on the command line is one clear line and exit code 2, and costs nothing: neither a file nor torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from draftwood.cli.main import main

WITH_DRAFT = "build --target PAIR/target --output OUT --backend onnxruntime --draft"
# A line, or its words, and what the error says. BUNDLE, PAIR, PROMPTS and OUT stand for paths, DRAFT for WITH_DRAFT.
MISTAKES: list[tuple[str | list[str], str]] = [
    ("generate nowhere --prompt x", "give the folder of a bundle"),
    ("generate PAIR/target --draft nowhere --prompt x", "--draft nowhere is not here: give a folder"),
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
    ("build --target PAIR/target --draft PAIR/draft --output OUT --draft-precision int8-dynamic", "gives all rows"),
    ("distill --target PAIR/target --output OUT --minutes 0", "minutes must be"),
    ("distill --target PAIR/target --output OUT --minutes 5 --prompts /nowhere.jsonl", "cannot be read"),
    ("distill --target nowhere --output OUT --minutes 5", "nowhere"),
    ("build --target PAIR/target --draft PAIR/draft --output OUT --backend abacus", "abacus"),
    ("build --target PAIR/target --draft PAIR/draft --output OUT --max-length 99999", "ask for at most"),
    ("build --target PAIR/target --draft PAIR/draft --output OUT --widths 2,4", "widths"),
    ("DRAFT none --draft-precision int8", "leave one of them out"),
    ("DRAFT none --draft-backend native", "leave one of them out"),
    ("DRAFT none --acceptance-head PAIR/head", "leave one of them out"),
    ("DRAFT none --draft-vocabulary 128", "leave one of them out"),
    ("DRAFT self:int8 --draft-precision int4", "contradicts --draft self:int8"),
    ("DRAFT self:int8 --draft-lora adapter", "contradicts --draft self:int8"),
    ("DRAFT self:fp32", "choose fewer bits, a smaller draft, or --draft none"),
    ("DRAFT self:int3", "choose fp32, int8, int4"),
    ("DRAFT self:", "choose fp32, int8, int4"),
    ("DRAFT PAIR/draft --draft-vocabulary-text x.txt", "add --draft-vocabulary N"),
    ("DRAFT PAIR/draft --draft-vocabulary 128 --draft-vocabulary-text x.txt", "cannot be"),
    *(
        (f"triton BUNDLE --output OUT {option}", "add --run")
        for option in ("--host h", "--http-port 1", "--metrics-port 9")
    ),
    ("bench BUNDLE --prompts PROMPTS --logprobs 1", "--logprobs changes no figure"),
    (["bench", "BUNDLE", "--prompts", "PROMPTS", "--configs", ""], "configuration '' is not understood"),
    (["bench", "BUNDLE", "--prompts", "PROMPTS", "--chat"], "no chat template, which --chat needs: leave --chat out"),
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
    (["bild"], "did you mean build?"),
    (["build", "--target", "x", "--draft", "y", "--output", "z", "--precison", "int4"], "did you mean --precision?"),
    (["generate", "x", "--prompt", "y", "--tempratur=0"], "did you mean --temperature?"),
    (["generate", "x", "y", "--prompt", "z"], "unrecognized arguments: y "),
    (["generate", "x", "--prompt", "y", "--bogus"], "unrecognized arguments: --bogus "),
    (["generate", "x", "--prompt", "\udcff"], "argument -p/--prompt: write text in UTF-8, which '\\udcff' is not"),
    (["generate", "x", "--chat", "\udcff"], "argument --chat: write text in UTF-8"),
    (["generate", "x", "--prompt", "y", "--regex", "\udcff"], "argument --regex: write text in UTF-8"),
    (["generate", "x", "--prompt", "y", "--stop", "\udcff"], "argument --stop: write text in UTF-8"),
    ("chat BUNDLE", "use draftwood generate BUNDLE --prompt TEXT"),
    (["chat", "x", "--system", "\udcff"], "argument --system: write text in UTF-8"),
    (["generate", "x", "--prompt", "y", "--regex", "a", "--json-schema", "b"], "not allowed with argument"),
    (["--print-completion", "basch"], "did you mean bash?"),
    (["generate", "a\nb", "c\nd", "--prompt", "z"], "unrecognized arguments: c\\nd"),
    (["inspect", "x", "--requests", "0"], "--requests: write a whole number, at least 1, not '0'"),
    (["serve", "x", "--max-body-bytes", "0"], "--max-body-bytes: write a whole number, at least 1, not '0'"),
    (["serve", "x", "--max-body-bytes", "-1"], "--max-body-bytes: write a whole number, at least 1"),
    (["serve", "x", "--allowed-hosts", "http://llm.example"], "without scheme, port and path"),
    (["serve", "x", "--allowed-hosts", "llm.example", "llm.example:8000"], "not 'llm.example:8000'"),
    (["serve", "x", "--allowed-hosts", "llm.*"], "without scheme, port and path"),
    (["serve", "x", "--allowed-hosts", ""], "without scheme, port and path"),
    (["serve", "x", "--allowed-origins", "localhost:3000"], "such as http://localhost:3000, or *"),
    (["serve", "x", "--allowed-origins", "http://localhost:3000/"], "write scheme, name and port alone"),
    (["serve", "x", "--allowed-origins", "http://*.example"], "write scheme, name and port alone"),
    (["serve", "x", "--otlp-traces-endpoint", "localhost:4318"], "http://localhost:4318/v1/traces, not"),
    (["serve", "x", "--served-model-name", ""], "the name is empty"),
]


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command says before it ends with exit code 2."""
    try:
        code: object = main(arguments)
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2 and error.startswith("draftwood") and error.count("\n") == 1, error
    return error


@pytest.mark.parametrize(("arguments", "named"), MISTAKES)
def test_a_mistake_is_one_clear_line_and_exit_code_2(
    arguments: str | list[str],
    named: str,
    tiny_bundle: Path,
    tiny_pair: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    paths = {"BUNDLE": tiny_bundle, "PAIR": tiny_pair, "PROMPTS": prompts, "OUT": tmp_path / "out"}
    words = arguments.replace("DRAFT", WITH_DRAFT).split() if isinstance(arguments, str) else arguments
    for name, path in paths.items():
        words, named = [word.replace(name, str(path)) for word in words], named.replace(name, str(path))
    assert named in refusal(words, capsys)
    assert [file.name for file in tmp_path.iterdir()] == [prompts.name]


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
    content: str, named: str, tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text(content)
    assert named in refusal(["bench", str(tiny_bundle), "--prompts", str(tmp_path / "prompts.jsonl")], capsys)


BUILD = "build --target x --draft y --output z --backend"
HEAD = "train-head --target x --draft y --prompts missing.jsonl --output z"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (f"{BUILD} native --precision int-4", "did you mean int4?"),
        (f"{BUILD} natve", "did you mean native?"),
        (f"{BUILD} native --widths 2,4", "widths must ascend from 1"),
        (f"{BUILD} native --draft-precision int3", "precision 'int3' is not available for native"),
        (f"{BUILD} onnxruntime --precision q4", "'q4' is not available for onnxruntime; choose fp32, int8, int4"),
        (f"{HEAD} --layers -1", "layers must be a whole number from 0 to 64, not -1"),
        (f"{HEAD} --contexts mixd", "contexts 'mixd' is unknown"),
        (HEAD, "missing.jsonl"),
    ],
)
def test_wrong_options_cost_no_import_of_heavy_packages(line: str, named: str) -> None:
    heavy = "{'torch', 'onnx', 'onnx_ir', 'onnxruntime'}"
    code = f"import sys; from draftwood.cli.main import main; code = main({line.split()}); "
    code += f"sys.exit(9 if {heavy} & set(sys.modules) else code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and named in done.stderr and done.stderr.count("\n") == 1, done.stderr
