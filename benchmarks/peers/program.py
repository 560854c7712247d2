"""What a comparison knows of a program: how its server is started, and the settings that may be its best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from draftwood.models.errors import RequestError

PLAIN, DEFAULT = "plain", "default"
MANY = 256  # texts at the same time, of programs that batch; no comparison asks for more
FILE = "file"  # the precision of the GGUF file itself


class SetupError(RequestError):
    """A program is not installed; the message names the script that installs it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to use a program. start: what its command line has beside the program's own. body: fields of every
    request. Settings of equal `start` share a server."""

    name: str
    start: tuple[str, ...] = ()
    body: tuple[tuple[str, Any], ...] = field(default=(), hash=False)
    lookups: bool = False
    """Whether it copies from the text or from earlier ones."""


@dataclass(frozen=True, slots=True)
class Program:
    """One program at one precision. command: takes --host and --port. settings: plain first. mixed: makes a further
    setting of the best without and the best with lookups. rest: seconds until idle threads sleep."""

    name: str
    precision: str
    version: str
    command: tuple[str, ...]
    settings: tuple[Setting, ...]
    environment: tuple[tuple[str, str], ...] = ()
    mixed: Callable[[Setting, Setting], Setting] | None = None
    rest: float = 0.2
    at_a_time: int = MANY
    model: str = "model"
    """In the field of requests."""

    @property
    def key(self) -> str:
        return f"{self.name}/{self.precision}"

    def mixtures(self) -> list[Setting]:
        """Every mixture of a setting without and one with lookups."""
        drafts = [setting for setting in self.settings[1:] if not setting.lookups]
        lookups = [setting for setting in self.settings if setting.lookups]
        return [] if self.mixed is None else [self.mixed(draft, lookup) for draft in drafts for lookup in lookups]

    @property
    def plain(self) -> Setting:
        return self.settings[0]


class Conditions(NamedTuple):
    """What is the same for all programs."""

    # GGUF files.
    target: Path
    draft: Path | None
    # Where programs are installed, and derived files are kept.
    work: Path
    threads: int
    # Texts at the same time, and tokens of each.
    at_a_time: int
    context: int
    # Restrict every program to AVX2.
    avx2: bool


def flags(*values: object) -> tuple[str, ...]:
    return tuple(map(str, values))


def installed(path: Path, script: str, conditions: Conditions, *options: str) -> Path:
    """Raises SetupError that names the script which installs a program, with its options."""
    if not path.is_file():
        command = ("sh", f"benchmarks/peers/setup/{script}.sh", str(conditions.work), *options)
        raise SetupError(f"{path} is missing: {' '.join(command)}")
    return path
