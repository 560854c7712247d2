"""LlamaConfig: what a LLaMA is, read from a Hugging Face config.json. Pure; refuses what it does not know, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from .errors import CheckpointError

# Architectures whose block is LLaMA's: RMSNorm, rotary positions, grouped attention, gated SiLU MLP.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
# The most that a checkpoint may ask for: beyond any LLaMA there is, and little enough to count to.
MOST = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 1024,
    "max_position_embeddings": 1 << 27,
    "original_max_position_embeddings": 1 << 27,
}
MOST_EOS = 1024  # ids that end a text
LEAST_NUMBER, MOST_NUMBER = 1e-30, 1e30  # of every other setting: its square and its reciprocal are finite


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
        if not 0 < head_dim <= MOST["head_dim"]:
            raise CheckpointError(f"config.json: head_dim must be 2 to {MOST['head_dim']}, found {head_dim}")
        if head_dim % 2:
            raise CheckpointError(f"config.json: head_dim ({head_dim}) is odd; rotary positions need pairs")
        rope = rope_settings(config)
        rope_theta = config.get("rope_theta", rope.get("rope_theta", 10000.0))
        vocab_size = positive_int(config, "vocab_size")
        return cls(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=positive_int(config, "intermediate_size"),
            num_layers=positive_int(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=positive_int(config, "max_position_embeddings"),
            norm_eps=positive_number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            rope_theta=positive_number("rope_theta", rope_theta),
            rope_scaling=read_rope_scaling(rope, config),
            tie_embeddings=switch(config, "tie_word_embeddings"),
            attention_bias=switch(config, "attention_bias"),
            mlp_bias=switch(config, "mlp_bias"),
            bos_token_id=next((token for token in token_ids(config, "bos_token_id", 1) if token >= 0), None),
            eos_token_ids=token_ids(config, "eos_token_id"),
        )

    def to_dict(self) -> dict[str, Any]:
        """Fields for JSON, which `typed` reads. A LLaMA's lack `variant`, so that older releases read them."""
        return {name: value for name, value in asdict(self).items() if name != "variant" or self.variant.differences}


def refuse_unknown(config: Mapping[str, Any]) -> None:
    """Refuse, by name, every setting that would make the model compute something else than LLaMA's block."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    if not any(name in ARCHITECTURES for name in names):
        found = ", ".join(map(brief, names[:3])) or "none"
        raise CheckpointError(
            f"config.json: architecture {found} is not supported; this project runs {', '.join(ARCHITECTURES)}"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"config.json: hidden_act {brief(activation)} is not supported; LLaMA uses 'silu'")
    if config.get("sliding_window") is not None and config.get("use_sliding_window", True):
        raise CheckpointError(
            f"config.json: sliding_window {brief(config['sliding_window'])} is not supported; only full attention is"
        )


def rope_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rope_parameters` of transformers 5, or `rope_scaling` of 4; nothing when both are absent or null."""
    for name in ("rope_parameters", "rope_scaling"):
        value = config.get(name)
        if value is not None and not isinstance(value, dict):
            raise CheckpointError(f"config.json: {name} must be an object or null, found {brief(value)}")
        if value:
            return value
    return {}


def read_rope_scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", positive_number("rope factor", rope.get("factor")))
    if kind == "llama3":
        name = "original_max_position_embeddings"
        scaling = RopeScaling(
            "llama3",
            positive_number("rope factor", rope.get("factor")),
            positive_number("rope low_freq_factor", rope.get("low_freq_factor")),
            positive_number("rope high_freq_factor", rope.get("high_freq_factor")),
            positive_int({name: rope.get(name, config.get(name))}, name),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise CheckpointError("config.json: rope high_freq_factor must be larger than low_freq_factor")
        return scaling
    raise CheckpointError(
        f"config.json: rope scaling {brief(kind)} is not supported; 'default', 'linear' and 'llama3' are"
    )


def positive_int(config: Mapping[str, Any], name: str) -> int:
    """A field of MOST."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST[name]:
        raise CheckpointError(
            f"config.json: {name} must be a positive integer of at most {MOST[name]}, found {brief(value)}"
        )
    return value


def optional_int(config: Mapping[str, Any], name: str) -> int | None:
    return None if config.get(name) is None else positive_int(config, name)


def positive_number(name: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not LEAST_NUMBER <= value <= MOST_NUMBER:
        raise CheckpointError(
            f"config.json: {name} must be a positive number from {LEAST_NUMBER:g} to {MOST_NUMBER:g}, "
            f"found {brief(value)}"
        )
    return float(value)


def switch(config: Mapping[str, Any], name: str) -> bool:
    """True or false; null and nothing mean false."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} must be true or false, found {brief(value)}")
    return bool(value)


def token_ids(config: Mapping[str, Any], name: str, most: int = MOST_EOS, file: str = "config.json") -> tuple[int, ...]:
    """Absent, one id, or a list of at most `most` ids; -1, which some checkpoints write for no token, is kept."""
    value = config.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    whole = all(isinstance(each, int) and not isinstance(each, bool) for each in ids)
    if not whole or not all(-1 <= each < MOST["vocab_size"] for each in ids) or len(ids) > most:
        raise CheckpointError(
            f"{file}: {name} must be a token id, or a list of at most {most} of them, found {brief(value)}"
        )
    return tuple(ids)


def brief(value: Any) -> str:
    """A value of a stranger's file as an error message shows it."""
    if isinstance(value, int) and not -(10**30) < value < 10**30:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value) if value is None or isinstance(value, int | float | str) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."
