"""Shared fixtures: random checkpoints, and the optional data folder beside the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "data"


@pytest.fixture(scope="session")
def stories() -> Path:
    """A real third-party LLaMA of 260K parameters, with a distilled draft and its author's published text."""
    folder = SHARED / "stories260K"
    if not folder.is_dir():
        pytest.skip("the shared data folder is not beside this checkout")
    return folder
