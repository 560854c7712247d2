"""LlamaConfig: the configuration of a LLaMA, read from a Hugging Face config.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .errors import CheckpointError
from .families import Variant, family_of
from .fields import MOST, Settings, optional_int, positive_int, positive_number, switch, token_ids
from .rope_scaling import LONGROPE, RopeScaling, read_rope_scaling, read_theta, scaled_context

NEWER = ("variant", "draft_vocab_size", "draft_context", "taps", "reads")  # fields that older releases do not know
MIN_DRAFT_CONTEXT = 16  # tokens
MOST_TAPS = 3


@dataclass(frozen=True, slots=True)
class Reading:
    """How a draft reads the states of its target, as EAGLE-3 does (arXiv 2503.01840)."""

    taps: tuple[int, ...]  # the target's rows after so many of its layers
    size: int  # the target's hidden_size
    norm_first: bool = False  # whether the first layer adds to its normed input instead of to its input

    @property
    def inputs(self) -> int:
        """Numbers of a row of the target's states."""
        return len(self.taps) * self.size


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
    variant: Variant = field(default_factory=Variant)
    draft_vocab_size: int | None = None  # tokens that a trimmed draft predicts, of all that it reads; None: all
    draft_context: int | None = None  # last tokens of a text that a draft reads, which learned from short ones
    taps: tuple[int, ...] = ()  # rows after so many layers, which the engine returns for a draft that reads them
    reads: Reading | None = None  # of a draft that reads its target's states

    @property
    def state_size(self) -> int:
        """Numbers of a row of the states that the engine returns: a target's taps, or a draft's own last row."""
        return (len(self.taps) + (self.reads is not None)) * self.hidden_size

    @property
    def state_inputs(self) -> int:
        """Numbers of a row of states that a draft takes: the target's, then its own. Either part may be zeros."""
        return 0 if self.reads is None else self.reads.inputs + self.hidden_size

    @property
    def num_logits(self) -> int:
        """Columns of a row of logits."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def query_size(self) -> int:
        """Width of all query heads together; differs from `hidden_size` when head_dim is explicit."""
        return self.num_heads * self.head_dim

    @property
    def rotary_size(self) -> int:
        """Numbers of each head that RoPE rotates."""
        return self.head_dim if self.variant.rotary_size is None else self.variant.rotary_size

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def limits(self) -> dict[str, int]:
        """What limits the context, with the number of tokens. Within all limits the rotary tables do not change."""
        limits = {"context": self.max_position}
        if self.rope_scaling is not None and self.rope_scaling.kind == LONGROPE:
            limits["context before longrope"] = self.rope_scaling.original_max_position
        return limits

    @property
    def longest(self) -> int:
        """Tokens of the longest text for which the engines compute what the model's own code computes."""
        return min(self.limits.values())

    @classmethod
    def from_hf(cls, config: Settings) -> LlamaConfig:
        """Read a Hugging Face `config.json`, in the spelling of transformers 4 or 5.

        Raises CheckpointError that names a setting which is unknown or not supported.
        """
        family, config = family_of(config)
        hidden_size = positive_int(config, "hidden_size")
        num_heads = positive_int(config, "num_attention_heads")
        num_kv_heads = optional_int(config, "num_key_value_heads") or num_heads
        num_layers = positive_int(config, "num_hidden_layers")
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
        variant = family.variant(config, num_layers, head_dim)
        scaling = read_rope_scaling(config, variant.rotary_size or head_dim, family.rope_kinds)
        vocab_size, draft_vocab_size = positive_int(config, "vocab_size"), optional_int(config, "draft_vocab_size")
        if draft_vocab_size is not None and draft_vocab_size > vocab_size:
            raise CheckpointError(
                f"config.json: draft_vocab_size ({draft_vocab_size}) is more than vocab_size ({vocab_size})"
            )
        draft_context = optional_int(config, "draft_context")
        if draft_context is not None and draft_context < MIN_DRAFT_CONTEXT:
            raise CheckpointError(
                f"config.json: draft_context must be at least {MIN_DRAFT_CONTEXT}, found {draft_context}"
            )
        return cls(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=positive_int(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=scaled_context(config, scaling),
            norm_eps=positive_number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            rope_theta=read_theta(config),
            rope_scaling=scaling,
            tie_embeddings=switch(config, "tie_word_embeddings"),
            attention_bias=switch(config, "attention_bias"),
            mlp_bias=switch(config, "mlp_bias"),
            bos_token_id=next((token for token in token_ids(config, "bos_token_id", 1) if token >= 0), None),
            eos_token_ids=token_ids(config, "eos_token_id"),
            variant=variant,
            draft_vocab_size=draft_vocab_size,
            draft_context=draft_context,
        )

    def to_dict(self) -> dict[str, Any]:
        """Fields for JSON, which `typed` reads; defaults that older releases do not know are left out."""
        content = asdict(self)
        content["rope_scaling"] = None if self.rope_scaling is None else stated(self.rope_scaling)
        content["variant"] = stated(self.variant)
        content["reads"] = None if self.reads is None else asdict(self.reads)
        return {name: value for name, value in content.items() if name not in NEWER or value}


def stated(part: RopeScaling | Variant) -> dict[str, Any]:
    """Fields that differ from their defaults."""
    defaults = {each.name: each.default for each in fields(part)}
    return {name: value for name, value in asdict(part).items() if value != defaults[name]}
