"""The GPU check on a machine without one: its parts on a CPU and small sizes, its report, and how it ends here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu import check, tensorrt
from benchmarks.gpu import kernel as gpu_kernel
from benchmarks.gpu.model import dense_tree_attention
from benchmarks.gpu.report import (
    FAILED,
    NOT_POSSIBLE,
    OK,
    Findings,
    NotPossible,
    Part,
    run_parts,
    write_outcomes,
)
from draftwood.plugins.tree_attention.plan import Shape

SMALL = [Shape(1, 4, 2, 3, 5, 40, 16, "fp32"), Shape(2, 2, 1, 4, 4, 64, 32, "fp16")]


def visible_only(*operands: torch.Tensor | float) -> torch.Tensor:
    """Dense attention reads every slot: those that nobody sees must be finite."""
    query, key, value, *rest = operands
    assert isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
    return dense_tree_attention(query, key.nan_to_num(), value.nan_to_num(), *rest)  # type: ignore[arg-type]  # a float


def test_numerics_name_the_worst_error_and_refuse_a_wrong_kernel() -> None:
    found = gpu_kernel.check_numerics(visible_only, SMALL, "cpu")
    assert found.summary.startswith("2 shapes; largest relative error fp32 ")
    assert 0 < max(found.figures["relative_error"].values()) < 1e-3

    def wrong(*operands: torch.Tensor | float) -> torch.Tensor:
        return 1.1 * visible_only(*operands)

    with pytest.raises(AssertionError, match=r"fp32 N=1 H=4:2 T=3 S=5 C=40 D=16 differs by 1\.0e-01"):
        gpu_kernel.check_numerics(wrong, SMALL, "cpu")
    with pytest.raises(AssertionError, match="differs by nan"):
        gpu_kernel.check_numerics(dense_tree_attention, SMALL, "cpu")  # which multiplies unseen NaN by zero


def test_torchs_attention_that_the_kernel_is_timed_against_computes_the_same() -> None:
    given = gpu_kernel.draw_inputs(Shape(1, 4, 2, 5, 5, 40, 16, "fp32"), [20], 0, "cpu")
    found = gpu_kernel.make_torch_baseline(given, 25)().numpy()
    np.testing.assert_allclose(found, gpu_kernel.compute_oracle(given, given.scale), atol=1e-5)


def test_every_part_reports_whatever_happens() -> None:
    def impossible() -> Findings:
        raise NotPossible("no such device")

    def missing() -> Findings:
        raise ModuleNotFoundError("No module named 'triton'")

    def wrong() -> Findings:
        raise AssertionError("1 is not\n 2")

    parts = [
        Part("works", 1, lambda: Findings("fine", {"a": 1})),
        Part("impossible", 1, impossible),
        Part("missing", 1, missing),
        Part("wrong", 1, wrong),
        Part("too long", 100, lambda: Findings("never", {})),
    ]
    results = list(run_parts(parts, budget=50))
    assert [result.status for result in results] == [OK, NOT_POSSIBLE, NOT_POSSIBLE, FAILED, NOT_POSSIBLE]
    summaries = [result.summary for result in results]
    assert summaries[1:] == [
        "no such device",
        "No module named 'triton'",
        "AssertionError: 1 is not 2",
        "less than 100 s of 50 s are left",
    ]
    assert "AssertionError" in results[3].trace and results[0].figures == {"a": 1}


def test_figures_are_written_under_the_devices_name_and_not_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_outcomes(tmp_path, "a", "NVIDIA H200 (SXM)", [])
    content = json.loads(file.read_text())
    assert file.name == f"gpu_check_a_nvidia-h200-sxm_{content['date']}.json" and content["python"]
    assert (content["device"], content["half"], content["parts"]) == ("NVIDIA H200 (SXM)", "a", [])
    monkeypatch.setattr(check, "find_device", lambda: None)
    monkeypatch.setattr(sys, "argv", ["check.py", "--output", str(tmp_path / "results")])
    assert check.main() == 0
    assert capsys.readouterr().out.startswith("No CUDA device") and not (tmp_path / "results").exists()


def broken(folder: str) -> Iterator[Part]:
    yield Part("works", 1, lambda: Findings("fine", {"folder": folder}))
    yield Part("ends its process", 1, lambda: os._exit(7))


def other(folder: str) -> Iterator[Part]:
    yield Part("other", 1, lambda: Findings("fine, too", {}))


def test_a_group_that_dies_takes_no_other_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups run in processes of their own. What was found before is written already."""
    groups = {
        "broken": check.Group("a", 60, broken),
        "missing": check.Group("a", 60, other, package="no-such-package"),
        "other": check.Group("a", 60, other),
        "of the other half": check.Group("b", 60, other),
    }
    plugin = tmp_path / "groups.py"
    plugin.write_text(
        "import sys\nimport test_gpu_check as tests\nfrom benchmarks.gpu import check\n"
        "check.GROUPS = {'broken': check.Group('a', 60, tests.broken), 'other': check.Group('a', 60, tests.other)}\n"
        "sys.exit(check.main())\n"
    )
    monkeypatch.setattr(check, "COMMAND", (sys.executable, str(plugin)))
    monkeypatch.setattr(check, "GROUPS", groups)
    monkeypatch.setattr(check, "find_device", lambda: "Fake GPU")
    monkeypatch.setattr(sys, "argv", ["check.py", "--half", "a", "--output", str(tmp_path)])
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert check.main() == 1
    (file,) = tmp_path.glob("*.json")
    parts = {part["part"]: part for part in json.loads(file.read_text())["parts"]}
    assert {name: part["status"] for name, part in parts.items()} == {
        "works": OK,
        "broken: process": FAILED,
        "missing": NOT_POSSIBLE,
        "other": OK,
    }
    assert "ended with 7" in parts["broken: process"]["summary"]
    assert parts["missing"]["summary"] == "the package no-such-package is not installed"


def test_what_works_is_known_before_how_fast_it_is() -> None:
    for form, stages in check.STAGES.items():
        assert set(stages) <= {"build", *tensorrt.STAGES} and form in tensorrt.FORMS
        assert stages.index("texts") < stages.index("speed")
    groups = list(check.GROUPS)
    assert groups.index("static engine") < groups.index("headline") < groups.index("kernel time")
    assert sum(group.seconds for group in check.GROUPS.values() if group.half == "a") <= 600
