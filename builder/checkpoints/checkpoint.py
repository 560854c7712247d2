"""A checked checkpoint: the model's configuration, its tensors as named arrays, and its tokenizer."""

from __future__ import annotations

import math
import re
import tempfile
from collections import Counter
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...models.errors import CheckpointError, RequestError
from ...models.layers import EMBEDDING_WEIGHT, HEAD_WEIGHT, network_of
from ...runtime.bundle.defaults import known, params_from
from ...runtime.text.tokenizer import Tokenizer
from ..parallel import in_parts
from ..tokenizer import check_rows, check_same_vocabulary
from .eagle import EagleHead, is_head
from .folder import CONFIG, HuggingFaceFolder
from .lora import Merged
from .source import Blocks, ModelFiles, Stored, TensorSource, read_json, stored_blocks
from .views import BY_TOKEN, check_tied, cut, read_kept_tokens, split, trimmed


class Checkpoint:
    """A checkpoint in any format. Opening it reads headers, and of a tied model a vocabulary projection that it stores
    nevertheless. `tensor` reads one tensor and keeps none in memory."""

    def __init__(self, path: Path, lora: Path | None = None, target: Checkpoint | None = None) -> None:
        """path: a Hugging Face folder or a GGUF file. lora: the folder of an adapter, which is merged into the tensors.
        target: of a draft, which may be a head that reads its states.

        Raises CheckpointError when anything that the model needs is missing, damaged or of the wrong shape."""
        self.path = path
        self._files = files_at(path, target)
        self.config = self._files.config
        self.notes = self._files.notes  # sentences that a build shows to its user
        self.is_adapted = lora is not None
        self._source: TensorSource = self._files.tensors
        self.kept_tokens: NDArray[np.int64] | None = None  # [N], ascending: those that a trimmed draft predicts
        if lora is not None and self.config.reads is not None:
            raise CheckpointError(f"{lora} is an adapter of a whole model, and {path} a head: leave --draft-lora out")
        if lora is not None:
            merged = Merged(self._source, lora, self.config.tie_embeddings)
            self._source, self.notes = merged, (*self.notes, *merged.notes)
        if self.config.draft_vocab_size is not None:
            self._trim(read_kept_tokens(self._files.tensors, self.config.draft_vocab_size, self.config.vocab_size))
        self._source = split(self._source, self.config)
        for name, shape in network_of(self.config).tensors().items():
            self._check(name, shape)
        if self.config.tie_embeddings:
            check_tied(self._source)

    def tensor(self, name: str) -> NDArray[Any]:
        """One tensor in its stored dtype. Raises CheckpointError when it holds NaN or infinity."""
        array = self._source.tensor(name)
        self._refuse_not_finite(name, array)
        return array

    def cut(self, tokens: int) -> Checkpoint:
        """The same checkpoint with a vocabulary of the first `tokens` tokens only."""
        result = copy(self)
        result.config = replace(self.config, vocab_size=tokens)
        if self.kept_tokens is not None and self.kept_tokens[-1] >= tokens:
            raise CheckpointError(
                f"{self.path}: the trimmed vocabulary keeps token {self.kept_tokens[-1]}, which the other model does "
                "not have: trim it to tokens that both have"
            )
        names = BY_TOKEN if self.kept_tokens is None else (EMBEDDING_WEIGHT,)
        result._source = cut(self._source, tokens, names)
        return result

    def trimmed(self, tokens: NDArray[np.int64]) -> Checkpoint:
        """The same checkpoint, not trimmed yet, with a projection for these tokens only, int64 [N], ascending."""
        result = copy(self)
        result._trim(tokens)
        return result

    def _trim(self, tokens: NDArray[np.int64]) -> None:
        self._source = trimmed(self._source, tokens, self.config.tie_embeddings)
        self.config = replace(self.config, draft_vocab_size=len(tokens), tie_embeddings=False)
        self.kept_tokens = tokens

    def tapped(self, taps: tuple[int, ...]) -> Checkpoint:
        """The same checkpoint, which shows its rows after so many layers."""
        result = copy(self)
        result.config = replace(self.config, taps=taps)
        return result

    def stored(self, name: str) -> Stored | None:
        return self._source.stored(name)

    def blocks(self, name: str) -> Blocks | None:
        """The codes, scales and offsets of a matrix that the file stores in blocks; None for any other tensor. Raises
        CheckpointError when a scale or an offset is NaN or infinite."""
        blocks = stored_blocks(self._source, name)
        if blocks is not None:
            self._refuse_not_finite(name, blocks.scales)
            self._refuse_not_finite(name, blocks.offsets)
        return blocks

    def eos_token_ids(self) -> list[int]:
        """Ids of tokens that end a text, ascending, some perhaps beyond the vocabulary. Raises CheckpointError."""
        return sorted({*self.config.eos_token_ids, *self._files.more_eos_ids()})

    def stored_bits(self) -> int:
        """Bits of most weights as the file stores them."""
        counts = Counter[int]()
        for name, shape in network_of(self.config).tensors().items():
            bits = re.search(r"\d+", self.stored_type(name))
            counts[int(bits[0]) if bits else 32] += math.prod(shape)
        return counts.most_common(1)[0][0]

    def stored_type(self, name: str) -> str:
        """The type of a tensor, by its name in the file's format; "" if there is none."""
        stored = self._source.stored(name)
        return "" if stored is None else stored.dtype

    def sampling(self) -> dict[str, Any]:
        """The sampling settings that the model's authors recommend; none if they are out of range."""
        found = known(self._files.sampling())
        try:
            params_from(found, self.config.max_position)
        except RequestError as error:
            self.notes = (*self.notes, f"the sampling settings of its authors are left out: {error}")
            return {}
        return found

    def write_tokenizer(self, destination: Path) -> Tokenizer:
        """Write the tokenizer into a folder, and open it there. Raises CheckpointError, also for another model's."""
        tokenizer = self._files.write_tokenizer(destination)
        check_rows(self.path, tokenizer, self.config.vocab_size)
        return tokenizer

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that `write_tokenizer` opens. Raises CheckpointError."""
        with tempfile.TemporaryDirectory() as folder:
            return self.write_tokenizer(Path(folder))

    def _refuse_not_finite(self, name: str, array: NDArray[Any]) -> None:
        if not is_finite(array):
            raise CheckpointError(f"{self.path}: tensor {name} holds NaN or infinity; the checkpoint is damaged")

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        stored = self._source.stored(name)
        if stored is None:
            tied = ", or config.json lacks tie_word_embeddings: true" if name == HEAD_WEIGHT else ""
            raise CheckpointError(f"{self.path}: tensor {name} is missing; the checkpoint is incomplete{tied}")
        if not stored.is_read:
            raise CheckpointError(f"{self.path}: tensor {name} is {stored.dtype}; use an fp32, fp16 or bf16 checkpoint")
        if stored.shape != shape:
            raise CheckpointError(
                f"{self.path}: tensor {name} has shape {stored.shape}, its configuration asks for {shape}"
            )


def is_finite(array: NDArray[Any]) -> bool:
    """Whether an array of floats holds neither NaN nor infinity, whose exponents have all bits."""
    bits = array.view(f"u{array.dtype.itemsize}")
    infinity = np.array(np.inf, array.dtype).view(bits.dtype)
    found: list[bool] = []
    if array.size:
        in_parts(
            len(bits),
            bits[:1].size,
            lambda part: found.append((bits[part] & (infinity | infinity - 1)).max() < infinity),
        )
    return all(found)


def check_same_tokens(target: Checkpoint, draft: Checkpoint) -> None:
    """Raises CheckpointError unless every token has the same id in both checkpoints."""
    with target.tokenizer() as ours, draft.tokenizer() as theirs:
        check_same_vocabulary(ours, theirs)


def files_at(path: Path, target: Checkpoint | None = None) -> ModelFiles:
    """Open a path in the format that it has. target: see Checkpoint. Raises CheckpointError."""
    if path.is_dir():
        content = read_json(path / CONFIG)
        if not is_head(content, path):
            return HuggingFaceFolder(path)
        if target is None:
            raise CheckpointError(f"{path} is an EAGLE-3 head, a part of a draft: give it as --draft beside its target")
        return EagleHead(path, content, target)
    if path.suffix.lower() == ".gguf":
        from .gguf.file import GgufFile  # imported only here: it needs the gguf package

        return GgufFile(path)
    raise CheckpointError(
        f"{path} is not a folder: give the path of a Hugging Face checkpoint folder, or of a .gguf file"
    )
