"""llama.cpp's weight formats for front.py: its own programs, on files that its llama-quantize makes."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from gguf import GGUFReader

from benchmarks.peers.client import post
from benchmarks.peers.server import Server
from benchmarks.precision.texts import WINDOW
from draftwood.runtime.text.tokenizer import Tokenizer

FORMATS = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_1", "IQ4_NL", "Q4_0")
ROOT = Path(__file__).resolve().parents[2]
# Of llama-perplexity: divergence, best tokens in per cent, perplexity.
SHOWN = (r"Mean\s+KLD:\s+(\S+)", r"Same top p:\s+(\S+)", r"Mean PPL\(Q\)\s+:\s+(\S+)")
ATTEMPTS = 5  # its last lines are lost where it ends before its log was written, which happens on a busy machine


class Decoded(NamedTuple):
    # Greedy text.
    tokens: list[int]
    # Tokens per second after the prompt.
    speed: float


Complete = Callable[[list[int], int], Decoded]  # of a prompt and a number of tokens
Divergence = dict[str, float]  # kl, top, loss: see front.score


class LlamaCpp:
    """One installation (benchmarks/peers/setup/llama.cpp.sh) and the files of one checkpoint in `work`."""

    def __init__(self, home: Path, checkpoint: Path, work: Path, threads: int) -> None:
        self._home, self._checkpoint, self._work, self._threads = home.resolve(), checkpoint, work, threads

    def file(self, form: str) -> Path:
        """The checkpoint in a format, made once."""
        path = self._work / f"{form}.gguf"
        if path.is_file():
            return path
        unfinished = path.with_suffix(".unfinished")
        if form == "F32":
            python = str(self._home / "venv" / "bin" / "python")
            convert = [python, "-m", "benchmarks.precision.convert_gguf", str(self._home / "source")]
            self._run([*convert, str(self._checkpoint.resolve()), "--outfile", str(unfinished), "--outtype", "f32"])
        else:
            self._run([self._program("llama-quantize"), str(self.file("F32")), str(unfinished), form])
        unfinished.rename(path)
        return path

    def bits(self, form: str) -> float:
        """Bits of a weight in the matrices of a pass: all but an embedding beside a projection of its own."""
        tensors = {tensor.name: tensor for tensor in GGUFReader(self.file(form)).tensors if len(tensor.shape) > 1}
        if "output.weight" in tensors:
            del tensors["token_embd.weight"]
        weights = sum(int(tensor.n_elements) for tensor in tensors.values())
        return 8 * sum(int(tensor.n_bytes) for tensor in tensors.values()) / weights

    def divergence(self, form: str, name: str, windows: list[list[int]]) -> Divergence:
        """What llama-perplexity says of a text: see front.score. Its F32 model is the reference."""
        text = self._work / f"{name}.txt"
        with Tokenizer.load(self._checkpoint) as tokenizer:
            text.write_text(tokenizer.decode(list(chain.from_iterable(windows))) + " and so on", encoding="utf-8")
        base = self._work / f"{name}.logits"
        common = ["-f", str(text), "-c", str(WINDOW), "--chunks", str(len(windows)), "-t", str(self._threads)]
        program = [self._program("llama-perplexity"), *common, "--kl-divergence-base"]
        if not base.is_file():
            unfinished = base.with_suffix(".unfinished")
            self._run([*program, str(unfinished), "-m", str(self.file("F32"))])
            unfinished.rename(base)
        for _ in range(ATTEMPTS):
            shown = self._run([*program, str(base), "-m", str(self.file(form)), "--kl-divergence"])
            found = [re.search(pattern, shown) for pattern in SHOWN]
            divergence, same, perplexity = (float(match[1]) if match else math.nan for match in found)
            if all(found):
                return {"kl": divergence, "top": same / 100, "loss": math.log(perplexity)}
        raise RuntimeError(f"llama-perplexity shows no figures:\n{shown[-2000:]}")

    @contextmanager
    def decoder(self, form: str) -> Iterator[Complete]:
        """A llama-server for one sequence."""
        threads = self._threads
        arguments = ["-m", self.file(form), "-c", 1024, "-np", 1, "-t", threads, "-tb", threads]
        with Server([self._program("llama-server"), *map(str, arguments)], self._work / "server.txt") as server:
            yield partial(complete, server.url)

    def _program(self, name: str) -> str:
        return str(self._home / "build" / "bin" / name)

    def _run(self, command: list[str]) -> str:
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        if result.returncode:
            raise RuntimeError(f"{command[0]} failed:\n{(result.stdout + result.stderr)[-2000:]}")
        return result.stdout + result.stderr


def complete(url: str, prompt: list[int], tokens: int) -> Decoded:
    """Greedy text of a server, and tokens per second after the prompt, by its own clock."""
    request = {"prompt": prompt, "n_predict": tokens, "temperature": 0.0, "samplers": ["temperature"]}
    reply = post(f"{url}/completion", request | {"cache_prompt": False, "return_tokens": True, "ignore_eos": False})
    return Decoded(list(reply["tokens"]), float(reply["timings"]["predicted_per_second"]))
