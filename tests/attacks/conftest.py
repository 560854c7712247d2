"""The server that attacks on connections share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from connections import OPTIONS, quiet_end
from serving import Served, faulty, served, with_infilling


@pytest.fixture(scope="module")
def pause(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that pauses the server's engine while it exists."""
    return tmp_path_factory.mktemp("pause") / "file"


@pytest.fixture(scope="module")
def server(tiny_bundle: Path, pause: Path) -> Iterator[Served]:
    """A server for the tests of a file. At the end its log must hold no traceback, whatever the tests did."""
    with served(with_infilling(tiny_bundle, pause.parent), *OPTIONS, program=faulty(pause)) as running:
        yield running
        quiet_end(running)
