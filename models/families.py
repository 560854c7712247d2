"""Families of models: how the config.json of each architecture differs from a LLaMA's, as transformers reads it.

FAMILIES lists the architectures. A setting that is neither in COMMON, nor in IGNORED, nor in the list of its family
might change what the model computes. It is refused unless it is off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import NamedTuple

from .errors import CheckpointError
from .fields import MOST, Settings, brief, positive_int, positive_number, switch
from .rope_scaling import LONGROPE, ORIGINAL, PARTIAL, YARN, rope_settings

SLIDING, FULL = "sliding_attention", "full_attention"
NONE: Settings = MappingProxyType({})
BIASES = ("attention_bias", "mlp_bias")
WINDOW = "sliding_window"
WINDOWED = (WINDOW, "use_sliding_window", "max_window_layers")
COMMON = {
    *("architectures", "model_type", *MOST, "hidden_act", "rms_norm_eps", "tie_word_embeddings", "layer_types"),
    *("rope_theta", "rope_scaling", "rope_parameters", PARTIAL, "bos_token_id", "eos_token_id", "quantization_config"),
}
# Settings that do not change what a model computes: of training, of generation, and of the file itself.
IGNORED = {
    *("attention_dropout", "embd_pdrop", "gradient_checkpointing", "hidden_dropout", "initializer_range"),
    *("pretraining_tp", "resid_pdrop", "unsloth_fixed", "unsloth_version"),
    *("auto_map", "dtype", "generation_config", "id2label", "is_llama_config", "label2id", "license", "name_or_path"),
    *("problem_type", "task_specific_params", "tokenizer_class", "torch_dtype", "transformers.js_config"),
    "transformers_version",
    *("begin_suppress_tokens", "chunk_size_feed_forward", "decoder_start_token_id", "do_sample", "diversity_penalty"),
    *("early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id"),
    *("forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size"),
    *("num_beam_groups", "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states"),
    *("output_scores", "pad_token_id", "repetition_penalty", "return_dict", "return_dict_in_generate"),
    *("sep_token_id", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p", "unk_token_id", "use_cache"),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """What a family adds to LLaMA's layer (models/layers.py). The defaults add nothing."""

    qkv_bias: bool = False  # a bias on queries, keys and values only, as in Qwen2.5
    qk_norm: bool = False  # an RMSNorm of each head's queries and keys, as in Qwen3
    layers_without_rope: tuple[int, ...] = ()  # indices of layers, as in SmolLM3
    rotary_size: int | None = None  # numbers of a head that RoPE rotates, as in Phi-4-mini; None: all
    embedding_multiplier: float = 1.0  # all four multipliers as in Granite
    attention_multiplier: float | None = None  # of queries times keys; None: 1 / sqrt(head_dim)
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    window: int | None = None  # tokens that attention reaches back, as in Mistral; it limits the context

    @property
    def differences(self) -> tuple[str, ...]:
        """Names of the fields that differ from a LLaMA's."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) != field.default)


class Family(NamedTuple):
    """How the config.json of one architecture is read."""

    model_type: str
    variant: Callable[[Settings, int, int], Variant]  # of the settings, the number of layers and head_dim
    settings: tuple[str, ...] = ()  # names of settings besides COMMON
    defaults: Settings = NONE  # of settings that a file may leave out, where they differ from LLaMA's
    rope_kinds: Settings = NONE  # kinds of rope scaling, by the other names that this family has for them


def llama(settings: Settings, layers: int, head_dim: int) -> Variant:
    return Variant()


def mistral(settings: Settings, layers: int, head_dim: int) -> Variant:
    return Variant(window=window_of(settings))


def qwen2(settings: Settings, layers: int, head_dim: int) -> Variant:
    return Variant(qkv_bias=True, window=qwen_window(settings, layers))


def qwen3(settings: Settings, layers: int, head_dim: int) -> Variant:
    return Variant(qk_norm=True, window=qwen_window(settings, layers))


def smollm3(settings: Settings, layers: int, head_dim: int) -> Variant:
    listed = settings.get("no_rope_layers")  # 1 for a layer that has RoPE
    if listed is None:
        interval = positive_int(settings, "no_rope_layer_interval", MOST["num_hidden_layers"] + 1)
        listed = [int((index + 1) % interval != 0) for index in range(layers)]
    if not isinstance(listed, list) or len(listed) < layers or any(each not in (0, 1) for each in listed):
        raise CheckpointError(
            f"config.json: no_rope_layers must list a 1 or a 0 for each of {layers} layers, found {brief(listed)}"
        )
    without = tuple(index for index in range(layers) if not listed[index])
    derived = [SLIDING if index in without else FULL for index in range(layers)]
    return Variant(layers_without_rope=without, window=switched_window(settings, derived))


def granite(settings: Settings, layers: int, head_dim: int) -> Variant:
    def multiplier(name: str) -> float:
        return positive_number(name, settings.get(name))

    return Variant(
        embedding_multiplier=multiplier("embedding_multiplier"),
        attention_multiplier=multiplier("attention_multiplier"),
        residual_multiplier=multiplier("residual_multiplier"),
        logits_multiplier=1 / multiplier("logits_scaling"),
    )


def phi3(settings: Settings, layers: int, head_dim: int) -> Variant:
    for name in ("full_attn_mod", "interpolate_factor"):
        if settings.get(name, 1) != 1:
            raise CheckpointError(f"config.json: {name} {brief(settings[name])} is not supported; 1 is")
    partial = positive_number(PARTIAL, rope_settings(settings).get(PARTIAL, settings.get(PARTIAL, 1.0)))
    size = int(head_dim * min(partial, 2.0))
    if not 2 <= size <= head_dim or size % 2:
        raise CheckpointError(
            f"config.json: {PARTIAL} {partial:g} of head_dim {head_dim} rotates {size} numbers: rotary positions need "
            f"pairs, at most {head_dim // 2} of them"
        )
    return Variant(rotary_size=None if size == head_dim else size, window=window_of(settings))


def window_of(settings: Settings) -> int | None:
    """Tokens of the sliding window; None without one. Raises CheckpointError."""
    return None if settings.get(WINDOW) is None else positive_int(settings, WINDOW, MOST["max_position_embeddings"])


def switched_window(settings: Settings, derived: list[str]) -> int | None:
    """The window of a family with the setting `use_sliding_window`; None when it is off, or no layer slides. derived:
    the types of the layers when the file does not list them."""
    types: list[str] = settings.get("layer_types") or derived
    return window_of(settings) if switch(settings, "use_sliding_window") and SLIDING in types else None


def qwen_window(settings: Settings, layers: int) -> int | None:
    """The window of Qwen, whose layers slide from `max_window_layers` on when `use_sliding_window` is on."""
    first = settings.get("max_window_layers")
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise CheckpointError(f"config.json: max_window_layers must be a whole number, found {brief(first)}")
    derived = [SLIDING if index >= first else FULL for index in range(layers)]
    return switched_window(settings, derived)


MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
QWEN = {WINDOW: 4096, "max_window_layers": 28, "num_key_value_heads": 32}
FAMILIES = {
    "LlamaForCausalLM": Family("llama", llama, BIASES),
    "MistralForCausalLM": Family("mistral", mistral, (WINDOW,), {WINDOW: 4096, "num_key_value_heads": 8}),
    "Qwen2ForCausalLM": Family("qwen2", qwen2, WINDOWED, QWEN),
    "Qwen3ForCausalLM": Family("qwen3", qwen3, ("attention_bias", *WINDOWED), QWEN | {"head_dim": 128}),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        smollm3,
        (*BIASES, *WINDOWED, "no_rope_layers", "no_rope_layer_interval"),
        {"rope_theta": 2e6, "tie_word_embeddings": True, "num_key_value_heads": 4, "no_rope_layer_interval": 4},
    ),
    "GraniteForCausalLM": Family("granite", granite, (*BIASES, *MULTIPLIERS), dict.fromkeys(MULTIPLIERS, 1.0)),
    "Phi3ForCausalLM": Family(
        "phi3",
        phi3,
        (WINDOW, "full_attn_mod", "interpolate_factor"),
        {ORIGINAL: 4096, "rms_norm_eps": 1e-5},
        {"su": LONGROPE, YARN: LONGROPE},
    ),
}
LISTED = ", ".join(FAMILIES)  # for error messages


def family_of(config: Settings) -> Family:
    """The family of a config.json. Raises CheckpointError that names what is not supported."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    name = next((name for name in names if isinstance(name, str) and name in FAMILIES), None)
    if name is None:
        found = ", ".join(map(brief, names[:3])) or "none"
        raise CheckpointError(f"config.json: architecture {found} is not supported; this project runs {LISTED}")
    family = FAMILIES[name]
    if config.get("model_type") not in (None, family.model_type):
        raise CheckpointError(
            f"config.json: model_type {brief(config['model_type'])} is not that of {name}, which is "
            f"{family.model_type!r}: set it to the model's own"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"config.json: hidden_act {brief(activation)} is not supported; {name} uses 'silu'")
    for setting, value in config.items():
        off = value is None or value is False or value in ("", [], {})
        if not off and not setting.startswith("_") and setting not in COMMON | IGNORED | {*family.settings}:
            raise CheckpointError(
                f"config.json: {brief(setting)} is not a setting of {name}: remove it if the model computes the same "
                "without it"
            )
    refuse_other_layers(config, name, family)
    return family


def refuse_other_layers(config: Settings, name: str, family: Family) -> None:
    """Raises CheckpointError for types of layers, or a partial rotation of heads, that the architecture does not
    have."""
    types, kinds = config.get("layer_types"), (FULL, SLIDING) if "use_sliding_window" in family.settings else (FULL,)
    listed = isinstance(types, list) and all(isinstance(each, str) and each in kinds for each in types)
    if types is not None and not (listed and len(types) in (0, config.get("num_hidden_layers"))):
        raise CheckpointError(f"config.json: layer_types must list {' or '.join(kinds)} for each layer of {name}")
    if types and SLIDING in types and not config.get("use_sliding_window"):
        raise CheckpointError(f"config.json: layer_types has {SLIDING} where use_sliding_window is off: correct one")
    partial = rope_settings(config).get(PARTIAL, config.get(PARTIAL))
    if family.variant is not phi3 and partial not in (None, 1):
        raise CheckpointError(f"config.json: {PARTIAL} {brief(partial)} is not supported for {name}; 1 is")
