"""The native kernels' matrices, and how they round weights to 4 bits, against numpy: for this processor and for lesser
ones."""

from __future__ import annotations

from pathlib import Path

import gguf.quants
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_files import SCALES, random_blocks
from hypothesis import example, given, settings
from hypothesis import strategies as st
from native_parts import PRECISIONS, Packed, kernels
from native_reference import linear, linear_halves, rounded, rounded_halves
from numpy.typing import NDArray

from draftwood.builder.checkpoints.gguf.file import BLOCK_TYPES
from draftwood.builder.quantization.formats import FORMATS, Quantized
from draftwood.builder.quantization.kept import HOLDS
from draftwood.plugins.native import library as library_module
from draftwood.plugins.native import processor
from draftwood.plugins.native.library import Codes, NativeLibrary, address
from draftwood.plugins.native.packing import MIN_HALF, alternated, code_panels, pair_panels, panels
from draftwood.plugins.native.processor import KernelError

few = settings(max_examples=8)


def random_rows(rng: np.random.Generator, rows: int, inputs: int) -> NDArray[np.float32]:
    """Numbers of every size, with outliers, as activations have them."""
    sizes = np.exp(rng.normal(0, 2, (rows, 1))) * np.where(rng.random((rows, inputs)) < 0.02, 30, 1)
    return np.asarray(rng.normal(size=(rows, inputs)) * sizes, np.float32)


@pytest.mark.parametrize("precision", PRECISIONS)
@few
@given(rows=st.integers(1, 9), outputs=st.integers(1, 100), blocks=st.integers(1, 5), seed=st.integers(0, 1 << 30))
@example(rows=6, outputs=71, blocks=5, seed=80)  # int8: activations within a rounding of a tie between two codes
def test_products_are_those_of_the_oracle(
    precision: str, rows: int, outputs: int, blocks: int, seed: int, library: NativeLibrary
) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(outputs, 64 * blocks)).astype(np.float32)
    bias = rng.normal(size=outputs).astype(np.float32)
    packed, x = Packed(matrix, precision, bias), random_rows(rng, rows, 64 * blocks)
    if packed.codes is not None and packed.scales is not None:
        expected = linear(x, packed.codes, packed.scales, packed.offsets) + bias
    elif precision == "bf16":
        expected = rounded_halves(x).astype(np.float64) @ packed.wide.T.astype(np.float64) + bias
    else:
        expected = x.astype(np.float64) @ packed.wide.T.astype(np.float64) + bias
    # What fp32 may lose of a row: in the order of its largest product, however many there are.
    scale = np.abs(x).max(1, keepdims=True) * np.abs(packed.wide).max() + 1
    difference = np.abs(packed.times(x, library) - expected)
    assert (difference <= 1e-5 * np.abs(expected) + 3e-6 * scale).all()


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K], ids=lambda kind: kind.name)
@few
@given(rows=st.integers(1, 9), outputs=st.integers(1, 70), blocks=st.integers(1, 3), seed=st.integers(0, 1 << 30))
def test_superblocks_are_multiplied_as_the_file_has_them(
    kind: Kind, rows: int, outputs: int, blocks: int, seed: int, library: NativeLibrary
) -> None:
    """The numbers are those to which the gguf package dequantises them, bit for bit."""
    rng, form = np.random.default_rng(seed), FORMATS["native", HOLDS[kind.name]]
    content = random_blocks((outputs * blocks, 256), kind, seed)
    for begin in SCALES[kind]:  # some of them 0
        factors = np.exp(rng.normal(-7, 2, (len(content), 1))) * (rng.random((len(content), 1)) > 0.1)
        content[:, begin : begin + 2] = factors.astype(np.float16).view(np.uint8)
    exact = gguf.quants.dequantize(content, kind).reshape(outputs, -1)
    stored = form.keep(BLOCK_TYPES[kind](content.reshape(outputs, blocks, -1)), form.block)
    assert stored is not None and form.bits == int(kind.name[1])
    packed, x = Packed(exact, form.precision, stored=stored), random_rows(rng, rows, 256 * blocks)
    np.testing.assert_array_equal(packed.wide, exact)
    codes, scales = rounded(x, 32)
    expected = (codes * scales[..., None].astype(np.float64)).reshape(x.shape) @ exact.T.astype(np.float64)
    found, scale = packed.times(x, library), np.abs(x).max(1, keepdims=True) * np.abs(exact).max() + 1
    assert (np.abs(found - expected) <= 1e-5 * np.abs(expected) + 3e-6 * scale).all()
    np.testing.assert_array_equal([packed.times(row[None], library)[0] for row in x], found)


