"""A small target, and a draft that was distilled for it: to train it takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from distilling import distilled, options, write_target

from draftwood.builder.torch_settings import torch_settings


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("distill") / "target")


@pytest.fixture(scope="session")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trimmed draft, with its state beside it. Copy both before you change them."""
    folder = tmp_path_factory.mktemp("draft") / "draft"
    with torch_settings(1):
        distilled(options(target, folder))
    return folder


@pytest.fixture(scope="session")
def head(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that reads its target's states, with its state beside it. Copy both before you change them."""
    folder = tmp_path_factory.mktemp("head") / "draft"
    with torch_settings(1):
        distilled(options(target, folder, kind="states", hidden=None))
    return folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models that are too small for several threads."""
    with torch_settings(1):
        yield
