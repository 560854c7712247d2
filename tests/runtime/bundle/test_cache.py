"""Models that are no bundles: one is built at the first use, kept, and found again, by whoever asks for it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bundling import own_cache
from checkpoints import write_checkpoint, write_tokenizer
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_gguf

from draftwood import LLM, AsyncLLM, BundleError, CheckpointError, ConfigError, SamplingParams
from draftwood.cli.main import main
from draftwood.plugins.native.cache import CACHE
from draftwood.runtime.bundle import cache, digests
from draftwood.runtime.bundle.bundle import MANIFEST, EngineBundle
from draftwood.runtime.bundle.cache import Model, bundle_of, folder_of, is_buildable
from draftwood.runtime.bundle.digests import FileRecord, file_record

GENERATE = [sys.executable, "-m", "draftwood", "generate"]
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder whose authors recommend how to sample."""
    folder = write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", hidden_size=32, head_dim=8)
    write_tokenizer(folder)
    recommended = {"temperature": 0.3, "top_p": 0.8, "max_new_tokens": 40, "eos_token_id": 2, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_gguf(folder, folder.with_name("tiny.gguf"), Kind.Q4_1)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with own_cache(tmp_path_factory.mktemp("cache")) as bundles:
        yield bundles


@pytest.fixture
def no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the bundle is in the cache")

    monkeypatch.setattr(cache, "asked_for", refuse)


@pytest.fixture(scope="module")
def first_use(model: Path, bundles: Path) -> list[tuple[str, str]]:
    """What two processes print that want the model at the same time: a pair of texts each."""
    command = [*GENERATE, str(model), "--prompt", "hello", "--temperature", "0", "--max-tokens", "6", "--ignore-eos"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    said = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    return said


def test_two_processes_build_once_and_find_the_same(first_use: list[tuple[str, str]], bundles: Path) -> None:
    assert first_use[0][0] == first_use[1][0]
    assert "".join(notes for _, notes in first_use).count("Building a bundle of tiny, once") == 1
    (bundle,) = bundles.iterdir()
    spec = EngineBundle.open(bundle).manifest.engines
    assert {role: each.precision for role, each in spec.items()} == {"target": "int4"}


@pytest.mark.usefixtures("first_use", "no_build")
def test_what_was_built_is_found_by_its_content(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy2(model, tmp_path / "tiny.gguf"))
    with LLM(model) as first, LLM(str(copy)) as second, AsyncLLM(copy) as served:
        folders = {each.bundle.folder for each in (first, second, served.llm)}
        assert len(folders) == 1 and first.generate("hello", GREEDY)[0].token_ids
    for other in (Model(str(model), precision="int8"), Model(str(model), max_length=64), Model(str(model), "none")):
        assert folder_of(other) not in folders
    with copy.open("r+b") as changed:
        changed.seek(-1, os.SEEK_END)
        changed.write(b"\1")
    assert folder_of(Model(str(copy))) not in folders


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read for their digests. Every file is large, and nobody waits until it has settled."""
    monkeypatch.setattr(digests, "LARGE", 0)
    monkeypatch.setattr(digests, "SETTLED_NS", -(10**18))
    seen = list[Path]()

    def counted(path: Path) -> FileRecord:
        seen.append(path)
        return file_record(path)

    monkeypatch.setattr(digests, "file_record", counted)
    return seen


def test_the_digest_of_a_large_file_is_kept_until_the_file_changes(
    bundles: Path, tmp_path: Path, seen: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"first")
    known = cache.digest(file)
    assert cache.digest(file) == known and seen == [file]
    file.write_bytes(b"longer")
    assert cache.digest(file) != known and len(seen) == 2
    for note in (bundles.parent / "digests").iterdir():
        note.write_bytes(b"\xff damaged")
    assert cache.digest(file) == cache.digest(file) and len(seen) == 3
    monkeypatch.setattr(digests, "SETTLED_NS", 10**18)  # changed a moment ago
    file.write_bytes(b"other")
    assert cache.digest(file) == cache.digest(file) and len(seen) == 5


@pytest.mark.usefixtures("bundles")
def test_a_bundle_is_read_once(demo_bundle: Path, tmp_path: Path, seen: list[Path]) -> None:
    shutil.copytree(demo_bundle, folder := tmp_path / "bundle")
    count = len(EngineBundle.open(folder).manifest.files)
    EngineBundle.open(folder)
    assert len(seen) == count
    file = folder / "target.onnx"
    content, times = file.read_bytes(), file.stat()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(BundleError, match=r"target\.onnx is damaged"):
        EngineBundle.open(folder)
    note = digests.note_of(file.stat())
    assert len(seen) == count + 1 and note is not None
    note.write_text(EngineBundle.open(demo_bundle).manifest.files[file.name].sha256)  # damage that leaves no trace
    EngineBundle.open(folder)
    assert main(["inspect", str(folder)]) == 0 and main(["inspect", "--verify", str(folder)]) == 2


@pytest.mark.usefixtures("first_use")
def test_the_cache_is_listed_and_emptied(model: Path, bundles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = folder_of(Model(str(model))).name
    assert main(["cache"]) == 0 and name in capsys.readouterr().out
    assert main(["cache", "--remove", f"../bundles/{name}"]) == 2
    assert "there is no bundle" in capsys.readouterr().err and (bundles / name / MANIFEST).is_file()
    kept = bundles.parent / "kept"
    shutil.copytree(bundles / name, kept)
    assert main(["cache", "--remove", name]) == 0 and not list(bundles.iterdir())
    kept.rename(bundles / name)
    (bundles / f".{name}.partial-0").mkdir()  # of a killed build
    (bundles / "note").touch()
    assert main(["cache", "--remove-all"]) == 0 and not list(bundles.iterdir())


def test_an_ended_build_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    large = write_checkpoint(tmp_path / "large", hidden_size=512, intermediate_size=4096, num_hidden_layers=8)
    write_tokenizer(large)
    environment, place = os.environ | {CACHE: str(tmp_path / "cache")}, tmp_path / "cache" / "bundles"
    command, unseen = [*GENERATE, str(large), "--prompt", "x"], subprocess.DEVNULL
    with subprocess.Popen(command, env=environment, stdout=unseen, stderr=unseen) as process:
        while not list(place.glob(".*.partial-*")):
            assert process.poll() is None, "the build ended before it could be"
            time.sleep(0.002)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 143
    assert not list(place.iterdir())


def test_a_folder_brings_the_sampling_of_its_authors(folder: Path, bundles: Path) -> None:
    """Weights of 32 bits are rounded to 8 unless somebody asks for them."""
    with LLM(folder, max_length=128) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_p, params.max_tokens, params.top_k) == (0.3, 0.8, 40, 0)
        assert llm.bundle.manifest.max_length == 128 and llm.bundle.manifest.engines["target"].precision == "int8"
        drawn = llm.generate("hello")[0]
        assert len(drawn.token_ids) <= 40


@pytest.mark.parametrize(
    ("model", "kind", "named"),
    [
        (Model("missing.gguf"), CheckpointError, "missing.gguf cannot be read"),
        (Model("BUNDLE", precision="int8"), ConfigError, "precision is a choice of the build"),
        (Model("BUNDLE", draft="none"), ConfigError, "leave it out, or give the model's file"),
        (Model("MODEL", precision="int3"), ConfigError, "precision 'int3' is not available"),
        (Model("MODEL", draft="missing.gguf"), CheckpointError, "missing.gguf cannot be read"),
        (Model("BROKEN"), CheckpointError, "is damaged"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused_with_the_reason(
    model: Model, kind: type[ValueError], named: str, tiny_bundle: Path, folder: Path, bundles: Path, tmp_path: Path
) -> None:
    """Also where another process finds it out."""
    (tmp_path / "broken.gguf").write_bytes(b"GGML")
    places = {"BUNDLE": tiny_bundle, "MODEL": folder, "BROKEN": tmp_path / "broken.gguf"}
    with pytest.raises(kind, match=named):
        bundle_of(model._replace(path=str(places.get(model.path, model.path))))


@pytest.mark.parametrize(
    ("path", "buildable"),
    [("org/name", True), ("org/name@main", True), ("x.gguf", True), ("x.GGUF", True), ("nowhere", False)],
)
def test_what_can_only_be_a_model(path: str, buildable: bool, tiny_bundle: Path, folder: Path) -> None:
    assert is_buildable(Path(path)) == buildable
    assert is_buildable(folder) and not is_buildable(tiny_bundle)
