"""What a build chooses where its user does not: the precision that the target's file has, and a draft that is known."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from ..models import errors
from ..models.errors import CheckpointError, ConfigError
from ..runtime.engines.backends import BACKENDS
from .checkpoints.checkpoint import Checkpoint
from .checkpoints.hub import MODEL, local_folder
from .options import BuildOptions
from .progress import Begin, remark
from .quantization.formats import FORMATS, QuantizedCheckpoint
from .tokenizer import check_same_vocabulary

# Drafts of this package, by layers, hidden size and intermediate size of their targets.
KNOWN = {(30, 576, 1536): Path(errors.__file__).with_name("demo") / "smollm2"}


def suited(options: BuildOptions, has_draft: bool, begin: Begin) -> BuildOptions:
    """The options with a precision and a draft that suit the target. has_draft: whether the user chose one, or none.
    Raises CheckpointError."""
    if has_draft and (options.precision is not None or BACKENDS[options.backend].is_compiled):
        return options
    options = replace(options, target=local_folder(options.target, MODEL, begin))
    target = Checkpoint(options.target)
    if options.precision is None and not BACKENDS[options.backend].is_compiled:
        options = replace(options, precision=own_precision(target, options.backend, begin))
    draft = None if has_draft else known_draft(target)
    if draft is None:
        return options
    remark(begin, f"Taking the draft of this package, {draft.name}: --draft none builds without it")
    return replace(options, draft=draft)


def own_precision(target: Checkpoint, backend: str, begin: Begin) -> str:
    """The integers nearest to what a file holds; the backend's first precision where matrices do not divide into
    blocks. `begin` hears of weights that are rounded."""
    bits, precisions = target.stored_bits(), BACKENDS[backend].precisions
    precision = "int4" if bits == 4 else "int8"
    try:
        QuantizedCheckpoint(target, FORMATS[backend, precision])
    except ConfigError:
        return precisions[0]
    if bits > 8:
        kept = "bf16" if bits == 16 and "bf16" in precisions else precisions[0]
        remark(begin, f"Rounding weights of {bits} bits to int8: --precision {kept} keeps them, and is slower")
    return precision


def known_draft(target: Checkpoint) -> Path | None:
    """A draft of this package for this target; None if there is none, or if their tokenizers differ."""
    config = target.config
    draft = KNOWN.get((config.num_layers, config.hidden_size, config.intermediate_size))
    if draft is None:
        return None
    try:
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            check_same_vocabulary(target.write_tokenizer(Path(one)), Checkpoint(draft).write_tokenizer(Path(other)))
    except CheckpointError:
        return None
    return draft
