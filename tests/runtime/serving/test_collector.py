"""A server's process leaves what it has loaded out of garbage collections; a program that uses the library does not."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

from serving import served

from draftwood.runtime.serving.collector import freeze_loaded

FREEZES = """
import gc, sys
from draftwood.cli.main import main

freeze = gc.freeze

def told():
    freeze()
    print("frozen", flush=True, file=sys.stderr)

gc.freeze = told
sys.exit(main(sys.argv[1:]))
"""


class Node:
    """A part of a cycle."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_garbage_is_freed_before_the_rest_is_frozen() -> None:
    kept, lost = Node(), weakref.ref(Node())
    before = gc.get_freeze_count()
    try:
        for _ in range(100):  # while another thread collects, nobody else can
            freeze_loaded()
            if lost() is None:
                break
            gc.unfreeze()
        assert lost() is None and gc.get_freeze_count() > before
        assert not any(each is kept for each in gc.get_objects())
    finally:
        gc.unfreeze()


def test_a_server_freezes_what_it_has_loaded(tiny_bundle: Path) -> None:
    with served(tiny_bundle, program=("-c", FREEZES)) as server:
        assert server.process.stderr is not None
        assert server.process.stderr.readline().startswith("frozen")
