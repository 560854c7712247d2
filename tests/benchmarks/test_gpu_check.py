"""The GPU check on a machine without one: its parts on a CPU and small sizes, its report, and how it ends here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from bundling import ROOT

from benchmarks.gpu import check
from benchmarks.gpu import engine as gpu_engine
from benchmarks.gpu import kernel as gpu_kernel
from benchmarks.gpu.report import (
    FAILED,
    NOT_POSSIBLE,
    OK,
    Findings,
    NotPossible,
    Outcome,
    Part,
    format_row,
    run_parts,
    write_outcomes,
)
from benchmarks.tools import inflate
from draftwood.models.llama import dense_tree_attention
from draftwood.plugins.tree_attention.plan import Shape

SMALL = [Shape(1, 4, 2, 3, 5, 40, 16, "fp32"), Shape(2, 2, 1, 4, 4, 64, 32, "fp16")]


@pytest.fixture(autouse=True)
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's attention takes as long as the cache is."""
    monkeypatch.setattr(gpu_engine, "CAPACITY", 320)


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


@pytest.mark.full
def test_engine_parts_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = gpu_engine.check_parity("cpu", ("fp32",)).figures["parity"]
    assert errors.keys() == {"fp32, first", "fp32, repeated"} and 0 < max(errors.values()) < 1e-5
    monkeypatch.setitem(gpu_engine.LOGIT_TOLERANCES, "bf16", 1e-6)
    with pytest.raises(AssertionError, match="bf16, first: logits differ by"):
        gpu_engine.check_parity("cpu", ("bf16",))
    accepted = gpu_engine.check_same_text("cpu", 8, 1).figures["acceptance"]
    assert accepted.keys() == gpu_engine.CONFIGS.keys() and min(accepted.values()) > 1


def test_speculation_of_an_inflated_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that takes a 7B shape on a GPU, on a shape that a CPU can wait for."""
    monkeypatch.setitem(inflate.SHAPES, "tiny", inflate.InflatedShape(384, 704, 4, 384, 128))
    lines: list[str] = []
    found = gpu_engine.measure_speculation(("tiny", "tiny"), "cpu", "fp32", 6, 1, threads=2, progress=lines.append)
    speed = found.figures["speed"]
    assert speed.keys() == {"plain", *gpu_engine.CONFIGS}
    assert all(figures["tokens_per_second"] > 0 for figures in speed.values())
    assert speed["plain"]["tokens_per_pass"] == 1 and speed["plain"]["same_tokens"] == 1
    assert max(figures["tokens_per_pass"] for figures in speed.values()) > 1
    assert len(lines) == 1 + len(speed)


def test_weights_are_made_ahead_in_threads() -> None:
    names = [f"w{index}" for index in range(20)]
    weights = gpu_engine.PrefetchedWeights(lambda name: np.full(3, float(name[1:])), names, threads=4)
    assert [weights(name)[0] for name in names] == list(range(20))
    weights.close()


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


def test_figures_are_written_under_the_devices_name(tmp_path: Path) -> None:
    file = write_outcomes(tmp_path / "results", "NVIDIA H200 (SXM)", [])
    content = json.loads(file.read_text())
    assert file.name == f"gpu_check_nvidia-h200-sxm_{content['date']}.json" and content["python"]
    assert (content["device"], content["parts"]) == ("NVIDIA H200 (SXM)", [])
    line = format_row(Outcome("kernel time", OK, 1.25, "fast", {}))
    assert line.split() == ["kernel", "time", "ok", "1.2", "s", "fast"]


def test_figures_outlive_a_part_that_ends_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Findings:
        raise KeyboardInterrupt

    parts = [Part("works", 1, lambda: Findings("fine", {"a": 1})), Part("interrupted", 1, interrupted)]
    monkeypatch.setattr(check, "find_device", lambda: "Fake GPU")
    monkeypatch.setattr(check, "list_gpu_parts", lambda shapes, folder: parts)
    monkeypatch.setattr(sys, "argv", ["check.py", "--output", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        check.main()
    (file,) = tmp_path.iterdir()
    (part,) = json.loads(file.read_text())["parts"]
    assert (part["part"], part["status"], part["figures"]) == ("works", OK, {"a": 1})


def test_packages_that_are_missing_make_tensorrt_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen through the process that the part runs in."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(NotPossible, match=r"is not installed|no NVIDIA driver|no usable GPU"):
        check.check_tensorrt("tensorrt-rtx", "build", check.KERNEL, "")
    with pytest.raises(RuntimeError, match="KeyError: 'unknown'"):
        check.check_tensorrt("unknown", "build", check.KERNEL, "")


def test_a_machine_without_a_gpu_checks_what_it_can_and_writes_nothing(tmp_path: Path) -> None:
    """As `make gpu-check` runs it, with time for the first part alone."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.check", "--output", str(tmp_path / "results"), "--budget", "61"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "build" / "typing")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("No CUDA device")
    assert lines[1].startswith("kernel, interpreted  ok") and "6 shapes" in lines[1]
    assert not (tmp_path / "results").exists()
