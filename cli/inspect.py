"""draftwood inspect: what a bundle holds, and whether this machine can run it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..models.errors import DraftwoodError
from ..runtime.bundle import EngineBundle


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("inspect", help="show what a bundle holds and whether it runs here")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    bundle = EngineBundle.open(args.bundle)
    obstacles = {role: obstacle(bundle, role) for role in bundle.manifest.engines}
    if args.json:
        print(json.dumps(bundle.manifest.to_json() | {"obstacles": obstacles}))
        return 0
    console = Console()
    console.print(describe(bundle))
    for role, problem in obstacles.items():
        console.print(f"The {role} engine {'runs here' if problem is None else 'cannot run here: ' + problem}.")
    return 0


def obstacle(bundle: EngineBundle, role: str) -> str | None:
    """Why this machine cannot open an engine; None when it can."""
    try:
        bundle.open_engine(role).close()
    except DraftwoodError as error:
        return str(error)
    return None


def describe(bundle: EngineBundle) -> Table:
    """The bundle as a table, one column per engine."""
    manifest = bundle.manifest
    table = Table(title=f"{bundle.folder}  ({manifest.builder})", title_justify="left")
    table.add_column("")
    for role in manifest.engines:
        table.add_column(role)
    engines = manifest.engines.values()
    rows = {
        "parameters": [f"{spec.model.num_parameters / 1e6:.2f}M" for spec in engines],
        "layers × hidden": [f"{spec.model.num_layers} × {spec.model.hidden_size}" for spec in engines],
        "heads : KV heads": [f"{spec.model.num_heads} : {spec.model.num_kv_heads}" for spec in engines],
        "backend": [f"{spec.backend} {spec.precision}" for spec in engines],
        "size": [f"{manifest.engine_bytes(role) / 1e6:.1f} MB" for role in manifest.engines],
        "cache slots": [str(spec.capacity) for spec in engines],
        "rows per pass": [",".join(map(str, spec.widths)) for spec in engines],
        "largest error": [f"{manifest.parity[role]:.0e} of the largest logit" for role in manifest.engines],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    table.caption = (
        f"vocabulary {next(iter(engines)).model.vocab_size}, up to {manifest.max_length} tokens of prompt and output"
    )
    return table
