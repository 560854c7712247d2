"""draftwood inspect: shows the content of a bundle, and whether this machine can run the bundle. Without a bundle it
shows what this machine can run, and how to mend what it cannot.

Nothing of a bundle is executed: no engine is opened, except with --open, and no chat template is rendered. Only data
is compared.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..models.bindings import DRAFT
from ..models.errors import ConfigError, DraftwoodError, RequestError
from ..models.layers import num_parameters
from ..models.printable import printable
from ..runtime.bundle.bundle import EngineBundle
from ..runtime.bundle.cache import is_buildable
from ..runtime.bundle.costs import stored_costs
from ..runtime.engines.backends import BACKENDS, bits_of_weight, cache_precision, format_of_weight
from ..runtime.engines.base import EngineSpec
from ..runtime.engines.comparison import Comparison
from ..runtime.engines.compatibility import TensorRTPlan
from ..runtime.engines.shared.sizes import cache_bytes
from ..runtime.inspection.machine import abilities, look_around
from ..runtime.text.tokenizer import DEFAULT, read_templates
from .options import DRAFT_THREADS, PROVIDER, THREADS, positive
from .streams import say

REQUESTS = 8  # whose memory is shown
HERE, ELSEWHERE, ASSUMED = "measured here", "measured elsewhere", "assumed"


def add_parser(commands: Any) -> None:
    words = "show what a bundle holds and whether it runs here, or what can run here"
    parser = commands.add_parser("inspect", help=words)
    parser.add_argument("bundle", type=Path, nargs="?", help="leave it out to see what this machine can run")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    words = f"show the memory that N requests at a time need (default {REQUESTS})"
    parser.add_argument("--requests", type=positive, metavar="N", help=words)
    parser.add_argument("--chat-template", action="store_true", help="print the chat template, and nothing else")
    parser.add_argument("--verify", action="store_true", help="read every file again, to find damage of the disk")
    parser.add_argument("--open", action="store_true", help="open the engines, too: for bundles that you trust")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.bundle is None:
        return show_machine(args)
    if args.chat_template and (args.json or args.open):
        other = "--json, which holds the template, too" if args.json else "--open"
        raise ConfigError(f"--chat-template prints nothing else: leave it out, or {other}")
    if is_buildable(args.bundle):
        built = "its first use, such as draftwood chat, builds a bundle, and draftwood cache names it"
        raise RequestError(f"{args.bundle} is a model: {built}; give the folder of a bundle")
    bundle = EngineBundle.open(args.bundle, verify=args.verify)
    templates = read_templates(bundle.folder)
    template = templates.get(DEFAULT, next(iter(templates.values()), None))
    if args.chat_template:
        if template is None:
            raise RequestError(f"{bundle.folder} has no chat template: its model completes texts")
        print(printable(template))
        return 0
    requests = args.requests or REQUESTS
    trials = {role: attempt(bundle, role, args.open) for role in bundle.manifest.engines}
    costs = costs_of(bundle)
    if args.json:
        specs = bundle.manifest.engines
        shown = {
            "bits_per_weight": {role: round(bits_of_weight(spec), 3) for role, spec in specs.items()},
            "formats": {role: format_of_weight(spec) for role, spec in specs.items()},
            "draft_vocabulary": specs[DRAFT].model.num_logits if bundle.has_draft else None,
            "chat_template": template,
            "chat_templates": templates,
            "memory_of_requests": {role: full_bytes(bundle, role, requests) for role in specs},
            "obstacles": {role: trial.obstacle for role, trial in trials.items()},
            "memory": {role: trial.memory for role, trial in trials.items()},
            "costs": costs._asdict() | {"compared": None if costs.compared is None else asdict(costs.compared)},
        }
        print(json.dumps(bundle.manifest.to_json() | shown))
        return 0
    console = Console()
    console.print(describe(bundle, requests))
    for role, trial in trials.items():
        fits = " runs here" if args.open else " fits this machine"
        words = fits if trial.obstacle is None else f": {trial.obstacle}"
        if trial.memory is not None:
            used = (f"{size / 1e6:.1f} MB {name.replace('_', ' ')}" for name, size in trial.memory.items())
            words += f" and takes {', '.join(used)}"
        say(console, f"The {role} engine{words}.")
    if costs.differences:
        say(console, f"Costs were {costs.source}: {', '.join(costs.differences)}.")
    return 0


def show_machine(args: argparse.Namespace) -> int:
    """What this machine can run. Raises ConfigError for options that need a bundle."""
    options = {"--open": args.open, "--verify": args.verify, "--chat-template": args.chat_template}
    given = [name for name, value in options.items() if value]
    if given or args.requests is not None:
        raise ConfigError(f"{(*given, '--requests')[0]} needs a bundle: draftwood inspect BUNDLE")
    found = abilities(look_around())
    if args.json:
        print(json.dumps([{"runs": each.runs} | each._asdict() for each in found]))
        return 0
    table = Table(title="This machine", title_justify="left")
    for column in ("engine", "runs", ""):
        table.add_column(column)
    for each in found:
        words = each.found if each.runs else "\n".join(each.obstacles)
        table.add_row(each.engine, "yes" if each.runs else "no", escape(printable(words)))
    Console().print(table)
    return 0


class Trial(NamedTuple):
    """The result of opening an engine, or of comparing it with this machine. obstacle: the reason why it cannot run
    here; None if it can. memory: bytes by use, if an open engine reports them."""

    obstacle: str | None
    memory: dict[str, int] | None


def attempt(bundle: EngineBundle, role: str, opens: bool) -> Trial:
    """Open an engine, or compare it with this machine without opening it."""
    spec, memory = bundle.manifest.engines[role], None
    try:
        if opens:
            engine = bundle.open_engine(role)
            memory = getattr(engine, "memory", None)
            engine.close()
        else:
            BACKENDS[spec.backend].check_file(bundle.folder / spec.file, spec)
            BACKENDS[spec.backend].check_machine(spec.plan)
    except DraftwoodError as error:
        return Trial(str(error), None)
    return Trial(None, None if memory is None else memory._asdict())


class Costs(NamedTuple):
    """The costs by which rounds are planned. source: HERE, ELSEWHERE or ASSUMED. differences: between this machine and
    the machine of the measurement, in words. compared: the target's backend with another one, on this machine."""

    source: str
    differences: list[str]
    compared: Comparison | None = None


