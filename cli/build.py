"""draftwood build (and build_engines.py): makes an engine bundle from two checkpoints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from ..builder.profile import BRIEF_SECONDS, brief_contexts
from ..models.config import LlamaConfig
from ..models.errors import ConfigError, DraftwoodError, EngineError
from ..models.printable import shell_word
from ..plugins.installation import install
from ..runtime.bundle.bundle import EngineBundle
from ..runtime.bundle.cache import NONE, SELF, Model, building, folder_of
from ..runtime.engines.backends import AUTO, BACKENDS, NATIVE, choose_backend
from ..runtime.engines.comparison import Comparison
from ..runtime.text.tokenizer import read_template
from .inspect import describe
from .options import DRAFT_THREADS, FURTHER, HIDDEN, PROVIDER, THREADS, add_quiet, flag, given, integers, read_options
from .profile import compare_layers, profile
from .progress import progress


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("build", help="make a bundle that can be shipped, or one for the cache")
    path = "{}: Hugging Face folder, .gguf file, or id on the Hub, org/name or org/name@revision"
    parser.add_argument("--target", type=folder_or_id, required=True, metavar="PATH", help=path.format("the target"))
    parser.add_argument(
        "--draft",
        type=folder_or_id,
        default=HIDDEN,
        metavar="PATH",
        help=path.format("a smaller model that proposes tokens")
        + "; self:int4 (or another precision) for the target's "
        "own copy in fewer bits; none for plain decoding and prompt lookup (default: a known draft, else none)",
    )
    parser.add_argument("--output", type=Path, metavar="BUNDLE", help="folder to write (default: one in the cache)")
    parser.add_argument(
        "--precision",
        default=HIDDEN,
        metavar="NAME",
        help="of the weights: int4, int8, bf16, fp16, fp32; TensorRT: fp8, too (default: int4 for files of 4 bits and "
        "fewer, else int8; TensorRT: fp16)",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        default=HIDDEN,
        metavar="N",
        help="tokens of prompt and output together (default: what both models support, at most 8192)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object with the bundle's folder, or the error")
    add_quiet(parser)
    add_further(parser.add_argument_group(FURTHER + "models"), parser.add_argument_group(FURTHER + "TensorRT"))
    parser.set_defaults(run=run)


def add_further(parser: argparse._ArgumentGroup, group: argparse._ArgumentGroup) -> None:
    """Add the options that few builds need. group: of those that are for TensorRT."""
    parser.add_argument(
        "--lora", type=folder_or_id, default=HIDDEN, metavar="DIR", help="LoRA folder (PEFT) to merge into the target"
    )
    parser.add_argument(
        "--draft-lora", type=folder_or_id, default=HIDDEN, metavar="DIR", help="LoRA folder to merge into the draft"
    )
    parser.add_argument(
        "--backend",
        default=AUTO,
        help=f"backend of the engines: {', '.join(BACKENDS)}, or {AUTO} (default): native, kernels compiled for this "
        "processor, if there is a C compiler and the processor has AVX2, else onnxruntime; on ARM the faster one, by a "
        "measurement of a layer",
    )
    parser.add_argument("--draft-backend", default=HIDDEN, help="default: the target's")
    parser.add_argument(
        "--draft-precision", default=HIDDEN, help="default: int8 if native or if the target is int4, else the target's"
    )
    parser.add_argument(
        "--draft-vocabulary",
        type=int,
        default=HIDDEN,
        metavar="N",
        help="let the draft predict the N most frequent tokens only, which makes its passes and draws cheaper",
    )
    parser.add_argument(
        "--draft-vocabulary-text",
        type=Path,
        default=HIDDEN,
        metavar="FILE",
        help="a text, or JSON lines, in which tokens are counted (default: the order of their ids, which BPE gives by "
        "frequency)",
    )
    parser.add_argument(
        "--widths", type=integers, default=HIDDEN, metavar="1,2,4,...", help="numbers of rows of a pass, with commas"
    )
    parser.add_argument(
        "--acceptance-head", type=Path, default=HIDDEN, metavar="DIR", help="output folder of draftwood train-head"
    )
    parser.add_argument(
        "--cache-precision",
        default=HIDDEN,
        metavar="NAME",
        help="native: of keys and values (default: fp16, but fp32 beside weights in fp32); int8 has a scale for each "
        "head and token",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        default=HIDDEN,
        metavar="FILE",
        help="native int4: a text like those the model will read and write; matrices are rounded with what it makes of "
        "the first 8192 tokens in view, which takes minutes and keeps more quality",
    )
    group.add_argument(
        "--compute-capability",
        nargs="+",
        action=AsTuple,
        default=HIDDEN,
        metavar="8.9",
        help="GPUs to compile for, tensorrt-rtx only (default: 8.0 8.6 8.9 12.0)",
    )
    group.add_argument(
        "--plugin",
        action=argparse.BooleanOptionalAction,
        default=HIDDEN,
        help="attention by our kernel or by TensorRT's own (default: ours where Triton is installed)",
    )
    group.add_argument(
        "--max-batch",
        type=int,
        default=HIDDEN,
        metavar="N",
        help="most requests that share a pass; the plan has caches for this many (default: 1)",
    )
    group.add_argument(
        "--workspace", type=int, default=HIDDEN, metavar="MIB", help="limit of an engine's scratch memory"
    )
    group.add_argument(
        "--timing-cache",
        type=Path,
        default=HIDDEN,
        metavar="FILE",
        help="measurements to reuse and extend, tensorrt only",
    )
    group.add_argument(
        "--graphs", type=Path, default=HIDDEN, metavar="DIR", help="keep the ONNX graphs the plans were compiled from"
    )
    parser.add_argument(
        "--no-profile",
        dest="profile",
        action="store_false",
        help="do not measure the costs of passes at the end, which is done briefly (draftwood profile measures them "
        "later, or again and longer)",
    )


def compare_usual(args: argparse.Namespace) -> Comparison:
    """Compare the native kernels with ONNX Runtime on a layer of a usual shape, before the model is read."""
    usual = LlamaConfig(
        vocab_size=256,
        hidden_size=1024,
        intermediate_size=2816,
        num_layers=1,
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
        max_position=2048,
        norm_eps=1e-5,
        rope_theta=10000.0,
    )
    precision = getattr(args, "precision", NATIVE.precisions[0])
    return compare_layers(usual, NATIVE, precision if precision in NATIVE.precisions else NATIVE.precisions[0])


def folder_or_id(text: str) -> Path:
    """A path. One that begins with a dot stays a path: without the dot it could be an id."""
    return Path.cwd() / text if text.startswith(".") else Path(text)


class AsTuple(argparse.Action):
    """Stores several values as a tuple, for a frozen dataclass."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, tuple(values))


