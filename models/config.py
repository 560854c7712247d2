"""LlamaConfig: what a LLaMA is, read from a Hugging Face config.json. Pure; refuses what it does not know, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from .errors import CheckpointError

# Architectures whose block is LLaMA's: RMSNorm, rotary positions, grouped attention, gated SiLU MLP.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary position scaling. `linear`: positions / factor. `llama3`: long wavelengths / factor, smooth in between
    (transformers' `modeling_rope_utils`, Llama 3.1)."""

    kind: str  # "linear" | "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class Variant:
    """What families of models add to LLaMA's layer (models/layers.py); a LLaMA has none of it. `from_hf` refuses these
    families until every engine computes them."""

    qkv_bias: bool = False  # on queries, keys and values only, as Qwen2.5 has it
    qk_norm: bool = False  # an RMSNorm of each head's queries and keys, as Qwen3 has it
    layers_without_rope: tuple[int, ...] = ()  # indices, as SmolLM3 has them
    embedding_multiplier: float = 1.0  # this one and the others as Granite has them
    attention_multiplier: float | None = None  # of the products of queries and keys; None: 1 / sqrt(head_dim)
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0

    @property
    def differences(self) -> tuple[str, ...]:
        """Names of the fields in which this is no LLaMA."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) != field.default)


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Shape and constants of one LLaMA. All sizes are counts, `norm_eps` and `rope_theta` are plain numbers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    variant: Variant = Variant()

    @property
    def query_size(self) -> int:
        """Width of all query heads together; differs from `hidden_size` when head_dim is explicit."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Read a Hugging Face `config.json`, in the spelling of transformers 4 or 5.

        Raises CheckpointError that names the field when the model is not a LLaMA this project runs.
        """
        refuse_unknown(config)
        hidden_size = positive_int(config, "hidden_size")
        num_heads = positive_int(config, "num_attention_heads")
        num_kv_heads = optional_int(config, "num_key_value_heads") or num_heads
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads ({num_heads}) "
                f"is not a multiple of num_key_value_heads ({num_kv_heads})"
            )
        head_dim = optional_int(config, "head_dim")
        if head_dim is None:
            if hidden_size % num_heads:
                raise CheckpointError(
                    f"config.json: hidden_size ({hidden_size}) is not a multiple of num_attention_heads ({num_heads}); "
                    "set head_dim explicitly"
                )
            head_dim = hidden_size // num_heads
        if head_dim % 2:
            raise CheckpointError(f"config.json: head_dim ({head_dim}) is odd; rotary positions need pairs")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_theta = config.get("rope_theta", rope.get("rope_theta", 10000.0))
        eos = config.get("eos_token_id")
        return cls(
            vocab_size=positive_int(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=positive_int(config, "intermediate_size"),
            num_layers=positive_int(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=positive_int(config, "max_position_embeddings"),
            norm_eps=positive_number(config, "rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            rope_theta=positive_number(config, "rope_theta", rope_theta),
            rope_scaling=read_rope_scaling(rope, config),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=token_ids(eos),
        )

    def to_dict(self) -> dict[str, Any]:
        """Fields for JSON. A LLaMA's lack `variant`, so that older releases read them."""
        return {name: value for name, value in asdict(self).items() if name != "variant" or self.variant.differences}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> LlamaConfig:
        """The inverse of `to_dict`, through JSON or not. Raises TypeError on unknown or missing fields."""
        scaling, variant = fields.get("rope_scaling"), Variant(**fields.get("variant", {}))
        return cls(
            **{
                **fields,
                "rope_scaling": RopeScaling(**scaling) if scaling else None,
                "eos_token_ids": tuple(fields.get("eos_token_ids", ())),
                "variant": replace(variant, layers_without_rope=tuple(variant.layers_without_rope)),
            }
        )


def refuse_unknown(config: Mapping[str, Any]) -> None:
    """Refuse, by name, every setting that would make the model compute something else than LLaMA's block."""
    architectures = config.get("architectures") or []
    if not any(name in ARCHITECTURES for name in architectures):
        found = ", ".join(map(str, architectures)) or "none"
        raise CheckpointError(
            f"config.json: architecture {found} is not supported; this project runs {', '.join(ARCHITECTURES)}"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"config.json: hidden_act {activation!r} is not supported; LLaMA uses 'silu'")
    if config.get("sliding_window") is not None and config.get("use_sliding_window", True):
        raise CheckpointError(
            f"config.json: sliding_window {config['sliding_window']} is not supported; only full attention is"
        )
    if config.get("quantization_config"):
        raise CheckpointError(
            "config.json: quantization_config is not supported; "
            "use the fp32, fp16 or bf16 checkpoint and let the builder quantise"
        )


def read_rope_scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", positive_number(rope, "factor", rope.get("factor")))
    if kind == "llama3":
        original = rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
        scaling = RopeScaling(
            "llama3",
            positive_number(rope, "factor", rope.get("factor")),
            positive_number(rope, "low_freq_factor", rope.get("low_freq_factor")),
            positive_number(rope, "high_freq_factor", rope.get("high_freq_factor")),
            int(positive_number(rope, "original_max_position_embeddings", original)),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise CheckpointError("config.json: rope high_freq_factor must be larger than low_freq_factor")
        return scaling
    raise CheckpointError(f"config.json: rope scaling {kind!r} is not supported; 'default', 'linear' and 'llama3' are")


def positive_int(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise CheckpointError(f"config.json: {name} must be a positive integer, found {value!r}")
    return value


def optional_int(config: Mapping[str, Any], name: str) -> int | None:
    return None if config.get(name) is None else positive_int(config, name)


def positive_number(config: Mapping[str, Any], name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {name} must be a positive number, found {value!r}")
    return float(value)


def token_ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id` is absent, one id, or a list of ids."""
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)
