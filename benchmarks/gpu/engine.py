"""The torch engine on a GPU: logits against the CPU, texts with and without speculation, speed at a real model size."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.report import Findings, require
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.models.bindings import COMPACT, DRAFT, TARGET, output_names
from draftwood.models.config import LlamaConfig
from draftwood.models.llama import dense_tree_attention
from draftwood.runtime import SamplingParams, SpecDecodeStats, SpeculativeConfig
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.engines.base import Engine, EngineSpec, TokenBatch
from draftwood.runtime.engines.passes import prefill
from draftwood.runtime.engines.torch import TorchEngine, Weights
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.text.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
MAX_LENGTH = 768  # tokens of prompt and output; the demo pair was trained for 1024
CAPACITY = MAX_LENGTH + 4 * WIDTHS[-1]
# Largest difference to the fp32 CPU engine, relative to the largest logit.
LOGIT_TOLERANCES = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}
CONFIGS = {
    "chain of 4": SpeculativeConfig("chain", budget="fixed", max_draft_len=4),
    "tree of 7": SpeculativeConfig("topk", budget="fixed", max_total_draft_tokens=7, max_draft_len=5),
    "tree of 31, merged": SpeculativeConfig(
        "topk", merge="gsd", budget="fixed", max_total_draft_tokens=31, max_draft_len=8, frontier_width=8
    ),
}


class EnginePair(NamedTuple):
    target: Engine
    draft: Engine


class DecodedText(NamedTuple):
    token_ids: list[int]
    stats: SpecDecodeStats


class TextDecoder:
    """Decodes texts one after the other over the same caches, so that captured graphs are replayed."""

    def __init__(self, target: Engine, draft: Engine | None, config: SpeculativeConfig | None) -> None:
        self._vocab_size = target.spec.model.vocab_size
        self._decoder = SpeculativeDecoder(target, draft, config, MAX_LENGTH, ())

    def decode(self, prompt: Sequence[int], params: SamplingParams) -> DecodedText:
        stats = SpecDecodeStats()
        sampler = Sampler(params, prompt, (), self._vocab_size)
        chunks = self._decoder.generate(prompt, sampler, seeded_streams(params.seed), stats)
        return DecodedText([token for chunk in chunks for token in chunk.token_ids], stats)


def make_spec(config: LlamaConfig, role: str) -> EngineSpec:
    return EngineSpec(role, "torch", "", config, WIDTHS, CAPACITY, "fp32", output_names(role, form=COMPACT))


def open_demo_engine(role: str, device: str, precision: str = "fp32") -> TorchEngine:
    """The demo pair's target or draft with caches of fixed size."""
    checkpoint = Checkpoint(DEMO / role)
    attend = dense_tree_attention if device == "cpu" else None
    return TorchEngine(
        checkpoint.tensor, make_spec(checkpoint.config, role), device, precision=precision, attend=attend
    )


