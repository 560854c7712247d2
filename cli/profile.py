"""draftwood profile: measures the cost of passes on this machine and stores the table in the bundle."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..builder.pass_times import Pair
from ..builder.profile import CONTEXTS, LONGEST, SECONDS, contexts_of, measure
from ..builder.progress import Begin, Step
from ..models.bindings import DRAFT, TARGET
from ..models.config import LlamaConfig
from ..models.errors import DraftwoodError
from ..models.printable import shell_word
from ..runtime.bundle.bundle import EngineBundle
from ..runtime.bundle.costs import check_writable, fingerprint, write_costs
from ..runtime.engines.backends import Backend, describe_backend
from ..runtime.engines.base import Engine, EngineSpec
from ..runtime.engines.comparison import Comparison
from ..runtime.speculation.planning.cost import CostModel, PassCosts
from .options import add_engines, add_model, add_quiet, bundle_for, integers
from .progress import progress
from .streams import say

# Upper quartile / least time of repeated passes: 1.10 to 1.25 on two idle cores (real-time priority), 1.46 to 9.7
# beside eight busy processes (21 November 2026).
BUSY = 1.35


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("profile", help="measure this machine's costs, by which speculation is planned")
    add_model(parser)
    shown = f"{','.join(map(str, CONTEXTS))}, and the bundle's --max-length up to {LONGEST}"
    words = f"committed tokens before a pass (default {shown})"
    parser.add_argument("--contexts", type=integers, default=(), help=words)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engines(parser)
    add_quiet(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    bundle = EngineBundle.open(bundle_for(args))
    console = Console(stderr=args.json, quiet=args.quiet)
    steps = 1 + len(args.contexts or contexts_of(bundle.manifest.max_length))
    say(console, f"This takes about {SECONDS * steps:.0f} seconds. Ctrl+C ends it early, and keeps what was measured.")
    costs = profile(bundle, args.threads, args.draft_threads, args.provider, args.contexts, console)
    if args.json:
        print(json.dumps(asdict(costs)))
    else:
        console.print(*tables(costs), summary(costs))
    return 0


def profile(
    bundle: EngineBundle,
    threads: int,
    draft_threads: int,
    provider: str,
    contexts: tuple[int, ...],
    console: Console,
    seconds: float = SECONDS,
) -> CostModel:
    """Measure and store the costs of a bundle. seconds: see `measure`. A first interrupt ends the measurement, and
    keeps it. Raises EngineError, ConfigError or BundleError."""
    check_writable(bundle.folder)
    with (
        closing(bundle.open_engine(TARGET, threads, provider)) as target,
        bundle_draft(bundle, threads, draft_threads, provider) as draft,
        progress(console) as begin,
        interruptible() as stopped,
    ):
        machine = fingerprint(bundle.manifest, provider, threads, draft_threads)
        engines = {TARGET: target} if draft is None else {TARGET: target, DRAFT: draft}
        pair = Pair(engines, bundle.manifest.max_length, machine)
        costs = measure(pair, begin, contexts, seconds=seconds, stopped=stopped)
        if not stopped():
            costs = replace(costs, compared=beside_rival(target.spec, threads, begin, console))
    write_costs(costs, bundle.folder)
    if costs.spread is not None and costs.spread > BUSY:
        say(
            console,
            f"The machine was busy (repeated passes spread by a factor of {costs.spread:.1f}): run draftwood profile "
            f"{shell_word(bundle.folder)} again when it is not",
        )
    elif costs.compared is not None and costs.compared.is_slower:
        say(console, advice(costs.compared))
    return costs


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """A function that says whether the user has interrupted the program; a second interrupt ends it."""
    asked: list[bool] = []

    def note(number: int, frame: object) -> None:
        asked.append(True)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


def advice(compared: Comparison) -> str:
    """What a faster rival would bring, from a measurement on a quiet machine."""
    slowest, rows = max(zip(compared.ratios, compared.rows, strict=True))
    rival = compared.other.partition(" ")[0]
    return (
        f"Backend {rival} takes {1 / slowest:.2f} of the time for a layer at {rows} row{'s' * (rows > 1)}, so a bundle "
        f"with --backend {rival} may be faster here. Measured: {compared.described}"
    )


def beside_rival(spec: EngineSpec, threads: int, begin: Begin, console: Console) -> Comparison | None:
    """Compare the target's backend with its rival, by one layer; None if it has none, or it is not installed. Says on
    the console why else nothing was compared."""
    backend = describe_backend(spec.backend)
    if not backend.rival or describe_backend(backend.rival).release() is None:
        return None
    advance = begin(Step(f"A layer with {backend.rival}", 1))
    try:
        compared = compare_layers(spec.model, backend, spec.precision, threads)
    except DraftwoodError as error:
        advance()
        say(console, f"Not compared with {backend.rival}: {error}")
        return None
    advance()
    return compared


def compare_layers(model: LlamaConfig, backend: Backend, precision: str, threads: int = 0) -> Comparison:
    """See `builder/comparison.py`."""
    from ..builder.comparison import compare  # only where it is asked for: it takes long

    return compare(model, backend, precision, threads)


def bundle_draft(
    bundle: EngineBundle, threads: int, draft_threads: int, provider: str
) -> AbstractContextManager[Engine | None]:
    """The draft, closed at the end; None for a bundle without one. Raises ConfigError for threads of no draft."""
    if not bundle.has_draft and not draft_threads:
        return nullcontext()
    return closing(bundle.open_draft(threads, draft_threads, provider))


def tables(costs: CostModel) -> Iterator[str | Table]:
    """Titles and tables: milliseconds of the passes of target and draft, and of the draft's further ones in a round."""
    every = {"the target": costs.target, "the draft": costs.draft, "the draft, after another one": costs.further}
    for role, passes in every.items():
        if passes is not None:
            yield f"A pass of {role}:"
            yield table(passes)


def table(passes: PassCosts) -> Table:
    """Milliseconds of an engine's passes, with one line per number of rows."""
    after = (f"after {context}" for context in passes.contexts)
    result = Table("rows", *after, box=box.SIMPLE, pad_edge=False)
    for column in result.columns:
        column.justify = "right"
    for width, *seconds in zip(passes.widths, *passes.seconds, strict=True):
        result.add_row(str(width), *(f"{1e3 * each:.2f}" for each in seconds))
    return result


def summary(costs: CostModel) -> str:
    lines = [f"Milliseconds on {costs.machine['processor']}, {costs.machine['cores']} cores."]
    for name, host in (("temperature 0", costs.greedy), ("higher temperatures", costs.sampled)):
        rounds = f"{1e3 * host.plain:.2f} a plain round, {1e3 * host.round:.2f} one with a proposal"
        lines.append(f"Outside the engines at {name}: {rounds}, {1e3 * host.token:.3f} a token of it.")
    if costs.compared is not None:
        lines.append(f"Beside another backend, {costs.compared.described}.")
    return "\n".join(lines)
