"""The static engine over a model that torch executes (`model.py`): logits, texts and draws beside the host's.

Everything here runs on a GPU, and on a machine without one over the driver that tests put in libcuda's place.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from math import erfc, sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu.model import DTYPES, TorchLlama, TorchProgram, Weights
from benchmarks.gpu.report import Findings, require
from benchmarks.tools.torch_engine import TorchEngine
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build
from draftwood.models.bindings import COMPACT, DRAFT, TARGET, output_names
from draftwood.models.config import LlamaConfig
from draftwood.runtime import LLM, RequestOutput, SamplingParams, SpecDecodeStats, SpeculativeConfig
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.engines.base import Engine, EngineSpec, TokenBatch
from draftwood.runtime.engines.passes import prefill
from draftwood.runtime.engines.static.cuda import CudaDevice
from draftwood.runtime.engines.static.device import Stream
from draftwood.runtime.engines.static.engine import StaticEngine
from draftwood.runtime.engines.static.rounds import StaticRounds
from draftwood.runtime.sampling import random
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.text.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
MAX_LENGTH = 768  # tokens of prompt and output; the demo pair was trained for 1024
CAPACITY = MAX_LENGTH + 4 * WIDTHS[-1]
# Largest difference to the fp32 CPU engine, relative to the largest logit.
LOGIT_TOLERANCES = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}
GREEDY = SamplingParams(max_tokens=96, temperature=0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=1.0, seed=0)
CHAIN = SpeculativeConfig("chain", budget="fixed", max_draft_len=4)
TREE = SpeculativeConfig("topk", budget="fixed", max_total_draft_tokens=15, max_draft_len=5, frontier_width=4)
DYSPEC = SpeculativeConfig("dyspec", budget="fixed", max_total_draft_tokens=15, max_draft_len=5, frontier_width=4)
MERGED = SpeculativeConfig(
    "topk", merge="gsd", budget="fixed", max_total_draft_tokens=31, max_draft_len=8, frontier_width=8
)
CONFIGS = {"chain of 4": CHAIN, "tree of 15": TREE, "drawn tree of 15": DYSPEC}
NEAR_TIE = 0.1  # nats between the two best tokens
UNLIKELY = 1e-5  # chance below which draws are not of their distribution
Queue = Callable[[Callable[[], None], Stream], None]


class EnginePair(NamedTuple):
    target: Engine
    draft: Engine


class DecodedText(NamedTuple):
    token_ids: list[int]
    stats: SpecDecodeStats


class TextDecoder:
    """Decodes texts one after the other over the same engines, so that captured graphs are replayed."""

    def __init__(self, pair: EnginePair, config: SpeculativeConfig | None) -> None:
        self._vocab_size = pair.target.spec.model.vocab_size
        self._decoder = SpeculativeDecoder(pair.target, pair.draft if config else None, config, MAX_LENGTH, ())

    def decode(self, prompt: Sequence[int], params: SamplingParams) -> DecodedText:
        stats, sampler = SpecDecodeStats(), Sampler(params, prompt, (), self._vocab_size)
        chunks = self._decoder.generate(prompt, sampler, seeded_streams(params.seed or 0), stats)
        return DecodedText([token for chunk in chunks for token in chunk.token_ids], stats)


def make_spec(config: LlamaConfig, role: str, requests: int = 1) -> EngineSpec:
    names = output_names(role, form=COMPACT)
    return EngineSpec(role, "torch", "", config, WIDTHS, CAPACITY, "fp32", names, max_batch=requests)


def static_engine(
    config: LlamaConfig, weights: Weights, role: str, precision: str, queue: Queue | None = None, requests: int = 1
) -> StaticEngine:
    """queue: see TorchProgram; None on a GPU. requests: that may share a pass."""
    model = TorchLlama(config, weights, CAPACITY, DTYPES[precision], "cpu" if queue else "cuda")
    spec = make_spec(config, role, requests)
    return StaticEngine(spec, TorchProgram(model, spec, queue), CudaDevice())


def open_demo_engine(role: str, precision: str, queue: Queue | None = None, requests: int = 1) -> StaticEngine:
    source = Checkpoint(DEMO / role)

    def weights(name: str) -> torch.Tensor:
        return torch.from_numpy(np.array(source.tensor(name), np.float32))

    return static_engine(source.config, weights, role, precision, queue, requests)


def open_demo(precision: str, queue: Queue | None = None) -> EnginePair:
    """The demo pair behind static engines."""
    return EnginePair(*(open_demo_engine(role, precision, queue) for role in (TARGET, DRAFT)))


@cache
def open_reference() -> EnginePair:
    """The demo pair on the CPU in fp32."""
    checkpoints = {role: Checkpoint(DEMO / role) for role in (TARGET, DRAFT)}
    return EnginePair(*(TorchEngine(each.tensor, make_spec(each.config, role)) for role, each in checkpoints.items()))


@cache
def read_demo_prompts(count: int) -> list[list[int]]:
    """Token ids of the demo pair's prompts."""
    lines = (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    tokenizer = Tokenizer.load(DEMO / TARGET)
    return [tokenizer.encode(json.loads(line)["prompt"]) for line in lines]


def check_parity(precisions: Sequence[str], queue: Queue | None = None) -> Findings:
    """Compare the logits of a prompt and of a tree after it with those of the CPU."""
    figures: dict[str, float] = {}
    expected = compute_tree_logits(open_reference().target)
    for precision in precisions:
        engine, limit = open_demo(precision, queue).target, LOGIT_TOLERANCES[precision]
        for name in ("first", "captured", "replayed"):
            error = float(np.abs(compute_tree_logits(engine) - expected).max() / np.abs(expected).max())
            figures[f"{precision}, {name}"] = error
            require(error < limit, f"{precision}, {name}: logits differ by {error:.1e} of the largest, not {limit:.0e}")
    text = ", ".join(f"{name} {error:.1e}" for name, error in figures.items())
    return Findings(f"largest difference, relative to the largest logit: {text}", {"parity": figures})


def compute_tree_logits(engine: Engine) -> NDArray[np.float32]:
    """Logits [10, V]: of a tree of eight rows in two passes after a prompt, and of two rows after the committed
    path."""
    rng, cache = np.random.default_rng(0), engine.new_cache()
    text = rng.integers(3, engine.spec.model.vocab_size, 150)
    parents = (-1, 0, 0, 1, 2, 2, 4, 6)
    visible = np.eye(len(parents), dtype=np.bool_)
    depths = np.zeros(len(parents), np.int64)
    for row, parent in enumerate(parents):
        if parent >= 0:
            visible[row] |= visible[parent]
            depths[row] = depths[parent] + 1
    prefill(engine, cache, text[:140].tolist())
    tokens = text[140:148]
    first = TokenBatch.pad(tokens[:5], 140 + depths[:5], visible[:5, :5], engine.spec.width_for(5))
    second = TokenBatch.pad(tokens[5:], 140 + depths[5:], visible[5:], engine.spec.width_for(3))
    logits = [engine.score(batch, cache).logits[: batch.num_tokens].copy() for batch in (first, second)]
    cache.commit([0, 2, 4, 6, 7])
    after = TokenBatch.pad(text[148:], np.arange(145, 147), np.tri(2, dtype=np.bool_), engine.spec.width_for(2))
    logits.append(engine.score(after, cache).logits[:2].copy())
    cache.close()
    return np.concatenate(logits)


def equal_tokens(plain: Sequence[RequestOutput], other: Sequence[RequestOutput], name: str) -> list[int]:
    """How many tokens of each text are equal. Half precision may decide another way where two tokens are as good as
    equal, and there alone. plain: texts of plain decoding with the log-probabilities of two alternatives."""
    shared = []
    for number, (one, two) in enumerate(zip(plain, other, strict=True)):
        place = find_difference(one.token_ids, two.token_ids)
        shared.append(place)
        if place < len(one.token_ids):
            logprobs = one.outputs[0].logprobs
            assert logprobs is not None
            best, second = sorted((each.logprob for each in logprobs[place].values()), reverse=True)[:2]
            gap = best - second
            require(
                gap < NEAR_TIE, f"text {number} of {name} parts from plain at token {place}, no tie: {gap:.2f} nats"
            )
    return shared


@contextmanager
def counted_rounds() -> Iterator[mock.Mock]:
    """`call_count` says how many texts' rounds ran on the device."""
    with mock.patch.object(StaticRounds, "accept", autospec=True, side_effect=StaticRounds.accept) as accept:
        yield accept


@contextmanager
def rounds_of_the_host() -> Iterator[None]:
    with mock.patch.object(StaticEngine, "rounds", lambda *_: None):
        yield


def check_greedy(count: int, params: SamplingParams = GREEDY, queue: Queue | None = None) -> Findings:
    """Check that neither speculation, nor rounds on the device, nor the GPU change a token at temperature 0. In fp32,
    where passes of different widths round so similarly that ties are improbable."""
    pair, lengths, on_device = open_demo("fp32", queue), dict[str, list[float]](), 0
    plain, by_cpu = TextDecoder(pair, None), TextDecoder(open_reference(), None)
    decoders = {name: TextDecoder(pair, config) for name, config in (CONFIGS | {"DAG of 31": MERGED}).items()}
    for prompt in read_demo_prompts(count):
        expected = by_cpu.decode(prompt, params).token_ids
        same(plain.decode(prompt, params).token_ids, expected, "plain", "the CPU's")
        for name, decoder in decoders.items():
            with counted_rounds() as rounds:
                found = decoder.decode(prompt, params)
            on_device += rounds.call_count
            same(found.token_ids, expected, name, "the CPU's")
            with rounds_of_the_host():
                same(decoder.decode(prompt, params).token_ids, expected, f"{name}, rounds of the host", "the CPU's")
            lengths.setdefault(name, []).append(found.stats.mean_acceptance_length)
    require(on_device > 0, "no round ran on the device")
    means = {name: round(float(np.mean(values)), 3) for name, values in lengths.items()}
    text = ", ".join(f"{name} {value:.2f}" for name, value in means.items())
    summary = f"{count} texts of {params.max_tokens} tokens, {on_device} rounds on the device; tokens per pass: {text}"
    return Findings(summary, {"acceptance": means, "device_rounds": on_device})


def check_shared(count: int, params: SamplingParams = GREEDY, queue: Queue | None = None) -> Findings:
    """Check that texts which share passes and rounds on the device are those of the CPU. In fp32, see check_greedy."""
    by_cpu, on_device = TextDecoder(open_reference(), None), dict[str, int]()
    texts = read_demo_prompts(count)
    expected = [by_cpu.decode(text, params).token_ids for text in texts]
    with TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        build(BuildOptions(DEMO / TARGET, DEMO / DRAFT, bundle, "onnxruntime", "fp32"), lambda step: lambda: None)
        for name, config in {"plain": None, "chain of 4": CHAIN, "tree of 15": TREE}.items():
            with (
                mock.patch.object(
                    EngineBundle, "open_engine", lambda _, role, *rest: open_demo_engine(role, "fp32", queue, count)
                ),
                mock.patch.object(LLM, "max_batch", count),
                counted_rounds() as rounds,
                LLM(bundle, config) as llm,
            ):
                found = llm.generate(list(texts), params)
            on_device[name] = rounds.call_count
            for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                same(one.token_ids, other, f"text {number} of {name}", "the CPU's")
            require(
                bool(rounds.call_count) == (config is not None), f"{rounds.call_count} rounds of {name} on the device"
            )
    return Findings(f"{count} texts share passes; rounds on the device: {on_device}", {"shared": on_device})


def same(found: list[int], expected: list[int], name: str, other: str) -> None:
    require(found == expected, f"{name} and {other} text part at token {find_difference(found, expected)}")


def find_difference(first: Sequence[int], second: Sequence[int]) -> int:
    """Index of the first token in which two texts differ."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def check_drawn(count: int, draws: int, params: SamplingParams = DRAWN, queue: Queue | None = None) -> Findings:
    """Check rounds on the device at temperature 1: with the same random numbers they write the texts of the host's
    rounds, but for rounding; and many first tokens have the distribution of the target's logits. The device draws a
    token with one number; streams, which take two above a block of tokens, do so here."""
    pair, figures, on_device = open_demo("fp32", queue), dict[str, Any](), 0
    for name, config in CONFIGS.items():
        decoder, parted = TextDecoder(pair, config), []
        for seed, prompt in enumerate(read_demo_prompts(count)):
            own = replace(params, seed=seed)
            with mock.patch.object(random, "BLOCK", pair.target.spec.model.vocab_size):
                with counted_rounds() as rounds:
                    found = decoder.decode(prompt, own).token_ids
                on_device += rounds.call_count
                with rounds_of_the_host():
                    parted.append(find_difference(found, decoder.decode(prompt, own).token_ids))
        whole = sum(each == params.max_tokens for each in parted)
        require(2 * whole > count, f"{name}: texts by the device's and the host's rounds part at tokens {parted}")
        chance, rounds_drawn = chance_of_draws(pair, config, draws)
        require(chance > UNLIKELY, f"{name}: {draws} first tokens have a chance of {chance:.1e}")
        figures[name] = {"same_tokens": parted, "chance_of_draws": chance, "device_rounds_of_draws": rounds_drawn}
        on_device += rounds_drawn
    require(on_device > 0, "no round ran on the device")
    text = ", ".join(
        f"{name} {each['same_tokens']}, p = {each['chance_of_draws']:.2g}" for name, each in figures.items()
    )
    return Findings(
        f"{on_device} rounds on the device; equal tokens of {params.max_tokens}: {text}", {"drawn": figures}
    )


def chance_of_draws(pair: EnginePair, config: SpeculativeConfig, draws: int) -> tuple[float, int]:
    """The chance that draws from the target's distribution are as far from it as these first tokens, by Pearson's chi²;
    and how many of their rounds ran on the device."""
    (prompt,) = read_demo_prompts(1)
    short, reference = prompt[:12], open_reference().target
    cache = reference.new_cache()
    scored = prefill(reference, cache, short)
    assert scored is not None
    logits = scored.logits[-1].astype(np.float64)
    cache.close()
    p = np.exp(logits - logits.max())
    p /= p.sum()
    decoder, params = TextDecoder(pair, config), replace(DRAWN, max_tokens=8)
    with counted_rounds() as rounds:
        found = Counter(decoder.decode(short, replace(params, seed=seed)).token_ids[0] for seed in range(draws))
    return chance_of(found, p), rounds.call_count


def chance_of(found: Counter[int], p: NDArray[np.float64]) -> float:
    """The chance that draws from p [V] are as far from it as these, by Pearson's chi². Tokens that are expected less
    than eight times count as one."""
    draws = found.total()
    likely = [token for token in np.argsort(-p).tolist() if p[token] * draws >= 8]
    observed = np.array([found[token] for token in likely] + [draws - sum(found[token] for token in likely)])
    expected = draws * np.array([*p[likely], max(1 - p[likely].sum(), 1e-9)])
    chi, freedom = float(((observed - expected) ** 2 / expected).sum()), max(len(likely), 1)
    deviation = ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / sqrt(2 / (9 * freedom))  # Wilson and Hilferty
    return erfc(deviation / sqrt(2)) / 2
