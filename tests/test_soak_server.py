"""Half a minute of everything at once against a real server. `tests/soak.py` is the same for an hour."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the [serve] extra")
pytest.importorskip("httpx", reason="needs httpx")


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads the size of a process from /proc")
def test_texts_stay_right_and_a_server_as_large_as_before(tmp_path: Path) -> None:
    from soak import native_demo, soak

    found = soak(native_demo(tmp_path / "bundle"), seconds=30, every=5)
    assert not found["complaints"], found["first_complaints"]
    assert found["texts_compared"] > 20 and found["texts_wrong"] == 0 and found["exit_code"] == 0
