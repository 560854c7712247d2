"""A description of a LLaMA as plain data: its tensors, the matrices that are merged, and the steps between them.

Checkpoints, the graph exporter, the packer and the loader of native weights, the reference and benchmarks read
this description. Names of a checkpoint's modules are Hugging Face's; a module's tensors are `<module>.weight` and
`<module>.bias`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .config import LlamaConfig

Shapes = dict[str, tuple[int, ...]]  # by tensor name; [out, in] for a matrix
EMBED_TOKENS, LM_HEAD = "model.embed_tokens", "lm_head"  # modules
EMBEDDING_WEIGHT, HEAD_WEIGHT = f"{EMBED_TOKENS}.weight", f"{LM_HEAD}.weight"
# GELU with tanh is x * sigmoid(x * (GELU_SLOPE + GELU_CURVE * x * x)).
GELU_SLOPE, GELU_CURVE = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715
EMBEDDING, HEAD, FUSION = "embedding", "head", "fusion"  # an engine's names of a tensor and of matrices


class Norm(NamedTuple):
    """An RMSNorm."""

    name: str  # the engine's name of its tensor
    source: str  # its module in the checkpoint
    size: int  # numbers in a row

    @property
    def weight(self) -> str:
        return f"{self.source}.weight"

    def tensors(self) -> Shapes:
        return {self.weight: (self.size,)}


class Matrix(NamedTuple):
    """One or more matrices over the same input, which engines compute as one product."""

    name: str  # the engine's name of its tensors
    sources: tuple[str, ...]  # modules in the checkpoint
    inputs: int  # numbers in an input row
    outputs: tuple[int, ...]  # numbers in an output row of each source
    bias: bool = False  # each source has one
    gated: bool = False  # the next step computes silu(first) * second, instead of using outputs side by side

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple(f"{source}.weight" for source in self.sources)

    @property
    def biases(self) -> tuple[str, ...]:
        return tuple(f"{source}.bias" for source in self.sources) if self.bias else ()

    def tensors(self) -> Shapes:
        shapes: Shapes = {}
        for source, outputs in zip(self.sources, self.outputs, strict=True):
            shapes[f"{source}.weight"] = (outputs, self.inputs)
            if self.bias:
                shapes[f"{source}.bias"] = (outputs,)
        return shapes


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. Without a norm that may be None, or with a `rotary_size` of 0, those steps are left out.

    q, k, v = qkv(input_norm(x))                                               split into heads
    q, k, v = qkv(token_norm(embedding), input_norm(x))                        with a token_norm, side by side
    a = attention(rope(query_norm(q)), rope(key_norm(k)), v, attention_scale)
    x += residual_multiplier * output_norm(output(a))
    x += residual_multiplier * down_norm(down(silu(gate) * up))                gate, up = gate_up(post_norm(x))
    """

    input_norm: Norm
    qkv: Matrix
    query_norm: Norm | None  # of each head
    key_norm: Norm | None
    rotary_size: int  # numbers at the start of each head that RoPE rotates
    local: bool  # whether RoPE has the local tables, see models/rope.py
    window: int | None  # the last of the tokens that a row would see to which it attends; None: all
    attention_scale: float  # of the products of queries and keys
    output: Matrix
    output_norm: Norm | None
    post_norm: Norm
    gate_up: Matrix
    down: Matrix
    down_norm: Norm | None
    gelu: bool  # GELU, of the kind with tanh, in place of SiLU
    residual_multiplier: float
    token_norm: Norm | None = None  # of the first layer of a draft that reads states
    norm_first: bool = False  # whether input_norm(x) replaces x, too

    @property
    def norms(self) -> tuple[Norm, ...]:
        norms = (self.input_norm, self.post_norm, self.query_norm, self.key_norm, self.output_norm, self.down_norm)
        return tuple(norm for norm in (*norms, self.token_norm) if norm is not None)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (self.qkv, self.output, self.gate_up, self.down)

    def tensors(self) -> Shapes:
        return merged(self.norms + self.matrices)


class Network(NamedTuple):
    """A whole model: head(norm(layers(embedding_multiplier * embedding[token]))) * logits_multiplier.

    With a fusion the rows that enter the layers are fusion(states of the target) + own state, of which one is zeros."""

    embedding: Matrix  # [V, H], whose rows are looked up
    layers: tuple[Layer, ...]
    norm: Norm
    head: Matrix  # [V, H], or a row for each token that a trimmed draft predicts; the embedding's tensor when tied
    embedding_multiplier: float
    logits_multiplier: float
    fusion: Matrix | None  # of a draft that reads states
    taps: tuple[int, ...]  # rows after so many layers, which are returned side by side

    def tensors(self) -> Shapes:
        """Every tensor of the checkpoint once."""
        fusion = () if self.fusion is None else (self.fusion,)
        return merged((self.embedding, *fusion, *self.layers, self.norm, self.head))


