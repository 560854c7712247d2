"""The finished draft: an ordinary Hugging Face folder in bf16, trimmed or with the full vocabulary, or an EAGLE-3 head.

A trimmed draft's config.json has `draft_vocab_size` N, and its safetensors hold `d2t`, int64 [N]: output i stands for
the target's token i + d2t[i], as in EAGLE-3 and in vLLM's speculators. The embedding is complete, and the vocabulary
projection is its rows of these tokens. A head has rows of its own, and neither an embedding nor a tokenizer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from ...models.config import LlamaConfig
from ...models.errors import ConfigError
from ...models.families import Variant
from ...models.layers import EMBEDDING_WEIGHT, HEAD_WEIGHT
from ...models.plain_files import read_object
from ...runtime.bundle.staging import staging_folder
from ...runtime.text.tokenizer import TOKENIZER
from ..checkpoints.checkpoint import Checkpoint, check_same_tokens
from ..checkpoints.eagle import TAPS, of_authors
from ..kept_tokens import offsets
from .card import EARLIER, Origin, card
from .network import DraftNetwork
from .state import write_json
from .target import digest

FIGURES = "distillation.json"
WEIGHTS = "model.safetensors"
PICTURE = "acceptance.svg"
MARGIN = 60.0  # nats by which a token without training should lie below the lowest best logit
RIDGE = 1e-3
BEGINNING = "beginning.json"  # beside the checkpoint of a training


class Report(NamedTuple):
    """What stands beside the weights."""

    figures: Mapping[str, Any]  # JSON-ready
    picture: str  # SVG


class Losing(NamedTuple):
    """The projection for tokens that the draft never writes."""

    row: Tensor  # [H]
    probability: float  # the largest of all these tokens together, at the states from which the row was made


def write_draft(
    folder: Path,
    network: DraftNetwork,
    target: Checkpoint,
    origin: Origin,
    report: Report,
    states: Tensor | None = None,
) -> dict[str, Any]:
    """Write a draft, replacing an older one, and return its figures. states: hidden states [M, H] of some text; with
    them the draft gets the full vocabulary. Raises ConfigError when it cannot be written."""
    config = network.llama.config
    tensors = {name: parameter.detach().cpu() for name, parameter in network.llama.named_parameters()}
    kept = network.kept.cpu()
    fields = config_fields(config)
    figures = dict(report.figures)
    if config.reads is not None:
        del tensors[EMBEDDING_WEIGHT]
        tensors = {of_authors(name.removeprefix("model.")): tensor for name, tensor in tensors.items()}
        fields |= {"architectures": ["LlamaForCausalLMEagle3"], TAPS: list(config.reads.taps)}
        fields["max_position_embeddings"] = config.draft_context or config.max_position
    elif config.draft_context is not None:
        fields["draft_context"] = config.draft_context
    if config.reads is not None and len(kept) == config.vocab_size:
        pass  # such a head has no offsets
    elif states is None:
        tensors["d2t"] = torch.from_numpy(offsets(kept.numpy()))
        fields["draft_vocab_size"] = len(kept)
    elif len(kept) < config.vocab_size:
        projection = tensors[EMBEDDING_WEIGHT][kept]
        losing = losing_row(projection, states.cpu().float(), config.vocab_size - len(kept))
        head = losing.row.repeat(config.vocab_size, 1)
        head[kept] = projection
        tensors[HEAD_WEIGHT] = head
        fields["tie_word_embeddings"] = False
        figures["probability_of_untrained_tokens"] = round(losing.probability, 6)
    stored = {
        name: tensor if tensor.dtype == torch.int64 else tensor.bfloat16().contiguous()
        for name, tensor in tensors.items()
    }
    with staging_folder(folder, FIGURES, ConfigError) as staging:
        if config.reads is None:
            target.write_tokenizer(staging)
            compact(staging / TOKENIZER)
        save_file(stored, staging / WEIGHTS, {"format": "pt"})
        write_json(staging / "config.json", fields)
        eos = target.eos_token_ids()
        write_json(staging / "generation_config.json", {"bos_token_id": config.bos_token_id, "eos_token_id": eos})
        write_json(staging / FIGURES, figures)
        (staging / PICTURE).write_text(report.picture, encoding="utf-8")
        trimmed = None if states is not None else len(kept)
        (staging / "README.md").write_text(card(origin, config, trimmed, figures), encoding="utf-8")
        if origin.licence_text is not None:
            (staging / "LICENSE").write_text(origin.licence_text, encoding="utf-8")
    return figures


@torch.no_grad()
def losing_row(projection: Tensor, states: Tensor, tokens: int) -> Losing:
    """A row whose logit is nearly constant and far below the best logit at every state, by ridge regression.

    projection: [N, H] of the trained tokens. states: [M, H]. tokens: the number of tokens that get the row. A row of
    zeros would not do: a best logit may lie near 0, and many tokens at 0 together have much probability.
    """
    logits = states @ projection.T
    wanted = float(logits.amax(-1).min()) - MARGIN
    gram = states.T @ states + RIDGE * len(states) * torch.eye(states.shape[1])
    row = torch.linalg.solve(gram, states.T @ torch.full((len(states),), wanted))
    row = row.bfloat16().float()
    own = torch.full((len(states),), float(np.log(max(tokens, 1)))) + states @ row
    share = (own - torch.logaddexp(own, logits.logsumexp(-1))).exp()
    return Losing(row, float(share.max()))


def config_fields(config: LlamaConfig) -> dict[str, Any]:
    """config.json, in the spelling of transformers 4 and 5."""
    eos = list(config.eos_token_ids)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def compact(file: Path) -> None:
    """Write a JSON file without spaces: a tokenizer then has half the size."""
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")


class Start(NamedTuple):
    """A finished draft with which a training begins."""

    checkpoint: Checkpoint
    config: LlamaConfig  # of the network in training, whose projection is tied: it has a row for whatever token
    kept: NDArray[np.int64]  # [N], the tokens that it writes so far
    earlier: Mapping[str, Any]  # figures of its own distillation, see EARLIER

    def load(self, network: DraftNetwork) -> None:
        """Copy the weights."""
        with torch.no_grad():
            for name, parameter in network.llama.named_parameters():
                parameter.copy_(torch.from_numpy(self.checkpoint.tensor(name).astype(np.float32)))


def read_start(folder: Path, target: Checkpoint) -> Start:
    """Read a draft that was distilled for a target with the same tokens. Raises CheckpointError and ConfigError."""
    checkpoint = Checkpoint(folder)
    config, kept = checkpoint.config, checkpoint.kept_tokens
    if config.vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"{folder} reads {config.vocab_size} tokens, and the target has {target.config.vocab_size}: give a draft "
            "of this target with --from"
        )
    check_same_tokens(target, checkpoint)
    plain = config.variant == Variant() and config.rope_scaling is None
    if kept is None or not plain or config.attention_bias or config.mlp_bias or not is_tied(checkpoint, kept):
        raise ConfigError(
            f"{folder} is no draft that a training can begin with: give a folder with --from that `draftwood distill` "
            "wrote without --full-vocabulary"
        )
    try:
        figures = read_object(folder / FIGURES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / FIGURES} cannot be read ({error}): give a folder of `distill`") from error
    earlier = {name: figures[name] for name in EARLIER if is_finite(figures.get(name))}
    config = replace(config, draft_vocab_size=None, tie_embeddings=True)
    return Start(checkpoint, config, kept.astype(np.int64), earlier)


def check_beginning(folder: Path, start: Start | None, continued: bool) -> Mapping[str, Any]:
    """Returns the figures of the draft with which the training in a folder began. Raises ConfigError if it is continued
    with another --from. Writes what a new one begins with: the draft's folder, too, since a draft may be written over
    the one that it began with."""
    file, given = folder / BEGINNING, None if start is None else start.checkpoint
    beginning = {} if given is None else {"from": str(given.path.resolve()), "digest": digest(given)}
    figures: Mapping[str, Any] = {} if start is None else start.earlier
    if not continued:
        write_json(file, beginning | {FIGURES: figures})
    if not file.is_file():
        return figures
    try:
        earlier = read_object(file, own=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not readable ({error}): remove it") from error
    then = earlier.pop(FIGURES, None)
    same = (name for name in beginning if earlier.get(name) == beginning[name])
    if earlier != beginning and next(same, None) is None:
        raise ConfigError(
            f"{folder} holds a training that began with another --from, or with none: give the same as then, choose "
            f"another --state, or remove {folder}, which keeps the texts"
        )
    return figures if then is None else then


def outputs_of(folder: Path) -> int | None:
    """The tokens that the draft in a folder writes; None for all."""
    found: int | None = read_object(folder / "config.json", own=True).get("draft_vocab_size")
    return found


def is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def is_tied(checkpoint: Checkpoint, kept: NDArray[np.int64]) -> bool:
    """Whether the projection is the embedding's rows of the tokens that a draft writes, as in training."""
    return np.array_equal(checkpoint.tensor(HEAD_WEIGHT), checkpoint.tensor(EMBEDDING_WEIGHT)[kept])
