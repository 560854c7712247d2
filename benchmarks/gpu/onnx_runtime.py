"""ONNX Runtime's CUDA provider with caches on the GPU: where its nodes run, its texts, and tokens per second."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import onnxruntime

from benchmarks.gpu.engine import CONFIGS, DEMO, equal_tokens, read_demo_prompts
from benchmarks.gpu.report import Findings, NotPossible
from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build
from draftwood.models.bindings import DRAFT, TARGET
from draftwood.models.errors import EngineError
from draftwood.runtime import LLM, RequestOutput, SamplingParams
from draftwood.runtime.engines.onnx.onnxruntime import GPU_PACKAGE, GPU_RELEASE, PROVIDERS
from draftwood.runtime.speculation.config import SpeculativeConfig

TOKENS, REQUESTS = 96, 4
CONFIG = CONFIGS["tree of 15"]


def check(precision: str, provider: str) -> Findings:
    """Raises NotPossible where the provider is missing. Texts may part at a near tie alone."""
    if PROVIDERS[provider].name not in onnxruntime.get_available_providers():
        fix = f"pip install '{GPU_PACKAGE}>={GPU_RELEASE}'"
        raise NotPossible(f"this onnxruntime has no {PROVIDERS[provider].name}: {fix}")
    with TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        build(BuildOptions(DEMO / TARGET, DEMO / DRAFT, bundle, "onnxruntime", precision), lambda step: lambda: None)
        try:
            LLM(bundle, CONFIG, provider=provider).close()
        except EngineError as error:
            raise NotPossible(str(error)) from error
        elsewhere = {role: nodes_elsewhere(bundle / f"{role}.onnx", provider) for role in (TARGET, DRAFT)}
        plain, plain_speed = run_texts(bundle, None, provider)
        speculative, speed = run_texts(bundle, CONFIG, provider)
        by_cpu, _ = run_texts(bundle, None, "cpu")
    shared = equal_tokens(plain, speculative, "the speculative texts")
    as_cpu = equal_tokens(plain, by_cpu, "the CPU's texts")
    figures = {
        "nodes_elsewhere": elsewhere,
        "same_tokens": shared,
        "same_tokens_as_cpu": as_cpu,
        "tokens_per_second": round(speed, 1),
        "plain_tokens_per_second": round(plain_speed, 1),
    }
    count = sum(sum(nodes.values()) for nodes in elsewhere.values())
    summary = f"{count} nodes on another provider; equal tokens of {TOKENS}: {shared}, as on the CPU: {as_cpu}; "
    return Findings(summary + f"{speed:.1f} tokens/s, plain {plain_speed:.1f}", figures)


def nodes_elsewhere(graph: Path, provider: str) -> dict[str, int]:
    """The operators that run on another provider, and their numbers."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = onnxruntime.InferenceSession(str(graph), options, providers=[PROVIDERS[provider].name])
    parts = session.get_provider_graph_assignment_info()
    found = (part for part in parts if part.ep_name != PROVIDERS[provider].name)
    return dict(Counter(node.op_type for part in found for node in part.get_nodes()))


def run_texts(bundle: Path, config: SpeculativeConfig | None, provider: str) -> tuple[list[RequestOutput], float]:
    """Texts that share passes, with log-probabilities, and their tokens per second without."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    texts = list(read_demo_prompts(REQUESTS))
    with LLM(bundle, config, provider=provider) as llm:
        llm.generate(texts, params)  # the first passes of a shape take longer
        begun = perf_counter()
        llm.generate(texts, params)
        speed = REQUESTS * TOKENS / (perf_counter() - begun)
        return llm.generate(texts, replace(params, logprobs=2)), speed
