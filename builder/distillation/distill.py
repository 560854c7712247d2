"""The distillation of a draft: the target writes text, a small LLaMA learns from it, and the best one is written.

The state folder holds texts (`texts/`), the bundle of the target (`target/`), its digest (`target.json`), the seconds
spent on text (`text.json`), and the checkpoint of the training (`training.safetensors`). The same command goes on where
an earlier one ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...models.bindings import TARGET
from ...models.config import LlamaConfig
from ...models.errors import ConfigError
from ...models.plain_files import read_object
from ...runtime.bundle.staging import replaceable
from ...runtime.text.tokenizer import Tokenizer
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.hub import MODEL, local_folder
from ..kept_tokens import expected_counts, kept_tokens
from ..pipeline import end_of_text, refuse_draft
from ..plots import acceptance_svg
from ..progress import Begin, Step, remark
from ..tokenizer import check_known
from ..torch_settings import is_half_fast, torch_settings
from .batches import Batch, pack, training_batches
from .card import origin_of
from .conversation import layout_of, questions_of
from .draft import FIGURES, Report, Start, check_beginning, outputs_of, read_start, write_draft
from .head import STEPS, HeadNetwork, head_config, initialise_head, taps_of
from .loss import Acceptance, estimate
from .network import DraftNetwork, draft_config, initialise
from .options import BATCH, RATE, VOCABULARY, WORTH_MINUTES, DistillOptions
from .state import (
    ANSWER,
    ANSWER_TEMPERATURES,
    HELD_OUT_SHARE,
    TextStore,
    WrittenText,
    is_held_out,
    locked,
    read_seconds,
    write_json,
    write_text,
)
from .target import COLUMNS, TextTarget, check_target, compile_target, digest
from .text import TextCounts, TextLimits, TextWriter, fingerprint
from .training import MEASURED_SECONDS, Progress, Schedule, Trainer

TEXT_SECONDS, CHECKPOINT, LOG, PLOT = "text.json", "training.safetensors", "training.json", "acceptance.svg"
MAX_HELD_OUT = 1 << 13  # tokens of held-out answers at each temperature
HELD_OUT_SEQUENCES = 8  # of a batch
MAX_STATES = 4096  # hidden states from which the rows of untrained tokens are made


class Watch(NamedTuple):
    """What a caller hears, and when."""

    text: Callable[[TextCounts, float], None] = lambda counts, seconds: None  # after each text, with seconds on text
    training: Callable[[Acceptance, Progress], None] = lambda found, progress: None  # after each estimate
    step: Callable[[float, float], None] = lambda seconds, divergence: None  # after each step, see Schedule
    clock: Callable[[], float] = monotonic  # the present time in seconds; tests count steps instead
    measured: float = MEASURED_SECONDS  # between two estimates
    limits: TextLimits = TextLimits()


class DistillResult(NamedTuple):
    """What a distillation made."""

    output: Path
    figures: dict[str, Any]  # the content of distillation.json; empty where only text was written


def distill(options: DistillOptions, begin: Begin, watch: Watch = Watch()) -> DistillResult:  # noqa: B008 - a NamedTuple
    """Write text, train, and write the draft. Raises CheckpointError and ConfigError."""
    target = Checkpoint(local_folder(options.target, MODEL, begin))
    refuse_draft(target)
    start = read_start(options.start, target) if options.start is not None else None
    taps = taps_of(options, target.config)
    target = target.tapped(taps)
    sized = head_config if taps else draft_config
    config = sized(options, target.config) if start is None else start.config  # refused before text is written
    if options.output.exists() and not replaceable(options.output, FIGURES):
        raise ConfigError(f"{options.output} exists and is no distilled draft: choose another --output")
    check_target(target, options.folder / "target")
    seed = options.seed if start is None else options.seed ^ int(digest(start.checkpoint)[:8], 16)  # other texts
    write_training_text(options, target, seed, begin, watch)
    if not options.training_seconds:
        return DistillResult(options.output, {})
    with locked(options.folder / "training"), torch_settings(options.threads):
        return train(options, target, config, start, begin, watch)


def write_training_text(options: DistillOptions, target: Checkpoint, seed: int, begin: Begin, watch: Watch) -> None:
    """Let the target write until the time for text is spent."""
    folder = options.folder
    spent = read_seconds(folder / TEXT_SECONDS)
    minutes = f"{options.text_seconds / 60:.0f} minutes of text, then {options.training_seconds / 60:.0f} of training"
    going_on = f"Going on with {folder}, which has {spent / 60:.1f} of {minutes}"
    remark(begin, going_on if (folder / "target").is_dir() else f"This takes {minutes}; texts are kept in {folder}")
    if spent >= options.text_seconds:
        return
    with locked(folder / "texts"):
        bundle = compile_target(target, folder / "target", begin)
        with Tokenizer.load(folder / "target") as tokenizer:
            questions = questions_of(tokenizer, list(options.questions))
            layout = layout_of(tokenizer, asked=bool(questions))
            check_known(chain(*questions), tokenizer, target.config.vocab_size, "a prompt")
            template = chain(layout.before, layout.after, layout.between or ())
            check_known(template, tokenizer, target.config.vocab_size, "the target's chat template")
        longest, spec = watch.limits.longest(layout, questions), bundle.manifest.engines[TARGET]
        if longest > spec.capacity - spec.max_width:
            raise ConfigError(
                f"the longest text would have {longest} tokens, and the target holds {spec.capacity - spec.max_width}: "
                + ("shorten the longest of the --prompts" if questions else "no draft can be made for so short a one")
            )
        store = store_of(options, target)
        if questions and options.training_seconds:
            check_held_out(questions, store)
        with TextTarget(bundle, options.requests, options.threads) as engine:
            writer = TextWriter(engine, layout, store, questions, options.requests, seed, watch.limits)
            started = watch.clock() - spent
            for counts in writer.write(lambda: watch.clock() - started >= options.text_seconds):
                seconds = watch.clock() - started
                write_json(folder / TEXT_SECONDS, {"seconds": seconds})
                watch.text(counts, seconds)
        write_json(folder / TEXT_SECONDS, {"seconds": options.text_seconds})


def store_of(options: DistillOptions, target: Checkpoint) -> TextStore:
    return TextStore(options.folder / "texts", target.config.vocab_size, COLUMNS, target.config.state_size)


def check_held_out(questions: Sequence[Sequence[int]], store: TextStore) -> None:
    """Raises ConfigError where neither an answer to a user's question nor a stored text will be kept from training: the
    training would refuse this, after all texts were written."""
    if any(is_held_out(fingerprint(each)) for each in questions) or any(text.is_held_out for text in store.read()):
        return
    raise ConfigError(
        f"none of the {len(questions)} --prompts is held out, and without one the draft cannot be judged: one in "
        f"{HELD_OUT_SHARE} is, by a hash of its tokens, so give more of them"
    )


def train(
    options: DistillOptions, target: Checkpoint, config: LlamaConfig, start: Start | None, begin: Begin, watch: Watch
) -> DistillResult:
    """Train on the stored texts, and write the draft whenever it has become better."""
    store = store_of(options, target)
    advance = begin(Step("Reading the texts", 1))
    counts = expected_counts(store.read(), target.config.vocab_size)
    if start is not None and options.vocabulary is None:
        kept = start.kept
    else:
        size = VOCABULARY if options.vocabulary is None else options.vocabulary
        kept = kept_tokens(
            np.argsort(-counts, kind="stable"), size, special_tokens(options, target, begin), "--vocabulary"
        )
    held_out = held_out_batches(store, options.context)
    if not held_out:
        raise ConfigError(nothing_held_out(options, sum(1 for _ in store.read())))
    advance()
    config = replace(config, draft_context=options.context)
    if config.reads is None:
        network = DraftNetwork(config, options.context, kept)
    else:
        network = HeadNetwork(replace(config, draft_vocab_size=len(kept)), options.context + STEPS, kept)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    file = options.folder / "training" / CHECKPOINT
    earlier = check_beginning(file.parent, start, continued=file.is_file())
    if isinstance(network, HeadNetwork):
        initialise_head(network, target, held_out, options.seed)
    elif start is None:
        initialise(network, target, options.seed)
    else:
        start.load(network)
    kind = "states" if config.reads else "text"
    sequences, rate = options.batch or BATCH[kind], options.learning_rate or RATE[kind]
    trainer = Trainer(network, rate, device, is_half_fast(device))
    if file.is_file():
        trainer.load(file)
    trainer.judge_anew(held_out)
    batches = training_batches(store, sequences, options.context, options.seed + trainer.progress.steps)
    schedule = Schedule(options.training_seconds, watch.clock, watch.measured, watch.step)
    origin = origin_of(target.path, options.target)
    coverage = float(counts[kept].sum() / max(counts.sum(), 1e-30))

    def publish(found: Acceptance) -> dict[str, Any]:
        states = some_states(network, held_out) if options.full_vocabulary else None
        figures = figures_of(trainer, found, coverage) | ({} if start is None else {"started_from": earlier})
        report = Report(figures, acceptance_svg(*trainer.progress.pictured()))
        return write_draft(options.output, network, target, origin, report, states)

    figures = dict[str, Any]()
    for found in trainer.run(batches, held_out, schedule, store.num_tokens):
        if trainer.improve(found):
            figures = publish(found)
        trainer.save(file)
        write_json(options.folder / LOG, {"curve": [point._asdict() for point in trainer.progress.curve]})
        write_text(options.folder / PLOT, acceptance_svg(*trainer.progress.pictured()))
        watch.training(found, trainer.progress)
    if not trainer.progress.steps:
        raise ConfigError(
            f"{options.folder / 'texts'} has {store.num_tokens()} tokens of text, too few for one step of "
            f"{sequences} x {options.context} tokens beside the held-out ones: give more --minutes, or lower "
            "--batch or --context"
        )
    outputs = None if options.full_vocabulary or (config.reads and len(kept) == config.vocab_size) else len(kept)
    if not (options.output / FIGURES).is_file() or outputs_of(options.output) != outputs:
        figures = publish(estimate(network, [batch.to(device) for batch in held_out]))
    return DistillResult(options.output, figures or read_object(options.output / FIGURES, own=True))


def special_tokens(options: DistillOptions, target: Checkpoint, begin: Begin) -> set[int]:
    """Tokens that the draft can write however rare they are in the text."""
    with target.tokenizer() as tokenizer:
        return {*tokenizer.special_token_ids, *end_of_text(target, begin)}


def held_out_batches(store: TextStore, context: int) -> list[Batch]:
    """The first texts that are kept from training, up to MAX_HELD_OUT answer tokens at each temperature: those of
    earlier runs, and more where these were fewer. Empty where no text is held out."""
    counts, chosen = dict.fromkeys(range(ANSWER, ANSWER + len(ANSWER_TEMPERATURES)), 0), list[WrittenText]()
    for text in store.read():
        kind = int(text.kinds.max())
        if text.is_held_out and counts[kind] < MAX_HELD_OUT:
            counts[kind] += len(text.tokens)
            chosen.append(text)
    return list(pack(chosen, HELD_OUT_SEQUENCES, context, fill=True))


def nothing_held_out(options: DistillOptions, num_texts: int) -> str:
    """Why no draft can be judged, and what to do. num_texts: those that are stored."""
    if num_texts:
        fix = "more --prompts, or more --minutes if not all were answered" if options.questions else "more --minutes"
        stored = f"none of the {num_texts} texts in {options.folder / 'texts'} is held out"
        return f"{stored} (one question in {HELD_OUT_SHARE} is), and without one the draft cannot be judged: give {fix}"
    if not options.text_seconds:
        return (
            f"{options.folder / 'texts'} holds no text, and --text-minutes 0 writes none: give minutes for text, or "
            "the --state of an earlier distillation"
        )
    return (
        f"the target finished no text in {options.text_seconds:g} seconds, and unfinished ones are not kept: give more "
        f"--minutes (a draft worth having takes some {WORTH_MINUTES}), or fewer --requests at a time"
    )


@torch.no_grad()
def some_states(network: DraftNetwork, batches: Sequence[Batch]) -> Tensor:
    """Hidden states [at most MAX_STATES, H] of held-out text."""
    found = list[Tensor]()
    for batch in batches:
        if sum(map(len, found)) < MAX_STATES:
            found.append(network.hidden(batch.to(network.kept.device)))
    return torch.cat(found)[:MAX_STATES]


def figures_of(trainer: Trainer, found: Acceptance, coverage: float) -> dict[str, Any]:
    """distillation.json. coverage: the target's probability on the tokens that the draft writes."""
    now, config = trainer.progress, trainer.network.llama.config
    last = now.curve[-1]
    return {
        "acceptance": found.to_dict(),
        "text_tokens": last.text_tokens,
        "tokens_seen": now.tokens,
        "steps": now.steps,
        "training_minutes": round(now.seconds / 60, 2),
        "vocabulary": len(trainer.network.kept),
        "vocabulary_coverage": round(coverage, 4),
        "kind": "states" if config.reads else "text",
        "layers": config.num_layers,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "curve": [point._asdict() for point in now.curve],
    }
