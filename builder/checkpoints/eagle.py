"""EAGLE-3 heads (arXiv 2503.01840) as checkpoints of drafts, in the forms of its authors and of vLLM's speculators.

A head has one or more decoder layers, its own projection, and no tokenizer; most have no embedding, which is the
target's then. What a head lacks is taken from the target's checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...models.config import MOST_TAPS, LlamaConfig, Reading
from ...models.errors import CheckpointError
from ...models.families import FAMILIES
from ...models.fields import Settings, brief, switch
from ...models.layers import EMBEDDING_WEIGHT, network_of
from ...runtime.text.tokenizer import Tokenizer
from .safetensors import Safetensors
from .source import Stored, TensorSource
from .views import OFFSETS

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

SPECULATOR, LAYER = "speculators_model_type", "transformer_layer_config"
TAPS, OF_SGLANG = "eagle_aux_hidden_state_layer_ids", "eagle_config"
NORM_FIRST = "norm_before_residual"
OTHER_NORMS = ("norm_before_fc", "fc_norm", "norm_output")  # of later EAGLEs
OF_HEAD = {SPECULATOR, LAYER, TAPS, OF_SGLANG, NORM_FIRST, *OTHER_NORMS, "speculators_config", "speculators_version"}
OF_HEAD |= {"target_hidden_size", "target_vocab_size", "embed_requires_grad", "draft_vocab_size", "tie_word_embeddings"}
# Words in the settings of other drafts that are parts of their targets, and what they are called.
OTHERS = {
    "medusa": "Medusa",
    "hydra": "Hydra",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "peagle": "P-EAGLE",
    "mtp": "multi-token prediction (MTP)",
    "nextn": "multi-token prediction (MTP)",
    "xpress": "Xpress",
    "mlp_speculator": "an MLP speculator",
    "mlpspeculator": "an MLP speculator",
}
READ = "EAGLE-3 heads and whole models are read as drafts"
DEFAULT_TAPS = 7  # layers that a target needs for the taps of a head that names none
LESS = ("t2d",)  # tensors that say nothing more


def is_head(content: Settings, folder: Path) -> bool:
    """Whether a folder with this config.json holds an EAGLE-3 head. Raises CheckpointError for others' heads."""
    names = content.get("architectures")
    words = [content.get("model_type"), *(names if isinstance(names, list) else [])]
    words = [content[SPECULATOR]] if SPECULATOR in content else words
    told = " ".join(word for word in words if isinstance(word, str)).lower().replace("-", "")
    keys = " ".join(map(str, content)).lower()
    for word, name in OTHERS.items():
        if word in told or f"{word}_num" in keys:
            raise CheckpointError(f"{folder} is a draft of the kind {name}, which is not supported: {READ}")
    if "eagle3" in told:
        return True
    is_other = "eagle" in told or SPECULATOR in content
    found = set() if is_other else names_of(folder)
    if "fc.weight" in found and any(name.startswith("midlayer.") for name in found):
        return True
    if is_other or {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= found:
        kind = brief(content[SPECULATOR]) if SPECULATOR in content else "EAGLE-1 or EAGLE-2"
        raise CheckpointError(f"{folder} is a draft of the kind {kind}, which is not supported: {READ}")
    return False


def names_of(folder: Path) -> set[str]:
    """Names of the tensors of a folder; none where it cannot be read, of which its reader tells."""
    try:
        return set(Safetensors(folder).names())
    except CheckpointError:
        return set()


class EagleHead:
    """The ModelFiles of an EAGLE-3 head for a target."""

    def __init__(self, folder: Path, content: Settings, target: Checkpoint) -> None:
        """content: of config.json. Raises CheckpointError for what is not supported, and for another target's head."""
        self._target, own = target, Safetensors(folder)
        model = config_of(content, target.config)
        names = {name: own_name(name, own) for name in network_of(replace(model, tie_embeddings=False)).tensors()}
        shares = own.stored(names[EMBEDDING_WEIGHT]) is None
        if shares and model.hidden_size != target.config.hidden_size:
            raise CheckpointError(
                f"{folder} has no embedding, and that of the target has {target.config.hidden_size} numbers for a "
                f"token instead of {model.hidden_size}: it is the head of another target"
            )
        if shares and target.config.variant.embedding_multiplier != 1:
            raise CheckpointError(f"{folder}: a head that shares an embedding which its target multiplies is not read")
        if shares:
            model = replace(model, vocab_size=target.config.vocab_size)
        unknown = sorted({*own.names()} - {*names.values(), OFFSETS, *LESS})
        if unknown:
            raise CheckpointError(f"{folder}: tensor {unknown[0]} is none of an EAGLE-3 head as this release reads it")
        if model.draft_vocab_size is None and own.stored(OFFSETS) is not None:
            raise CheckpointError(
                f"{folder}: a head of all tokens has no {OFFSETS}: remove it, or say draft_vocab_size"
            )
        self.config = model
        self.tensors: TensorSource = HeadTensors(own, names, target if shares else None)
        told = "the embedding is the target's" if shares else "it has an embedding of its own"
        taps = ", ".join(map(str, model.reads.taps)) if model.reads else ""
        self.notes: tuple[str, ...] = (f"an EAGLE-3 head, which reads the target after {taps} layers; {told}",)

    def more_eos_ids(self) -> tuple[int, ...]:
        return ()

    def sampling(self) -> Mapping[str, Any]:
        return {}

    def write_tokenizer(self, destination: Path) -> Tokenizer:
        """The target's."""
        return self._target.write_tokenizer(destination)


class HeadTensors:
    """A TensorSource over a head's tensors by their own names, and the embedding of a target."""

    def __init__(self, source: Safetensors, names: Mapping[str, str], target: Checkpoint | None) -> None:
        self._source, self._names, self._target = source, names, target

    def stored(self, name: str) -> Stored | None:
        if name == EMBEDDING_WEIGHT and self._target is not None:
            return self._target.stored(name)
        return self._source.stored(self._names.get(name, name))

    def tensor(self, name: str) -> NDArray[Any]:
        if name == EMBEDDING_WEIGHT and self._target is not None:
            return np.asarray(self._target.tensor(name))
        return self._source.tensor(self._names.get(name, name))


def own_name(name: str, source: Safetensors) -> str:
    """A head's own name of a tensor."""
    bare = name.removeprefix("model.")
    return of_authors(bare) if source.stored(of_authors(bare)) is not None else bare


def of_authors(bare: str) -> str:
    """A tensor's name in the authors' form."""
    return re.sub(r"^layers\.0\.", "midlayer.", bare)


def config_of(content: Settings, target: LlamaConfig) -> LlamaConfig:
    """The configuration of a head. Raises CheckpointError."""
    layer = content.get(LAYER, content)
    if not isinstance(layer, dict):
        raise CheckpointError(f"config.json: {LAYER} must be an object, found {brief(layer)}")
    for name in OTHER_NORMS:
        if switch(content, name):
            raise CheckpointError(f"config.json: {name} of heads after EAGLE-3 is not supported: train it without")
    kind = layer.get("model_type", "llama")
    architecture = next((name for name, each in FAMILIES.items() if each.model_type == kind), None)
    if architecture not in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        raise CheckpointError(f"config.json: layers of {brief(kind)} in a head are not supported; llama and qwen3 are")
    settings = {name: value for name, value in layer.items() if name not in OF_HEAD}
    settings |= {"architectures": [architecture], "draft_vocab_size": content.get("draft_vocab_size")}
    model = LlamaConfig.from_hf(settings)
    trimmed = model.draft_vocab_size if model.draft_vocab_size != model.vocab_size else None
    # Such heads learned from texts of this length; a text may be as long as its target allows.
    context = model.max_position if model.max_position < target.max_position else None
    reads = Reading(taps_of(content, target), target.hidden_size, switch(content, NORM_FIRST))
    longest = max(model.max_position, target.max_position)
    return replace(model, draft_vocab_size=trimmed, draft_context=context, max_position=longest, reads=reads)


def taps_of(content: Settings, target: LlamaConfig) -> tuple[int, ...]:
    """After how many layers of its target a head reads the rows. Raises CheckpointError."""
    inner = content.get(OF_SGLANG)
    named = content.get(TAPS) or (inner.get(TAPS) if isinstance(inner, dict) else None)
    layers = target.num_layers
    if named is None:
        if layers < DEFAULT_TAPS:
            raise CheckpointError(f"config.json: {TAPS} must name layers, since the target has {layers} alone")
        return 2, layers // 2, layers - 3
    whole = isinstance(named, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in named)
    if not whole or not 1 <= len(named) <= MOST_TAPS or list(named) != sorted(set(named)):
        raise CheckpointError(f"config.json: {TAPS} must be 1 to {MOST_TAPS} numbers that ascend, found {brief(named)}")
    if not 1 <= named[0] <= named[-1] <= layers:
        raise CheckpointError(f"config.json: {TAPS} goes beyond the target's {layers} layers: it is another's head")
    return tuple(named)
