"""Plain and speculative tokens per second of one text in the shapes of Llama-3.1-8B and Llama-3.2-1B, fp16, beside the
floor by bandwidth, and beside transformers over the same weights.

The weights are random and are made on the GPU; draft and target agree by construction (`benchmarks/tools/pair.py`). At
temperature 1 the same tokens are drawn, by the same kernels as other ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.gpu.engine import CONFIGS, EnginePair, TextDecoder, find_difference, static_engine
from benchmarks.gpu.model import DTYPES, TorchLlama, TorchProgram
from benchmarks.gpu.report import Findings, Part, require
from benchmarks.tools.pair import LAYER_SCALE, Agreement, ModelShape, make_draft_head, make_target_head
from draftwood.models.bindings import DRAFT, TARGET
from draftwood.models.config import LlamaConfig
from draftwood.models.layers import EMBEDDING_WEIGHT, HEAD_WEIGHT, network_of
from draftwood.plugins.device_round.images import KERNELS
from draftwood.runtime import SamplingParams
from draftwood.runtime.engines.static.cuda import CudaDevice
from draftwood.runtime.engines.static.engine import StaticEngine
from draftwood.runtime.engines.static.rounds import StaticRounds

SHAPES = {TARGET: ModelShape(4096, 32, 32, 8, 14336), DRAFT: ModelShape(2048, 16, 32, 8, 8192)}
VOCABULARY = 128256
AGREEMENT, SECOND = 0.8, 0.5  # of all tokens; of the others, those that are the draft's second choice
PROMPT = 64  # tokens
COUNTED = ("synchronize", "replay", "upload", "download", "launch", "move_rows")


@dataclass(frozen=True)
class Scale:
    """The size of the measurement; smaller in tests."""

    shapes: dict[str, ModelShape]
    vocabulary: int = VOCABULARY
    tokens: int = 128
    texts: int = 3
    precision: str = "fp16"
    device: str = "cuda"


class Headline:
    """The parts of the measurement, which share the models. bandwidth: bytes per second of a copy. queue: see
    TorchProgram."""

    def __init__(self, scale: Scale, bandwidth: Callable[[], float], queue: Any = None) -> None:
        self.scale, self._bandwidth, self._queue = scale, bandwidth, queue
        self.engines: dict[str, StaticEngine] = {}
        self.plain: dict[float, float] = {}  # tokens per second by temperature
        self.texts: dict[str, list[list[int]]] = {}

    def parts(self) -> Iterator[Part]:
        yield Part("headline: models", 60, self.make)
        for temperature in (0.0, 1.0):
            for name, config in (("plain", None), *CONFIGS.items()):
                yield Part(f"headline: {name}, T = {temperature:g}", 30, partial(self.run, name, config, temperature))
        yield Part("headline: rounds of the host", 30, self.run_on_host)
        yield Part("headline: where the time goes", 60, self.profile)
        yield Part("headline: transformers", 60, self.run_peer)
        yield Part("headline: transformers, compiled", 90, partial(self.run_peer, compiled=True))

    def make(self) -> Findings:
        scale, figures = self.scale, dict[str, Any]()
        agreement = Agreement(scale.vocabulary, AGREEMENT, SECOND, seed=0)
        for role, head in ((TARGET, make_target_head), (DRAFT, make_draft_head)):
            config = LlamaConfig.from_hf(scale.shapes[role].fields(scale.vocabulary))
            weights = RandomWeights(config, partial(head, agreement=agreement), scale.device)
            engine = static_engine(config, weights, role, scale.precision, self._queue)
            self.engines[role] = engine
            nbytes = self.model(role).nbytes
            figures[role] = {"read_gb": round(nbytes / 1e9, 3), "floor_ms": round(1e3 * nbytes / self._bandwidth(), 3)}
        rng = np.random.default_rng(1)
        self._prompts = [rng.choice(agreement.words, PROMPT).tolist() for _ in range(scale.texts)]
        text = "; ".join(
            f"{role}: {each['read_gb']} GB a pass, {each['floor_ms']} ms" for role, each in figures.items()
        )
        return Findings(text, figures)

    @property
    def floor(self) -> float:
        """Least seconds of a plain pass: its weights over the bandwidth."""
        return self.model(TARGET).nbytes / self._bandwidth()

    def model(self, role: str) -> TorchLlama:
        program = self.engines[role].program
        assert isinstance(program, TorchProgram)
        return program.model

    def params(self, temperature: float) -> SamplingParams:
        return SamplingParams(max_tokens=self.scale.tokens, temperature=temperature, ignore_eos=True, seed=0)

    def run(self, name: str, config: Any, temperature: float, host: bool = False) -> Findings:
        """The second run of each text, whose graphs the first one captured."""
        require(len(self.engines) == 2, "the models were not made")
        params = self.params(temperature)
        decoder = TextDecoder(EnginePair(self.engines[TARGET], self.engines[DRAFT]), config)
        for prompt in self._prompts:
            decoder.decode(prompt, params)
        speeds, found = [], []
        counters = [
            mock.patch.object(CudaDevice, each, autospec=True, side_effect=getattr(CudaDevice, each))
            for each in COUNTED
        ]
        for prompt in self._prompts:
            begun = time.perf_counter()
            found.append(decoder.decode(prompt, replace(params, seed=0)))
            speeds.append(self.scale.tokens / (time.perf_counter() - begun))
        counts = {name: counter.start() for name, counter in zip(COUNTED, counters, strict=True)}
        with mock.patch.object(StaticRounds, "accept", autospec=True, side_effect=StaticRounds.accept) as accept:
            passes = decoder.decode(self._prompts[0], params).stats.target_passes
        mock.patch.stopall()
        stats = [each.stats for each in found]
        total = sum(each.target_passes for each in stats)
        figures: dict[str, Any] = {
            "tokens_per_second": round(median(speeds), 1),
            "tokens_per_pass": round(sum(each.num_tokens for each in stats) / total, 3),
            "round_ms": round(1e3 * sum(self.scale.tokens / speed for speed in speeds) / total, 3),
            "device_rounds": accept.call_count,
            **{f"{each}_per_round": round(count.call_count / passes, 2) for each, count in counts.items()},
        }
        if config is None:
            self.plain[temperature] = figures["tokens_per_second"]
            figures["share_of_floor"] = round(self.floor * figures["tokens_per_second"], 3)
            self.texts[f"{temperature}"] = [each.token_ids for each in found]
        else:
            figures["times_plain"] = round(figures["tokens_per_second"] / self.plain[temperature], 3)
            shared = [
                find_difference(each.token_ids, text)
                for each, text in zip(found, self.texts[f"{temperature}"], strict=True)
            ]
            figures["same_tokens"] = shared
            require(min(shared) == self.scale.tokens, f"{name} and plain decoding part at tokens {shared}")
            require(host or accept.call_count > 0, f"no round of {name} ran on the device")
        return Findings(", ".join(f"{key} {value}" for key, value in figures.items()), figures)

    def run_on_host(self) -> Findings:
        from benchmarks.gpu.engine import rounds_of_the_host

        with rounds_of_the_host():
            found = {
                f"{name}, T = {temperature:g}": self.run(name, CONFIGS[name], temperature, host=True).figures
                for name in CONFIGS
                for temperature in (0.0, 1.0)
            }
        speeds = {name: each["tokens_per_second"] for name, each in found.items()}
        return Findings(", ".join(f"{name}: {speed}" for name, speed in speeds.items()), found)

    def profile(self) -> Findings:
        """Microseconds of a round by kernel, and how often each runs."""
        figures = {}
        runs: tuple[tuple[str, Any, float], ...] = (("plain", None, 0.0), *((n, c, 1.0) for n, c in CONFIGS.items()))
        for name, config, temperature in runs:
            decoder = TextDecoder(EnginePair(self.engines[TARGET], self.engines[DRAFT]), config)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                passes = decoder.decode(self._prompts[0], self.params(temperature)).stats.target_passes
            averages = sorted(profiler.key_averages(), key=lambda each: -each.self_device_time_total)
            figures[f"{name}, T = {temperature:g}"] = {
                each.key[:60]: [round(each.self_device_time_total / passes, 1), round(each.count / passes, 1)]
                for each in averages[:40]
            }
        models = map(self.model, self.engines)
        figures["tiles"] = {str(key): tile for model in models for key, tile in model.steps.tiles.items()}
        own = {
            name: sum(us for kernel, (us, _) in each.items() if kernel in KERNELS)
            for name, each in figures.items()
            if name != "tiles"
        }
        return Findings(", ".join(f"{name}: {us:.0f} us in kernels of rounds" for name, us in own.items()), figures)

    def run_peer(self, compiled: bool = False) -> Findings:
        """transformers over the same memory, one text: plain, and assisted by the draft with 4 tokens, or compiled."""
        require(len(self.engines) == 2, "the models were not made")
        models = {role: self._peer(role) for role in self.engines}
        draft = models[DRAFT].generation_config
        draft.num_assistant_tokens, draft.num_assistant_tokens_schedule = 4, "constant"
        draft.assistant_confidence_threshold = 0.0
        runs: dict[str, dict[str, Any]] = {
            "plain": {"do_sample": False},
            "assisted": {"do_sample": False, "assistant_model": models[DRAFT]},
            "assisted, T = 1": {"do_sample": True, "temperature": 1.0, "top_k": 0, "assistant_model": models[DRAFT]},
        }
        if compiled:
            runs = {"compiled": {"do_sample": False, "cache_implementation": "static"}}
        figures = {name: round(self._peer_speed(models[TARGET], options), 1) for name, options in runs.items()}
        return Findings(", ".join(f"{name} {speed} tokens/s" for name, speed in figures.items()), figures)

    def _peer_speed(self, model: Any, options: dict[str, Any]) -> float:
        """Tokens per second of a text's second run."""
        tokens, prompt = self.scale.tokens, self._prompts[0]
        given = torch.tensor([prompt], device=self.scale.device)
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        for _ in range(2):
            begun = time.perf_counter()
            with torch.inference_mode():
                found = model.generate(given, attention_mask=torch.ones_like(given), **lengths, **options)
            written = found[0, len(prompt) :].tolist()  # waits for the device
            seconds = time.perf_counter() - begun
        same = options["do_sample"] or written[:16] == self.texts["0.0"][0][:16]
        require(same, "transformers writes another text")
        return len(written) / seconds

    def _peer(self, role: str) -> Any:
        """transformers' model, whose weights are views of the engine's."""
        from transformers import LlamaConfig as PeerConfig
        from transformers import LlamaForCausalLM

        own = self.model(role)
        fields = self.scale.shapes[role].fields(self.scale.vocabulary)
        known = {key: value for key, value in fields.items() if key not in ("architectures", "dtype", "torch_dtype")}
        with torch.device("meta"):
            model = LlamaForCausalLM(PeerConfig(**known, dtype=DTYPES[self.scale.precision]))
        state = {name: own.tensor(name) for name in network_of(own.config).tensors()}
        model.load_state_dict(state, assign=True)
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(self.scale.device)
        model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
        return model.train(False)


class RandomWeights:
    """Weights as `benchmarks/tools/pair.py` draws them, on a device. head: makes the vocabulary projection from the
    embeddings."""

    def __init__(self, config: LlamaConfig, head: Callable[[Any], Any], device: str) -> None:
        self._shapes, self._head, self._device = network_of(config).tensors(), head, device
        self._embeddings: torch.Tensor | None = None
        self._generator = torch.Generator(device).manual_seed(0)

    def __call__(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        if name == HEAD_WEIGHT:
            assert self._embeddings is not None, "the embeddings are asked for first"
            return torch.from_numpy(self._head(self._embeddings.cpu().numpy()))
        drawn = torch.randn(shape, generator=self._generator, device=self._device)
        if name == EMBEDDING_WEIGHT:
            self._embeddings = drawn
            return drawn
        return drawn.mul_(LAYER_SCALE / shape[1] ** 0.5)
