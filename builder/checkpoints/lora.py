"""LoRA adapters of PEFT (arXiv 2106.09685), merged while tensors are read: W + scale * B @ A.

A folder holds adapter_config.json and adapter_model.safetensors. scale is lora_alpha / r, or lora_alpha / sqrt(r) with
use_rslora (arXiv 2312.03732); rank_pattern and alpha_pattern change r and lora_alpha of some modules.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...models.errors import CheckpointError
from ...models.fields import brief
from ...models.layers import EMBED_TOKENS, HEAD_WEIGHT, LM_HEAD
from ..tokenizer import TOKENIZER_FILES
from .safetensors import Safetensors, open_safetensors
from .source import Blocks, Stored, TensorSource, read_json, stored_blocks

SETTINGS, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."  # of every tensor's name; what follows is the model's own
BASE = ".base_layer."  # PEFT inserts it into names of the own tensors of a module that has an adapter
A, B, WEIGHT = ".lora_A.weight", ".lora_B.weight", ".weight"
# Fields that change no weight: how the adapter was trained, and which modules have one (its tensors say this, too).
OF_TRAINING = (
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("modules_to_save", "bias", "eva_config", "megatron_core", "qalora_group_size", "runtime_config"),
)
OF_SCALE = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
SAME_BASE = (None, True, False, "gaussian", "eva", "orthogonal")  # init_lora_weights that do not change the model
MAX_RANK, MAX_ALPHA, MAX_PATTERNS = 1 << 16, 1e9, 1 << 12


@dataclass(frozen=True, slots=True)
class Scales:
    """Ranks and scales of adapter_config.json. A pattern's key is the end of a module's name, or `^` and the name."""

    rank: int  # r
    alpha: float  # lora_alpha
    by_root: bool  # use_rslora
    ranks: Mapping[str, int]  # rank_pattern
    alphas: Mapping[str, float]  # alpha_pattern

    def rank_of(self, module: str) -> int:
        return self.ranks.get(pattern_of(self.ranks, module), self.rank)

    def scale_of(self, module: str) -> float:
        rank, alpha = self.rank_of(module), self.alphas.get(pattern_of(self.alphas, module), self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)


class Merged:
    """A TensorSource over another one, with the tensors of an adapter merged in as fp32.

    Raises CheckpointError for an adapter that is not supported, or whose tensors do not belong to the model.
    """

    def __init__(self, source: TensorSource, folder: Path, tied: bool = False) -> None:
        """tied: whether the vocabulary projection of the model is its embedding."""
        self._source, self._folder, self._tied = source, folder, tied
        self._scales = read_scales(folder)
        self._adapter = open_adapter(folder)
        self._modules: set[str] = set()
        self._whole: dict[str, str] = {}  # name of a replaced tensor in the model -> its name in the adapter
        self._names = {self._own_name(name): name for name in self._adapter.names()}
        if len(self._names) < len(self._adapter.names()):
            raise CheckpointError(f"{folder / WEIGHTS} holds a tensor twice, by two names: save the adapter again")
        for own in self._names:
            self._add(own)

    @property
    def notes(self) -> tuple[str, ...]:
        name, changed, replaced = self._folder.name, len(self._modules), len(self._whole)
        merged = f"the adapter {name} is merged (matrices changed: {changed}, tensors replaced: {replaced})"
        if any(os.path.lexists(self._folder / file) for file in TOKENIZER_FILES):
            return merged, f"the tokenizer and template of the adapter {name} are not used, but the model's own"
        return (merged,)

    def stored(self, name: str) -> Stored | None:
        return self._source.stored(name)

    def tensor(self, name: str) -> NDArray[Any]:
        replaced = self._whole.get(name)
        array = self._source.tensor(name) if replaced is None else self._adapter.tensor(replaced)
        module = name.removesuffix(WEIGHT)
        if not name.endswith(WEIGHT) or module not in self._modules:
            return array
        first, second = (self._adapter.tensor(self._names[module + end]).astype(np.float32) for end in (A, B))
        with np.errstate(over="ignore", invalid="ignore"):  # Checkpoint.tensor refuses infinity
            change = second @ first
            change *= np.float32(self._scales.scale_of(module))
            change += array
        return change

    def blocks(self, name: str) -> Blocks | None:
        """See BlockSource.blocks. None for a tensor that the adapter changes."""
        changed = name in self._whole or (name.endswith(WEIGHT) and name.removesuffix(WEIGHT) in self._modules)
        return None if changed else stored_blocks(self._source, name)

    def _own_name(self, name: str) -> str:
        if not name.startswith(PREFIX):
            raise self._unmatched(name)
        return name.removeprefix(PREFIX).replace(BASE, ".")

    def _add(self, own: str) -> None:
        """Check a tensor, and note what it changes. own: its name in the model. Raises CheckpointError."""
        name = self._names[own]
        stored = self._adapter.stored(name)
        if stored is None or not stored.is_read:
            found = "unreadable" if stored is None else stored.dtype
            raise CheckpointError(f"{self._folder}: tensor {name} is {found}; use an fp32, fp16 or bf16 adapter")
        if "lora_embedding_" in own:
            raise CheckpointError(f"{self._folder}: tensor {name} adapts an embedding, {FIX}")
        if self._tied and own.startswith((f"{EMBED_TOKENS}.", f"{LM_HEAD}.")):
            raise CheckpointError(
                f"{self._folder}: tensor {name} belongs to the embedding or the projection alone, and this model ties "
                f"them together: store {HEAD_WEIGHT}, a copy of the embedding, in the model's folder, and set "
                "tie_word_embeddings to false in its config.json"
            )
        if own.endswith((A, B)):
            module = own.removesuffix(A).removesuffix(B)
            if module not in self._modules:
                self._check_module(module, name)
                self._modules.add(module)
            return
        base = self._source.stored(own)
        if base is None:
            raise self._unmatched(name)
        if base.shape != stored.shape:
            raise CheckpointError(
                f"{self._folder}: tensor {name} has shape {stored.shape}, the model's has {base.shape}: "
                "give the model that the adapter was trained on"
            )
        self._whole[own] = name

    def _check_module(self, module: str, name: str) -> None:
        """Raises CheckpointError unless A [r, in] and B [out, r] belong to a matrix of the model."""
        base = self._source.stored(module + WEIGHT)
        if base is None or len(base.shape) != 2:
            raise self._unmatched(name)
        rank, (outputs, inputs) = self._scales.rank_of(module), base.shape
        for end, shape in ((A, (rank, inputs)), (B, (outputs, rank))):
            stored = self._adapter.stored(self._names.get(module + end, ""))
            if stored is None:
                raise CheckpointError(f"{self._folder}: {module}{end} is missing; the adapter is incomplete")
            if stored.shape != shape:
                raise CheckpointError(
                    f"{self._folder}: tensor {module}{end} has shape {stored.shape} and should have {shape}, for rank "
                    f"{rank} and a matrix of {outputs} x {inputs}: give the model that the adapter was trained on"
                )

    def _unmatched(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self._folder}: tensor {brief(name)} belongs to nothing in the model: give the model that the adapter "
            "was trained on"
        )


FIX = "which is not supported: merge it into the model with peft's merge_and_unload, and build from the result"


def open_adapter(folder: Path) -> Safetensors:
    """Open the tensors of an adapter. Raises CheckpointError when there are none, or only pickled ones."""
    file = folder / WEIGHTS
    if not os.path.lexists(file):
        if (folder / PICKLED).exists():
            raise CheckpointError(f"{folder} holds a pickled adapter, which can run code when opened: save it again")
        raise CheckpointError(f"{file} is missing: is this a LoRA folder of PEFT?")
    adapter = Safetensors(folder, dict.fromkeys(open_safetensors(file).keys(), file))
    if not adapter.names():
        raise CheckpointError(f"{file} holds no tensors: save the adapter again")
    return adapter


def read_scales(folder: Path) -> Scales:
    """Read adapter_config.json. Raises CheckpointError that names a setting which is not supported."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: give a LoRA folder of PEFT, with {SETTINGS} and {WEIGHTS}")
    file = folder / SETTINGS
    config = read_json(file, "LoRA folder of PEFT")
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{file}: peft_type is {brief(config.get('peft_type'))} and not 'LORA', {FIX}")
    start = config.get("init_lora_weights")
    if not any(start is each or (start == each and isinstance(start, str)) for each in SAME_BASE):
        raise CheckpointError(f"{file}: init_lora_weights {brief(start)} changes the model itself, {FIX}")
    for name, value in config.items():
        if value and name not in (*OF_TRAINING, *OF_SCALE, "init_lora_weights"):
            raise CheckpointError(f"{file}: {brief(name)} is {brief(value)}, {FIX}")
    by_root = config.get("use_rslora")
    if by_root is not None and not isinstance(by_root, bool):
        raise CheckpointError(f"{file}: use_rslora must be true or false, found {brief(by_root)}")
    return Scales(
        checked(file, "r", config.get("r"), rank=True),
        checked(file, "lora_alpha", config.get("lora_alpha"), rank=False),
        bool(by_root),
        patterns(file, config, "rank_pattern", rank=True),
        patterns(file, config, "alpha_pattern", rank=False),
    )