def read_demo_prompts(count: int) -> list[list[int]]:
    """Token ids of the demo pair's prompts."""
    lines = (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    tokenizer = Tokenizer.load(DEMO / TARGET)
    return [tokenizer.encode(json.loads(line)["prompt"]) for line in lines]


def check_parity(device: str, precisions: Sequence[str]) -> Findings:
    """Compare the logits of a prompt and of a tree after it with those of the CPU."""
    figures: dict[str, float] = {}
    checkpoint = Checkpoint(DEMO / TARGET)
    reference = TorchEngine(checkpoint.tensor, make_spec(checkpoint.config, TARGET))
    wanted = compute_tree_logits(reference, reference.new_cache())
    for precision in precisions:
        engine = open_demo_engine(TARGET, device, precision)
        cache = engine.new_cache()
        for name in ("first", "repeated"):  # a shape's first pass runs as it is, later ones replay a captured graph
            found = compute_tree_logits(engine, cache)
            error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
            figures[f"{precision}, {name}"] = error
            limit = LOGIT_TOLERANCES[precision]
            require(error < limit, f"{precision}, {name}: logits differ by {error:.1e} of the largest, not {limit:.0e}")
    text = ", ".join(f"{name} {error:.1e}" for name, error in figures.items())
    return Findings(f"largest difference, relative to the largest logit: {text}", {"parity": figures})


def compute_tree_logits(engine: Engine, cache: Any) -> NDArray[np.float32]:
    """Logits [10, V]: of a tree of eight rows in two passes after a prompt, and of two rows after the committed path.
    The cache is emptied first."""
    rng = np.random.default_rng(0)
    text = rng.integers(3, engine.spec.model.vocab_size, 150)
    parents = (-1, 0, 0, 1, 2, 2, 4, 6)
    visible = np.eye(len(parents), dtype=np.bool_)
    depths = np.zeros(len(parents), np.int64)
    for row, parent in enumerate(parents):
        if parent >= 0:
            visible[row] |= visible[parent]
            depths[row] = depths[parent] + 1
    cache.truncate(0)
    prefill(engine, cache, text[:140].tolist())
    tokens = text[140:148]
    first = TokenBatch.pad(tokens[:5], 140 + depths[:5], visible[:5, :5], engine.spec.width_for(5))
    second = TokenBatch.pad(tokens[5:], 140 + depths[5:], visible[5:], engine.spec.width_for(3))
    logits = [engine.score(batch, cache).logits[: batch.num_tokens].copy() for batch in (first, second)]
    cache.commit([0, 2, 4, 6, 7])
    behind = TokenBatch.pad(text[148:], np.arange(145, 147), np.tri(2, dtype=np.bool_), engine.spec.width_for(2))
    return np.concatenate((*logits, engine.score(behind, cache).logits[:2]))


def check_same_text(device: str, max_tokens: int, count: int) -> Findings:
    """Check that speculation changes no token at temperature 0. The check runs in fp32, where passes of different
    widths round so similarly that ties are improbable."""
    pair = EnginePair(open_demo_engine(TARGET, device), open_demo_engine(DRAFT, device))
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    plain_decoder = TextDecoder(pair.target, None, None)
    decoders = {name: TextDecoder(*pair, config) for name, config in CONFIGS.items()}
    figures: dict[str, list[float]] = {}
    for prompt in read_demo_prompts(count):
        plain = plain_decoder.decode(prompt, params).token_ids
        for name, decoder in decoders.items():
            found = decoder.decode(prompt, params)
            require(
                found.token_ids == plain, f"{name} and plain decoding part at token {find_difference(found[0], plain)}"
            )
            figures.setdefault(name, []).append(found.stats.mean_acceptance_length)
    lengths = {name: round(float(np.mean(values)), 3) for name, values in figures.items()}
    text = ", ".join(f"{name} {value:.2f}" for name, value in lengths.items())
    return Findings(f"{count} texts of {max_tokens} tokens; tokens per target pass: {text}", {"acceptance": lengths})


def find_difference(first: Sequence[int], second: Sequence[int]) -> int:
    """Index of the first token in which two texts differ."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


class PrefetchedWeights:
    """Weights that threads make ahead of their use. The user must ask for them in the order of `names`."""

    def __init__(self, weights: Weights, names: Sequence[str], threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads)
        self._futures: dict[str, Future[NDArray[Any]]] = {name: self._pool.submit(weights, name) for name in names}

    def __call__(self, name: str) -> NDArray[Any]:
        return self._futures.pop(name).result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def make_inflated_engine(role: str, shape: str, device: str, precision: str, threads: int) -> TorchEngine:
    """The demo model in a real LLaMA's shape (tools/inflate.py), made on the device without a file."""
    from benchmarks.tools.inflate import SHAPES, Inflation

    inflation = Inflation(Checkpoint(DEMO / role), SHAPES[shape], "fp16" if precision == "fp16" else "bf16")
    weights = PrefetchedWeights(inflation.tensor, list(inflation.shapes), threads)
    try:
        return TorchEngine(weights, make_spec(inflation.config, role), device, precision=precision)
    finally:
        weights.close()


def measure_speculation(
    shapes: tuple[str, str],
    device: str,
    precision: str,
    max_tokens: int,
    count: int,
    threads: int,
    progress: Callable[[str], object] = print,
) -> Findings:
    """Measure tokens per second with and without speculation, of a target and a draft of real shapes."""
    target_shape, draft_shape = shapes
    progress(f"  making {target_shape} and {draft_shape} parameters of the demo pair")
    pair = EnginePair(
        make_inflated_engine(TARGET, target_shape, device, precision, threads),
        make_inflated_engine(DRAFT, draft_shape, device, precision, threads),
    )
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    texts = read_demo_prompts(count)
    figures: dict[str, Any] = {}
    decoders = {"plain": TextDecoder(pair.target, None, None)}
    decoders |= {name: TextDecoder(*pair, config) for name, config in CONFIGS.items()}
    plain_texts: list[list[int]] = []
    for name, decoder in decoders.items():
        for text in texts:  # captures the graphs that the measured run replays
            decoder.decode(text, params)
        results = [decoder.decode(text, params) for text in texts]
        plain_texts = plain_texts or [result.token_ids for result in results]
        figures[name] = summarise(results, plain_texts)
        progress(f"  {name}: {figures[name]['tokens_per_second']} tokens/s")
    plain = figures["plain"]["tokens_per_second"]
    best = max(CONFIGS, key=lambda name: float(figures[name]["tokens_per_second"]))
    gain = figures[best]["tokens_per_second"] / plain
    summary = f"{target_shape} + {draft_shape} {precision}: plain {plain} tokens/s, {best} {gain:.2f} times that"
    return Findings(summary, {"target": target_shape, "draft": draft_shape, "precision": precision, "speed": figures})


def summarise(results: Sequence[DecodedText], plain: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Figures of one configuration. same_tokens: share of a text before its first difference from plain decoding."""
    stats = [result.stats for result in results]
    passes = sum(each.target_passes for each in stats)
    shared = [find_difference(result.token_ids, text) / len(text) for result, text in zip(results, plain, strict=True)]
    return {
        "tokens_per_second": round(median(each.tokens_per_second for each in stats), 1),
        "tokens_per_pass": round(sum(each.num_tokens for each in stats) / passes, 3),
        "target_ms_per_pass": round(1e3 * sum(each.target_seconds for each in stats) / passes, 3),
        "draft_ms_per_round": round(1e3 * sum(each.draft_seconds for each in stats) / passes, 3),
        "host_ms_per_round": round(1e3 * sum(each.host_seconds for each in stats) / passes, 3),
        "same_tokens": round(float(np.mean(shared)), 4),
    }
