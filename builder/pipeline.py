"""The build: two checkpoints -> tokenizer, engines, parity -> one engine bundle, or nothing at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ..models import errors
from ..models.acceptance_head import TrainedHead, read_head
from ..models.bindings import DRAFT, INTEGERS, ROLES, TARGET
from ..models.errors import BundleError, CheckpointError, ConfigError
from ..models.layers import num_parameters
from ..models.release import own_version
from ..runtime.bundle.bundle import GENERATION, MANIFEST, EngineBundle, Manifest, write_manifest
from ..runtime.bundle.checks import check_manifest
from ..runtime.bundle.digests import FileRecord, file_record
from ..runtime.bundle.staging import replaceable, staging_folder
from ..runtime.engines.backends import BACKENDS
from ..runtime.engines.base import EngineSpec
from ..runtime.text.tokenizer import Tokenizer
from .checkpoints.checkpoint import Checkpoint, check_same_tokens
from .checkpoints.hub import ADAPTER, MODEL, local_folder
from .engines.make import Source, engine_spec, make_engine
from .engines.plan import check_compiler
from .kept_tokens import affordable, most_frequent
from .options import ALL, STORED_BITS, BuildOptions, Count
from .progress import Begin, Step, remark
from .quantization.formats import FORMATS, Quantized, QuantizedCheckpoint, Weights
from .quantization.kept import kept_format, nearest_integers
from .tokenizer import check_known, check_same_vocabulary

# Parameters of a draft that is bound by reading its weights: a smaller one stays in a processor's caches, and in fewer
# than 8 bits only loses acceptance.
LARGE = 50_000_000
LONGEST = 8192  # default context where the models would allow more: rotary tables and masks grow with it
# Drafts of this package, by layers, hidden size and intermediate size of their targets.
KNOWN = {(30, 576, 1536): Path(errors.__file__).with_name("demo") / "smollm2"}


def build(options: BuildOptions, begin: Begin) -> EngineBundle:
    """Build, check and write a bundle; returns it opened.

    Everything happens in a temporary folder beside the output, which is renamed when all of it succeeded. Raises
    CheckpointError, ConfigError or BundleError.
    """
    asked, options = options, downloaded(options, begin)
    checkpoints = opened(options, begin(Step("Reading checkpoints", len(options.roles))))
    for text in remarks(options, checkpoints):
        remark(begin, text)
    max_length = context_length(options, checkpoints)
    if BACKENDS[options.backend].is_compiled:
        check_compiler(options.compile_options())
    elif isinstance(options.draft, Path):
        options = with_cheap_draft(options, checkpoints, begin)
    heads: dict[str, TrainedHead | None] = dict.fromkeys(options.roles)
    if options.acceptance_head is not None:
        heads[DRAFT] = read_head(options.acceptance_head, checkpoints[DRAFT].config.hidden_size)
    with staging_folder(options.output, MANIFEST, BundleError) as staging:
        advance = begin(Step("Converting the tokenizer", 1))
        tokenizer = checkpoints[TARGET].write_tokenizer(staging)
        if isinstance(options.draft, Path):
            with checkpoints[DRAFT].tokenizer() as other:
                check_same_vocabulary(tokenizer, other)
        advance()
        checkpoints = one_vocabulary(checkpoints, tokenizer, begin)
        if options.draft_vocabulary is not None:
            checkpoints[DRAFT] = trimmed(checkpoints, options, options.draft_vocabulary, tokenizer, begin)
        engines, parity, files = dict[str, EngineSpec](), dict[str, float](), dict[str, FileRecord]()
        for role in options.roles:
            source = Source(checkpoints[role], role, heads[role], options.backend_of(role), options.precision_of(role))
            usual = FORMATS.get((source.backend, source.precision))
            if role == DRAFT and usual is not None:  # a coarse projection costs it hardly any acceptance
                source = replace(source, form=replace(usual, others={}))
            elif options.keeps_blocks:
                kept = kept_format(checkpoints[role], BACKENDS[source.backend], source.precision)
                source = replace(source, form=kept)
            if options.calibration is not None and options.is_calibrated(role):
                source = replace(source, rounded=rounded_with(options.calibration, source.weights, tokenizer, begin))
            spec = engine_spec(source, options, max_length)
            engines[role], parity[role], record = make_engine(source, spec, options, staging, begin)
            files |= {} if record is None else {spec.file: record}
        if sampling := checkpoints[TARGET].sampling():
            (staging / GENERATION).write_text(json.dumps(sampling) + "\n", encoding="utf-8")
        names = sorted(file.name for file in staging.iterdir())
        advance = begin(Step("Sealing the bundle", len(names)))
        for name in names:
            files[name] = files.get(name) or file_record(staging / name)
            advance()
        eos = end_of_text(checkpoints[TARGET], begin)
        builder = f"draftwood {own_version()}"
        adapters = {role: name_of(lora) for role in options.roles if (lora := asked.lora_of(role)) is not None}
        manifest = Manifest(builder, max_length, eos, engines, parity, files, adapters)
        check_manifest(manifest)  # before an older bundle in this place is replaced
        write_manifest(staging, manifest)
    return EngineBundle.open(options.output)


def downloaded(options: BuildOptions, begin: Begin) -> BuildOptions:
    """With a folder in place of each id of the Hugging Face Hub. Raises CheckpointError."""
    lora, draft_lora = (
        None if given is None else local_folder(given, ADAPTER, begin) for given in (options.lora, options.draft_lora)
    )
    target, draft = local_folder(options.target, MODEL, begin), options.draft
    draft = local_folder(draft, MODEL, begin) if isinstance(draft, Path) else draft
    return replace(options, target=target, draft=draft, lora=lora, draft_lora=draft_lora)


def opened(options: BuildOptions, advance: Callable[[], None]) -> dict[str, Checkpoint]:
    checkpoints: dict[str, Checkpoint] = {}
    for role in options.roles:
        path = options.target if role == TARGET or not isinstance(options.draft, Path) else options.draft
        target = checkpoints.get(TARGET) if isinstance(options.draft, Path) else None
        checkpoints[role] = Checkpoint(path, options.lora_of(role), target)
        advance()
    refuse_draft(checkpoints[TARGET])
    reads = checkpoints[DRAFT].config.reads if DRAFT in checkpoints else None
    if reads is not None:
        refuse_beside_states(options)
    checkpoints[TARGET] = checkpoints[TARGET].tapped(options.taps if reads is None else reads.taps)
    return checkpoints


def refuse_beside_states(options: BuildOptions) -> None:
    """Raises ConfigError for what a draft that reads its target's states cannot have."""
    told = f"is not for {options.draft}, a head that reads its target's states"
    if options.acceptance_head is not None:
        raise ConfigError(f"--acceptance-head {told}: leave it out, since draftwood train-head trains none for it")
    if options.is_calibrated(DRAFT):
        raise ConfigError(f"--calibration {told}: build it with --draft-precision int8, or leave --calibration out")


