"""OpenVINO GenAI's weight formats for front.py: optimum-intel exports them, and openvino_program.py runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import log_softmax

from benchmarks.precision.front_peer import Complete, Decoded, Divergence, LogProbs, mean, score
from benchmarks.precision.texts import SCORED

FORMATS = ("OpenVINO int8", "OpenVINO int4")
ROOT = Path(__file__).resolve().parents[2]


class OpenVino:
    """One installation (benchmarks/peers/setup/openvino-genai.sh) and the exports of one checkpoint in `work`."""

    formats, label, marker = FORMATS, "OpenVINO GenAI", "^"

    def __init__(self, home: Path, checkpoint: Path, work: Path, threads: int) -> None:
        self._bin, self._checkpoint, self._work = home.resolve() / "venv" / "bin", checkpoint, work
        self._threads = threads

    def folder(self, form: str) -> Path:
        """The checkpoint in a format, exported once with the defaults of that format."""
        path = self._work / form.replace(" ", "-")
        if path.is_dir():
            return path
        unfinished, precision = path.with_suffix(".unfinished"), form.split()[-1]
        export = [str(self._bin / "optimum-cli"), "export", "openvino", "-m", str(self._checkpoint.resolve())]
        # Matrices that the format's blocks of 128 do not divide take smaller ones, instead of an error.
        blocks = ["--group-size-fallback", "adjust"] if precision == "int4" else []
        task = ["--task", "text-generation-with-past", "--weight-format", precision]
        subprocess.run([*export, *task, *blocks, str(unfinished)], check=True, stdout=sys.stderr)
        unfinished.rename(path)
        return path

    def bits(self, form: str) -> float:
        with self._program(form) as ask:
            return float(ask({"kind": "bits"})["bits"])

    def divergence(self, form: str, name: str, windows: list[list[int]], exact: LogProbs) -> Divergence:
        file, scores = self._work / f"{name}.npy", []
        with self._program(form) as ask:
            for window in windows:
                ask({"kind": "logits", "ids": window, "file": str(file.resolve())})
                scores.append(score(exact(window), log_softmax(np.load(file)[SCORED], axis=-1), window))
        file.unlink()
        return mean(scores)

    @contextmanager
    def decoder(self, form: str) -> Iterator[Complete]:
        with self._program(form) as ask:
            yield partial(complete, ask)

    @contextmanager
    def _program(self, form: str) -> Iterator[Any]:
        file = Path(__file__).with_name("openvino_program.py")
        command = [str(self._bin / "python"), str(file), str(self.folder(form)), str(self._threads)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            yield partial(ask, process)
            assert process.stdin is not None
            process.stdin.close()  # ends it


def ask(process: subprocess.Popen[str], request: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("OpenVINO's program ended without an answer; its last lines are on stderr")
    answer: dict[str, Any] = json.loads(line)
    return answer


def complete(ask: Any, prompt: list[int], tokens: int) -> Decoded:
    answer = ask({"kind": "text", "ids": prompt, "tokens": tokens})
    return Decoded(answer["tokens"], answer["speed"])
