"""OpenVINO GenAI on the CPU: plain and with the draft, on its continuous-batching backend.

The precision fp32 includes fp32 arithmetic and caches. Other precisions keep the processor's default arithmetic (bf16
if the processor has it), under which speculation may change the text. The variant "f32" selects fp32 arithmetic for
them.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.peers.protocol import MANY, PLAIN, Generation, PeerOptions, serve, split_method

EXACT_SETTINGS = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
CACHE_GB = 1


class OpenVinoGenAI:
    def __init__(self, options: PeerOptions) -> None:
        self._models = options.convert_once(lambda folder: convert(options, folder))
        self._library: Any = import_module("openvino_genai")
        self._tensor: Any = import_module("openvino").Tensor
        self._properties: dict[str, object] = {"INFERENCE_NUM_THREADS": options.threads}
        if options.precision == "fp32" or options.variant == "f32":
            self._properties |= EXACT_SETTINGS
        self._loaded: dict[str, Any] = {}
        self.version = f"openvino-genai {version('openvino-genai')}"
        self.methods, self.at_a_time = options.methods("draft"), MANY

    def generate(self, method: str, prompts: list[list[int]], max_tokens: int) -> Generation:
        kind, length = split_method(method)
        if kind not in (PLAIN, "draft"):
            raise ValueError(f"method {method!r} is not one of {', '.join(self.methods)}")
        config = self._library.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        if kind == "draft":
            config.num_assistant_tokens = length
        if len(prompts) > 1:
            return self._generate_all(kind, prompts, config)
        pipeline = self._pipeline(kind)
        start = perf_counter()
        ids = np.array(prompts, np.int64)
        inputs = self._library.TokenizedInputs(self._tensor(ids), self._tensor(np.ones_like(ids)))
        result = pipeline.generate(inputs, config)
        tokens = [int(token) for token in result.tokens[0]]
        seconds = perf_counter() - start
        return Generation([tokens], seconds, count(result))

    def _generate_all(self, kind: str, prompts: list[list[int]], config: Any) -> Generation:
        pipeline = self._batching(kind)
        start = perf_counter()
        ids = [self._tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results = pipeline.generate(ids, [config] * len(prompts))
        texts = [[int(token) for token in result.m_generation_ids[0]] for result in results]
        seconds = perf_counter() - start
        return Generation(texts, seconds, count(results[0]))  # each result has the counts of all texts together

    def _pipeline(self, kind: str) -> Any:
        """For one text at a time."""
        if kind not in self._loaded:
            # Prompts recur: the scheduler's configuration leaves no doubt that there is no prefix cache.
            settings = self._settings(kind) | {"scheduler_config": self._scheduler()}
            self._loaded[kind] = self._library.LLMPipeline(str(self._models / "target"), "CPU", **settings)
        return self._loaded[kind]

    def _batching(self, kind: str) -> Any:
        """For several texts at a time."""
        if (name := f"{kind} batching") not in self._loaded:
            self._loaded[name] = self._library.ContinuousBatchingPipeline(
                str(self._models / "target"), self._scheduler(), "CPU", self._settings(kind)
            )
        return self._loaded[name]

    def _settings(self, kind: str) -> dict[str, object]:
        settings = dict(self._properties)
        if kind == "draft":
            draft = str(self._models / "draft")
            settings["draft_model"] = self._library.draft_model(draft, "CPU", **self._properties)
        return settings

    def _scheduler(self) -> Any:
        scheduler = self._library.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching = CACHE_GB, False
        return scheduler


def count(result: Any) -> dict[str, float]:
    """The protocol's counters; none of plain decoding."""
    metrics = result.extended_perf_metrics
    if metrics is None:
        return {}
    return {"drafted": metrics.get_num_draft_tokens(), "accepted": metrics.get_num_accepted_tokens()}


def convert(options: PeerOptions, folder: Path) -> None:
    for role, source in options.checkpoints.items():
        export = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
        task = ["--task", "text-generation-with-past", "--weight-format", options.precision]
        # Matrices that its blocks of 128 do not divide take smaller ones, instead of an error.
        blocks = ["--group-size-fallback", "adjust"] if options.precision == "int4" else []
        output = folder / role
        subprocess.run([*export, "-m", str(source), *task, *blocks, str(output)], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    serve(OpenVinoGenAI)
