"""Comparisons of methods and of modes still run: a default that changes elsewhere must not break them unnoticed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bundling import ROOT

from benchmarks.papers.methods import BUDGETS, RANKS, PairBenchmark, make_configurations, summarise
from draftwood.cli.bench import read_prompts
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.bundle.fit import refuse_too_large


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_configuration_is_legal_and_fits_a_bundle(tiny_bundle: Path, budget: int) -> None:
    bundle = EngineBundle.open(tiny_bundle)
    for config in make_configurations(budget, [0.6, 0.2, 0.1], head=False).values():
        refuse_too_large(config, bundle)
    assert len(make_configurations(budget, [0.6, 0.2, 0.1], head=True)) > len(
        make_configurations(budget, [0.6], head=False)
    )


def test_a_comparison_counts_what_happened(tiny_bundle: Path) -> None:
    bench = PairBenchmark(EngineBundle.open(tiny_bundle), [[1, 5, 9], [1, 7]], max_tokens=6)
    acceptance = bench.acceptance_by_rank(1.0)
    assert len(acceptance) == RANKS and 0 <= sum(acceptance) <= 1
    for config in make_configurations(8, acceptance, head=False).values():
        texts = bench.run(config, 0.6)
        assert [text.num_tokens for text in texts] == [6, 6]
        row = summarise(texts)
        assert 1 <= row["tokens_per_target_pass"] <= 6 and row["verification_rate"] <= 1


def test_questions_are_taken_from_each_file_at_equal_distances(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    first.write_text("".join(json.dumps({"prompt": f"p{line}"}) + "\n" for line in range(9)))
    second.write_text("".join(json.dumps({"turns": [f"t{line}", "then"]}) + "\n" for line in range(4)))
    command = (sys.executable, "-m", "benchmarks.tools.questions", first, second)
    subprocess.run([*map(str, command), "--num", "2", "--output", str(tmp_path / "x")], cwd=ROOT, check=True)
    assert read_prompts(tmp_path / "x") == ["p0", "t0", "p4", "t2"]


def test_the_index_lists_every_script_and_every_result() -> None:
    folder = ROOT / "benchmarks"
    index = (folder / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\((results/[^)]+)\)", index))
    committed = subprocess.run(["git", "ls-files", "results"], cwd=folder, capture_output=True, text=True, check=True)
    assert linked == set(committed.stdout.split())
    assert all(re.fullmatch(r"results/[\w.-]+_20\d\d-\d\d-\d\d\.(json|svg)", link) for link in linked)
    scripts = {file.relative_to(folder).as_posix() for file in folder.rglob("*.py") if "def main(" in file.read_text()}
    named = set(re.findall(r"^\| `([\w/]+\.py)`", index, re.MULTILINE))
    assert scripts - {"peers/programs/convert_gguf.py"} <= named and all((folder / name).is_file() for name in named)
