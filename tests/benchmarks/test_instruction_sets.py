"""What the benchmark of instruction sets reads of llama.cpp's programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.costs.instruction_sets import ROWS, least_milliseconds, loads_from

LISTED = """\
	libllama.so.0 => /peers/build/bin/libllama.so.0 (0x00007ff50b400000)
	libggml-base.so.0 => /avx2/bin/libggml-base.so.0 (0x00007ff50c2a0000)
	libggml-cpu.so.0 => /avx2/bin/libggml-cpu.so.0 (0x00007ff50b23d000)
	/lib64/ld-linux-x86-64.so.2 (0x00007ff50c3f9000)
"""  # of ldd


def shown(*rows: int) -> str:
    """In the form that llama-bench shows as JSON, less what is not read."""
    samples = [[5_000_000 * count, 4_000_400 * count] for count in rows]
    tests = [{"n_prompt": count, "n_gen": 0, "samples_ns": each} for count, each in zip(rows, samples, strict=True)]
    return json.dumps(tests)


def test_the_least_time_by_rows_counts() -> None:
    assert least_milliseconds(shown(*ROWS)) == {"1": 4.0, "2": 8.001, "4": 16.002, "8": 32.003}


@pytest.mark.parametrize("rows", [(), (1, 2), (1, 2, 4, 8, 16)])
def test_other_rows_than_were_asked_for_are_an_error(rows: tuple[int, ...]) -> None:
    with pytest.raises(SystemExit, match="not 1, 2, 4, 8"):
        least_milliseconds(shown(*rows))


def test_the_kernels_must_come_from_the_build() -> None:
    """A program with a fixed path to its libraries would measure the same kernels twice."""
    assert loads_from(LISTED, Path("/avx2/bin"))
    assert not loads_from(LISTED, Path("/peers/build/bin"))
    assert not loads_from(LISTED.replace("libggml-cpu.so.0 => ", "libggml-cpu.so.0 not found "), Path("/avx2/bin"))
    assert not loads_from("", Path("/avx2/bin"))
