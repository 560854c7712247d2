"""LoRA adapters in PEFT's layout, with random matrices."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from draftwood.builder.checkpoints.lora import SETTINGS, WEIGHTS

PREFIX = "base_model.model."


def adapted(plain: Path, modules: Iterable[str]) -> list[str]:
    """Names of the modules of a checkpoint that end like one of `modules`."""
    names = [name.removesuffix(".weight") for name in load_file(plain / "model.safetensors")]
    return [name for name in names if name.rpartition(".")[2] in set(modules)]


def write_adapter(
    folder: Path,
    plain: Path,
    modules: Iterable[str] = ("q_proj", "v_proj", "down_proj"),
    ranks: Mapping[str, int] | None = None,
    settings: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Write an adapter of a checkpoint. modules: last parts of names. ranks: by name, where not 4. settings: fields of
    adapter_config.json. Returns its tensors."""
    generator = torch.Generator().manual_seed(5)
    weights = load_file(plain / "model.safetensors")
    tensors = {}
    for module in adapted(plain, modules):
        rank, (outputs, inputs) = (ranks or {}).get(module, 4), weights[f"{module}.weight"].shape
        for end, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            random = torch.empty(shape).normal_(0, 0.3, generator=generator)
            tensors[f"{PREFIX}{module}.lora_{end}.weight"] = random.to(dtype)
    save_adapter(folder, tensors, settings)
    return tensors


def save_adapter(folder: Path, tensors: dict[str, torch.Tensor], settings: Mapping[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    # What peft 0.21 writes of an adapter with its default settings.
    absent: tuple[str, ...] = (
        "alora_invocation_tokens",
        "arrow_config",
        "auto_mapping",
        "corda_config",
        "eva_config",
        "exclude_modules",
    )
    absent += ("layer_replication", "layers_pattern", "layers_to_transform", "megatron_config", "modules_to_save")
    absent += ("exclude_modules", "target_parameters", "trainable_token_indices", "use_bdlora")
    unused = ("ensure_weight_tying", "fan_in_fan_out", "lora_bias", "use_dora", "use_qalora", "use_rslora")
    empty = ("alpha_pattern", "rank_pattern", "loftq_config")
    config: dict[str, Any] = {
        **dict.fromkeys(absent) | dict.fromkeys(unused, False) | {name: {} for name in empty},
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "base_model_name_or_path": "org/model",
        "megatron_core": "megatron.core",
        "init_lora_weights": True,
        "bias": "none",
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.05,
        "qalora_group_size": 16,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
    }
    (folder / SETTINGS).write_text(json.dumps(config | dict(settings or {})))
    return folder
