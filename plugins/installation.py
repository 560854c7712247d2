"""How this installation gets further packages: there is no release on an index, whose name anybody could take."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote


def install(*extras: str) -> str:
    """The command that adds extras to this installation, from its checkout or its wheel."""
    try:
        origin = json.loads(distribution("draftwood").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    url, wanted = str(origin.get("url", "")), ",".join(extras)
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {editable}'{unquote(url.removeprefix('file://'))}[{wanted}]'"
    return f"pip install '{url.removeprefix('file://') or 'DRAFTWOOD.whl'}[{wanted}]'"
