"""Random tiny LLaMAs as Hugging Face folders, written by transformers and tokenizers themselves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM

from draftwood.models.acceptance_head import TrainedHead
from draftwood.models.head_config import HeadConfig

Reference = Callable[[Sequence[Sequence[int]]], NDArray[np.float32]]
VOCAB_SIZE = 288  # three special tokens, 256 bytes, 29 merges
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
FREQUENT = " etaoinshrdlucmfwygpbvk"  # bytes that a small vocabulary keeps, and that merges are made of

GQA: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {  # the original context is so short that tests reach far beyond it
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Everything a LLaMA's config.json may vary, one at a time; the values are fields of transformers' LlamaConfig.
SHAPES: dict[str, dict[str, Any]] = {
    "mha": GQA | {"num_key_value_heads": 4},
    "gqa": GQA,
    "mqa": GQA | {"num_key_value_heads": 1},
    "tied": GQA | {"tie_word_embeddings": True},
    "biases": GQA | {"attention_bias": True, "mlp_bias": True},
    "llama3": GQA | {"rope_parameters": LLAMA3},
    "linear": GQA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "head_dim 12": GQA | {"head_dim": 12},
    "head_dim 6": GQA | {"hidden_size": 30, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6},
}


def write_checkpoint(
    folder: Path, shape: str = "gqa", seed: int = 0, dtype: str = "float32", shards: int = 1, **overrides: Any
) -> Path:
    """Write config.json and random weights; returns `folder`, which is created.

    shape: a key of SHAPES. dtype: of the stored weights, as torch names it; the same seed draws the same weights and
    rounds them. shards: at least this many safetensors files with an index, or one file. overrides: fields of
    transformers' LlamaConfig.
    """
    config = LlamaConfig.from_dict(SHAPES[shape] | overrides)
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            mean, deviation = scale(name, weight)
            weight.data = weight.normal_(mean, deviation, generator=generator).to(getattr(torch, dtype))
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    model.save_pretrained(folder, max_shard_size=size + 1 if shards == 1 else size // shards)
    return folder


def transformers_logits(folder: Path) -> Reference:
    """The logits of transformers after each of several texts, [texts, V]."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def last_logits(texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        # Padding after a text is invisible to it: attention is causal.
        padded = [[*text, *[0] * (max(map(len, texts)) - len(text))] for text in texts]
        with torch.no_grad():
            logits = model(torch.tensor(padded)).logits
        return np.stack([logits[index, len(text) - 1].numpy() for index, text in enumerate(texts)])

    return last_logits


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite an unsharded folder's weights: `edit` changes the dictionary of tensors it is given."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def scale(name: str, weight: torch.Tensor) -> tuple[float, float]:
    """Mean and standard deviation of a weight: layers that matter beside the embeddings, attention that chooses, and
    logits of a deviation near 3, so that the best token is seldom a near tie."""
    if weight.dim() == 1:
        return (1.0, 0.2) if "norm" in name else (0.0, 0.3)
    spread = 1 / math.sqrt(weight.shape[1])
    if "lm_head" in name or "embed_tokens" in name:
        return 0.0, 3 * spread
    return 0.0, (2.5 if "o_proj" in name or "down_proj" in name else 1.2) * spread


def write_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE, add_bos: bool = True) -> Path:
    """Write tokenizer.json and tokenizer_config.json of a byte-level BPE with exactly `vocab_size` entries.

    Ids 0 to 2 are `<unk>`, `<s>`, `</s>`; then come bytes, the frequent ones first, then merges of two frequent ones.
    With 259 entries or more every text survives encoding and decoding; below that, missing bytes become `<unk>`.
    add_bos: `<s>` is put before every text. Returns `folder`, which is created. Raises ValueError beyond 765 entries.
    """
    # What ByteLevel writes for a byte is the byte itself for printable ASCII, and one of these letters otherwise.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda letter: (len(letter.encode()), letter))
    frequent = [letter.replace(" ", "Ġ") for letter in FREQUENT]
    letters = frequent + [letter for letter in alphabet if letter not in frequent]
    merges = [(first, second) for first in frequent for second in frequent if second != "Ġ"]
    entries = [*SPECIAL_TOKENS, *letters, *(first + second for first, second in merges)]
    if not len(SPECIAL_TOKENS) < vocab_size <= len(entries):
        raise ValueError(f"vocab_size must be between {len(SPECIAL_TOKENS) + 1} and {len(entries)}, not {vocab_size}")
    vocabulary = {entry: index for index, entry in enumerate(entries[:vocab_size])}
    kept = [pair for pair in merges if "".join(pair) in vocabulary]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=kept, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocabulary["<s>"])]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def trained_head(config: HeadConfig, seed: int = 0) -> TrainedHead:
    """A random head of SpecDec++."""
    rng = np.random.default_rng(seed)
    weights = {name: rng.normal(0, 0.4, shape).astype(np.float32) for name, shape in config.shapes().items()}
    return TrainedHead(config, weights)
