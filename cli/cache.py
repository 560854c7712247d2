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
    bundles = {name: path for name, path in contents(folder).items() if (path / MANIFEST).is_file()}
    if args.remove and (unknown := [name for name in args.remove if name not in bundles]):
        near = nearest(unknown[0], bundles) or ": draftwood cache lists the names"
        raise RequestError(f"there is no bundle {unknown[0]!r} in {folder}{near}")
    if args.remove or (args.remove_all and contents(folder)):
        with building(folder / "removed", lambda: None):  # what another process builds now is not left over
            found = contents(folder)
            removed = [name for name in args.remove or found if name in found]
            for path in map(found.__getitem__, removed):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        say(console, f"Removed {', '.join(removed) or 'nothing'}")
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


def contents(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted(folder.iterdir())} if folder.is_dir() else {}


def size(folder: Path) -> int:
    """Bytes of a folder's files."""
    return sum(file.lstat().st_size for file in folder.iterdir())
