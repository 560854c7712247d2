"""draftwood cache: shows the bundles that were built for models at their first use, and removes them."""

from __future__ import annotations

import argparse
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..models.errors import RequestError, nearest
from ..models.printable import printable
from ..runtime.bundle.bundle import MANIFEST
from ..runtime.bundle.cache import building, cached_bundles
from .streams import say


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("cache", help="show or remove bundles that were built at a model's first use")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--remove", nargs="+", metavar="NAME", help="remove these bundles")
    chosen.add_argument("--remove-all", action="store_true", help="remove all of them, and what killed builds left")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    folder, console = cached_bundles(), Console()
    found = {path.name: path for path in sorted(folder.iterdir())} if folder.is_dir() else {}
    bundles = {name: path for name, path in found.items() if (path / MANIFEST).is_file()}
    if args.remove and (unknown := [name for name in args.remove if name not in bundles]):
        near = nearest(unknown[0], bundles) or ": draftwood cache lists the names"
        raise RequestError(f"there is no bundle {unknown[0]!r} in {folder}{near}")
    if removed := list(found) if args.remove_all else args.remove or []:
        with building(folder / "removed", lambda: None):  # what another process builds now is not left over
            for name in removed:
                shutil.rmtree(found[name])
        say(console, f"Removed {', '.join(removed)}")
        return 0
    table = Table("bundle", "MB", "built", box=box.SIMPLE, pad_edge=False)
    for name, path in bundles.items():
        built = datetime.fromtimestamp((path / MANIFEST).stat().st_mtime)
        table.add_row(escape(printable(name)), f"{size(path) / 1e6:.0f}", f"{built:%Y-%m-%d %H:%M}")
    if bundles:
        console.print(table)
    total = sum(map(size, bundles.values()))
    say(console, f"{len(bundles)} bundles, {total / 1e6:.0f} MB, in {folder}")
    return 0


def size(folder: Path) -> int:
    """Bytes of a folder's files."""
    return sum(file.lstat().st_size for file in folder.iterdir())