def run(args: argparse.Namespace) -> int:
    """Build a bundle. With --json the error goes to standard output, too: `bundle_of` reads it there."""
    console = Console(stderr=args.json or args.output is None, quiet=args.quiet)
    try:
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
    """The folder in the cache, where the bundle is built unless it is there. Raises ConfigError for options by which
    the cache does not know bundles."""
    with progress(console) as begin, needed_packages():
        from ..builder.checkpoints.hub import MODEL, local_folder
        from ..builder.options import BuildOptions

        unusual = set(given(args, BuildOptions)) - {*Model._fields, "target", "output"}
        unusual -= {"backend"} if args.backend == AUTO else set()
        if unusual or not args.profile:
            option = flag(min(unusual, default="no_profile"))
            raise ConfigError(f"{option} is for a bundle of your own: add --output, or leave it out")
        args.target, draft = local_folder(args.target, MODEL, begin), getattr(args, "draft", None)
        if draft is not None and str(draft) != NONE and not str(draft).startswith(SELF):
            draft = args.draft = local_folder(draft, MODEL, begin)
    choices = getattr(args, "precision", None), getattr(args, "max_length", None)
    folder = args.output = folder_of(Model(str(args.target), None if draft is None else str(draft), *choices))

    def waits() -> None:
        console.print("Another process builds a bundle: waiting for it", highlight=False)

    with building(folder, waits) as needed:
        if needed:
            words = f"Building a bundle of {args.target.name}, once: it is kept in {folder}"
            console.print(words, markup=False, highlight=False, soft_wrap=True)
            built(args, console)
    return folder


def built(args: argparse.Namespace, console: Console) -> Path:
    """The folder of the bundle that was built."""
    with needed_packages():
        from ..builder.options import BuildOptions, SelfDraft

        choice = choose_backend(lambda: compare_usual(args)) if args.backend == AUTO else None
        if choice is not None:
            args.backend = choice.backend
        draft, has_draft = str(getattr(args, "draft", NONE)), hasattr(args, "draft")
        if draft.startswith(SELF):
            args.draft = SelfDraft(draft.removeprefix(SELF))
        elif draft == NONE:
            args.draft = None
        options = read_options(args, BuildOptions)  # invalid options are refused before torch is imported
        from ..builder.pipeline import build
        from ..builder.suited import suited
    if choice is not None:
        console.print(f"Backend {choice.backend}: {choice.reason}", markup=False, highlight=False, soft_wrap=True)
    with progress(console) as begin:
        bundle = build(suited(options, has_draft, begin), begin)
    if args.profile:
        try:
            contexts = brief_contexts(bundle.manifest.max_length)
            profile(bundle, THREADS, DRAFT_THREADS, PROVIDER, contexts, console, BRIEF_SECONDS)
        except DraftwoodError as error:  # the bundle is complete, and may be intended for another machine
            console.print(f"Costs were not measured: {error}", markup=False, highlight=False, soft_wrap=True)
    if not console.stderr:
        console.print(describe(bundle))
        console.print(next_step(bundle), markup=False, highlight=False, soft_wrap=True)
    return bundle.folder


@contextmanager
def needed_packages() -> Iterator[None]:
    """Where the packages of a build are imported, so that the other commands need neither torch nor onnx. Raises
    EngineError if they are not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise EngineError(f"building needs {error.name}: {install('build', 'cpu')}") from error


def next_step(bundle: EngineBundle) -> str:
    """What to do with a bundle, in a line that can be copied."""
    folder, plans = shell_word(bundle.folder), [spec.plan for spec in bundle.manifest.engines.values()]
    if any(plan is not None and not plan.executed for plan in plans):
        return (
            "The plans were not executed: this machine cannot run them.\n"
            f"Next: copy {folder} to one that can, and ask draftwood inspect there"
        )
    talks = read_template(bundle.folder) is not None
    return f"Next: draftwood chat {folder}" if talks else f"Next: draftwood generate {folder} --prompt 'The first'"
