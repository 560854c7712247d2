"""Random EAGLE-3 heads in the forms in which others store them, and what they compute: in torch, of transformers' own
layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from checkpoints import GQA, LLAMA3, VOCAB_SIZE, write_checkpoint, write_tokenizer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

KEPT = 120
LAYER: dict[str, dict[str, Any]] = {
    "llama": GQA | {"model_type": "llama", "num_hidden_layers": 1, "rope_parameters": LLAMA3},
    "qwen3": GQA | {"model_type": "qwen3", "num_hidden_layers": 1, "head_dim": 16},
}


class Head(nn.Module):
    """What a head computes, over whole texts."""

    def __init__(self, kind: str, layers: int = 1, norm_first: bool = False, taps: int = 3, seed: int = 0) -> None:
        super().__init__()
        config: Any = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**LAYER[kind] | {"num_hidden_layers": layers})
        config._attn_implementation = "eager"
        layer: Any = LlamaDecoderLayer if kind == "llama" else Qwen3DecoderLayer
        self.config, size = config, config.hidden_size
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, size)
        self.fc = nn.Linear(taps * size, size, bias=False)
        self.layers = nn.ModuleList(layer(config, index) for index in range(layers))
        attention: Any = self.layers[0].self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(attention, name, nn.Linear(2 * size, getattr(attention, name).out_features, bias=False))
        self.layers[0].hidden_norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, KEPT, bias=False)
        self.rotary = (LlamaRotaryEmbedding if kind == "llama" else Qwen3RotaryEmbedding)(config)
        self.norm_first = norm_first
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.parameters():
                spread = (1.0, 0.2) if weight.dim() == 1 else (0.0, 1.5 / weight.shape[1] ** 0.5)
                weight.normal_(*spread, generator=generator)
        self.d2t = torch.randperm(VOCAB_SIZE, generator=generator)[:KEPT].sort().values - torch.arange(KEPT)

    def forward(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [T], states [T, hidden]: fused ones of the target, or the head's own. Returns logits and states."""
        count = len(tokens)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        first: Any = self.layers[0]
        rotary = self.rotary(states[None], torch.arange(count)[None])
        normed = first.hidden_norm(states)
        rows = torch.cat((first.input_layernorm(self.embed_tokens(tokens)), normed), -1)[None]
        attended, _ = first.self_attn(hidden_states=rows, position_embeddings=rotary, attention_mask=mask)
        rows = (normed if self.norm_first else states)[None] + attended
        rows = rows + first.mlp(first.post_attention_layernorm(rows))
        for layer in self.layers[1:]:
            found = layer(rows, attention_mask=mask, position_embeddings=rotary)
            rows = found[0] if isinstance(found, tuple) else found
        return self.lm_head(self.norm(rows))[0], rows[0]

    def tensors(self, embedding: bool) -> dict[str, Tensor]:
        content = {name: value for name, value in self.state_dict().items() if embedding or "embed" not in name}
        kept = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
        kept[self.d2t + torch.arange(KEPT)] = True
        return content | {"d2t": self.d2t, "t2d": kept}


def write_authors(folder: Path, head: Head, **others: Any) -> Path:
    """A head as SafeAILab and SGLang store it, without an embedding."""
    tensors = {name.replace("layers.0.", "midlayer."): each for name, each in head.tensors(False).items()}
    config = LAYER["llama"] | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": KEPT, **others}
    return written(folder, tensors, config)


def write_speculators(folder: Path, head: Head, taps: list[int] | None = None, **others: Any) -> Path:
    """A head as the package speculators stores it, with an embedding."""
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": None, "architectures": []}},
        "transformer_layer_config": head.config.to_dict(),
        "draft_vocab_size": KEPT,
        "norm_before_residual": head.norm_first,
        "eagle_aux_hidden_state_layer_ids": taps,
    }
    return written(folder, head.tensors(True), config | others)


def written(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_target(folder: Path, layers: int = 8) -> Path:
    write_checkpoint(folder, num_hidden_layers=layers)
    return write_tokenizer(folder)


def write_small_pair(folder: Path) -> tuple[Path, Path]:
    """A target and its head, which learned from short texts."""
    taps = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    head = write_authors(folder / "head", Head("llama"), max_position_embeddings=64, **taps)
    return write_target(folder / "target", layers=3), head


def rows_of(target: Path, tokens: Tensor, taps: list[int]) -> Tensor:
    """The rows [T, taps * hidden] of transformers' target after so many layers."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        found = model(tokens[None], output_hidden_states=True).hidden_states
    return torch.cat([found[tap][0] for tap in taps], -1)
