"""Shared fixtures: a random tiny pair, the demo pair, and a third-party pair from the optional data folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from cuda_driver.machine import Machine

# How long an example takes says something about the machine and what else runs on it, nothing about the code.
settings.register_profile("draftwood", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("draftwood")

# The fixtures import their helpers themselves: these import torch and transformers, which takes seconds, and most tests
# need neither.


@pytest.fixture(scope="session")
def stories() -> Path:
    """A real third-party LLaMA of 260K parameters, with a distilled draft and its author's published text."""
    from bundling import optional

    return optional("stories260K")


@pytest.fixture(scope="session")
def stories_bundle(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from bundling import built

    return built(stories / "target", stories / "draft", tmp_path_factory.mktemp("stories") / "bundle")


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random `target` and `draft` that share a byte-level tokenizer."""
    return write_pair(tmp_path_factory.mktemp("pair"), add_bos=True)


@pytest.fixture(scope="session")
def tiny_bundle(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from bundling import built

    return built(tiny_pair / "target", tiny_pair / "draft", tmp_path_factory.mktemp("tiny") / "bundle")


@pytest.fixture(scope="session")
def no_bos_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose tokenizer puts nothing before a text."""
    from bundling import built

    folder = write_pair(tmp_path_factory.mktemp("no_bos"), add_bos=False)
    return built(folder / "target", folder / "draft", folder / "bundle")


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle that `make demo` builds."""
    from bundling import DEMO, built

    return built(DEMO / "target", DEMO / "draft", tmp_path_factory.mktemp("demo") / "bundle", DEMO / "head")


@pytest.fixture(scope="module")
def gpu() -> Iterator[Machine]:
    """A driver in the place of libcuda.so.1, and moves of rows by a function of the host."""
    from cuda_driver.library import stand_in
    from onnx_program import mover_image, mover_images

    from draftwood.runtime.engines.static import cuda

    machine = stand_in()
    machine.images |= mover_images()
    machine.is_present = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "compile_mover", mover_image)
        yield machine
    machine.is_present = False


@pytest.fixture
def no_faults(gpu: Machine) -> Iterator[None]:
    """The program under test does nothing wrong with the driver."""
    gpu.counts.clear()
    gpu.ran.clear()
    gpu.launches.clear()
    yield
    faults, gpu.faults[:] = list(gpu.faults), []
    assert not faults


def write_pair(folder: Path, add_bos: bool) -> Path:
    from checkpoints import write_checkpoint, write_tokenizer

    for role, seed in (("target", 0), ("draft", 1)):
        write_checkpoint(folder / role, "gqa", seed=seed)
        write_tokenizer(folder / role, add_bos=add_bos)
    return folder
