"""The command that adds packages names a checkout or a wheel, not an index that has no release."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from draftwood.plugins import installation
from draftwood.plugins.installation import install


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (
            {"url": "file:///home/a%20b/draftwood", "dir_info": {"editable": True}},
            "-e '/home/a b/draftwood[cpu,serve]'",
        ),
        ({"url": "file:///src/draftwood", "dir_info": {}}, "'/src/draftwood[cpu,serve]'"),
        (
            {"url": "file:///d/draftwood-0.1.0-py3-none-any.whl", "archive_info": {}},
            "'/d/draftwood-0.1.0-py3-none-any.whl[",
        ),
        (
            {"url": "https://x.org/draftwood-0.1.0.whl", "archive_info": {}},
            "'https://x.org/draftwood-0.1.0.whl[cpu,serve]'",
        ),
        (None, "'DRAFTWOOD.whl[cpu,serve]'"),
    ],
)
def test_the_command_is_for_this_installation(
    origin: dict[str, Any] | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = None if origin is None else json.dumps(origin)
    found = SimpleNamespace(read_text=lambda name: text)
    monkeypatch.setattr(installation, "distribution", lambda name: found)
    assert install("cpu", "serve").startswith(f"pip install {command}")
