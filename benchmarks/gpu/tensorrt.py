"""TensorRT on a GPU in stages, each of which reports within a minute: a bundle of the demo pair is built, its plans are
loaded, their passes captured, the first token is timed, texts are compared, and at last their speed is measured.

Each stage runs in a process of its own, and finds the bundle that an earlier stage built.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np

from benchmarks.gpu.engine import CONFIGS, DEMO, counted_rounds, equal_tokens, read_demo_prompts
from benchmarks.gpu.report import Findings, NotPossible, require
from draftwood.models.bindings import DRAFT, TARGET
from draftwood.models.errors import ConfigError, EngineError
from draftwood.plugins.tensorrt import PACKAGES
from draftwood.runtime import LLM, SamplingParams, SpeculativeConfig
from draftwood.runtime.engines.passes import causal_batch
from draftwood.runtime.engines.static.cuda import CudaDevice
from draftwood.runtime.engines.static.engine import StaticEngine

TOKENS = 96
REQUESTS = 4


class Form(NamedTuple):
    """What a bundle is built with: whether with our kernel, and how many requests share a pass."""

    plugin: bool = True
    max_batch: int = 1
    precision: str = "fp16"


FORMS = {
    "our kernel": Form(),
    f"{REQUESTS} requests": Form(max_batch=REQUESTS),
    "TensorRT's attention": Form(plugin=False),
    "int8": Form(precision="int8"),
    "int4": Form(precision="int4"),
    "fp8": Form(precision="fp8"),
}


def check(backend: str, stage: str, form: str, folder: str) -> Findings:
    """Run a stage for a form of bundle, in `folder`. Raises NotPossible if a package is missing, if it does not support
    this GPU, or if an earlier stage built no bundle."""
    if importlib.util.find_spec(PACKAGES[backend]) is None:
        raise NotPossible(f"the package {backend} is not installed")
    try:
        capability = CudaDevice().compute_capability
    except EngineError as error:
        raise NotPossible(str(error)) from error
    bundle = Path(folder) / f"{backend}, {form}"
    if stage == "build":
        return build_bundle(bundle, backend, capability, form)
    if not bundle.exists():
        raise NotPossible("the bundle was not built")
    return STAGES[stage](bundle)


def build_bundle(output: Path, backend: str, capability: str, form: str) -> Findings:
    from draftwood.builder.engines.plan import check_compiler
    from draftwood.builder.options import BuildOptions
    from draftwood.builder.pipeline import build

    wanted = FORMS[form]
    if wanted.plugin and importlib.util.find_spec("triton") is None:
        raise NotPossible("OpenAI Triton, which compiles our kernel, is not installed")
    targets = (capability,) if backend == "tensorrt-rtx" else ()
    try:
        options = BuildOptions(
            DEMO / TARGET,
            DEMO / DRAFT,
            output,
            backend=backend,
            precision=wanted.precision,
            max_length=512,
            compute_capability=targets,
            plugin=wanted.plugin,
            max_batch=wanted.max_batch,
        )
        check_compiler(options.compile_options())
    except ConfigError as error:
        raise NotPossible(f"{backend} does not build for SM {capability}: {error}") from error
    begun = perf_counter()
    build(options, lambda step: lambda: None)
    seconds = round(perf_counter() - begun, 1)
    return Findings(f"{seconds} s, each plan executed and compared with torch", {"seconds": seconds})


def load_plans(bundle: Path) -> Findings:
    """Loading checks that every cache output shares the memory of its input."""
    begun = perf_counter()
    with LLM(bundle, CONFIGS["tree of 15"]) as llm:
        seconds, engines = round(perf_counter() - begun, 2), (llm.target, llm.draft)
        memory = {each.spec.role: each.memory._asdict() for each in engines if isinstance(each, StaticEngine)}
    require(len(memory) == 2, "the engines are no static engines")
    return Findings(f"{seconds} s, every cache is written in place", {"seconds": seconds, "memory": memory})


def capture_passes(bundle: Path) -> Findings:
    """Whether passes of some shapes become CUDA graphs, and whether a replay computes what the first run did."""
    with LLM(bundle, None) as llm:
        engine = llm.target
        require(isinstance(engine, StaticEngine), "the target is no static engine")
        differences = {}
        with captured_warnings() as refused:
            for width in engine.spec.widths:
                cache, runs = engine.new_cache(), []
                for _ in range(3):  # run directly, then captured, then replayed
                    output = engine.score(causal_batch(engine.spec, list(range(1, width + 1)), 0), cache)
                    runs.append(np.array(output.logits[0]))
                    cache.truncate(0)
                cache.close()
                differences[width] = float(max(np.abs(run - runs[0]).max() for run in runs))
    require(not refused, f"not captured: {'; '.join(refused)}")
    require(max(differences.values()) < 0.05, f"replays differ by {differences}")
    return Findings(f"passes of {', '.join(map(str, differences))} rows are captured", {"differences": differences})


@contextmanager
def captured_warnings() -> Iterator[list[str]]:
    """What engines warn of."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Handler(logging.WARNING)
    logging.getLogger("draftwood.engines").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("draftwood.engines").removeHandler(handler)


