"""draftwood build (and build_engines.py): two checkpoints -> an engine bundle."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from ..builder.profile import CONTEXTS
from ..models.errors import DraftwoodError, EngineError
from ..runtime.engines.backends import AUTO, BACKENDS, choose_backend
from .inspect import describe
from .options import DRAFT_THREADS, PROVIDER, THREADS, add_checkpoints, given, integers
from .profile import profile
from .progress import progress


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("build", help="compile a draft and a target into an engine bundle")
    add_arguments(parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the build, for both names it goes by."""
    hidden = argparse.SUPPRESS  # the defaults are BuildOptions' own
    add_checkpoints(parser)
    parser.add_argument("--output", type=Path, required=True, metavar="BUNDLE", help="folder to write")
    parser.add_argument(
        "--backend",
        default=AUTO,
        help=f"what runs the engines: {', '.join(BACKENDS)}, or {AUTO} (default): native, kernels compiled for this "
        "processor, where there is a C compiler and the processor has AVX-512, else onnxruntime",
    )
    parser.add_argument(
        "--precision",
        default=hidden,
        help="of the weights: fp32 (default), int8 or int4; native: fp16 and bf16, too; on TensorRT fp16 (default), "
        "bf16 or fp32",
    )
    parser.add_argument("--draft-backend", default=hidden, help="the target's if not given")
    parser.add_argument(
        "--draft-precision", default=hidden, help="int8 if not given, natively and beside int4; elsewhere the target's"
    )
    parser.add_argument(
        "--max-length", type=int, default=hidden, metavar="N", help="tokens of prompt and output (default: the models')"
    )
    parser.add_argument(
        "--widths", type=integers, default=hidden, metavar="1,2,4,...", help="rows a pass may have, separated by commas"
    )
    parser.add_argument(
        "--acceptance-head", type=Path, default=hidden, metavar="DIR", help="what draftwood train-head wrote"
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
        help="requests that may share a pass; the plan's caches are for so many (default: 1)",
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
        help="do not measure this machine's costs at the end (draftwood profile measures them later)",
    )
    parser.set_defaults(run=run)


class AsTuple(argparse.Action):
    """Several values as a tuple, which is what a frozen dataclass holds."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, tuple(values))


def run(args: argparse.Namespace) -> int:
    # Here, so that the other commands need neither torch nor onnx.
    try:
        from ..builder.options import BuildOptions

        choice = choose_backend() if args.backend == AUTO else None
        if choice is not None:
            args.backend = choice.backend
        options = given(args, BuildOptions)  # refused within a second, before torch is imported
        from ..builder.pipeline import build
    except ModuleNotFoundError as error:
        raise EngineError(f"building needs {error.name}: pip install 'draftwood[build,cpu]'") from error

    console = Console()
    if choice is not None:
        console.print(f"Backend {choice.backend}: {choice.reason}", markup=False, highlight=False, soft_wrap=True)
    with progress(console) as begin:
        bundle = build(options, begin)
    if args.profile:
        try:
            profile(bundle, THREADS, DRAFT_THREADS, provider=PROVIDER, contexts=CONTEXTS, console=console)
        except DraftwoodError as error:  # the bundle is complete, and may be for another machine
            console.print(f"Costs were not measured: {error}", markup=False, highlight=False, soft_wrap=True)
    console.print(describe(bundle))
    plans = [spec.plan for spec in bundle.manifest.engines.values() if spec.plan is not None]
    if all(plan.executed for plan in plans):
        console.print(f"Next: draftwood generate {bundle.folder} --prompt 'Once upon a time'", markup=False)
    else:
        console.print(
            "The plans were not executed: this machine cannot run them.\n"
            f"Next: copy {bundle.folder} to one that can, and ask draftwood inspect there",
            markup=False,
        )
    return 0