def refuse_draft(target: Checkpoint) -> None:
    """Raises CheckpointError for a target that can only be a draft."""
    if target.kept_tokens is not None:
        raise CheckpointError(
            f"{target.path} is a draft with a trimmed vocabulary, which cannot be a target: its text would lack all "
            "other tokens"
        )
    if target.config.draft_context is not None:
        raise CheckpointError(
            f"{target.path} is a draft that reads the last {target.config.draft_context} tokens alone, which a target "
            "does not: remove draft_context from its config.json to make it one"
        )


def trimmed(
    checkpoints: Mapping[str, Checkpoint], options: BuildOptions, count: Count, tokenizer: Tokenizer, begin: Begin
) -> Checkpoint:
    """The draft, predicting `count` tokens. Raises CheckpointError if it is trimmed already, and ConfigError."""
    draft, text = checkpoints[DRAFT], options.draft_vocabulary_text
    vocab_size = draft.config.vocab_size
    if draft.kept_tokens is not None:
        raise CheckpointError(
            f"{draft.path} predicts {len(draft.kept_tokens)} of {vocab_size} tokens already: leave --draft-vocabulary "
            "out, or trim the draft that it was made from"
        )
    if count == ALL:
        return draft
    by = "the order of their ids" if text is None else f"their frequency in {text.name}"
    advance = begin(Step(f"Keeping {count} of the draft's {vocab_size} tokens, by {by}", 1))
    kept = most_frequent(tokenizer, count, vocab_size, text, checkpoints[TARGET].eos_token_ids())
    advance()
    return draft.trimmed(kept)