def time_first_token(bundle: Path) -> Findings:
    (text,) = read_demo_prompts(1)
    figures = {}
    with LLM(bundle, CONFIGS["tree of 15"]) as llm:
        for name in ("first request", "second request"):
            begun = perf_counter()
            next(llm.stream(text, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)))
            figures[name] = round(1000 * (perf_counter() - begun), 1)
    return Findings(", ".join(f"{name} {each} ms" for name, each in figures.items()), {"milliseconds": figures})


def compare_texts(bundle: Path) -> Findings:
    """Plain texts beside those of a tree, and of a chain by the device's rounds and by the host's."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    texts, shared = list(read_demo_prompts(REQUESTS)), dict[str, list[int]]()
    with LLM(bundle, None) as llm:
        plain = llm.generate(texts, replace(params, logprobs=2))
    with LLM(bundle, CONFIGS["tree of 15"]) as llm:
        shared["tree"] = equal_tokens(plain, llm.generate(texts, params), "the tree")
    with counted_rounds() as rounds, LLM(bundle, CONFIGS["chain of 4"]) as llm:
        shared["chain"] = equal_tokens(plain, llm.generate(texts, params), "the chain")
        on_device = rounds.call_count
        # A request for log-probabilities needs logits, which only rounds of the host bring.
        by_host = llm.generate(texts, replace(params, logprobs=1))
        shared["chain, host"] = equal_tokens(plain, by_host, "the chain by the host")
        require(rounds.call_count == on_device, "the rounds to compare with ran on the device, too")
        devices = [each.device for each in (llm.target, llm.draft) if isinstance(each, StaticEngine)]
        expected = all(each.runs_rounds for each in devices)
    require(bool(on_device) == expected, f"{on_device} rounds ran on the device")
    summary = f"{on_device} rounds on the device; tokens of {TOKENS} equal to plain ones: {shared}"
    return Findings(summary, {"same_tokens": shared, "device_rounds": on_device})


def measure_speed(bundle: Path) -> Findings:
    """Tokens per second of all texts together."""
    plain, speculative = (run_texts(bundle, config) for config in (None, CONFIGS["tree of 15"]))
    figures = {"tokens_per_second": round(speculative, 1), "plain_tokens_per_second": round(plain, 1)}
    return Findings(f"{speculative:.1f} tokens/s, plain {plain:.1f}", figures)


def run_texts(bundle: Path, config: SpeculativeConfig | None) -> float:
    """Tokens per second of all texts together."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    texts = list(read_demo_prompts(REQUESTS))
    with LLM(bundle, config) as llm:
        llm.generate(texts, params)  # captures the graphs
        begun = perf_counter()
        llm.generate(texts, params)
        return REQUESTS * TOKENS / (perf_counter() - begun)


STAGES: dict[str, Callable[[Path], Findings]] = {
    "load": load_plans,
    "capture": capture_passes,
    "first token": time_first_token,
    "texts": compare_texts,
    "speed": measure_speed,
}
