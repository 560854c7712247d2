"""The acceptance head: the published layout, its folder, and errors that name the fix (I13)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import trained_head
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from draftwood.builder.head.network import AcceptanceHead
from draftwood.builder.reference import accepted
from draftwood.models.acceptance_head import DESCRIPTION, WEIGHTS, read_head, write_head
from draftwood.models.errors import CheckpointError, ConfigError
from draftwood.models.head_config import HeadConfig

SIZE = 16


class ReferenceBlock(nn.Module):
    """The authors' block."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.silu(self.linear(x))


def reference(layers: int, tied: bool) -> nn.Sequential:
    """The authors' head; `[block] * layers` is one object, which is what ties it."""
    torch.manual_seed(layers)
    blocks = [ReferenceBlock(SIZE)] * layers if tied else [ReferenceBlock(SIZE) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(SIZE, 2))


@pytest.mark.parametrize(("layers", "tied"), [(0, True), (1, True), (3, True), (3, False)])
def test_i13_the_weights_of_the_authors_head_give_its_output(layers: int, tied: bool) -> None:
    module, head = reference(layers, tied), AcceptanceHead(HeadConfig(SIZE, layers, tied))
    state = {name.replace(f"{layers}.", "output.", 1): tensor for name, tensor in module.state_dict().items()}
    own = {name if "output" in name else f"blocks.{name}": tensor for name, tensor in state.items()}
    head.load_state_dict({name: own[name] for name in head.state_dict()})
    hidden = torch.randn(7, SIZE)
    torch.testing.assert_close(head(hidden), module(hidden), rtol=0, atol=1e-6)


def test_the_exported_projection_is_the_calibrated_probability() -> None:
    """Both follow sigmoid((l1 - l0 + log w) / temperature)."""
    config = HeadConfig(SIZE, 2, reject_weight=3.0, temperature=1.7)
    trained = trained_head(config)
    head, hidden = AcceptanceHead.from_trained(trained), torch.randn(9, SIZE)
    rows = hidden
    for _ in range(2):
        rows = head.blocks[0](rows)
    odds, shift = config.logit_projection(trained.weights["output.weight"], trained.weights["output.bias"])
    folded = torch.sigmoid(rows @ torch.from_numpy(odds) + torch.from_numpy(shift))[:, 0]
    reject, accept = head(hidden).unbind(-1)
    by_hand = torch.sigmoid((accept - reject + np.log(3.0)) / 1.7)
    torch.testing.assert_close(head.acceptance(hidden), by_hand, rtol=0, atol=1e-6)
    torch.testing.assert_close(folded, by_hand, rtol=0, atol=1e-6)
    np.testing.assert_allclose(accepted(trained, hidden.numpy()), by_hand.detach(), rtol=0, atol=1e-6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_head(tmp_path, trained_head(HeadConfig(SIZE, 3, tied=False, reject_weight=3.0, temperature=1.5)))
    return tmp_path


def test_a_folder_reads_back_what_was_written(folder: Path) -> None:
    head = read_head(folder, SIZE)
    written = trained_head(HeadConfig(SIZE, 3, tied=False, reject_weight=3.0, temperature=1.5))
    assert head.config == written.config
    assert all(np.array_equal(head.weights[name], weight) for name, weight in written.weights.items())
    assert {file.name for file in folder.iterdir()} == {WEIGHTS, DESCRIPTION}


def describe(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / DESCRIPTION).read_text())
    (folder / DESCRIPTION).write_text(json.dumps(content | changes))


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda f: (f / DESCRIPTION).unlink(), "head.json is missing.*train-head"),
        (lambda f: (f / DESCRIPTION).write_text("{"), "not readable JSON"),
        (lambda f: (f / DESCRIPTION).write_bytes(b"\xff\xfe"), "not readable JSON"),
        (lambda f: (f / DESCRIPTION).write_text("[]"), "holds no JSON object"),
        (lambda f: describe(f, format=2), "update draftwood"),
        (lambda f: describe(f, temperature=0), "temperature must be a positive"),
        (lambda f: describe(f, temperature="warm"), "temperature must be a positive"),
        (lambda f: describe(f, layers=-1), "layers must be"),
        (lambda f: describe(f, tied=1), "tied must be"),
        (lambda f: describe(f, tied=True), "not expected"),
        (lambda f: describe(f, hidden_size=8), "reads 8 hidden values and the draft has 16.*train-head"),
        (lambda f: (f / WEIGHTS).unlink(), "missing or unreadable"),
        (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-20]), "missing or unreadable"),
        (lambda f: edit(f, lambda t: t.pop("output.bias")), "output.bias; train it again"),
        (lambda f: edit(f, lambda t: t.update({"output.bias": np.zeros(3, np.float32)})), "expected float32"),
        (lambda f: edit(f, lambda t: t.update({"output.bias": np.zeros(2, np.float64)})), "expected float32"),
        (lambda f: edit(f, lambda t: t["output.weight"].fill(np.nan)), "NaN or infinity"),
    ],
)
def test_a_damaged_folder_is_refused_with_the_fix(folder: Path, damage: Callable[[Path], object], named: str) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=named):
        read_head(folder, SIZE)


@pytest.mark.parametrize("change", [{"hidden_size": 0}, {"layers": True}, {"reject_weight": float("nan")}])
def test_impossible_shapes_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        HeadConfig(**{"hidden_size": SIZE} | change)
