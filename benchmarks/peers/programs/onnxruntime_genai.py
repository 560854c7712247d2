"""ONNX Runtime GenAI: its model builder's graphs for the CPU, plain and with the draft.

The draft is a section of the target's genai_config.json, so plain and speculative decoding load models of their own.
The length of a proposal is fixed per request. The rule that adapts it is off, as with the other peers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.peers.protocol import PLAIN, Generation, PeerOptions, serve, split_method

SETTINGS = "genai_config.json"


class OnnxRuntimeGenAI:
    def __init__(self, options: PeerOptions) -> None:
        self._options = options
        self._models = options.convert_once(self._convert)
        self._library: Any = import_module("onnxruntime_genai")
        self._loaded: dict[str, Any] = {}
        self.version = f"onnxruntime-genai {version('onnxruntime-genai')}, onnxruntime {version('onnxruntime')}"
        self.methods, self.at_a_time = options.methods("draft"), 1

    def generate(self, method: str, prompts: list[list[int]], max_tokens: int) -> Generation:
        (prompt,) = prompts
        kind, length = split_method(method)
        if kind not in (PLAIN, "draft"):
            raise ValueError(f"method {method!r} is not one of {', '.join(self.methods)}")
        if kind not in self._loaded:
            self._loaded[kind] = self._library.Model(str(self._models / kind))
        start = perf_counter()
        params = self._library.GeneratorParams(self._loaded[kind])
        total = len(prompt) + max_tokens
        params.set_search_options(do_sample=False, max_length=total, min_length=total)
        if kind == "draft":
            params.set_speculative_options(max_draft_tokens=length)
        generator = self._library.Generator(self._loaded[kind], params)
        generator.append_tokens(prompt)
        while not generator.is_done():
            generator.generate_next_token()
        tokens = [int(token) for token in generator.get_sequence(0)[len(prompt) :]]
        seconds = perf_counter() - start
        counters = {}
        if kind == "draft":
            stats = generator.get_speculative_stats()
            counters = {"drafted": stats["draft_tokens_proposed"], "accepted": stats["draft_tokens_accepted"]}
        return Generation([tokens], seconds, counters)

    def _convert(self, folder: Path) -> None:
        plain, both = folder / PLAIN, folder / "draft"
        self._build("target", plain, folder / "cache")
        shutil.copytree(plain, both, copy_function=os.link)  # hard links: one file on the disk and in the page cache
        self._build("draft", both / "draft", folder / "cache")
        whole, draft = read_settings(plain), read_settings(both / "draft")
        whole["model"]["draft"] = draft["model"]["decoder"] | {"filename": "draft/model.onnx"}
        (both / SETTINGS).unlink()  # a hard link: writing would change the plain model's
        write_settings(both, whole)

    def _build(self, role: str, output: Path, cache: Path) -> None:
        source = self._options.checkpoints[role]
        build = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(output)]
        chosen = ["-p", self._options.precision, "-e", "cpu", "-c", str(cache)]
        subprocess.run([*build, *chosen], check=True, stdout=sys.stderr)
        settings = read_settings(output)
        settings["model"]["decoder"]["session_options"]["intra_op_num_threads"] = self._options.threads
        write_settings(output, settings)


def read_settings(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    return settings


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2), encoding="utf-8")


if __name__ == "__main__":
    serve(OnnxRuntimeGenAI)
