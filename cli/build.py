"""draftwood build (and build_engines.py): makes an engine bundle from two checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from ..builder.profile import BRIEF_SECONDS, brief_contexts
from ..models.config import LlamaConfig
from ..models.errors import DraftwoodError, EngineError
from ..models.printable import shell_word
from ..runtime.engines.backends import AUTO, BACKENDS, NATIVE, choose_backend
from ..runtime.engines.comparison import Comparison
from .inspect import describe
from .options import DRAFT_THREADS, PROVIDER, THREADS, add_quiet, integers, read_options
from .profile import compare_layers, profile
from .progress import progress

NONE, SELF = "none", "self:"  # words of --draft; a folder of that name is written ./none


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("build", help="compile a draft and a target into an engine bundle")
    add_arguments(parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a build, for both of its commands."""
    hidden = argparse.SUPPRESS  # the defaults are those of BuildOptions
    path = "the {}: Hugging Face folder, .gguf file, or id on the Hub, org/name or org/name@revision"
    parser.add_argument("--target", type=folder_or_id, required=True, metavar="PATH", help=path.format("target"))
    parser.add_argument(
        "--draft",
        type=folder_or_id,
        required=True,
        metavar="PATH",
        help=path.format("draft") + "; self:int4 (or another precision) for the target's own copy in fewer bits; none "
        "for a bundle that decodes plainly or by prompt lookup",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="BUNDLE", help="folder to write")
    parser.add_argument(
        "--lora", type=folder_or_id, default=hidden, metavar="DIR", help="LoRA folder (PEFT) to merge into the target"
    )
    parser.add_argument(
        "--draft-lora", type=folder_or_id, default=hidden, metavar="DIR", help="LoRA folder to merge into the draft"
    )
    parser.add_argument(
        "--backend",
        default=AUTO,
        help=f"backend of the engines: {', '.join(BACKENDS)}, or {AUTO} (default): native, kernels compiled for this "
        "processor, if there is a C compiler and the processor has AVX2, else onnxruntime; on ARM the faster one, by a "
        "measurement of a layer",
    )
    parser.add_argument(
        "--precision",
        default=hidden,
        help="of the weights. native: fp32 (default), bf16, fp16, int8, int4; onnxruntime: fp32 (default), int8, int4; "
        "TensorRT: fp16 (default), bf16, fp32, int8, int4, fp8",
    )
    parser.add_argument("--draft-backend", default=hidden, help="default: the target's")
    parser.add_argument(
        "--draft-precision", default=hidden, help="default: int8 if native or if the target is int4, else the target's"
    )
    parser.add_argument(
        "--draft-vocabulary",
        type=int,
        default=hidden,
        metavar="N",
        help="let the draft predict the N most frequent tokens only, which makes its passes and draws cheaper",
    )
    parser.add_argument(
        "--draft-vocabulary-text",
        type=Path,
        default=hidden,
        metavar="FILE",
        help="a text, or JSON lines, in which tokens are counted (default: the order of their ids, which BPE gives by "
        "frequency)",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        default=hidden,
        metavar="N",
        help="tokens of prompt and output together (default: what both models support, at most 8192)",
    )
    parser.add_argument(
        "--widths", type=integers, default=hidden, metavar="1,2,4,...", help="numbers of rows of a pass, with commas"
    )
    parser.add_argument(
        "--acceptance-head", type=Path, default=hidden, metavar="DIR", help="output folder of draftwood train-head"
    )
    parser.add_argument(
        "--cache-precision",
        default=hidden,
        metavar="NAME",
        help="native: of keys and values (default: fp16, but fp32 beside weights in fp32); int8 has a scale for each "
        "head and token",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        default=hidden,
        metavar="FILE",
        help="native int4: a text like those the model will read and write; matrices are rounded with what it makes of "
        "the first 8192 tokens in view, which takes minutes and keeps more quality",
    )
    group = parser.add_argument_group("TensorRT")
    group.add_argument(
        "--compute-capability",
        nargs="+",
        action=AsTuple,
        default=hidden,
        metavar="8.9",
        help="GPUs to compile for, tensorrt-rtx only (default: 8.0 8.6 8.9 12.0)",
    )
    group.add_argument(
        "--plugin",
        action=argparse.BooleanOptionalAction,
        default=hidden,
        help="attention by our kernel or by TensorRT's own (default: ours where Triton is installed)",
    )
    group.add_argument(
        "--max-batch",
        type=int,
        default=hidden,
        metavar="N",
        help="most requests that share a pass; the plan has caches for this many (default: 1)",
    )
    group.add_argument(
        "--workspace", type=int, default=hidden, metavar="MIB", help="limit of an engine's scratch memory"
    )
    group.add_argument(
        "--timing-cache",
        type=Path,
        default=hidden,
        metavar="FILE",
        help="measurements to reuse and extend, tensorrt only",
    )
    group.add_argument(
        "--graphs", type=Path, default=hidden, metavar="DIR", help="keep the ONNX graphs the plans were compiled from"
    )
    parser.add_argument(
        "--no-profile",
        dest="profile",
        action="store_false",
        help="do not measure the costs of passes at the end, which is done briefly (draftwood profile measures them "
        "later, or again and longer)",
    )
    add_quiet(parser)
    parser.set_defaults(run=run)


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
    # Imported here, so that the other commands need neither torch nor onnx.
    try:
        from ..builder.options import BuildOptions, SelfDraft

        choice = choose_backend(lambda: compare_usual(args)) if args.backend == AUTO else None
        if choice is not None:
            args.backend = choice.backend
        given = str(args.draft)
        if given.startswith(SELF):
            args.draft = SelfDraft(given.removeprefix(SELF))
        elif given == NONE:
            args.draft = None
        options = read_options(args, BuildOptions)  # invalid options are refused before torch is imported
        from ..builder.pipeline import build
    except ModuleNotFoundError as error:
        raise EngineError(f"building needs {error.name}: pip install 'draftwood[build,cpu]'") from error

    console = Console(quiet=args.quiet)
    if choice is not None:
        console.print(f"Backend {choice.backend}: {choice.reason}", markup=False, highlight=False, soft_wrap=True)
    with progress(console) as begin:
        bundle = build(options, begin)
    if args.profile:
        try:
            contexts = brief_contexts(bundle.manifest.max_length)
            profile(bundle, THREADS, DRAFT_THREADS, PROVIDER, contexts, console, BRIEF_SECONDS)
        except DraftwoodError as error:  # the bundle is complete, and may be intended for another machine
            console.print(f"Costs were not measured: {error}", markup=False, highlight=False, soft_wrap=True)
    console.print(describe(bundle))
    plans = [spec.plan for spec in bundle.manifest.engines.values() if spec.plan is not None]
    if all(plan.executed for plan in plans):
        command = f"draftwood generate {shell_word(bundle.folder)} --prompt 'Once upon a time'"
        console.print(f"Next: {command}", markup=False, highlight=False, soft_wrap=True)
    else:
        console.print(
            "The plans were not executed: this machine cannot run them.\n"
            f"Next: copy {shell_word(bundle.folder)} to one that can, and ask draftwood inspect there",
            markup=False,
        )
    return 0
