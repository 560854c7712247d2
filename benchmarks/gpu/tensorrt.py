"""TensorRT in a GPU check: build the demo pair's bundle, load it, run it, and compare texts."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.gpu.engine import CONFIGS, DEMO, parting, prompts
from benchmarks.gpu.report import Findings, NotPossible, require
from draftwood.models.bindings import DRAFT, TARGET
from draftwood.models.errors import ConfigError, EngineError
from draftwood.plugins.tensorrt import PACKAGES
from draftwood.runtime import LLM, SamplingParams
from draftwood.runtime.engines.cuda import CudaDevice

PRECISION, TOKENS = "fp16", 96
REQUESTS = 4
# How bundles are built: with our kernel or without, and for how many requests at a time.
FORMS = {"our kernel": (True, 1), f"{REQUESTS} requests": (True, REQUESTS), "TensorRT's attention": (False, 1)}


def check(backend: str) -> Findings:
    """Both forms of attention, TensorRT's own and, where Triton is there to compile it, our kernel; that one for
    requests in turn and for requests that share passes. Raises NotPossible where a package is missing or does not serve
    this GPU."""
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
                figures[name] = one_bundle(Path(folder) / name, backend, capability, plugin, max_batch)
    text = "; ".join(f"{name}: {each['tokens_per_second']} tokens/s" for name, each in figures.items())
    return Findings(f"{backend} {PRECISION}, {text}", {backend: figures})


def one_bundle(output: Path, backend: str, capability: str, plugin: bool, max_batch: int) -> dict[str, Any]:
    """Build, load and run one bundle. Tokens per second are those of all texts, by the clock."""
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
    texts = prompts(REQUESTS)
    with LLM(output, None) as plain, LLM(output, CONFIGS["tree of 7"]) as speculative:
        for llm in (plain, speculative):  # captures the graphs
            llm.generate(list(texts), params)
        begun = perf_counter()
        wanted = plain.generate(list(texts), params)
        between = perf_counter()
        found = speculative.generate(list(texts), params)
        ended = perf_counter()
    # Half precision may part at a near tie; most of a text must agree.
    shared = [parting(one.token_ids, other.token_ids) for one, other in zip(found, wanted, strict=True)]
    require(max(shared) > TOKENS // 4, f"speculative and plain text part at tokens {shared}")
    return {
        "tokens_per_second": round(sum(len(each.token_ids) for each in found) / (ended - between), 1),
        "plain_tokens_per_second": round(sum(len(each.token_ids) for each in wanted) / (between - begun), 1),
        "same_tokens": shared,
    }
