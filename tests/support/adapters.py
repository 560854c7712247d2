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
    config: dict[str, Any] = {
        "alora_invocation_tokens": None,
        "alpha_pattern": {},
        "arrow_config": None,
        "auto_mapping": None,
        "base_model_name_or_path": "org/model",
        "bias": "none",
        "corda_config": None,
        "ensure_weight_tying": False,
        "eva_config": None,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": 8,
        "lora_bias": False,
        "lora_dropout": 0.05,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "r": 4,
        "rank_pattern": {},
        "revision": None,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "target_parameters": None,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": None,
        "use_bdlora": None,
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
    }
    (folder / SETTINGS).write_text(json.dumps(config | dict(settings or {})))
    return folder
