"""Rounding to 4 bits with the model's activations in view: GPTQ (Frantar et al. 2022, arXiv:2210.17323).

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
from ...models.layers import HEAD_WEIGHT, network_of
from ...models.llama import Llama, causal
from ...models.plain_files import read_plain
from ...plugins.native.cache import open_kernels
from ...plugins.native.library import BLOCK, NativeLibrary
from ...runtime.text.tokenizer import Tokenizer
from .formats import Quantized, QuantizedCheckpoint

MOST_BYTES = 64 << 20  # of a text
MOST_LETTERS = 1 << 17  # that are read of it
LENGTH, MOST_WINDOWS = 512, 16  # tokens that run through the model together, and how often
DAMPING = 0.01  # of the mean square of an input, added to each: a text of few tokens says little of seldom ones


def read_windows(file: Path, tokenizer: Tokenizer, longest: int) -> NDArray[np.int64]:
    """Token ids [windows, T] of the beginning of a text. longest: tokens that the model was made for. Raises
    ConfigError for a file that is no text or too short."""
    try:
        text = read_plain(file, MOST_BYTES).decode("utf-8")[:MOST_LETTERS]
    except (OSError, ValueError) as error:
        raise ConfigError(f"the text for calibration, {file}, cannot be read ({error}): give a UTF-8 file") from error
    ids, length = tokenizer.encode(text), min(LENGTH, longest)
    windows = min(len(ids) // length, MOST_WINDOWS)
    if not windows:
        raise ConfigError(
            f"the text for calibration, {file}, has {len(ids)} tokens: give at least {length}, better "
            f"{length * MOST_WINDOWS}, of the kind that the model is to read and write"
        )
    return np.array(ids[: windows * length], np.int64).reshape(windows, length)


def calibrate(
    view: QuantizedCheckpoint, windows: NDArray[np.int64], advance: Callable[[], None]
) -> dict[str, Quantized]:
    """Every matrix of a view, by its tensor's name, rounded with the rows of these tokens, int64 [B, T], in view.
    advance: called after each of the layers and the projection. Raises CheckpointError as the source does, KernelError
    and CompilerError."""
    with torch.device("meta"):  # neither memory nor time for weights that are about to be replaced
        model = Llama(view.config, windows.shape[1])
    model.load_state_dict({name: torch.from_numpy(view.stored(name)) for name in model.state_dict()}, assign=True)
    rounding = Rounding(open_kernels())
    network = network_of(view.config)
    for layer in network.layers:
        for matrix in layer.matrices:
            for source, name in zip(matrix.sources, matrix.weights, strict=True):
                rounding.watch(model.get_submodule(source), name)
    for layer_module in model.model.layers:
        layer_module.register_forward_hook(lambda *_: advance())
    tokens = torch.from_numpy(windows)
    with torch.inference_mode():
        rows = model.model(tokens, model.rotary(torch.arange(tokens.shape[1])[None]), causal)
        assert model.lm_head is not None  # a view's is never tied
        rounding.round(HEAD_WEIGHT, model.lm_head.weight, model.model.norm(rows))
    advance()
    return rounding.results


class Rounding:
    """Matrices as they are reached."""

    def __init__(self, library: NativeLibrary) -> None:
        self.results: dict[str, Quantized] = {}
        self._library = library
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
        self.results[name] = round_in_turn(weight.numpy(), self._feedback, self._library)
        return self.results[name]


def feedback_of(rows: Tensor) -> NDArray[np.float32]:
    """Of rows [R, K]: entry [k, j], j > k, is what input j gives back of what is left of input k: the rows of the
    upper Cholesky factor of the inverse of their products, each divided by its diagonal, [K, K]."""
    products = (rows.T @ rows).double()
    mean = products.diagonal().mean()
    products.diagonal().add_(DAMPING * mean if mean > 0 else 1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(products))
    factor = torch.linalg.cholesky(inverse, upper=True)
    return np.asarray((factor / factor.diagonal()[:, None]).float().numpy())


def round_in_turn(matrix: NDArray[np.float32], feedback: NDArray[np.float32], library: NativeLibrary) -> Quantized:
    """A matrix [N, K], one block of inputs after the other; what is left of a block is given to all later ones."""
    matrix = matrix.copy()
    parts = []
    for begin in range(0, matrix.shape[1], BLOCK):
        end = begin + BLOCK
        part, left = library.round_block(matrix[:, begin:end], feedback[begin:end, begin:end])
        matrix[:, end:] -= left @ feedback[begin:end, end:]
        parts.append(part)
    return Quantized(*(np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True)))
