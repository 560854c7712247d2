"""TensorRT on a GPU: build the demo pair's bundle, run it, and compare texts with and without speculation."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.gpu.engine import CONFIGS, DEMO, find_difference, read_demo_prompts
from benchmarks.gpu.report import Findings, NotPossible, require
from draftwood.models.bindings import DRAFT, TARGET
from draftwood.models.errors import ConfigError, EngineError
from draftwood.plugins.tensorrt import PACKAGES
from draftwood.runtime import LLM, SamplingParams
from draftwood.runtime.engines.cuda import CudaDevice

PRECISION, TOKENS = "fp16", 96
REQUESTS = 4
# Name of a bundle: whether it has our kernel, and how many requests share a pass.
FORMS = {"our kernel": (True, 1), f"{REQUESTS} requests": (True, REQUESTS), "TensorRT's attention": (False, 1)}


def check(backend: str) -> Findings:
    """Check every form of bundle; those with our kernel only if OpenAI Triton is installed to compile it. Raises
    NotPossible if a package is missing or does not support this GPU."""
    if importlib.util.find_spec(PACKAGES[backend]) is None:
        raise NotPossible(f"the package {backend} is not installed")
    try:
        capability = CudaDevice().compute_capability
    except EngineError as error:
        raise NotPossible(str(error)) from error
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (plugin, max_batch) in FORMS.items():
            if not plugin or importlib.util.find_spec("triton"):
                figures[name] = measure_bundle(Path(folder) / name, backend, capability, plugin, max_batch)
    text = "; ".join(f"{name}: {each['tokens_per_second']} tokens/s" for name, each in figures.items())
    return Findings(f"{backend} {PRECISION}, {text}", {backend: figures})


def measure_bundle(output: Path, backend: str, capability: str, plugin: bool, max_batch: int) -> dict[str, Any]:
    """Build, load and run one bundle. Tokens per second are those of all texts together."""
    from draftwood.builder.compile import check_compiler
    from draftwood.builder.options import BuildOptions
    from draftwood.builder.pipeline import build

    targets = (capability,) if backend == "tensorrt-rtx" else ()
    try:
        options = BuildOptions(
            DEMO / TARGET,
            DEMO / DRAFT,
            output,
            backend=backend,
            precision=PRECISION,
            max_length=512,
            compute_capability=targets,
            plugin=plugin,
            max_batch=max_batch,
        )
        check_compiler(options.compile_options())
    except ConfigError as error:
        raise NotPossible(f"{backend} does not build for SM {capability}: {error}") from error
    build(options, lambda step: lambda: None)
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    texts = read_demo_prompts(REQUESTS)
    with LLM(output, None) as plain, LLM(output, CONFIGS["tree of 7"]) as speculative:
        for llm in (plain, speculative):  # captures the graphs
            llm.generate(list(texts), params)
        begun = perf_counter()
        wanted = plain.generate(list(texts), params)
        between = perf_counter()
        found = speculative.generate(list(texts), params)
        ended = perf_counter()
    # Texts in half precision may differ after a near tie; one must agree for longer than a quarter.
    shared = [find_difference(one.token_ids, other.token_ids) for one, other in zip(found, wanted, strict=True)]
    require(max(shared) > TOKENS // 4, f"speculative and plain text part at tokens {shared}")
    return {
        "tokens_per_second": round(sum(len(each.token_ids) for each in found) / (ended - between), 1),
        "plain_tokens_per_second": round(sum(len(each.token_ids) for each in wanted) / (between - begun), 1),
        "same_tokens": shared,
    }
