"""Bundles of models that were given without one: built once, by the command `draftwood build` in a process of its own,
and kept in the user's cache (XDG) by the content of the model's files and the options of the build.

The process is what lets the runtime ask for a build without importing the builder, a higher floor; and a build takes no
memory of the process that serves.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import NamedTuple

from ...models.errors import BundleError, CheckpointError, ConfigError, DraftwoodError, EngineError, shown
from ...models.release import own_version
from ...plugins.native.cache import CACHE, cache_folder
from ...plugins.native.packing import LAYOUT
from .bundle import FORMAT, MANIFEST, checksum
from .digests import known_digest

GGUF = ".gguf"
NONE, SELF = "none", "self:"  # words in the place of a draft's path; a folder of that name is written ./none
CONFIG = "config.json"  # what a folder of Hugging Face has, and no bundle
PART = re.compile(r"(.*-)\d{5}(-of-\d{5}\.gguf)", re.IGNORECASE | re.DOTALL)
ID = re.compile(r"(?!\.)[\w.-]+/[\w.-]+(@[\w./-]+)?")  # of the Hub; builder/checkpoints/hub.py is stricter
READ = (".safetensors", ".json", ".jinja", ".model", ".txt")  # files of a folder that a build may read
ENDING_S = 30.0  # for a build that is ended to remove its files


class Model(NamedTuple):
    """What somebody wants to run. path: a bundle, a .gguf file, a Hugging Face folder, or an id on the Hub, org/name.

    The others are options of a build, None for its own choice, and contradict a bundle. draft: a path or an id, "none",
    or "self:PRECISION". precision: of the target's weights. max_length: tokens of prompt and output together."""

    path: str
    draft: str | None = None
    precision: str | None = None
    max_length: int | None = None

    @classmethod
    def of(cls, model: object, draft: object, precision: str | None, max_length: int | None) -> Model:
        """The same with paths as texts. Raises ConfigError for what is none."""
        for name, value in (("model", model), ("draft", draft)):
            if not isinstance(value, str | Path) and (name, value) != ("draft", None):
                raise ConfigError(f"{name} must be a path, not {shown(value)}")
        return cls(str(model), None if draft is None else str(draft), precision, max_length)

    @property
    def name(self) -> str:
        """The last part of the path, without the ending of a file."""
        name = Path(self.path).absolute().name
        return name[: -len(GGUF)] if is_gguf(Path(name)) else name

    @property
    def options(self) -> list[str]:
        """The options of `draftwood build`."""
        given = {"draft": self.draft, "precision": self.precision, "max-length": self.max_length}
        return [f"--target={self.path}", *(f"--{name}={value}" for name, value in given.items() if value is not None)]


def bundle_of(model: Model, quiet: bool = False) -> Path:
    """The folder of a model's bundle, which is built if there is none. quiet: show no progress on standard error.
    Raises CheckpointError or ConfigError, and EngineError if the build cannot be done here."""
    path = Path(model.path)
    if not is_buildable(path):
        if given := next((name for name, value in model._asdict().items() if name != "path" and value), None):
            raise ConfigError(
                f"{given} is a choice of the build, and {path} is a bundle: leave it out, or give the model's file"
            )
        return path
    folder = folder_of(model) if path.exists() else None  # what an id stands for is known after a look at the Hub
    if folder is not None and (folder / MANIFEST).is_file():
        return folder
    return asked_for(model, quiet)


def is_buildable(path: Path) -> bool:
    """Whether a path can only be that of a model, and not of a bundle."""
    if path.is_dir():
        return (path / CONFIG).is_file() and not (path / MANIFEST).is_file()
    return is_gguf(path) or (not os.path.lexists(path) and ID.fullmatch(path.as_posix()) is not None)


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == GGUF


def asked_for(model: Model, quiet: bool) -> Path:
    """Have the bundle built by another process. Ctrl-C reaches this one alone, which ends the other."""
    command = [sys.executable, "-m", "draftwood", "build", "--json", *model.options, *(["--quiet"] if quiet else [])]
    environment = os.environ | {"PYTHONSAFEPATH": "1"}  # what lies in the working folder is not imported
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate()
        except BaseException:  # Ctrl-C, SIGTERM
            process.terminate()
            process.wait(ENDING_S)
            raise
    kinds = {kind.__name__: kind for kind in DraftwoodError.__subclasses__()}
    try:
        answer = json.loads(said.splitlines()[-1])
        if process.returncode == 0:
            return Path(answer["bundle"])
        refusal = kinds[answer["kind"]](answer["error"])
    except (ValueError, LookupError, TypeError) as error:
        raise EngineError(f"the build of {model.path} ended with exit code {process.returncode}") from error
    raise refusal


def folder_of(model: Model, asked: str | None = None) -> Path:
    """The place of a model's bundle in the cache. Reads the files of the model and of the draft. asked: the model's
    name where the path is that of a download. Raises CheckpointError."""
    chosen = [FORMAT, LAYOUT, own_version(), model.precision, model.max_length]
    chosen.append(digest(Path(model.path)))
    word = model.draft is None or model.draft == NONE or model.draft.startswith(SELF)
    chosen.append(model.draft if word else digest(Path(str(model.draft))))
    key = checksum({"asked": chosen})[:12]
    name = re.sub(r"[^\w.-]+", "-", asked or model.name)[:64].lstrip(".-")
    return cached_bundles() / "-".join(filter(None, (name, model.precision, key)))


def cached_bundles() -> Path:
    """The folder of all bundles in the cache. Raises ConfigError where there is no home folder."""
    cache = cache_folder()
    if cache is None:
        raise ConfigError(f"there is no home folder to keep a bundle in: set {CACHE} to a folder of your own")
    return cache / "bundles"


def digest(path: Path) -> str:
    """Of the content of a model's files. An id of the Hub stands for itself. Raises CheckpointError."""
    if not os.path.lexists(path) and not is_gguf(path):
        return str(path)
    part = PART.fullmatch(path.name)
    try:
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix in READ and file.is_file())
        else:
            files = sorted(path.parent.glob(f"{escape(part[1])}?????{escape(part[2])}")) if part else [path]
        return checksum(
            {file.name if path.is_dir() else str(place): known_digest(file) for place, file in enumerate(files)}
        )
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path} cannot be read ({reason}): give the path of a .gguf file or a folder") from error


@contextmanager
def building(folder: Path, waits: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock of the cache, and say whether the bundle must be built: so two processes build a bundle once.
    waits: called if another process builds. The lock ends with its process. Windows has no such locks; there the last
    of two builds stays. Raises BundleError if the cache cannot be written."""
    lock: int | None = None
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if sys.platform != "win32":
            lock = os.open(folder.parent, os.O_RDONLY)
            wait_for(lock, waits)
    except OSError as error:
        fix = f"set {CACHE} to another folder"
        raise BundleError(f"{folder.parent} cannot be written ({error.strerror}): {fix}") from error
    try:
        yield not (folder / MANIFEST).is_file()
    finally:
        if lock is not None:
            os.close(lock)


def wait_for(lock: int, waits: Callable[[], None]) -> None:
    """Take the lock of an open folder; call `waits` first if another process has it."""
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waits()
        fcntl.flock(lock, fcntl.LOCK_EX)
