"""How the native kernels round weights to 4 bits, on this processor and on lesser ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftwood.builder.quantization.formats import Quantized
from draftwood.plugins.native.library import Codes, NativeLibrary
from draftwood.plugins.native.processor import KernelError

few = settings(max_examples=8)


def blocks_of_gguf(rng: np.random.Generator, kind: str, rows: int, blocks: int) -> NDArray[np.float32]:
    """Random matrices [rows, 32 * blocks] as llama.cpp's types hold them: every block has its own fp16 numbers."""
    codes = rng.integers(0, 16, (rows, blocks, 32))
    codes[..., 0], codes[..., 1] = 0, 15
    scales = np.exp(rng.normal(-4, 1, (rows, blocks, 1))).astype(np.float16).astype(np.float32)
    minima = rng.normal(size=(rows, blocks, 1)).astype(np.float16).astype(np.float32)
    offsets = -8 * scales if kind == "Q4_0" else minima
    return np.asarray((codes * scales + offsets).reshape(rows, -1), np.float32)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_weights_of_4_bits_that_were_rounded_before_are_not_rounded_again(kind: str, library: NativeLibrary) -> None:
    matrix = blocks_of_gguf(np.random.default_rng(7), kind, 37, 3)
    found = Quantized(*library.round_to_codes(matrix))
    np.testing.assert_array_equal(found.dequantized(), matrix)


def errors_of_search(matrix: NDArray[np.float32], found: Codes) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The square errors of each block, and those of a plain search, which tries many shares of a block's span, and fits
    no lines."""
    block = matrix.reshape(len(matrix), -1, 32)

    def error(stored: NDArray[np.float32]) -> NDArray[np.float64]:
        return np.asarray(np.square(stored.reshape(block.shape) - block.astype(np.float64)).sum(-1))

    least, most = block.min(-1), block.max(-1)
    plain = np.full(least.shape, np.inf)
    for share in np.linspace(0.7, 1.05, 15, dtype=np.float32):
        scales = np.maximum((most - least) * share / 15, 2.0**-24).astype(np.float16).astype(np.float32)
        offsets = ((most + least) / 2 - scales * 7.5).astype(np.float16).astype(np.float32)
        codes = np.rint((block - offsets[..., None]) / scales[..., None]).clip(0, 15)
        plain = np.minimum(plain, error(codes * scales[..., None] + offsets[..., None]))
    return error(Quantized(*found).dequantized()), plain


@few
@given(outputs=st.integers(1, 40), blocks=st.integers(1, 3), size=st.integers(-30, 12), seed=st.integers(0, 1 << 30))
def test_no_block_is_rounded_much_worse_than_by_a_longer_search(
    outputs: int, blocks: int, size: int, seed: int, library: NativeLibrary
) -> None:
    rng = np.random.default_rng(seed)
    matrix = np.ldexp(rng.standard_t(4, (outputs, 32 * blocks)).clip(-9, 9), size).astype(np.float32)
    found = library.round_to_codes(matrix)
    assert found.codes.min() >= 0 and found.codes.max() <= 15 and (found.scales > 0).all()
    for numbers in (found.scales, found.offsets):
        np.testing.assert_array_equal(numbers, numbers.astype(np.float16))
    errors, plain = errors_of_search(matrix, found)
    assert (errors <= 1.5 * plain + 1e-12).all()


def test_lines_of_least_squares_round_better_than_a_longer_search(library: NativeLibrary) -> None:
    for freedom in (3, 100):  # with and without weights far from the others
        matrix = np.random.default_rng(6).standard_t(freedom, (256, 128)).clip(-9, 9).astype(np.float32)
        errors, plain = errors_of_search(matrix, library.round_to_codes(matrix))
        assert errors.sum() <= 0.9 * plain.sum()


def test_blocks_of_one_number_are_exact_to_fp16(library: NativeLibrary) -> None:
    for number in (0.0, 1.0, -0.75, 2.0**-24, 60000.0):
        stored = Quantized(*library.round_to_codes(np.full((3, 64), number, np.float32)))
        np.testing.assert_array_equal(stored.dequantized(), np.full((3, 64), number, np.float32))


def test_what_is_left_of_an_input_is_taken_from_later_ones(library: NativeLibrary) -> None:
    """Input by input, in plain numpy, with the scale and the offset that the kernels chose."""
    rng = np.random.default_rng(5)
    block, feedback = rng.normal(size=(19, 32)).astype(np.float32), np.triu(rng.normal(0, 0.1, (32, 32)), 1)
    found, left = library.round_block(block, feedback.astype(np.float32))
    codes, scales, offsets = found
    np.testing.assert_array_equal(scales, library.round_to_codes(block).scales)
    wanted = block.astype(np.float64)
    for k in range(32):
        rest = wanted[:, k] - (codes[:, k] * scales[:, 0] + offsets[:, 0])
        np.testing.assert_allclose(left[:, k], rest, atol=1e-5)
        inside = (codes[:, k] > 0) & (codes[:, k] < 15)
        assert (np.abs(rest[inside]) <= 0.5001 * scales[inside, 0]).all()
        wanted[:, k + 1 :] -= rest[:, None] * feedback[k, k + 1 :]
    plain, _ = library.round_block(block, np.zeros((32, 32), np.float32))
    np.testing.assert_array_equal(plain.codes, library.round_to_codes(block).codes)
    assert (plain.codes != codes).any()


def test_a_width_without_blocks_is_no_matrix_of_4_bits(library: NativeLibrary) -> None:
    with pytest.raises(KernelError, match="48 inputs are no blocks of 32"):
        library.round_to_codes(np.ones((1, 48), np.float32))
    for shape in ((1, 64), (1, 16)):
        with pytest.raises(KernelError, match="is no block of 32 inputs"):
            library.round_block(np.ones(shape, np.float32), np.zeros((32, 32), np.float32))
