"""EngineBundle: a folder with the compiled engines, the tokenizer and a manifest; checked when opened, written
atomically.

Files: `manifest.json` (written last, with its own checksum); `target.onnx` and `draft.onnx`, with `<name>.data` if
large, or `target.plan` and `draft.plan`, or `target.weights` and `draft.weights`; `tokenizer.json` and its companions.
Only files that the manifest lists are read, and none of them is Draftwood's code. `costs.json` may lie beside them
(`costs.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

from ...models.bindings import DRAFT, TARGET
from ...models.errors import BundleError, ConfigError, shown
from ...models.plain_files import read_object
from ...models.typed import typed
from ..engines.backends import BACKENDS, Opening
from ..engines.base import Engine, EngineSpec
from ..engines.onnx.file import EXTERNAL
from ..text.tokenizer import SETTINGS, TEMPLATE, TOKENIZER
from .checks import check_manifest
from .digests import FileRecord, file_record, known_digest

GENERATION = "generation_config.json"  # what the model's authors recommend for sampling: see defaults.py
MANIFEST, COSTS = "manifest.json", "costs.json"
FORMAT = 1  # increased when an older release could misread a newer bundle
READ_BESIDE = (TOKENIZER, SETTINGS, TEMPLATE, GENERATION)  # optional files that are read by name


class Stamp(NamedTuple):
    """Properties that reveal, without reading a file, that it was replaced or written to."""

    device: int
    inode: int
    size: int
    modified: int  # nanoseconds


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a bundle.

    max_length: most tokens of prompt and output together. eos_token_ids: tokens that end a text. engines: by role; a
    bundle may have no draft.
    parity: for each engine, the largest difference of logits from the reference at build time; for a TensorRT
    plan that was not executed at build time, the difference of its graph. files: every file except the manifest, by
    name. adapters: names of the LoRA folders that were merged, by role.
    """

    builder: str
    max_length: int
    eos_token_ids: tuple[int, ...]
    engines: Mapping[str, EngineSpec]
    parity: Mapping[str, float]
    files: Mapping[str, FileRecord]
    adapters: Mapping[str, str] = field(default_factory=dict)

    def engine_bytes(self, role: str) -> int:
        """Size of an engine with its external data."""
        file = self.engines[role].file
        return sum(record.bytes for name, record in self.files.items() if name.startswith(file))

    @property
    def digest(self) -> str:
        """SHA-256 of the parts of a bundle that determine the time of a pass: its files, rows and caches."""
        content: dict[str, Any] = {"files": {name: record.sha256 for name, record in self.files.items()}}
        content["widths"] = {role: spec.widths for role, spec in self.engines.items()}
        if caches := {role: spec.cache_precision for role, spec in self.engines.items() if spec.cache_precision}:
            content["caches"] = caches
        return checksum(content)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready content, checksum included."""
        content = {
            "format": FORMAT,
            "builder": self.builder,
            "max_length": self.max_length,
            "eos_token_ids": list(self.eos_token_ids),
            "engines": {role: spec_fields(spec) for role, spec in self.engines.items()},
            "parity": dict(self.parity),
            "adapters": dict(self.adapters),
            "files": {name: record._asdict() for name, record in self.files.items()},
        }
        # Through JSON and back, so that the checksum is of the content that a reader gets (tuples become lists).
        content = dict(json.loads(json.dumps(content)))
        return content | {"checksum": checksum(content)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Manifest:
        """The inverse of `to_json`. Raises BundleError for another format and for content that was edited."""
        version = content.get("format")
        if version != FORMAT:
            age = "newer" if isinstance(version, int) and version > FORMAT else "unknown"
            raise BundleError(
                f"bundle format {version!r} is {age}; this release reads format {FORMAT}: "
                "update draftwood, or rebuild the bundle with draftwood build"
            )
        unsigned = {name: value for name, value in content.items() if name not in ("checksum", "format")}
        try:
            if content.get("checksum") != checksum({"format": FORMAT, **unsigned}):
                raise BundleError(f"{MANIFEST} was changed after the build: rebuild the bundle instead of editing it")
            manifest: Manifest = typed(cls, unsigned, MANIFEST)
        except RecursionError as error:
            raise BundleError(f"{MANIFEST} has too many levels: rebuild the bundle") from error
        except BundleError:
            raise
        except ValueError as error:
            raise BundleError(f"{error}: rebuild the bundle") from error
        check_manifest(manifest)
        return manifest


@dataclass(frozen=True, slots=True)
class EngineBundle:
    """A bundle whose files were all checked against its manifest, since they last changed."""

    folder: Path
    manifest: Manifest
    stamps: Mapping[str, Stamp]  # of every file, taken before the file was read: see watch.py
    private: bool = False  # engines copy their weights into memory instead of mapping files

    @classmethod
    def open(cls, folder: Path, private: bool = False, verify: bool = False) -> EngineBundle:
        """Check a bundle: format, checksum, and size and digest of every file. private: see the class. verify: read
        large files again that were read before and did not change. Raises BundleError naming the fix, and ConfigError
        for `private` where no engine maps its weights."""
        if not folder.is_dir():
            raise BundleError(
                f"{folder} is neither a bundle nor a model: give the folder of a bundle or of a Hugging Face model, a "
                ".gguf file, or an id on the Hub, org/name"
            )
        try:
            content = read_object(folder / MANIFEST, own=True)
        except FileNotFoundError as error:
            raise BundleError(
                f"{folder} has no {MANIFEST}, so it is no bundle or its build did not finish: "
                "give a bundle, a .gguf file, or the folder of a Hugging Face model with its config.json"
            ) from error
        except (OSError, ValueError) as error:
            raise BundleError(f"{folder / MANIFEST} is unreadable ({error}): rebuild the bundle") from error
        manifest = Manifest.from_json(content)
        beside = (*READ_BESIDE, *(spec.file + EXTERNAL for spec in manifest.engines.values()))
        if unlisted := [name for name in beside if name not in manifest.files and os.path.lexists(folder / name)]:
            raise BundleError(f"{folder / unlisted[0]} is not listed in {MANIFEST}: remove it, or rebuild")
        stamps = {name: stamp(folder / name) for name in manifest.files}
        for name, record in manifest.files.items():
            check_file(folder / name, record, stamps[name].size, verify)
        bundle = cls(folder, manifest, stamps)
        if private and not bundle.mapped:
            raise ConfigError(
                f"private weights are of no use with {manifest.engines[TARGET].backend}, which reads each file once "
                "and maps none: leave --private-weights (private_weights=True) out"
            )
        return replace(bundle, private=private)

    @property
    def mapped(self) -> bool:
        """Whether an open engine reads its weights from a file, so that changes of the file reach it."""
        return not self.private and any(BACKENDS[spec.backend].maps for spec in self.manifest.engines.values())

    def open_engine(self, role: str, threads: int = 0, provider: str = "cpu") -> Engine:
        """Open the engine of "target" or "draft". threads: 0 lets the backend choose. provider: "cuda" is for ONNX
        Runtime; TensorRT computes there anyway. Raises EngineError or ConfigError."""
        spec = self.manifest.engines[role]
        backend, file = BACKENDS[spec.backend], self.folder / spec.file
        whole = isinstance(threads, Integral) and not isinstance(threads, bool)
        if not whole or not 0 <= threads <= backend.most_threads:
            most = f" to {backend.most_threads}" if backend.most_threads else f", as {spec.backend} computes on a GPU"
            raise ConfigError(f"threads of the {role} must be 0 (the backend chooses){most}, not {shown(threads)}")
        self.check_provider(role, provider)
        return backend.open(file, spec, Opening(int(threads), provider, self.private))

    def check_provider(self, role: str, provider: str) -> None:
        """Raises ConfigError if the engine of a role cannot compute on a provider."""
        backend = BACKENDS[self.manifest.engines[role].backend]
        if provider not in backend.providers:
            raise ConfigError(
                f"the {role} runs on {backend.name}, which has no provider {shown(provider)}: choose one of "
                f"{', '.join(backend.providers)}"
                + ("" if len(backend.providers) > 1 else ", or build with --backend onnxruntime")
            )

    @property
    def has_draft(self) -> bool:
        return DRAFT in self.manifest.engines

    def check_draft(self) -> None:
        """Raises ConfigError if there is no draft."""
        if not self.has_draft:
            raise ConfigError(
                f"{self.folder} was built with --draft none: build it with a draft, or leave out what is of a draft, "
                "such as its threads"
            )

    def open_draft(self, threads: int = 0, draft_threads: int = 0, provider: str = "cpu") -> Engine:
        """Open the draft beside a target with `threads`. draft_threads: 0 means one thread, because waking threads
        costs more than the passes of a small draft; on the native engine 0 means as many as the target's, because both
        share one team of threads. Raises as `check_draft` does."""
        self.check_draft()
        backend = BACKENDS[self.manifest.engines[DRAFT].backend]
        chosen = threads if backend.shares_threads else min(1, backend.most_threads)
        return self.open_engine(DRAFT, draft_threads or chosen, provider)

    def copy_to(self, folder: Path) -> None:
        """Copy the files of the bundle, and its cost table, into a new folder. Raises OSError."""
        folder.mkdir()
        costs = [COSTS] if (self.folder / COSTS).is_file() and not (self.folder / COSTS).is_symlink() else []
        for name in (MANIFEST, *self.manifest.files, *costs):
            shutil.copy2(self.folder / name, folder / name)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, as the last step of a build."""
    text = json.dumps(manifest.to_json(), indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def stamp(file: Path) -> Stamp:
    """The file's Stamp. Raises BundleError unless it is plain: a link could lead out, and a pipe blocks its reader."""
    try:
        found = file.lstat()
    except OSError as error:
        raise BundleError(f"{file} is missing ({error.strerror}): copy the bundle again, or rebuild it") from error
    if not stat.S_ISREG(found.st_mode):
        kind = "a link" if stat.S_ISLNK(found.st_mode) else "no plain file"
        raise BundleError(f"{file} is {kind}, which a bundle does not hold: copy the bundle with cp -rL, or rebuild it")
    return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def check_file(file: Path, record: FileRecord, size: int, verify: bool) -> None:
    """Raises BundleError for another size or digest. verify: see `EngineBundle.open`."""
    if size != record.bytes:
        raise BundleError(f"{file} has {size} bytes instead of {record.bytes}: copy the bundle again, or rebuild it")
    if (file_record(file).sha256 if verify else known_digest(file)) != record.sha256:
        raise BundleError(f"{file} is damaged (its SHA-256 differs): copy the bundle again, or rebuild it")


def checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON text."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def spec_fields(spec: EngineSpec) -> dict[str, Any]:
    plan = None if spec.plan is None else spec.plan.to_json()
    return asdict(spec) | {"model": spec.model.to_dict(), "plan": plan}