@few
@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 100),
    size=st.sampled_from([0, 2, 8]),
    seed=st.integers(0, 1 << 30),
)
@example(rows=33, outputs=33, inputs=70, size=0, seed=0)
@example(rows=5, outputs=16, inputs=64, size=8, seed=1)
def test_products_of_bf16_are_added_in_the_order_of_matrix_registers(
    rows: int, outputs: int, inputs: int, size: float, seed: int, library: NativeLibrary
) -> None:
    """Bit for bit, numbers of any size among them: so small ones that their products would be subnormal count as 0."""
    if "fma" not in library.instructions:
        pytest.skip("products and sums are rounded apart")
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(rows, inputs)) * np.exp(rng.normal(0, size, (rows, inputs)))).astype(np.float32)
    matrix = (rng.normal(size=(outputs, inputs)) * np.exp(rng.normal(0, size, (outputs, inputs)))).astype(np.float32)
    x[rng.random(x.shape) < 0.1] *= np.float32(1e-30)
    matrix[rng.random(matrix.shape) < 0.1] *= np.float32(1e-38)
    expected = linear_halves(rounded_halves(x), rounded_halves(matrix))
    np.testing.assert_array_equal(Packed(matrix, "bf16").times(x, library), expected)


@pytest.mark.parametrize("precision", PRECISIONS)
@few
@given(rows=st.integers(2, 40), seed=st.integers(0, 99), data=st.data())
def test_a_row_has_the_same_bits_in_every_tile(
    precision: str, rows: int, seed: int, data: st.DataObject, library: NativeLibrary
) -> None:
    rng = np.random.default_rng(seed)
    packed = Packed(rng.normal(size=(70, 192)).astype(np.float32), precision)
    x = random_rows(rng, rows, 192)
    together, row = packed.times(x, library), data.draw(st.integers(0, rows - 1))
    np.testing.assert_array_equal(packed.times(x[row : row + 1], library)[0], together[row])


def test_integers_are_exact_on_every_processor(library: NativeLibrary) -> None:
    """Where scales are powers of two, no sum is rounded: the bits are the oracle's."""
    rng = np.random.default_rng(3)
    for least, most, precision in ((-127, 127, "int8"), (-8, 7, "int4")):
        matrix = rng.integers(least, most + 1, (40, 128)).astype(np.float32)
        matrix[:, ::32], matrix[:, 1::32] = most, least  # so that a block's scale is one
        x = rng.integers(-127, 128, (5, 128)).astype(np.float32)
        x[:, ::32] = 127
        np.testing.assert_array_equal(Packed(matrix, precision).times(x, library), x @ matrix.T)


