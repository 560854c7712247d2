"""The build: two checkpoint folders -> tokenizer, ONNX graphs, parity -> one engine bundle, or nothing at all."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from ..models.acceptance_head import TrainedHead, read_head
from ..models.bindings import DRAFT, ROLES, TARGET, output_names
from ..models.config import token_ids
from ..models.errors import CheckpointError, ConfigError
from ..runtime.bundle import (
    EngineBundle,
    Manifest,
    file_record,
    staging_folder,
    write_manifest,
)
from ..runtime.engines.base import EngineSpec
from ..runtime.engines.onnxruntime import OnnxRuntimeEngine
from ..runtime.engines.torch import TorchEngine
from .checkpoint import Checkpoint, read_json
from .export import export
from .parity import largest_difference
from .tokenizer import convert_tokenizer, same_vocabulary

BACKENDS = {"onnxruntime": ("fp32",)}  # and the precisions each can build
LONGEST = 8192  # default context where the models would allow more: rotary tables and masks grow with it
SPECULATIVE_PASSES = 4  # widest passes a cache has room for behind the longest text


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What to build. Raises ConfigError for what this release cannot build.

    target, draft: Hugging Face checkpoint folders. output: the bundle's folder. max_length: tokens of prompt and output
    together; None takes what both models were trained for, up to 8192. widths: rows a pass may have. acceptance_head:
    a folder of draftwood train-head, whose head becomes part of the draft's graph.
    """

    target: Path
    draft: Path
    output: Path
    backend: str = "onnxruntime"
    precision: str = "fp32"
    max_length: int | None = None
    widths: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
    acceptance_head: Path | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend {self.backend!r} is not available; choose one of {', '.join(BACKENDS)}")
        if self.precision not in BACKENDS[self.backend]:
            choices = ", ".join(BACKENDS[self.backend])
            raise ConfigError(f"precision {self.precision!r} is not available for {self.backend}; choose {choices}")
        if not self.widths or self.widths[0] != 1 or list(self.widths) != sorted(set(self.widths)):
            raise ConfigError(f"widths must ascend from 1, not {','.join(map(str, self.widths))}")
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(f"max_length must be at least 2 (one token in, one out), not {self.max_length}")


class Step(NamedTuple):
    """One step of a build: what is done, and the number of units it consists of."""

    title: str
    units: int


Begin = Callable[[Step], Callable[[], None]]  # announces a step; what it returns is called once per unit done


def build(options: BuildOptions, begin: Begin) -> EngineBundle:
    """Build, check and write a bundle; returns it opened.

    Everything happens in a temporary folder beside the output, which is renamed when all of it succeeded. Raises
    CheckpointError, ConfigError or BundleError.
    """
    advance = begin(Step("Reading checkpoints", 2))
    folders = {TARGET: options.target, DRAFT: options.draft}
    checkpoints = {}
    for role, folder in folders.items():
        checkpoints[role] = Checkpoint(folder)
        advance()
    refuse_different_sizes(checkpoints)
    max_length = context_length(options, checkpoints)
    heads: dict[str, TrainedHead | None] = dict.fromkeys(ROLES)
    if options.acceptance_head is not None:
        heads[DRAFT] = read_head(options.acceptance_head, checkpoints[DRAFT].config.hidden_size)
    with staging_folder(options.output) as staging:
        advance = begin(Step("Converting the tokenizer", 1))
        tokenizer = convert_tokenizer(options.target, staging)
        with tempfile.TemporaryDirectory() as other:
            same_vocabulary(tokenizer, convert_tokenizer(options.draft, Path(other)))
        advance()
        engines = {}
        parity = {}
        for role in ROLES:
            engines[role] = export_engine(checkpoints[role], role, options, max_length, staging, begin, heads[role])
            parity[role] = check_parity(checkpoints[role], engines[role], staging, begin, heads[role])
        names = sorted(file.name for file in staging.iterdir())
        advance = begin(Step("Sealing the bundle", len(names)))
        files = {}
        for name in names:
            files[name] = file_record(staging / name)
            advance()
        eos = end_of_text(options.target, checkpoints[TARGET])
        builder = f"draftwood {version('draftwood')}"
        write_manifest(staging, Manifest(builder, max_length, eos, engines, parity, files))
    return EngineBundle.open(options.output)


def export_engine(
    checkpoint: Checkpoint,
    role: str,
    options: BuildOptions,
    max_length: int,
    staging: Path,
    begin: Begin,
    head: TrainedHead | None,
) -> EngineSpec:
    """Write one role's graph."""
    capacity = max_length + SPECULATIVE_PASSES * options.widths[-1]
    file = f"{role}.onnx"
    advance = begin(Step(f"Exporting the {role} ({checkpoint.config.num_parameters / 1e6:.1f}M parameters)", 1))
    write = export if head is None else partial(export, head=head)
    write(checkpoint, role, capacity, staging / file, lambda name: None)
    advance()
    return EngineSpec(
        role=role,
        backend=options.backend,
        file=file,
        model=checkpoint.config,
        widths=options.widths,
        capacity=capacity,
        precision=options.precision,
        outputs=output_names(role, head is not None),
    )


def check_parity(
    checkpoint: Checkpoint, spec: EngineSpec, staging: Path, begin: Begin, head: TrainedHead | None
) -> float:
    """Compare one engine with the torch reference."""
    advance = begin(Step(f"Comparing the {spec.role} with the torch reference", 1))
    engine = OnnxRuntimeEngine(staging / spec.file, spec)
    reference = TorchEngine(checkpoint.tensor, spec, head=head)
    difference = largest_difference(engine, reference)
    engine.close()
    reference.close()
    advance()
    return difference


def refuse_different_sizes(checkpoints: Mapping[str, Checkpoint]) -> None:
    """Both models must score the same token ids."""
    target, draft = (checkpoints[role].config.vocab_size for role in (TARGET, DRAFT))
    if target != draft:
        raise CheckpointError(
            f"the target's vocabulary has {target} tokens and the draft's {draft}: "
            "choose a draft that shares the target's tokenizer"
        )


def context_length(options: BuildOptions, checkpoints: Mapping[str, Checkpoint]) -> int:
    """Tokens of prompt and output together. Raises ConfigError when a model was not trained for that many."""
    trained = min(checkpoint.config.max_position for checkpoint in checkpoints.values())
    if options.max_length is None:
        return min(trained, LONGEST)
    for role, checkpoint in checkpoints.items():
        if options.max_length > checkpoint.config.max_position:
            raise ConfigError(
                f"max_length {options.max_length} exceeds the {role}'s context of {checkpoint.config.max_position} "
                f"tokens: ask for at most {trained}"
            )
    return options.max_length


def end_of_text(folder: Path, checkpoint: Checkpoint) -> tuple[int, ...]:
    """Ids that end a text: generation_config.json's (chat models list several there) and config.json's."""
    file = folder / "generation_config.json"
    listed = token_ids(read_json(file).get("eos_token_id")) if file.is_file() else ()
    return tuple(sorted({*listed, *checkpoint.config.eos_token_ids}))
