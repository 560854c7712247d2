"""Checks of the numbers of a manifest, before anything is computed from them.

The types are checked when the manifest is read. An engine's file is compared with these numbers when the engine is
opened: see `engines/native/weights.py`, `engines/onnx/file.py` and `engines/feeds.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from ...models.bindings import DTYPES, INTEGERS, LOW_BIT, ROLES, SUPERBLOCKS, TARGET, output_names
from ...models.config import MIN_DRAFT_CONTEXT, MOST_TAPS, LlamaConfig
from ...models.errors import BundleError
from ...models.fields import MAX_NUMBER
from ...models.layers import network_of
from ...models.rope_scaling import LONGROPE, STATIC, YARN
from ...plugins.native.library import STRIDE
from ..engines.backends import BACKENDS, COMPILED, stored_matrices
from ..engines.base import EngineSpec
from ..engines.compatibility import TensorRTPlan

if TYPE_CHECKING:
    from .bundle import Manifest

PRECISIONS = (*DTYPES, *LOW_BIT)
EXECUTABLE = (".so", ".dylib", ".dll", ".pyd", ".py")
MAX_FILES = 1000
# Orders of magnitude larger than any model or machine of today; small enough for 32-bit arithmetic.
MAX_LAYERS, MAX_SIZE, MAX_SLOTS, MAX_ROWS, MAX_BATCH = 4096, 1 << 24, 1 << 24, 1 << 14, 1 << 12
MAX_NUMBERS = (1 << 31) - 1  # of the rows of a pass: the kernels count them in 32 bits


class Unsound(ValueError):
    """A manifest whose numbers cannot be those of a build."""


def check_manifest(manifest: Manifest) -> None:
    """Raises BundleError that names the violated condition."""
    try:
        check_names(manifest.files)
        check_numbers(manifest)
        for role, spec in manifest.engines.items():
            check_engine(role, spec, manifest)
    except Unsound as error:
        raise BundleError(f"the manifest cannot be a build's: {error}: rebuild the bundle") from error


def check_names(files: Iterable[str]) -> None:
    """Raises BundleError for file names that lead out of the bundle, and for executable code."""
    for name in files:
        if PurePosixPath(name).parts != (name,) or name == ".." or "\\" in name or ":" in name:
            raise BundleError(f"the manifest names the file {name!r}, which leaves the bundle: do not use this bundle")
        if name.lower().endswith(EXECUTABLE):
            raise BundleError(f"{name!r} is executable code, which no bundle holds: do not use this one, or rebuild it")


def check_numbers(manifest: Manifest) -> None:
    roles = set(manifest.engines)
    sound = roles in ({TARGET}, set(ROLES)) and roles == set(manifest.parity)
    require(sound, "it does not describe a target, with a draft or without one")
    require(set(manifest.adapters) <= roles, "it names the adapter of another model")
    require(len(manifest.files) <= MAX_FILES, f"it lists {len(manifest.files)} files")
    for name, record in manifest.files.items():
        sound = record.bytes >= 0 and re.fullmatch("[0-9a-f]{64}", record.sha256) is not None
        require(sound, f"the size or digest of {name} is none")
    for role, difference in manifest.parity.items():
        require(difference >= 0, f"the {role}'s parity is {difference}")
    target, draft = (manifest.engines.get(role) for role in ROLES)
    reads = None if draft is None else draft.model.reads
    shown = (() if target is None else target.model.taps, 0 if target is None else target.model.hidden_size)
    sound = draft is None or ((reads.taps, reads.size) == shown if reads else not shown[0])
    require(sound, "the target does not return the states that the draft reads")
    sizes = {spec.model.vocab_size for spec in manifest.engines.values()}
    require(len(sizes) == 1, "target and draft have different vocabularies")
    require(all(0 <= token < min(sizes) for token in manifest.eos_token_ids), "an eos_token_id is outside of them")
    require(2 <= manifest.max_length <= MAX_SLOTS, f"max_length is {manifest.max_length}")


def check_engine(role: str, spec: EngineSpec, manifest: Manifest) -> None:
    """Check the numbers of one engine. Raises BundleError for an unknown backend, which a later release may support."""
    if spec.backend not in BACKENDS:
        fix = "update draftwood, or rebuild the bundle"
        raise BundleError(f"the {role} engine's backend {spec.backend!r} is unknown to this release: {fix}")
    if spec.precision not in PRECISIONS:
        raise BundleError(f"the {role}'s precision {spec.precision!r} is unknown to this release: update draftwood")
    require(spec.role == role, f"the {role} is a {spec.role}")
    backend = BACKENDS[spec.backend]
    computed = spec.precision not in LOW_BIT or spec.precision in backend.precisions
    require(computed, f"the {role} has matrices of {spec.precision}, which {spec.backend} does not compute")
    stored = spec.cache_precision
    require(stored in ("", *backend.caches), f"the {role}'s keys and values are {stored!r}")
    file = f"{role}.{backend.file}"
    require(spec.file == file, f"the {role}'s file is {spec.file!r} instead of {file!r}")
    require(file in manifest.files, f"it lists no file {file!r}")
    model, widths = spec.model, spec.pass_widths
    check_model(role, model)
    check_kept_tokens(role, spec)
    check_matrices(role, spec)
    require(ascending(widths) and bool(spec.widths) and widths[0] >= 1, f"the {role}'s widths do not ascend from 1")
    require(widths[-1] <= MAX_ROWS, f"the {role}'s passes have {widths[-1]} rows")
    sizes = (2 * model.hidden_size, model.intermediate_size, model.query_size + 2 * model.kv_size, model.state_inputs)
    longest = max(*sizes, model.state_size) + STRIDE
    fits = widths[-1] * longest <= MAX_NUMBERS  # and so do heads times rows
    require(fits, f"the {role}'s passes have {widths[-1]} rows of up to {longest - STRIDE} numbers")
    least = manifest.max_length + 2 * spec.max_width
    require(least <= spec.capacity <= MAX_SLOTS, f"the {role}'s caches have {spec.capacity} slots")
    for limit, tokens in model.limits.items():
        require(manifest.max_length <= tokens, f"the {role}'s {limit} is {tokens} tokens")
    known = {output_names(role, head, backend.form, model.state_size > 0) for head in (False, True)}
    require(spec.outputs in known, f"the {role}'s outputs are {', '.join(spec.outputs) or 'none'}")
    most_batch = MAX_BATCH if backend.is_compiled else 1
    require(1 <= spec.max_batch <= most_batch, f"the {role}'s max_batch is {spec.max_batch}")
    require((spec.plan is not None) == backend.is_compiled, f"the {role} has a plan, or lacks one")
    if spec.plan is not None:
        check_plan(role, spec.plan)


def check_model(role: str, model: LlamaConfig) -> None:
    sizes = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
    }
    for name, size in sizes.items():
        require(1 <= size <= MAX_SIZE, f"the {role}'s {name} is {size}")
    require(1 <= model.num_layers <= MAX_LAYERS, f"the {role} has {model.num_layers} layers")
    require(model.max_position >= 1, f"the {role}'s max_position is {model.max_position}")
    require(model.num_heads % model.num_kv_heads == 0, f"the {role}'s heads do not share its KV heads evenly")
    require(model.head_dim % 2 == 0, f"the {role}'s head_dim {model.head_dim} is odd")
    require(0 < model.norm_eps <= MAX_NUMBER, f"the {role}'s norm_eps is {model.norm_eps}")
    require(model.rope_theta > 0, f"the {role}'s rope_theta is {model.rope_theta}")
    variant, rotary_size = model.variant, model.rotary_size
    for indices in (variant.layers_without_rope, variant.full_layers):
        known = ascending(indices) and set(indices) <= set(range(model.num_layers))
        require(known, f"the {role} has no layers {indices}")
    require(
        variant.local_theta is None or variant.local_theta > 0, f"the {role}'s local_theta is {variant.local_theta}"
    )
    require(2 <= rotary_size <= model.head_dim and rotary_size % 2 == 0, f"the {role}'s rotary_size is {rotary_size}")
    scale = 1.0 if variant.attention_multiplier is None else variant.attention_multiplier
    multipliers = (variant.embedding_multiplier, scale, variant.residual_multiplier, variant.logits_multiplier)
    require(min(multipliers) > 0, f"the {role}'s multipliers are none")
    require(variant.window is None or variant.window >= 1, f"the {role}'s window is {variant.window}")
    sound = model.draft_context is None or (role != TARGET and model.draft_context >= MIN_DRAFT_CONTEXT)
    require(sound, f"the {role}'s draft_context is {model.draft_context}")
    require(scales_positions(model), f"the {role}'s rope_scaling is none")
    taps = model.taps if model.reads is None else model.reads.taps
    known = role != TARGET if model.reads is not None else role == TARGET or not taps
    known = known and ascending(taps) and len(taps) <= MOST_TAPS and (min(taps, default=1) >= 1)
    known = known and (max(model.taps, default=0) <= model.num_layers)
    known = known and (model.reads is None or (bool(taps) and not model.taps and 1 <= model.reads.size <= MAX_SIZE))
    require(known, f"the {role}'s states are none")


def check_kept_tokens(role: str, spec: EngineSpec) -> None:
    """A trimmed draft names the token of each of its columns; a target predicts every token."""
    model, kept = spec.model, spec.kept_tokens
    require(role != TARGET or model.draft_vocab_size is None, "the target's vocabulary is trimmed")
    require(len(kept) == (model.draft_vocab_size or 0), f"the {role} has other columns than kept tokens")
    if model.draft_vocab_size is not None:
        inside = ascending(kept) and kept[0] >= 0 and kept[-1] < model.vocab_size
        require(bool(kept) and inside, f"the {role}'s kept tokens are none of its vocabulary, or do not ascend")
        require(not model.tie_embeddings, f"the {role}'s projection is trimmed and tied to its embedding")


def check_matrices(role: str, spec: EngineSpec) -> None:
    """Where each matrix has its own codes, some may have others than the engine's."""
    if not spec.matrices:
        return
    mixes = bool(BACKENDS[spec.backend].heads) and spec.precision in INTEGERS
    require(mixes, f"the {role}'s matrices have precisions of their own, and {spec.backend} has one for all")
    for name, precision in spec.matrices.items():
        sound = precision in (*INTEGERS, *SUPERBLOCKS) and precision != spec.precision
        require(sound, f"the {role}'s matrix {name!r} has the precision {precision!r} beside {spec.precision}")
    unknown = spec.matrices.keys() - {matrix.name for matrix in stored_matrices(network_of(spec.model), spec.model)}
    require(not unknown, f"the {role} has no matrix {min(unknown, default='')!r}")