def rounded_with(text: Path, view: Weights, tokenizer: Tokenizer, begin: Begin) -> dict[str, Quantized]:
    """The matrices of a view, rounded while its model reads a text."""
    from .quantization.calibration import calibrate, read_windows

    assert isinstance(view, QuantizedCheckpoint)
    windows = read_windows(text, tokenizer, view.config.max_position)
    check_known(windows.ravel().tolist(), tokenizer, view.config.vocab_size, f"the text for calibration, {text},")
    step = Step(f"Rounding with {windows.size} tokens of {text.name} in view", view.config.num_layers)
    return calibrate(view, windows, begin(step))


def with_cheap_draft(options: BuildOptions, checkpoints: Mapping[str, Checkpoint], begin: Begin) -> BuildOptions:
    """The options with a precision and a vocabulary for a draft of usual size, where the user chose none."""
    draft, target = checkpoints[DRAFT], checkpoints[TARGET]
    large = draft.kept_tokens is None and num_parameters(draft.config) >= LARGE
    precision = options.draft_precision or default_precision(draft, large, options)
    tokens = options.draft_vocabulary
    if large and tokens is None:
        read = STORED_BITS[options.precision_of(TARGET)] * num_parameters(target.config)
        smaller = min(target.config.vocab_size, draft.config.vocab_size)
        tokens = affordable(read, STORED_BITS[precision] * draft.config.hidden_size, smaller)
    if precision != options.precision_of(DRAFT):
        remark(begin, f"The draft is built in {precision}: --draft-precision chooses another one")
    if tokens != options.draft_vocabulary:
        remark(begin, f"The draft proposes {tokens} of its tokens: --draft-vocabulary all lets it propose every one")
    return replace(options, draft_precision=precision, draft_vocabulary=tokens)


def default_precision(draft: Checkpoint, large: bool, options: BuildOptions) -> str:
    """The draft's default, None where its sizes fit no blocks. large: whether reading weights is most of a pass."""
    backend, precision = BACKENDS[options.backend_of(DRAFT)], options.precision_of(DRAFT)
    precision = INTEGERS[-1] if large and backend.draft_precision is not None else precision
    form = FORMATS.get((backend.name, precision))
    if form is None:
        return precision
    try:
        QuantizedCheckpoint(draft, form)
    except ConfigError:
        return backend.precisions[0]
    return precision


def one_vocabulary(checkpoints: Mapping[str, Checkpoint], tokenizer: Tokenizer, begin: Begin) -> dict[str, Checkpoint]:
    """Both models with as many tokens: what one has beyond the other is cut off, and `begin` hears of it. Models of one
    tokenizer are often filled up to different sizes with rows that no token has. Raises CheckpointError where tokens
    would be cut."""
    sizes = {role: checkpoint.config.vocab_size for role, checkpoint in checkpoints.items()}
    smaller, *_, larger = sorted([*sizes, TARGET], key=lambda role: sizes[role])  # of one model both are the target
    needed = tokenizer.num_ids
    if sizes[smaller] == sizes[larger]:
        if needed > sizes[smaller]:
            told = f"The tokenizer has {needed} tokens and the model {sizes[smaller]}"
            remark(begin, f"{told}: a prompt with one of the last {needed - sizes[smaller]} will be refused")
        return dict(checkpoints)
    if needed > sizes[smaller]:
        raise CheckpointError(
            f"the tokenizer has {needed} tokens, of which the {smaller} knows {sizes[smaller]} and the {larger} "
            f"{sizes[larger]}: choose a draft that knows all of the target's tokens, or the other way round"
        )
    remark(begin, f"Cutting the {larger}'s vocabulary of {sizes[larger]} to the {smaller}'s {sizes[smaller]} tokens")
    return {role: checkpoint.cut(sizes[smaller]) for role, checkpoint in checkpoints.items()}


