"""Rounds at temperature 0 by the kernels, which the driver in libcuda's place executes from their PTX, against the
host's own code; and the images of all kernels of rounds."""

from __future__ import annotations

import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compared_rounds import PROMPT, changed, compared, ranking
from cuda_driver.machine import Machine
from scripted_rounds import COLUMNS, VOCABULARY

from draftwood.models.errors import EngineError
from draftwood.plugins.device_round import images
from draftwood.plugins.device_round.compile import DIGEST, digest
from draftwood.plugins.device_round.images import KERNELS, image, is_current
from draftwood.runtime.engines.rounds import RoundShape
from draftwood.runtime.engines.static.draws import Buffers

pytestmark = pytest.mark.usefixtures("no_faults")

SHAPES = [RoundShape(1, 1, 1), RoundShape(4, 4, 1), RoundShape(3, 5, 2), RoundShape(5, 15, 4), RoundShape(4, 6, 3)]
TEXTS = (PROMPT, (2, 7), (1, 8, 2, 8, 1, 8))
NOTICED = (AssertionError, EngineError, ValueError, IndexError, KeyError)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_rounds_are_those_of_the_host(shape: RoundShape, ties: bool, gpu: Machine) -> None:
    """Trees, accepted paths, caches, and what the draft has not read. Equal values are ordered as the host orders
    them."""
    assert compared(gpu, shape, ranking(ties=ties)) > 2


def test_a_trimmed_draft_proposes_tokens_of_the_target(gpu: Machine) -> None:
    kept = np.sort(np.random.default_rng(0).choice(VOCABULARY, COLUMNS, replace=False)).tolist()
    assert compared(gpu, RoundShape(3, 5, 2), ranking(kept_tokens=kept), kept_tokens=kept) > 0


@pytest.mark.parametrize("widest", [64, 16])
def test_texts_that_share_a_round_get_what_each_gets_alone(widest: int, gpu: Machine) -> None:
    """In a cache for four texts, of which columns are in use; as many texts as fit share a pass of the target."""
    area: dict[str, Any] = {"sequences": 4, "widest": widest, "used": 5}
    assert compared(gpu, RoundShape(3, 5, 2), ranking(ties=widest == 16), texts=TEXTS, **area) > 6


def test_a_text_alone_in_a_cache_for_several(gpu: Machine) -> None:
    assert compared(gpu, RoundShape(4, 4, 1), ranking(), sequences=2) > 2


