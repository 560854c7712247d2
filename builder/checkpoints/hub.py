"""Checkpoints by their ids on the Hugging Face Hub, `org/name` or `org/name@revision`.

Only an id that a user gave is downloaded, through huggingface_hub and into its cache, and only files that are read: a
model's settings, safetensors and tokenizer, or an adapter's two files. Nothing pickled is fetched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...models.errors import CheckpointError
from ...models.plain_files import MAX_TOKENIZER
from ...plugins.installation import install
from ..progress import Begin, Step, remark
from ..tokenizer import MAX_TEMPLATES, TEMPLATES, TOKENIZER_FILES
from . import lora
from .safetensors import INDEX, WEIGHTS, weight_map

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"  # a part of an id, as the Hub allows it
REPOSITORY, REVISION = re.compile(f"{PART}/{PART}"), re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,253}[A-Za-z0-9])?")
FILES = (".gguf", ".safetensors", ".json")  # an id with such an ending is taken for the mistyped path of a file
MEGABYTE = 1 << 20
TIMEOUT = 30.0  # seconds for the list of files


class Kind(NamedTuple):
    words: str  # what error messages call it
    settings: tuple[str, ...]  # files to download; the first one must exist
    weights: str  # the file of weights when there is no index


MODEL = Kind(
    "a model in Hugging Face's format", ("config.json", "generation_config.json", *TOKENIZER_FILES, INDEX), WEIGHTS
)
ADAPTER = Kind("a LoRA adapter of PEFT", (lora.SETTINGS,), lora.WEIGHTS)


class HubId(NamedTuple):
    repository: str
    revision: str | None  # a branch, a tag or a commit; None is the main branch

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"

    @property
    def by_hand(self) -> str:
        """Instructions to get the folder without this program."""
        revision = "" if self.revision is None else f" --revision {self.revision}"
        return (
            f"get it where there is a network, and give the folder: hf download {self.repository}{revision} "
            f"--local-dir FOLDER, or git lfs install and git clone https://huggingface.co/{self.repository}"
        )


def hub_id(given: Path) -> HubId | None:
    """Read a path as an id; None when it cannot be one."""
    repository, at, revision = given.as_posix().partition("@")
    if not REPOSITORY.fullmatch(repository) or "--" in repository or repository.endswith(FILES):
        return None
    if (at and not REVISION.fullmatch(revision)) or any(
        ".." in part or "//" in part for part in (repository, revision)
    ):
        return None
    return HubId(repository, revision or None)


def local_folder(given: Path, kind: Kind, begin: Begin) -> Path:
    """Return a path that exists, or that is no id, unchanged. Otherwise download the files from the Hub and return
    their folder. Raises CheckpointError that says how to get the folder when the download fails."""
    wanted = None if os.path.lexists(given) else hub_id(given)
    if wanted is None:
        return given
    try:
        from huggingface_hub import HfApi
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{given} is no folder here. If it is an id of the Hugging Face Hub, {install()} lets "
            f"this command download it; or {wanted.by_hand}"
        ) from error
    try:
        return download(HfApi(), wanted, kind, begin)
    except CheckpointError:
        raise
    except Exception as error:  # classes of huggingface_hub and its HTTP library, which change by release
        if folder := cached(wanted, error):
            remark(begin, f"Taking {wanted} from the cache: the Hub cannot be reached")
            return folder
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise CheckpointError(
            f"{given} is no folder here, and was not downloaded from the Hugging Face Hub ({reason}): {wanted.by_hand}"
        ) from error


def cached(wanted: HubId, error: Exception) -> Path | None:
    """The folder of an earlier download; None when there is none, or the Hub answered."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):  # the Hub answered
        return None
    try:
        return Path(snapshot_download(wanted.repository, revision=wanted.revision, local_files_only=True))
    except Exception:  # there is no complete download
        return None


def download(hub: HfApi, wanted: HubId, kind: Kind, begin: Begin) -> Path:
    """Download the files that are read; returns their folder. Raises CheckpointError and huggingface_hub's errors."""
    info = hub.model_info(wanted.repository, revision=wanted.revision, files_metadata=True, timeout=TIMEOUT)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    settings = [name for name in kind.settings if name in sizes]
    if kind is MODEL:
        settings += [name for name in sorted(sizes) if os.path.split(name)[0] == TEMPLATES][:MAX_TEMPLATES]
    if kind.settings[0] not in settings:
        raise CheckpointError(f"{wanted} on the Hugging Face Hub has no {kind.settings[0]}: choose {kind.words}")
    if large := [name for name in settings if sizes[name] > MAX_TOKENIZER]:
        raise CheckpointError(f"{wanted} on the Hugging Face Hub: {large[0]} has {sizes[large[0]]} bytes, too many")
    # The first file is downloaded by the revision's name, which the cache then knows; the others by its commit.
    folder = Path(hub.hf_hub_download(wanted.repository, settings[0], revision=wanted.revision, tqdm_class=bar_of(int)))
    commit = folder.parent.name
    if commit != info.sha:
        raise CheckpointError(f"{wanted} on the Hugging Face Hub was changed just now: try again")
    fetch(hub, wanted, commit, {name: sizes[name] for name in settings}, "settings", begin)
    names = set(weight_map(folder.parent).values()) if INDEX in settings else {kind.weights}
    if not names & sizes.keys():
        raise CheckpointError(
            f"{wanted} on the Hugging Face Hub has no {kind.weights}, and nothing pickled is read: choose a repository "
            "with safetensors"
        )
    fetch(hub, wanted, commit, {name: sizes[name] for name in sorted(names & sizes.keys())}, "weights", begin)
    return folder.parent


def fetch(hub: HfApi, wanted: HubId, commit: str, sizes: Mapping[str, int], what: str, begin: Begin) -> None:
    """Download files of one commit, as a step of the build whose units are megabytes. sizes: bytes, by name."""
    units = 1 + sum(sizes.values()) // MEGABYTE
    meter, before = Meter(begin(Step(f"Downloading {wanted}: {what}, MB", units))), 0
    for name, size in sizes.items():
        bar = bar_of(meter.of_file(before, size))
        hub.hf_hub_download(wanted.repository, name, revision=commit, tqdm_class=bar)
        before += size
        meter.reach(before)
    meter.reach(units * MEGABYTE)


class Meter:
    """Advances a step of the build by the megabytes that were received. advance: adds one unit."""

    def __init__(self, advance: Callable[[], None]) -> None:
        self._advance, self._shown = advance, 0

    def of_file(self, before: int, size: int) -> Callable[[int], None]:
        """A function to call with the bytes received of one file. before: bytes of the earlier files."""
        return lambda received: self.reach(before + min(received, size))

    def reach(self, received: int) -> None:
        """Advance the step to this number of bytes."""
        while self._shown < received // MEGABYTE:
            self._shown += 1
            self._advance()


def bar_of(report: Callable[[int], object]) -> type[Any]:
    """A class of progress bars for huggingface_hub, which draw nothing and report the bytes received of a file."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            report(int(self.n))

    return Bar
