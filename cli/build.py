"""draftwood build (and build_engines.py): makes an engine bundle from two checkpoints."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from ..builder.options import TENSORRT, BuildOptions, SelfDraft
from ..builder.profile import BRIEF_SECONDS, brief_contexts
from ..builder.setting import flag, settings_of
from ..models.config import LlamaConfig
from ..models.errors import ConfigError, DraftwoodError
from ..models.printable import shell_word
from ..runtime.bundle.bundle import EngineBundle
from ..runtime.bundle.cache import NONE, SELF, Model, building, folder_of
from ..runtime.engines.backends import AUTO, BACKENDS, NATIVE, choose_backend
from ..runtime.engines.comparison import Comparison
from ..runtime.text.tokenizer import read_templates
from .inspect import describe
from .options import (
    DRAFT_THREADS,
    FURTHER,
    HIDDEN,
    PROVIDER,
    THREADS,
    add_quiet,
    add_settings,
    folder_or_id,
    given,
    needed_packages,
    read_options,
)
from .profile import compare_layers, profile
from .progress import progress
from .streams import say


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("build", help="make a bundle that can be shipped, or one for the cache")
    path = "Hugging Face folder, .gguf file, or id on the Hub, org/name or org/name@revision"
    parser.add_argument("--target", type=folder_or_id, required=True, metavar="PATH", help=f"the model: {path}")
    words = (
        "a smaller model that proposes tokens; self:int4 (or another precision) for the target's own copy in fewer "
        "bits; none (default: a known draft, else none)"
    )
    parser.add_argument("--draft", type=folder_or_id, default=HIDDEN, metavar="PATH", help=words)
    parser.add_argument("--output", type=Path, metavar="BUNDLE", help="folder to write (default: one in the cache)")
    parser.add_argument("--json", action="store_true", help="one JSON object with the bundle's folder, or the error")
    add_quiet(parser)
    add_settings(parser, "models", BuildOptions)
    add_settings(parser, TENSORRT, BuildOptions, settings_of(BuildOptions, TENSORRT))
    group = parser.add_argument_group(FURTHER + "machine")
    words = (
        f"of the engines: {', '.join(BACKENDS)}, or {AUTO} (default): native, kernels compiled for this processor, if "
        "there are AVX2 and kernels or a compiler, else onnxruntime; on ARM the faster one, by a measurement of a layer"
    )
    group.add_argument("--backend", default=AUTO, help=words)
    words = "do not measure the costs of passes, which is done briefly at the end (see draftwood profile)"
    group.add_argument("--no-profile", dest="profile", action="store_false", help=words)
    parser.set_defaults(run=run)


def compare_usual(precision: str) -> Comparison:
    """Compare the native kernels with ONNX Runtime on a layer of a usual shape, before the model is read."""
    usual = LlamaConfig(256, 1024, 2816, 1, 16, 4, 64, 2048, norm_eps=1e-5, rope_theta=10000.0)
    return compare_layers(usual, NATIVE, precision if precision in NATIVE.precisions else NATIVE.precisions[0])


def run(args: argparse.Namespace) -> int:
    """Build a bundle. With --json the error goes to standard output, too: `bundle_of` reads it there."""
    console = Console(stderr=args.json or args.output is None, quiet=args.quiet)
    try:
        with needed_packages("building"):
            folder = cached(args, console) if args.output is None else built(args, console)
    except DraftwoodError as error:
        if not args.json:
            raise
        print(json.dumps({"error": str(error), "kind": type(error).__name__}))
        return 2
    if args.json:
        print(json.dumps({"bundle": str(folder)}))
    elif args.output is None:
        print(folder)
    return 0


def cached(args: argparse.Namespace, console: Console) -> Path:
    """The folder in the cache; built if absent. Raises ConfigError for options by which the cache knows no bundles."""
    with progress(console) as begin:
        from ..builder.checkpoints.hub import MODEL, local_folder

        unusual = set(given(args, BuildOptions)) - {*Model._fields, "target", "output"}
        unusual -= {"backend"} if args.backend == AUTO else set()
        if unusual or not args.profile:
            option = flag(min(unusual, default="no_profile"))
            raise ConfigError(f"{option} is for a bundle of your own: add --output, or leave it out")
        asked, draft = Model(str(args.target)).name, getattr(args, "draft", None)
        args.target = local_folder(args.target, MODEL, begin)
        if draft is not None and str(draft) != NONE and not str(draft).startswith(SELF):
            draft = args.draft = local_folder(draft, MODEL, begin)
            if not draft.exists():
                raise ConfigError(f"--draft {draft} is not here: give a folder, a .gguf file, or an id on the Hub")
    choices = getattr(args, "precision", None), getattr(args, "max_length", None)
    folder = args.output = folder_of(Model(str(args.target), None if draft is None else str(draft), *choices), asked)

    def waits() -> None:
        console.print("Another process builds a bundle: waiting for it", highlight=False)

    with building(folder, waits) as needed:
        if needed:
            words = f"Building a bundle of {asked}, once: it is kept in {folder}"
            say(console, words)
            built(args, console)
    return folder


def built(args: argparse.Namespace, console: Console) -> Path:
    choice = (
        choose_backend(lambda: compare_usual(str(getattr(args, "precision", "")))) if args.backend == AUTO else None
    )
    if choice is not None:
        args.backend = choice.backend
    draft, has_draft = str(getattr(args, "draft", NONE)), hasattr(args, "draft")
    if draft.startswith(SELF):
        args.draft = SelfDraft(draft.removeprefix(SELF))
    elif draft == NONE:
        args.draft = None
    options = read_options(args, BuildOptions)  # invalid options are refused before a model is read
    from ..builder.pipeline import build, suited

    if choice is not None:
        say(console, f"Backend {choice.backend}: {choice.reason}")
    with progress(console) as begin:
        bundle = build(suited(options, has_draft, begin), begin)
    if args.profile:
        try:
            contexts = brief_contexts(bundle.manifest.max_length)
            profile(bundle, THREADS, DRAFT_THREADS, PROVIDER, contexts, console, BRIEF_SECONDS)
        except DraftwoodError as error:  # the bundle is complete, and may be intended for another machine
            say(console, f"Costs were not measured: {error}")
    if not console.stderr:
        console.print(describe(bundle))
        say(console, next_step(bundle))
    return bundle.folder


def next_step(bundle: EngineBundle) -> str:
    """What to do with a bundle, in a line that can be copied."""
    folder, plans = shell_word(bundle.folder), [spec.plan for spec in bundle.manifest.engines.values()]
    if any(plan is not None and not plan.executed for plan in plans):
        return (
            "The plans were not executed: this machine cannot run them.\n"
            f"Next: copy {folder} to one that can, and ask draftwood inspect there"
        )
    talks = bool(read_templates(bundle.folder))
    return f"Next: draftwood chat {folder}" if talks else f"Next: draftwood generate {folder} --prompt 'The first'"