def costs_of(bundle: EngineBundle) -> Costs:
    """The costs for engines with the default numbers of threads. Raises BundleError if the table is damaged."""
    measured, found = stored_costs(bundle, PROVIDER, THREADS, DRAFT_THREADS)
    if measured is None:
        return Costs(ASSUMED, [])
    return Costs(ELSEWHERE, found) if found else Costs(HERE, [], measured.compared)


def describe(bundle: EngineBundle, requests: int = REQUESTS) -> Table:
    """The bundle as a table, one column per engine. requests: at a time, whose memory is shown."""
    manifest = bundle.manifest
    table = Table(title=escape(printable(f"{bundle.folder}  ({manifest.builder})")), title_justify="left")
    table.add_column("")
    for role in manifest.engines:
        table.add_column(role)
    engines = list(manifest.engines.values())
    rows = {
        "parameters": [f"{num_parameters(spec.model) / 1e6:.2f}M" for spec in engines],
        "layers × hidden": [f"{spec.model.num_layers} × {spec.model.hidden_size}" for spec in engines],
        "heads : KV heads": [f"{spec.model.num_heads} : {spec.model.num_kv_heads}" for spec in engines],
        "backend": [f"{spec.backend} {spec.precision}" for spec in engines],
        "weights": [format_of_weight(spec) for spec in engines],
        "bits per weight": [f"{bits_of_weight(spec):.2f}" for spec in engines],
        "size": [f"{manifest.engine_bytes(role) / 1e6:.1f} MB" for role in manifest.engines],
        "cache slots": [cache_slots(spec) for spec in engines],
        f"memory of {requests} requests": [
            f"{full_bytes(bundle, role, requests) / 1e6:.1f} MB" for role in manifest.engines
        ],
        "rows per pass": [",".join(map(str, spec.widths)) for spec in engines],
        "largest error": [f"{manifest.parity[role]:.0e} of the largest logit" for role in manifest.engines],
    }
    if any(spec.model.draft_context for spec in engines):
        contexts = (spec.model.draft_context for spec in engines)
        rows["reads"] = ["the whole text" if most is None else f"the last {most} tokens" for most in contexts]
    if any(spec.kept_tokens for spec in engines):
        rows["predicted tokens"] = [f"{spec.model.num_logits} of {spec.model.vocab_size}" for spec in engines]
    if manifest.adapters:
        rows["merged adapter"] = [printable(manifest.adapters.get(role, "")) for role in manifest.engines]
    added = [", ".join(spec.model.variant.differences) for spec in engines]
    if any(added):
        rows["added to LLaMA's layer"] = added
    plans = [spec.plan for spec in engines if spec.plan is not None]
    if plans:
        rows |= {
            "compiled by": [f"{plan.package} {plan.version}" for plan in plans],
            "compiled for": [f"SM {', '.join(plan.compute_capabilities)}" for plan in plans],
            "attention": [attention(plan) for plan in plans],
            "compared": ["the plan" if plan.executed else "its graph: not executed" for plan in plans],
        }
    for name, cells in rows.items():
        table.add_row(name, *map(escape, cells))
    costs = costs_of(bundle)
    table.add_row("costs", costs.source)
    if costs.compared is not None:
        table.add_row("compared", escape(costs.compared.described))
    table.caption = f"vocabulary {engines[0].model.vocab_size}, up to {manifest.max_length} tokens of prompt and output"
    for name, template in (templates := read_templates(bundle.folder)).items():
        table.caption += f"\nchat template of {len(template)} characters"
        table.caption += "" if name == DEFAULT else f", {printable(name)}"
    table.caption += "" if templates else "\nno chat template"
    if not bundle.has_draft:
        table.caption += "\nno draft: decodes plainly or by prompt lookup"
    if costs.source != HERE:
        table.caption += "\ndraftwood profile measures this machine's costs"
    return table


