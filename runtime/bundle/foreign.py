"""The keywords of vLLM's `LLM`: one without a meaning here is a warning, or an error that names the fix."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from ...models.errors import ConfigError, nearest, shown
from ..speculation.config import SpeculativeConfig
from .cache import Model

PRECISIONS = {"auto": None, "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
ONE = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")  # processors that share a model
NEEDLESS = {  # keywords without an effect, and why they need none
    "gpu_memory_utilization": "caches take what AsyncLLM(kv_cache_bytes=...) allows",
    "kv_cache_memory_bytes": "it is AsyncLLM(kv_cache_bytes=...)",
    "swap_space": "caches stay in memory",
    "cpu_offload_gb": "weights are mapped from a file",
    "enforce_eager": "engines are compiled ahead of time",
    "enable_prefix_caching": "prefixes are always shared",
    "enable_chunked_prefill": "prompts are always read in chunks",
    "max_num_batched_tokens": "the costs of the bundle decide",
    "max_num_seqs": "it is AsyncLLM(max_running=...)",
    "block_size": "caches have no blocks",
    "trust_remote_code": "no code of a model is executed",
    "disable_log_stats": "each result has its own stats",
    "load_format": "the format is seen in the file",
    "tokenizer_mode": "there is one",
    "seed": "a seed belongs to a text: SamplingParams(seed=...)",
}
MAPPED = {  # keywords, and what they are here
    "speculative_config": "speculative_config",
    "max_model_len": "max_length",
    "dtype": "precision",
    "revision": "revision",
}
ELSEWHERE = {
    "tokenizer": ": the model's own tokenizer is used",
    "quantization": "; write precision='int8' or 'int4'",
    "hf_overrides": ": change the model's config.json",
}
DRAFTLESS = ("ngram", "ngram_gpu", "suffix")  # methods of vLLM that are lookups here


def with_others(
    model: Model, speculative: SpeculativeConfig | None, others: Mapping[str, Any]
) -> tuple[Model, SpeculativeConfig | None]:
    """What is to be opened, and the settings of speculation, with what vLLM's keywords say of them. Warns of keywords
    without an effect; raises ConfigError for those that cannot be obeyed, or that contradict our own."""
    for name, value in others.items():
        if name in NEEDLESS:
            warnings.warn(f"{name} has no effect here and can be left out: {NEEDLESS[name]}", stacklevel=3)
        elif name in ONE:
            if value != 1:
                raise ConfigError(f"{name} must be 1, not {shown(value)}: one machine computes a model here")
        elif name not in MAPPED and (name not in ELSEWHERE or value is not None):
            own = ("speculative", "threads", "draft_threads", "provider", "private_weights", *Model._fields[1:])
            fix = ELSEWHERE.get(name, nearest(name, (*own, *MAPPED)) or f": it has {', '.join(own)}")
            raise ConfigError(f"LLM has no keyword {shown(name)}{fix}")
    given = {MAPPED[name]: value for name, value in others.items() if name in MAPPED and value is not None}
    if "precision" in given:
        given["precision"] = precision_of(str(given["precision"]).removeprefix("torch."))
    config = given.pop("speculative_config", None)
    if config is not None:
        if speculative != SpeculativeConfig():
            raise ConfigError("speculative and speculative_config say the same: give one of them")
        speculative, draft = speculation_of(config)
        given |= {} if draft is None else {"draft": draft}
    if revision := given.pop("revision", None):
        given["path"] = f"{model.path}@{revision}"
    for name, value in given.items():
        if name != "path" and getattr(model, name) not in (None, value):
            raise ConfigError(
                f"{name}={shown(getattr(model, name))} and vLLM's keyword for it differ: give one of them"
            )
    return model._replace(**given), speculative


def precision_of(dtype: str) -> str | None:
    """Our name of vLLM's dtype; None for "auto". Raises ConfigError."""
    if dtype not in PRECISIONS:
        names = ", ".join(PRECISIONS)
        raise ConfigError(f"dtype must be one of {names}, not {shown(dtype)}; precision='int8' makes weights of 8 bits")
    return PRECISIONS[dtype]


def speculation_of(config: Any) -> tuple[SpeculativeConfig, str | None]:
    """Our settings and the draft of vLLM's `speculative_config`. Raises ConfigError."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"speculative_config must be a dictionary, not {shown(config)}")
    known = ("model", "method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
    if unknown := next((name for name in config if name not in known and config[name] is not None), None):
        raise ConfigError(
            f"speculative_config has no {shown(unknown)} here{nearest(str(unknown), known)}: leave it out, or use "
            "speculative=SpeculativeConfig(...)"
        )
    draft, method = config.get("model"), config.get("method")
    if draft in DRAFTLESS:
        draft, method = None, draft
    method = method or ("draft_model" if draft is not None else "ngram")
    tokens = config.get("num_speculative_tokens")
    if method in DRAFTLESS and draft is None:
        size = {} if tokens is None else {"lookup_len": tokens, "max_draft_len": tokens}
        longest = config.get("prompt_lookup_max")
        return SpeculativeConfig("lookup", lookup_ngram=longest or 0, **size), None
    if method != "draft_model" or draft is None:
        raise ConfigError(
            f'speculative_config: method {shown(method)} is not known here; give a draft as "model", or "ngram" as '
            "the method"
        )
    size = {} if tokens is None else {"max_draft_len": tokens, "max_total_draft_tokens": tokens}
    return SpeculativeConfig(**size), str(draft)
