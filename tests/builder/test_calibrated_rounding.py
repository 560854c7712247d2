"""Rounding to 4 bits with activations in view, on the demo pair."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from bundling import DEMO
from numpy.typing import NDArray
from steps import noted

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build
from draftwood.builder.quantization.calibration import (
    LENGTH,
    MAX_WINDOWS,
    Rounding,
    calibrate,
    feedback_of,
    read_windows,
)
from draftwood.builder.quantization.formats import FORMATS, QuantizedCheckpoint, rounding_kernels
from draftwood.cli.main import main
from draftwood.models.errors import CheckpointError, ConfigError
from draftwood.models.layers import EMBEDDING_WEIGHT, HEAD_WEIGHT, network_of
from draftwood.models.llama import Llama
from draftwood.runtime.text.tokenizer import Tokenizer

HELD = 30  # lines that are scored; what is read while rounding comes after them


def view_of(folder: Path) -> QuantizedCheckpoint:
    return QuantizedCheckpoint(Checkpoint(folder), FORMATS["native", "int4"])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = (DEMO / "held_out.jsonl").read_text(encoding="utf-8").splitlines()[HELD:]
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n\n".join(json.loads(line)["prompt"] for line in lines), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def windows(text: Path) -> NDArray[np.int64]:
    with Tokenizer.load(DEMO / "draft") as tokenizer:
        return read_windows(text, tokenizer, 1024)


def read(weights: Checkpoint | QuantizedCheckpoint) -> torch.Tensor:
    """Log-probabilities after every token of the lines that are scored."""
    model = Llama(weights.config, 1024)
    model.load_state_dict(
        {
            name: torch.from_numpy(np.array(weights.tensor(name), np.float32))
            for name in network_of(weights.config).tensors()
        }
    )
    lines = (DEMO / "held_out.jsonl").read_text(encoding="utf-8").splitlines()[:HELD]
    with Tokenizer.load(DEMO / "draft") as tokenizer, torch.inference_mode():
        texts = [torch.tensor([tokenizer.encode(json.loads(line)["prompt"])]) for line in lines]
        return torch.cat([model.full(text).logits[0] for text in texts]).log_softmax(-1)


def divergence(exact: torch.Tensor, own: torch.Tensor) -> float:
    return (exact.exp() * (exact - own)).sum(-1).mean().item()


def test_a_text_in_view_nearly_halves_the_divergence_on_another_one(windows: NDArray[np.int64]) -> None:
    view = view_of(DEMO / "draft")
    steps: list[int] = []
    rounded = calibrate(view, windows, lambda: steps.append(1))
    assert len(steps) == view.config.num_layers
    assert rounded.keys() == {name for name in view._shapes if view.rounds(name)} - {EMBEDDING_WEIGHT, HEAD_WEIGHT}
    for stored in rounded.values():
        assert stored.offsets is not None and stored.codes.min() >= 0 and stored.codes.max() <= 15
    exact = read(Checkpoint(DEMO / "draft"))
    calibrated = divergence(exact, read(QuantizedCheckpoint(view.source, view.form, rounded)))
    assert calibrated < 0.55 * divergence(exact, read(view))  # 0.501 on Zen 5


def test_rows_that_go_together_give_back_and_independent_ones_do_not() -> None:
    import torch

    rows = torch.randn(4000, 4, generator=torch.Generator().manual_seed(0))
    assert np.abs(np.triu(feedback_of(rows), 1)).max() < 0.1
    rows[:, 3] = rows[:, 0]
    assert feedback_of(rows)[0, 3] == pytest.approx(-1, abs=0.05)
    assert np.isfinite(feedback_of(torch.zeros(10, 4))).all()


def test_a_bundle_of_calibrated_engines_holds_what_the_reference_computes(text: Path, tmp_path: Path) -> None:
    """For both roles; the build itself compares them."""
    given = BuildOptions(
        DEMO / "target", DEMO / "draft", tmp_path / "bundle", "native", "int4", draft_precision="int4", calibration=text
    )
    steps: list[str] = []
    manifest = build(given, noted(steps)).manifest
    assert sum("tokens of text.txt in view" in step for step in steps) == 2
    assert max(manifest.parity.values()) < 0.05


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read .*No such file"),
        ("a folder", "cannot be read .*directory"),
        (b"\xff\xfe\x00", "cannot be read .*utf-8"),
        (b"short", rf"has \d tokens: give at least {LENGTH}, better {LENGTH * MAX_WINDOWS}"),
    ],
)
def test_a_file_that_is_no_text_is_refused(content: bytes | str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        file.mkdir()
    with Tokenizer.load(DEMO / "draft") as tokenizer, pytest.raises(ConfigError, match=message):
        read_windows(file, tokenizer, 1024)


def test_only_the_beginning_of_a_text_is_read(text: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_text(text.read_text(encoding="utf-8") * 20, encoding="utf-8")
    with Tokenizer.load(DEMO / "draft") as tokenizer:
        assert read_windows(long, tokenizer, 1024).shape == (MAX_WINDOWS, LENGTH)
        assert read_windows(long, tokenizer, 100).shape == (MAX_WINDOWS, 100)


@pytest.mark.parametrize("options", [["--precision", "int8"], ["--backend", "onnxruntime", "--precision", "int4"]])
def test_a_text_for_what_is_not_calibrated_is_refused(
    options: list[str], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = ["--target", str(DEMO / "target"), "--draft", str(DEMO / "draft"), "--output", str(tmp_path / "out")]
    assert main(["build", *folders, *options, "--calibration", str(text)]) == 2
    assert "--calibration is for int4 on the native backend" in capsys.readouterr().err


def test_a_weight_beyond_fp16_is_refused() -> None:
    """As without a text: a block's offset would be another number."""
    weight = torch.full((16, 64), 65504.0)
    rounding = Rounding(rounding_kernels(), FORMATS["native", "int4"])
    assert np.array_equal(rounding.round("matrix", weight, torch.ones(4, 64)).dequantized(), weight.numpy())
    weight[3, 5] = 65536.0
    with pytest.raises(CheckpointError, match="matrix has weights too large for int4: build with --precision bf16 or"):
        rounding.round("matrix", weight, torch.ones(4, 64))