@pytest.mark.full
@pytest.mark.parametrize("several", [False, True], ids=["one text", "several"])
def test_rounds_of_many_shapes(several: bool, gpu: Machine) -> None:
    rng = np.random.default_rng(several)
    for seed in range(50):
        depth, width, size = (int(rng.integers(1, most)) for most in ((5, 4, 9) if several else (7, 6, 25)))
        lengths = rng.integers(1, 20, rng.integers(1, 5)) if several else [5]
        texts = [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]
        area: dict[str, Any] = {"sequences": 4, "widest": 1 << int(rng.integers(4, 7)), "used": int(rng.integers(0, 3))}
        models = ranking(seed, bool(rng.integers(2)))
        compared(gpu, RoundShape(depth, size, width), models, texts=texts, **(area if several else {}))


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        ("expand", "setp.ge.f64", "setp.gt.f64"),  # a value as good as this one does not count
        ("expand", "setp.eq.f64", "setp.ne.f64"),  # the order of equal values
        ("unroll", "setp.gt.f64", "setp.lt.f64"),  # the worst nodes
        ("unroll", "setp.eq.f64", "setp.ne.f64"),
        ("tree_inputs", "mul.lo.s32", "add.s32"),  # a stride of the mask
        ("verify", "max.s32", "min.s32"),  # the child that matches
        ("commit", "mul.lo.s64", "add.s64"),  # a stride of the cache
    ],
)
def test_a_kernel_that_differs_would_be_noticed(
    kernel: str, old: str, new: str, gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(kernel, old, new, monkeypatch)
    with gpu.expecting(), pytest.raises((AssertionError, EngineError)):
        compared(gpu, RoundShape(3, 5, 2), ranking(ties=True))


NUMBERS = {
    "pending_inputs": ("columns", "width", "nodes", "layers", "accepted", "outputs", "texts", "sequence_rows"),
    "expand": ("columns", "layer", "width", "size", "num_names", "first_slot", "nodes", "layers", "ranked"),
    "unroll": ("layer", "size", "nodes"),
    "tree_inputs": ("rows", "columns", "read", "first", "chosen", "nodes", "spread", "texts", "sequence_rows"),
    "verify": ("columns", "size", "depth", "nodes", "accepted_rows"),
    "commit": ("tensor_words", "heads", "capacity", "row_words", "most", "read"),
}
WRONG = [  # some others make loops over wrong parents endless
    *(("pending_inputs", name) for name in ("layers", "accepted", "texts", "sequence_rows")),
    *(("expand", name) for name in ("columns", "first_slot", "ranked")),
    ("unroll", "nodes"),
    *(("tree_inputs", name) for name in ("read", "first", "chosen", "spread", "sequence_rows")),
    *(("verify", name) for name in ("size", "depth", "accepted_rows")),
    *(("commit", name) for name in ("capacity", "most", "read")),
]


@pytest.mark.parametrize(("kernel", "number"), WRONG)
def test_a_wrong_number_of_a_launch_would_be_noticed(
    kernel: str, number: str, gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, names = Buffers.launch, NUMBERS[kernel]

    def changed(self: Buffers, name: str, grid: Any, pointers: Any, numbers: tuple[int, ...]) -> None:
        assert name != kernel or len(numbers) == len(names)
        wrong = (
            value + (each == number and name == kernel) for each, value in zip_longest(names, numbers, fillvalue=0)
        )
        launch(self, name, grid, pointers, tuple(wrong)[: len(numbers)])

    monkeypatch.setattr(Buffers, "launch", changed)
    with gpu.expecting() as faults:
        try:
            compared(gpu, RoundShape(3, 5, 2), ranking(ties=True), texts=TEXTS, sequences=4, widest=16, used=5)
        except NOTICED:
            return
        assert faults


def test_the_images_are_compiled_from_these_kernels() -> None:
    """What git says was compiled, by the same release of Triton; another one may compile other code."""
    assert image("commit").text
    found, known = digest(), DIGEST.read_text()
    if found.split("by")[1] != known.split("by")[1]:
        pytest.skip(f"the images were not compiled by {known.split('by')[1]}")
    assert found == known, "python -m draftwood.plugins.device_round.compile --digest"


def test_images_of_other_sources_are_compiled_anew_and_a_machine_that_cannot_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in KERNELS:
        (tmp_path / f"{name}.ptx").write_text(image(name).text)
    assert is_current(tmp_path) and not is_current(tmp_path / "nowhere")
    (tmp_path / "commit.ptx").write_text(image("commit").text.replace("sources ", "sources 0"))
    assert not is_current(tmp_path)
    monkeypatch.setattr(images, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(RuntimeError, match="the kernels of rounds cannot be compiled"):
        image.__wrapped__("commit")


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_the_images_assemble_for_devices_without_spilling(capability: int, tmp_path: Path) -> None:
    """As a driver would assemble them, by the ptxas of the package triton."""
    triton = pytest.importorskip("triton")
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    for kernel in KERNELS:
        (tmp_path / "kernel.ptx").write_text(image(kernel).text)
        tool = folder / ("ptxas-blackwell" if capability >= 100 and (folder / "ptxas-blackwell").exists() else "ptxas")
        command = [str(tool), "-v", f"--gpu-name=sm_{capability}", "kernel.ptx", "-o", "kernel.cubin"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr and image(kernel).shared_bytes == 0, kernel
