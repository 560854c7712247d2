"""How this installation gets further packages: there is no release on an index, whose name anybody could take."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution, distributions
from urllib.parse import unquote

EXTRAS = {"torch": "train", **dict.fromkeys(("onnx", "onnx_ir", "onnxruntime"), "onnxruntime")}  # by module


def install(*extras: str) -> str:
    """The command that adds extras to this checkout's or wheel's installation; without any, what all have."""
    try:
        origin = json.loads(distribution("draftwood").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    url, wanted = str(origin.get("url", "")), f"[{','.join(extras)}]" if extras else ""
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {editable}'{unquote(url.removeprefix('file://'))}{wanted}'"
    return f"pip install '{url.removeprefix('file://') or 'DRAFTWOOD.whl'}{wanted}'"


def lacking(error: ModuleNotFoundError) -> str:
    """The module that is not there, and the command that brings it."""
    extra = EXTRAS.get(str(error.name).partition(".")[0])
    if error.name in ("onnx", "onnx_ir") and any(distributions(name="onnxruntime-gpu")):
        extra = "gpu"  # both have one package folder
    return f"{error.name}: {install() if extra is None else install(extra)}"
