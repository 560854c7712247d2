"""What a measurement was taken on, and where its figures go."""

from __future__ import annotations

import json
import os
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("draftwood", "onnxruntime", "openvino", "numpy", "torch")


def machine() -> dict[str, Any]:
    """Date, processor, cores and package versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": date.today().isoformat(),
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
    }


def write(output: Path, name: str, figures: dict[str, Any]) -> None:
    """Figures of one benchmark as `<name>.json`."""
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{name}.json").write_text(json.dumps(machine() | figures, indent=2) + "\n", encoding="utf-8")
