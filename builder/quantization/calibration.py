"""Rounding to 4 or 5 bits with the model's activations in view: GPTQ (Frantar et al. 2022, arXiv:2210.17323).

A text runs through the model once. Where its rows reach a matrix, the matrix is rounded input by input: what is left of
one input is made up for by those that are not rounded yet, as far as the rows of this text go together. The rows go on
through the rounded matrix, so that later ones make up for earlier ones, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...models.errors import ConfigError
from ...models.layers import network_of
from ...models.llama import DecoderLayer, Rotary, causal, scaled
from ...models.plain_files import read_plain
from ...models.rope import LOCAL, rope_tables
from ...plugins.native.library import BLOCK, NativeLibrary, empty_codes
from ...runtime.text.tokenizer import Tokenizer
from ..parallel import in_parts
from .formats import Quantized, QuantizedCheckpoint, WeightFormat, rounding_kernels

MAX_BYTES = 64 << 20  # of a text
MAX_LETTERS = 1 << 17  # that are read of it
LENGTH, MAX_WINDOWS = 512, 16  # tokens that run through the model together, and how often
DAMPING = 0.01  # of the mean square of an input, added to each: a text of few tokens says little of seldom ones


def read_windows(file: Path, tokenizer: Tokenizer, longest: int) -> NDArray[np.int64]:
    """Token ids [windows, T] of the beginning of a text. longest: tokens that the model was made for. Raises
    ConfigError for a file that is no text or too short."""
    try:
        text = read_plain(file, MAX_BYTES).decode("utf-8-sig")[:MAX_LETTERS]
    except (OSError, ValueError) as error:
        raise ConfigError(f"the text for calibration, {file}, cannot be read ({error}): give a UTF-8 file") from error
    ids, length = tokenizer.encode(text), min(LENGTH, longest)
    windows = min(len(ids) // length, MAX_WINDOWS)
    if not windows:
        raise ConfigError(
            f"the text for calibration, {file}, has {len(ids)} tokens: give at least {length}, better "
            f"{length * MAX_WINDOWS}, of the kind that the model is to read and write"
        )
    return np.array(ids[: windows * length], np.int64).reshape(windows, length)


def calibrate(
    view: QuantizedCheckpoint, windows: NDArray[np.int64], advance: Callable[[], None]
) -> dict[str, Quantized]:
    """Every matrix of a view's layers, by its tensor's name, rounded with the rows of these tokens, int64 [B, T], in
    view; the vocabulary projection has more bits and needs no text. advance: called after each layer. Raises
    CheckpointError as the source does, KernelError and CompilerError."""
    network, config = network_of(view.config), view.config
    rounding = Rounding(rounding_kernels(), view.form)
    rotary = [
        Rotary._make(torch.from_numpy(table)[None, None] for table in rope_tables(config, windows.shape[1], local))
        for local in LOCAL
    ]
    rows = torch.from_numpy(view.tensor(network.embedding.weights[0])[windows])
    rows = scaled(rows, network.embedding_multiplier)
    with torch.inference_mode():
        for index in range(config.num_layers):
            layer = load_layer(view, index)
            for matrix in network.layers[index].matrices:
                for source, name in zip(matrix.sources, matrix.weights, strict=True):
                    rounding.watch(layer.get_submodule(source.removeprefix(f"model.layers.{index}.")), name)
            rows = layer(rows, rows, rotary, causal, index)
            advance()
    return rounding.results


def load_layer(view: QuantizedCheckpoint, index: int) -> DecoderLayer:
    """One layer in torch, in fp32, before rounding."""
    with torch.device("meta"):  # neither memory nor time for weights that are about to be replaced
        module = DecoderLayer(network_of(view.config).layers[index], view.config)
    names = {name: f"model.layers.{index}.{name}" for name in module.state_dict()}
    weights = {name: np.require(view.stored(source), np.float32, ["C", "W"]) for name, source in names.items()}
    module.load_state_dict({name: torch.from_numpy(weight) for name, weight in weights.items()}, assign=True)
    return module


class Rounding:
    def __init__(self, library: NativeLibrary, form: WeightFormat) -> None:
        self.results: dict[str, Quantized] = {}
        self._library, self._form = library, form
        self._rows: Tensor | None = None  # q, k and v have the same, and so have gate and up
        self._feedback = np.empty((0, 0), np.float32)

    def watch(self, module: nn.Module, name: str) -> None:
        """Round a module's weight, [N, K], when rows reach it, and let them go on through what it was rounded to."""

        def reached(module: nn.Module, inputs: tuple[Tensor]) -> None:
            weight = module.weight
            assert isinstance(weight, Tensor)
            weight.copy_(torch.from_numpy(self.round(name, weight, inputs[0]).dequantized()))

        module.register_forward_pre_hook(reached)

    def round(self, name: str, weight: Tensor, rows: Tensor) -> Quantized:
        """A matrix [N, K] for rows [..., K]."""
        if rows is not self._rows:
            self._rows, self._feedback = rows, feedback_of(rows.flatten(0, -2))
        self._form.check_size(name, weight.numpy())
        self.results[name] = round_in_turn(weight.numpy(), self._feedback, self._library, self._form.bits)
        return self.results[name]


def feedback_of(rows: Tensor) -> NDArray[np.float32]:
    """Of rows [R, K]: entry [k, j], j > k, is what input j gives back of what is left of input k: the rows of the
    upper Cholesky factor of the inverse of their products, each divided by its diagonal, [K, K].

    That factor is the inverse of R, upper, where R times its transpose is the products: the Cholesky factor from the
    last input to the first."""
    products = (rows.T @ rows).double()
    mean = products.diagonal().mean()
    products.diagonal().add_(DAMPING * mean if mean > 0 else 1.0)
    backwards = torch.linalg.cholesky(products.flip(0, 1)).flip(0, 1)
    unit = torch.eye(len(products), dtype=products.dtype)
    factor = torch.linalg.solve_triangular(backwards, unit, upper=True)
    return np.asarray((factor / factor.diagonal()[:, None]).float().numpy())


def round_in_turn(
    matrix: NDArray[np.float32], feedback: NDArray[np.float32], library: NativeLibrary, bits: int = 4
) -> Quantized:
    """A matrix [N, K], one block of inputs after the other; what is left of a block is given to all later ones."""
    outputs, inputs = matrix.shape
    result = empty_codes(outputs, inputs)

    def fill(part: slice) -> None:
        rows = matrix[part].copy()
        for begin in range(0, inputs, BLOCK):
            end, block = begin + BLOCK, slice(begin // BLOCK, begin // BLOCK + 1)
            found, left = library.round_block(rows[:, begin:end], feedback[begin:end, begin:end], bits)
            rows[:, end:] -= left @ feedback[begin:end, end:]
            result.codes[part, begin:end] = found.codes
            result.scales[part, block], result.offsets[part, block] = found.scales, found.offsets

    in_parts(outputs, inputs, fill)
    return Quantized(*result)