def near_ties(peak: float) -> NDArray[np.float32]:
    """One row [32 n] of blocks whose largest magnitude is `peak`, full of numbers next to the middle of two codes."""
    step = np.float32(127) / np.float32(peak)
    middles = ((np.arange(-126, 126) + 0.5) / step.astype(np.float64)).astype(np.float32)
    near = np.concatenate([middles, np.nextafter(middles, np.float32(9e9)), np.nextafter(middles, np.float32(-9e9))])
    blocks = np.full((-(-len(near) // 31), 32), np.float32(peak))
    blocks[:, 1:] = np.resize(near, (len(blocks), 31))
    return blocks.reshape(1, -1)


def test_activations_near_a_tie_have_the_same_codes_on_every_processor(library: NativeLibrary) -> None:
    """With fused instructions and without: one code more or less is worth hundreds of roundings."""
    for peak in (1.0, 3.7, 0.01234, 5e6):
        x = near_ties(peak)
        codes = rounded(x, 32).codes.ravel()
        matrix = np.zeros((16, x.shape[1]), np.float32)
        for column in range(1, 16):
            matrix[column, column::16] = 1 + column
        matrix[:, ::32] = 127  # so that a block's scale is one
        expected = matrix.astype(np.int64) @ codes.astype(np.int64) * (np.float32(peak) / np.float32(127))
        np.testing.assert_allclose(Packed(matrix, "int8").times(x, library)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_small_rows_have_the_codes_of_large_ones(precision: str, library: NativeLibrary) -> None:
    """A power of two changes no rounding; activations below 1e-30 are nothing."""
    rng = np.random.default_rng(4)
    x = rng.uniform(-1, 1, (3, 128)).astype(np.float32)
    packed = Packed(rng.normal(size=(20, 128)).astype(np.float32), precision)
    expected = packed.times(x, library)
    for power in (-20, -60, -95, 60):
        np.testing.assert_array_equal(packed.times(np.ldexp(x, power), library), np.ldexp(expected, power))
    assert (packed.times(np.ldexp(x, -101), library) == 0).all()


def test_extreme_rows_stay_finite(library: NativeLibrary) -> None:
    matrix = np.ones((16, 64), np.float32)
    for precision in ("int8", "int4"):
        x = np.stack([np.zeros(64), np.full(64, 1e-38), np.full(64, 1e30)]).astype(np.float32)
        found = Packed(matrix, precision).times(x, library)
        assert np.isfinite(found).all()
        assert (found[0] == 0).all()
        np.testing.assert_allclose(found[2], 64e30, rtol=0.01)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("number", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_none_in_every_output(number: float, precision: str, library: NativeLibrary) -> None:
    """Of its row alone, wherever it is: rounded to codes it became a number, another one on each processor."""
    rng = np.random.default_rng(5)
    x, packed = random_rows(rng, 3, 128), Packed(rng.normal(size=(40, 128)).astype(np.float32), precision)
    expected = packed.times(x, library)
    for place in (0, 3, 31, 64, 127):
        broken = x.copy()
        broken[1, place] = number
        found = packed.times(broken, library)
        assert not np.isfinite(found[1]).any()
        np.testing.assert_array_equal(found[::2], expected[::2])
        if packed.codes is not None and packed.scales is not None:
            oracle = linear(broken, packed.codes, packed.scales, packed.offsets)
            np.testing.assert_array_equal(np.isnan(found), np.isnan(oracle))


def test_packing_puts_every_number_where_the_kernels_look() -> None:
    codes = np.arange(16, dtype=np.int8).repeat(24).reshape(16, 24)
    codes[3] = np.arange(24) % 16
    packed = code_panels(codes, 4)
    assert packed.shape == (1, 3, 16, 4)
    low, high = packed & 15, packed >> 4
    for k in range(24):
        half = high if k % 8 >= 4 else low
        np.testing.assert_array_equal(half[0, k // 8, :, k % 4], codes[:, k])
    wide = code_panels(codes, 8)
    np.testing.assert_array_equal(wide[0, 5, 3], codes[3, 20:24].astype(np.int16) + 128)
    assert panels(codes[:5]).shape == (1, 24, 16)
    assert (panels(codes[:5])[0, :, 5:] == 0).all()
    turns = alternated(np.zeros((20, 4)), np.ones((20, 4)))
    assert turns.shape == (64, 4)
    assert [int(turns[row, 0]) for row in (0, 16, 32, 48)] == [0, 1, 0, 1]


def test_pairs_of_inputs_lie_side_by_side() -> None:
    halves = (np.arange(17)[:, None] * 100 + np.arange(35) + 0x4000).astype(np.uint16)
    halves[16, 34] = (int(np.float32(MIN_HALF).view(np.uint32)) >> 16) - 1 | 0x8000  # counts as 0
    halves[3, 7] = 0x8001
    packed = pair_panels(halves)
    assert packed.shape == (2, 32, 16, 2)
    halves[16, 34] = halves[3, 7] = 0
    for output in range(17):
        for k in range(35):
            assert packed[output // 16, k // 2, output % 16, k % 2] == halves[output, k]
    assert packed.astype(np.int64).sum() == halves.astype(np.int64).sum(), "all others are 0"


def test_the_oracle_rounds_as_it_says() -> None:
    halves = rounded_halves(
        np.array([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 1.1 * 2**-8), MIN_HALF, -0.9 * MIN_HALF], np.float32)
    )
    assert halves.tolist() == [1, 1 + 2**-6, -(1 + 2**-7), MIN_HALF, 0]  # the first two: ties to even
    x = np.array([[254, 1, -3, 0], [0, 0, 0, 0]], np.float32)
    codes, scales = rounded(x, 4)
    assert codes.tolist() == [[[127, 0, -2, 0]], [[0, 0, 0, 0]]]  # 0.5 and -1.5: ties to even
    assert scales.tolist() == [[2.0], [0.0]]


def test_kernels_for_another_processor_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lesser = tmp_path / "cpuinfo"
    lesser.write_text("processor: 0\nflags\t\t: fpu sse2\n")
    monkeypatch.setattr(processor, "CPUINFO", lesser)
    if not NativeLibrary(kernels("-march=x86-64")).instructions:
        with pytest.raises(KernelError, match=r"compiled for a processor with .*avx2.*: delete it"):
            NativeLibrary(kernels("-march=x86-64-v3"))
    monkeypatch.setattr(library_module, "INTERFACE", library_module.INTERFACE + 1)
    with pytest.raises(KernelError, match="compiled for another release of draftwood: delete it"):
        NativeLibrary(kernels())
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "none")  # not Linux: nothing to compare with
    (tmp_path / "damaged.so").write_bytes(b"no library")
    for name in ("damaged.so", "missing.so"):
        with pytest.raises(KernelError, match=f"{name} cannot be loaded here"):
            NativeLibrary(tmp_path / name)


def test_where_any_array_lies() -> None:
    """What may not be written, is empty or is not contiguous has no buffer that ctypes takes."""
    square = np.zeros((4, 4), np.float32)
    arrays = (square, square[2], square[:, 1], square.T, np.zeros(0), np.frombuffer(b"read only", np.uint8))
    assert [address(array) for array in arrays] == [array.ctypes.data for array in arrays]
    assert address(None) is None


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
