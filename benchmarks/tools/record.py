"""Write the figures of a benchmark, together with the machine that it ran on, into a dated file."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterable, Mapping
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

PACKAGES = (
    "draftwood",
    "numpy",
    "torch",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "safetensors",
    "tokenizers",
    "triton",
    "cuda-bindings",
    "tensorrt",
    "tensorrt-rtx",
    "polygraphy",
)


def describe_machine() -> dict[str, Any]:
    """Date, processor, number of usable cores, and the versions of Python and of every package that is installed."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": date.today().isoformat(),
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **package_versions(),
    }


def package_versions() -> dict[str, str]:
    """Version of each of PACKAGES that is installed."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """The parser of a script, whose --help begins with the script's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_output(parser: argparse.ArgumentParser, name: str, required: bool = True) -> None:
    """Add the options --output and --name, which say where `write_results` writes. name: the default of --name."""
    parser.add_argument("--output", type=Path, metavar="DIR", required=required, help="folder for the results")
    parser.add_argument("--name", default=name, help="of the files in DIR, the date is appended (default %(default)s)")


class Row(Protocol):
    """A NamedTuple of figures."""

    def _asdict(self) -> dict[str, Any]: ...


def rows_to_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows of a table as objects; floats have three decimals."""
    return [
        {name: round(value, 3) if isinstance(value, float) else value for name, value in row._asdict().items()}
        for row in rows
    ]


def write_results(output: Path, name: str, figures: Mapping[str, Any]) -> Path:
    """Write `<name>_<date>.json` with the machine's description and the figures. Returns the file."""
    content = {**describe_machine(), **figures}
    output.mkdir(parents=True, exist_ok=True)
    file = output / f"{name}_{content['date']}.json"
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return file
