"""The LLM of most tests: its engines are functions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from draftwood.runtime import LLM, SpeculativeConfig


@pytest.fixture(scope="module", params=["pooled", "one by one"])
def llm(tiny_bundle: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Requests whose passes run together, and requests whose engines cannot do that."""
    from fakes import POOLED
    from together import fake_engine

    from draftwood.runtime.bundle.bundle import EngineBundle
    from draftwood.runtime.engines.backends import BACKENDS, UNLISTED

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineBundle, "open_engine", fake_engine)
        patch.setitem(BACKENDS, "fake", POOLED if request.param == "pooled" else UNLISTED)
        yield LLM(tiny_bundle, SpeculativeConfig(budget="fixed"))