def cache_slots(spec: EngineSpec) -> str:
    """The cache slots of a sequence, or of all sequences of a TensorRT plan, and the bytes of their keys and values."""
    slots = f"{spec.capacity}" if spec.max_batch == 1 else f"{spec.max_batch} × {spec.capacity}"
    return f"{slots}, {full_cache_bytes(spec) / 1e6:.1f} MB when full, in {cache_precision(spec)}"


def full_cache_bytes(spec: EngineSpec) -> int:
    """Bytes of the keys and values of one sequence, or of all sequences of a TensorRT plan, when the cache is full."""
    return cache_bytes(spec, spec.max_batch * spec.capacity, spec.max_batch)


def full_bytes(bundle: EngineBundle, role: str, requests: int) -> int:
    """Bytes of an engine's file and of the full caches of so many requests. A TensorRT plan has its caches anyway."""
    spec = bundle.manifest.engines[role]
    caches = 1 if BACKENDS[spec.backend].is_compiled else requests
    return bundle.manifest.engine_bytes(role) + caches * full_cache_bytes(spec)


def attention(plan: TensorRTPlan) -> str:
    if plan.kernel is None:
        return f"TensorRT's own, {plan.layers.attention or 'no'} fused layers of {plan.layers.total}"
    return f"kernel {plan.kernel.fingerprint[:12]}, {plan.layers.plugin} layers of {plan.layers.total}"