def scales_positions(model: LlamaConfig) -> bool:
    """Whether rotary tables can be computed from a model's scaling, if it has one."""
    scaling = model.rope_scaling
    if scaling is None:
        return True
    numbers = (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position)
    more = (scaling.attention_factor, scaling.beta_fast, scaling.beta_slow, *scaling.factors)
    listed = model.rotary_size // 2 if scaling.kind == LONGROPE else 0
    sound = scaling.kind in STATIC and min(*numbers, *more) > 0 and len(scaling.factors) == listed
    return sound and (scaling.kind != YARN or model.rope_theta > 1)


def check_plan(role: str, plan: TensorRTPlan) -> None:
    """Raises Unsound for impossible numbers. Whether this machine can run the plan is checked elsewhere."""
    require(plan.package in COMPILED, f"the {role}'s plan is of {plan.package!r}")
    sound = all(1 <= family.minimum <= family.optimum <= family.maximum <= MAX_ROWS for family in plan.families)
    require(sound and bool(plan.families), f"the {role}'s profiles are none")
    require(1 <= plan.columns <= MAX_SLOTS, f"the {role}'s plan has {plan.columns} columns")
    require(min(plan.layers) >= 0, f"the {role}'s layers are counted below 0")


def ascending(numbers: tuple[int, ...]) -> bool:
    return list(numbers) == sorted(set(numbers))


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Unsound(otherwise)