def patterns(file: Path, config: Mapping[str, Any], name: str, rank: bool) -> dict[str, Any]:
    """Entries of rank_pattern or alpha_pattern. PEFT reads their keys as regular expressions; only keys that are plain
    names are supported. Raises CheckpointError for others."""
    found = config.get(name) or {}
    if not isinstance(found, dict) or len(found) > MAX_PATTERNS:
        raise CheckpointError(f"{file}: {name} must be an object of at most {MAX_PATTERNS} entries")
    for key in found:
        if not re.fullmatch(r"\^?[\w.-]+", key):
            raise CheckpointError(f"{file}: {name} has {brief(key)}, and not the name of a module, {FIX}")
    return {key: checked(file, name, value, rank) for key, value in found.items()}


def pattern_of(keys: Mapping[str, Any], module: str) -> str:
    """The first key that matches a module; the module's own name when none does."""
    for key in keys:
        if module in (key, key.removeprefix("^")) or module.endswith(f".{key}"):
            return key
    return module


def checked(file: Path, name: str, value: Any, rank: bool) -> Any:
    """A rank from 1 to MAX_RANK, or an alpha from -MAX_ALPHA to MAX_ALPHA. Raises CheckpointError."""
    kind, least, most = (int, 1, MAX_RANK) if rank else (int | float, -MAX_ALPHA, MAX_ALPHA)
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
        wanted = f"a whole number from 1 to {MAX_RANK}" if rank else f"a number of at most {MAX_ALPHA:g}"
        raise CheckpointError(f"{file}: {name} must be {wanted}, found {brief(value)}")
    return value