def remarks(options: BuildOptions, checkpoints: Mapping[str, Checkpoint]) -> Iterator[str]:
    """What somebody who asks for this build should hear; none of it keeps it from being done."""
    if replaceable(options.output, MANIFEST) and (options.output / MANIFEST).is_file():
        yield f"Replacing the bundle in {options.output} at the end"
    for role, checkpoint in checkpoints.items():
        yield from (f"The {role}: {note}" for note in checkpoint.notes)
        if checkpoint.config.reads is not None and BACKENDS[options.backend].is_compiled:
            yield "Rounds of a draft that reads its target's states run on the host, not on the GPU as a whole"
    if not isinstance(options.draft, Path):
        return
    target, draft = (num_parameters(checkpoints[role].config) for role in ROLES)
    if options.target.resolve() == options.draft.resolve():
        yield (
            "Warning: draft and target are the same checkpoint, so speculation can only cost time: choose a smaller "
            "draft"
        )
    elif draft > target:
        size = f"{draft / 1e6:.1f}M parameters to {target / 1e6:.1f}M"
        yield f"Warning: the draft is larger than its target ({size}), so speculation can only cost time"


def context_length(options: BuildOptions, checkpoints: Mapping[str, Checkpoint]) -> int:
    """Tokens of prompt and output together. Raises ConfigError when a model does not compute that many as here."""
    longest = min(checkpoint.config.longest for checkpoint in checkpoints.values())
    if options.max_length is None:
        return min(longest, LONGEST)
    for role, checkpoint in checkpoints.items():
        for limit, tokens in checkpoint.config.limits.items():
            if options.max_length > tokens:
                raise ConfigError(
                    f"max_length {options.max_length} exceeds the {role}'s {limit} of {tokens} tokens: "
                    f"ask for at most --max-length {longest}"
                )
    return options.max_length


def end_of_text(checkpoint: Checkpoint, begin: Begin) -> tuple[int, ...]:
    """Ids that end a text. Those that the model cannot say are left out, and `begin` hears of them."""
    ids = checkpoint.eos_token_ids()
    vocab_size = checkpoint.config.vocab_size
    if unknown := [token for token in ids if not 0 <= token < vocab_size]:
        remark(begin, f"Leaving out eos_token_id {unknown}: the model has {vocab_size} tokens")
    return tuple(token for token in ids if token not in unknown)


def name_of(folder: Path) -> str:
    """A folder's own name, printable."""
    name = folder.name or folder.resolve().name
    return name if name.isprintable() else ascii(name)


def suited(options: BuildOptions, has_draft: bool, begin: Begin) -> BuildOptions:
    """The options with a precision and a draft that suit the target. has_draft: whether the user chose one, or none.
    Raises CheckpointError."""
    if has_draft and (options.precision is not None or BACKENDS[options.backend].is_compiled):
        return options
    options = replace(options, target=local_folder(options.target, MODEL, begin))
    target = Checkpoint(options.target)
    if options.precision is None and not BACKENDS[options.backend].is_compiled:
        precision = own_precision(target, options.backend, begin)
        keeps = options.calibration is None and precision in INTEGERS
        options = replace(options, precision=precision, keeps_blocks=keeps)
    draft = None if has_draft else known_draft(target)
    if draft is None:
        return options
    remark(begin, f"Taking the draft of this package, {draft.name}: --draft none builds without it")
    return replace(options, draft=draft)


def own_precision(target: Checkpoint, backend: str, begin: Begin) -> str:
    """The integers nearest to what a file holds; the backend's first precision where matrices do not divide into
    blocks. `begin` hears of weights that are rounded."""
    bits, precisions = target.stored_bits(), BACKENDS[backend].precisions
    precision = nearest_integers(bits, precisions)
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
        check_same_tokens(target, Checkpoint(draft))
    except CheckpointError:
        return None
    return draft
