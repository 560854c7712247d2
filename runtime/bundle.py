"""EngineBundle: a folder of compiled engines, tokenizer and manifest; checked when opened, written all or nothing.

Layout: `manifest.json` (written last, and carrying its own checksum), `target.onnx`, `draft.onnx`, with `<name>.data`
beside them when large, or `target.plan`, `draft.plan`, or `target.weights`, `draft.weights` and `kernels.so`;
`tokenizer.json` and its companions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ..models.bindings import DRAFT, ROLES
from ..models.config import LlamaConfig
from ..models.errors import BundleError, ConfigError
from .engines.base import Engine, EngineSpec
from .engines.compatibility import PACKAGES, Plan

MANIFEST = "manifest.json"
FORMAT = 1  # raised when an older release could misread a newer bundle
READ_BYTES = 1 << 20
MOST_THREADS = {"native": 64}  # of an engine, as in plugins/native/kernels/threads.h
MOST_THREADS_ELSEWHERE = 1024


class FileRecord(NamedTuple):
    """What a file of the bundle must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a bundle holds.

    max_length: tokens of prompt and output together. eos_token_ids: tokens that end a text. engines: by role.
    parity: largest difference, in logits, between each engine and the torch reference when the bundle was built; of a
    plan that was not executed then, the difference of the graph it was compiled from.
    files: every file but the manifest, by name.
    """

    builder: str
    max_length: int
    eos_token_ids: tuple[int, ...]
    engines: Mapping[str, EngineSpec]
    parity: Mapping[str, float]
    files: Mapping[str, FileRecord]

    def engine_bytes(self, role: str) -> int:
        """Size of an engine with its external data."""
        file = self.engines[role].file
        return sum(record.bytes for name, record in self.files.items() if name.startswith(file))

    @property
    def digest(self) -> str:
        """SHA-256 of what decides how long a pass takes: every file, kernels included, and the rows of passes."""
        files = {name: record.sha256 for name, record in self.files.items()}
        return checksum({"files": files, "widths": {role: spec.widths for role, spec in self.engines.items()}})

    def to_json(self) -> dict[str, Any]:
        """JSON-ready content, checksum included."""
        content = {
            "format": FORMAT,
            "builder": self.builder,
            "max_length": self.max_length,
            "eos_token_ids": list(self.eos_token_ids),
            "engines": {role: spec_fields(spec) for role, spec in self.engines.items()},
            "parity": dict(self.parity),
            "files": {name: record._asdict() for name, record in self.files.items()},
        }
        # Through JSON and back, so that what is hashed is what a reader will see (tuples are lists there).
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
                "update draftwood, or rebuild the bundle with build_engines.py"
            )
        unsigned = {name: value for name, value in content.items() if name != "checksum"}
        if content.get("checksum") != checksum(unsigned):
            raise BundleError(f"{MANIFEST} was changed after the build: rebuild the bundle instead of editing it")
        try:
            manifest = cls(
                builder=content["builder"],
                max_length=int(content["max_length"]),
                eos_token_ids=tuple(content["eos_token_ids"]),
                engines={role: read_spec(content["engines"][role]) for role in ROLES},
                parity=content["parity"],
                files={plain_name(name): FileRecord(**record) for name, record in content["files"].items()},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise BundleError(f"{MANIFEST} lacks what this release needs ({error!r}): rebuild the bundle") from error
        for spec in manifest.engines.values():
            if spec.file not in manifest.files:
                raise BundleError(f"{MANIFEST} lists no file {spec.file!r}: rebuild the bundle")
        return manifest


@dataclass(frozen=True, slots=True)
class EngineBundle:
    """A bundle whose every file was found to be what its manifest says."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path) -> EngineBundle:
        """Check a bundle: format, checksum, and size and digest of every file. Raises BundleError naming the fix."""
        if not folder.is_dir():
            raise BundleError(f"{folder} is not a folder: build a bundle there with build_engines.py --output {folder}")
        try:
            content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise BundleError(
                f"{folder} has no {MANIFEST}, so it is no bundle or its build did not finish: "
                f"run build_engines.py --output {folder}"
            ) from error
        except (OSError, ValueError) as error:
            raise BundleError(f"{folder / MANIFEST} is unreadable ({error}): rebuild the bundle") from error
        if not isinstance(content, dict):
            raise BundleError(f"{folder / MANIFEST} holds no JSON object: rebuild the bundle")
        manifest = Manifest.from_json(content)
        for name, record in manifest.files.items():
            check_file(folder / name, record)
        return cls(folder, manifest)

    def open_engine(self, role: str, threads: int = 0, provider: str = "cpu") -> Engine:
        """Open the engine of "target" or "draft". threads: 0 lets the backend choose. provider: "cuda" is for ONNX
        Runtime; TensorRT computes there anyway. Raises EngineError or ConfigError."""
        spec = self.manifest.engines[role]
        most = MOST_THREADS.get(spec.backend, MOST_THREADS_ELSEWHERE)
        if not 0 <= threads <= most:
            raise ConfigError(f"threads of the {role} must be 0 (the backend chooses) to {most}, not {threads}")
        if provider != "cpu" and spec.backend not in ("onnxruntime", *PACKAGES):
            raise ConfigError(
                f"the {role} runs on {spec.backend}, which has no provider {provider}: leave --provider out, or build "
                "with --backend onnxruntime"
            )
        if spec.backend == "onnxruntime":
            from .engines.onnxruntime import OnnxRuntimeEngine

            return OnnxRuntimeEngine(self.folder / spec.file, spec, threads, provider)
        if spec.backend == "openvino":
            from .engines.openvino import OpenVinoEngine

            return OpenVinoEngine(self.folder / spec.file, spec, threads)
        if spec.backend == "native":
            from .engines.native import NativeEngine

            return NativeEngine(self.folder / spec.file, spec, threads)
        if spec.backend in PACKAGES:
            from .engines.tensorrt import TensorRTEngine

            return TensorRTEngine(self.folder / spec.file, spec)
        raise BundleError(f"the {role} engine's backend {spec.backend!r} is unknown to this release: update draftwood")

    def open_draft(self, threads: int = 0, draft_threads: int = 0, provider: str = "cpu") -> Engine:
        """Open the draft beside a target on `threads`. draft_threads: 0 takes one, since a small draft has less to
        compute than threads cost to wake; natively as many as the target, since the two share a team."""
        native = self.manifest.engines[DRAFT].backend == "native"
        return self.open_engine(DRAFT, draft_threads or (threads if native else 1), provider)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The last step of a build."""
    text = json.dumps(manifest.to_json(), indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def file_record(file: Path) -> FileRecord:
    """Size and digest of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while block := handle.read(READ_BYTES):
            digest.update(block)
    return FileRecord(file.stat().st_size, digest.hexdigest())