def merged(parts: Iterable[Norm | Matrix | Layer]) -> Shapes:
    return {name: shape for part in parts for name, shape in part.tensors().items()}


def layer_of(config: LlamaConfig, index: int) -> Layer:
    """Layer `index` of a model. All layers have the same shapes."""
    hidden, query, kv, inner = config.hidden_size, config.query_size, config.kv_size, config.intermediate_size
    variant, name, source = config.variant, f"layers.{index}.", f"model.layers.{index}."
    attention, mlp = f"{source}self_attn.", f"{source}mlp."
    qkv = tuple(f"{attention}{part}_proj" for part in "qkv")
    qkv_bias = config.attention_bias or variant.qkv_bias
    scale, sandwich = variant.attention_multiplier, variant.output_norms
    slides = variant.window is not None and index not in variant.full_layers
    reads = config.reads if index == 0 else None
    return Layer(
        input_norm=Norm(f"{name}input_norm", f"{source}{'hidden_norm' if reads else 'input_layernorm'}", hidden),
        qkv=Matrix(f"{name}qkv", qkv, 2 * hidden if reads else hidden, (query, kv, kv), qkv_bias),
        query_norm=Norm(f"{name}query_norm", f"{attention}q_norm", config.head_dim) if variant.qk_norm else None,
        key_norm=Norm(f"{name}key_norm", f"{attention}k_norm", config.head_dim) if variant.qk_norm else None,
        rotary_size=0 if index in variant.layers_without_rope else config.rotary_size,
        local=slides and variant.local_theta is not None,
        window=variant.window if slides else None,
        attention_scale=1 / math.sqrt(config.head_dim) if scale is None else scale,
        output=Matrix(f"{name}output", (f"{attention}o_proj",), query, (hidden,), config.attention_bias),
        output_norm=Norm(f"{name}output_norm", f"{source}post_attention_layernorm", hidden) if sandwich else None,
        post_norm=Norm(
            f"{name}post_norm", f"{source}{'pre_feedforward' if sandwich else 'post_attention'}_layernorm", hidden
        ),
        gate_up=Matrix(
            f"{name}gate_up", (f"{mlp}gate_proj", f"{mlp}up_proj"), hidden, (inner, inner), config.mlp_bias, True
        ),
        down=Matrix(f"{name}down", (f"{mlp}down_proj",), inner, (hidden,), config.mlp_bias),
        down_norm=Norm(f"{name}down_norm", f"{source}post_feedforward_layernorm", hidden) if sandwich else None,
        gelu=variant.gelu,
        residual_multiplier=variant.residual_multiplier,
        token_norm=Norm(f"{name}token_norm", f"{source}input_layernorm", hidden) if reads else None,
        norm_first=reads is not None and reads.norm_first,
    )


def network_of(config: LlamaConfig) -> Network:
    hidden = config.hidden_size
    return Network(
        embedding=Matrix(EMBEDDING, (EMBED_TOKENS,), hidden, (config.vocab_size,)),
        layers=tuple(layer_of(config, index) for index in range(config.num_layers)),
        norm=Norm("norm", "model.norm", hidden),
        head=Matrix(HEAD, (EMBED_TOKENS if config.tie_embeddings else LM_HEAD,), hidden, (config.num_logits,)),
        embedding_multiplier=config.variant.embedding_multiplier,
        logits_multiplier=config.variant.logits_multiplier,
        fusion=None if config.reads is None else Matrix(FUSION, ("fc",), config.reads.inputs, (hidden,)),
        taps=config.taps if config.reads is None else (config.num_layers,),
    )


def last_seen(seen: NDArray[np.bool_], window: int) -> NDArray[np.bool_]:
    """What a window leaves of the slots that rows see, [..., S], in the order of the text: the last `window`."""
    after: NDArray[np.bool_] = np.cumsum(seen[..., ::-1], -1)[..., ::-1] <= window
    return seen & after


def num_parameters(config: LlamaConfig) -> int:
    """Numbers in a checkpoint, embeddings and biases included."""
    return sum(map(math.prod, network_of(config).tensors().values()))
