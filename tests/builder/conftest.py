"""A distilled draft, for all files that need one: to train it takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from distilling import distilled, options, write_target

from draftwood.builder.distillation.distill import torch_settings


@pytest.fixture(scope="session")
def distill_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("distill") / "target")


@pytest.fixture(scope="session")
def distilled_draft(distill_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trimmed draft, with its state beside it. Copy both before you change them."""
    folder = tmp_path_factory.mktemp("draft") / "draft"
    with torch_settings(1):
        distilled(options(distill_target, folder))
    return folder
