"""GGUF files as Hugging Face folders in bf16, for programs that read no GGUF."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.peers import inside
from benchmarks.peers.program import Conditions, SetupError, installed

INSIDE = Path(inside.__file__).parent
ROOT = INSIDE.parents[2]


def as_folder(model: Path, conditions: Conditions) -> Path:
    """Made once, by transformers. Raises SetupError when it cannot be."""
    made = conditions.work / "models" / f"{model.stem}-bf16"
    if not made.is_dir():
        python = interpreter("transformers", conditions)
        unfinished = made.with_suffix(".unfinished")
        command = [python, INSIDE / "write_folder.py", model, unfinished]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SetupError(f"{model.name} does not become a folder: {done.stderr.strip()[-300:]}")
        unfinished.rename(made)
    return made


def interpreter(name: str, conditions: Conditions) -> Path:
    """Of a peer's environment. Raises SetupError that names the script which makes it."""
    return installed(conditions.work / name / "venv" / "bin" / "python", name, conditions)