def check_file(file: Path, record: FileRecord) -> None:
    if not file.is_file():
        raise BundleError(f"{file} is missing: copy the bundle again, or rebuild it")
    size = file.stat().st_size
    if size != record.bytes:
        raise BundleError(f"{file} has {size} bytes instead of {record.bytes}: copy the bundle again, or rebuild it")
    if file_record(file).sha256 != record.sha256:
        raise BundleError(f"{file} is damaged (its SHA-256 differs): copy the bundle again, or rebuild it")


def checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON text."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def spec_fields(spec: EngineSpec) -> dict[str, Any]:
    """JSON-ready content of a spec."""
    plan = None if spec.plan is None else spec.plan.to_json()
    return asdict(spec) | {"model": spec.model.to_dict(), "plan": plan}


def read_spec(fields: Mapping[str, Any]) -> EngineSpec:
    tuples = {name: tuple(fields[name]) for name in ("widths", "outputs")}
    tuples["prompt_widths"] = tuple(fields.get("prompt_widths", ()))  # older bundles have none
    plan = None if fields.get("plan") is None else Plan.from_json(fields["plan"])
    return EngineSpec(**{**fields, **tuples, "model": LlamaConfig.from_dict(fields["model"]), "plan": plan})


def plain_name(name: str) -> str:
    """A file's name inside the bundle. Raises BundleError when it would lead anywhere else."""
    if PurePosixPath(name).parts != (name,) or name in ("..", MANIFEST) or "\\" in name:
        raise BundleError(f"{MANIFEST} names the file {name!r}, which leaves the bundle: do not use this bundle")
    return name
