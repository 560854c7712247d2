"""A bundle that changes while a real server serves it, and bundles of strangers given to the real command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bundling import built_native, resigned
from serving import Served, served, wait_for

from draftwood.plugins.native.compile import compiler

TIMEOUT = 120  # seconds


@pytest.fixture(scope="module")
def native_bundle(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_native(tiny_pair, tmp_path_factory.mktemp("native") / "bundle")


@pytest.fixture
def copy(native_bundle: Path, tmp_path: Path) -> Path:
    """A bundle to change."""
    return Path(shutil.copytree(native_bundle, tmp_path / "bundle"))


def complete(server: Served) -> str:
    body = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return str(json.loads(server.ask("/v1/completions", body)[1])["choices"][0]["text"])


def overwrite(file: Path) -> None:
    """The same bytes again, where they lie, as a copy onto a bundle does."""
    content = file.read_bytes()
    with file.open("r+b") as handle:
        handle.write(content)


def replaced_by_renaming(bundle: Path) -> None:
    other = Path(shutil.copytree(bundle, bundle.with_name("other")))
    bundle.rename(bundle.with_name("old"))
    other.rename(bundle)
    shutil.rmtree(bundle.with_name("old"))


@pytest.mark.parametrize("change", [overwrite, lambda file: os.truncate(file, file.stat().st_size - 1)])
def test_a_file_that_is_written_to_turns_health_to_503(copy: Path, change: Callable[[Path], object]) -> None:
    with served(copy) as server:
        assert server.ask("/health")[0] == 200
        change(copy / "draft.weights")
        wait_for(lambda: server.ask("/health")[0] == 503, 60)
        for path in ("/health", "/health/ready"):
            code, text = server.ask(path)
            assert code == 503 and text.startswith("changed: draft.weights was written to") and "--private" in text
        assert server.metric("draftwood_engine_healthy") == 0


def test_a_bundle_that_is_replaced_by_renaming_goes_on(copy: Path) -> None:
    with served(copy) as server:
        text = complete(server)
        assert server.ask("/health")[0] == 200
        replaced_by_renaming(copy)
        wait_for(lambda: server.ask("/health")[0] == 200 and complete(server) == text)
        server.process.terminate()
        _, errors = server.process.communicate(timeout=60)
        assert "Traceback" not in errors


def test_private_weights_survive_everything(copy: Path) -> None:
    """Without them the same truncation ends the process by SIGBUS, in silence."""
    with served(copy, "--private-weights") as server:
        text = complete(server)
        for file in sorted(copy.iterdir()):
            os.truncate(file, 0)
        assert complete(server) == text
        wait_for(lambda: server.ask("/health")[0] == 200)


EVIL = """
#include <stdio.h>
__attribute__((constructor)) static void ran(void) { fclose(fopen("%s", "w")); }
"""


@pytest.mark.parametrize("listed", [False, True])
def test_no_code_of_a_bundle_is_executed(copy: Path, listed: bool, tmp_path: Path) -> None:
    """A kernels.so whose constructor writes a file: it did under `generate` and even under `inspect`."""
    (tmp_path / "evil.c").write_text(EVIL % (tmp_path / "ran"))
    library = ["-shared", "-fPIC", str(tmp_path / "evil.c"), "-o", str(copy / "kernels.so")]
    subprocess.run([*compiler(), *library], check=True)
    if listed:
        resigned(copy)
    for command in (["inspect", str(copy)], ["generate", str(copy), "--prompt", "hi", "--max-tokens", "2"]):
        done = subprocess.run(
            [sys.executable, "-m", "draftwood", *command], capture_output=True, text=True, timeout=TIMEOUT
        )
        assert done.returncode == (2 if listed else 0), done.stderr
        assert not listed or "executable code, which no bundle holds" in done.stderr
    assert not (tmp_path / "ran").exists()
    subprocess.run([sys.executable, "-c", f"import ctypes; ctypes.CDLL('{copy / 'kernels.so'}')"], check=True)
    assert (tmp_path / "ran").exists(), "the library would have told"


# Every field of a manifest, and what a stranger may put there.
HOSTILE: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2, 3, 7, 100_000, 2**31 - 1, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308),
    *("", "x", "../x", "/etc/passwd", "\x1b[31mred", "int4", "onnxruntime", "tensorrt"),
    *([], [0], [1], [-5], [2**40], ["x"], [3, 2, 1], {}, {"x": 1}, [[]]),
)


def fields_of(content: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every value, objects included."""
    for name, value in content.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from fields_of(value, (*path, name))


def changed(path: tuple[str, ...], value: Any) -> Callable[[dict[str, Any]], object]:
    def change(content: dict[str, Any]) -> None:
        for name in path[:-1]:
            content = content[name]
        content[path[-1]] = value

    return change


PROGRAM = """
import json, resource, sys
from draftwood.cli.main import main
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
for folder in json.load(sys.stdin):
    print(folder, flush=True)
    generate = ["generate", folder, "--prompt", "hi", "--max-tokens", "4", "--json"]
    code = main([*generate, "--no-speculation"]) or main([*generate, "--speculative", "budget=fixed"])
    inspected = main(["inspect", folder])
    assert code in (0, 2) and inspected in (0, 2), (code, inspected)
print("END", flush=True)
"""


def survive(bundle: Path, tmp_path: Path, cases: list[tuple[tuple[str, ...], Any]]) -> int:
    """Run each changed bundle through the command line in one process, which would be gone by a signal; returns how
    many were refused."""
    folders = []
    for number, (path, value) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        for file in bundle.iterdir():
            os.link(file, folder / file.name)
        (folder / "manifest.json").unlink()
        shutil.copy(bundle / "manifest.json", folder)
        resigned(folder, changed(path, value))
        folders.append(str(folder))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(folders), capture_output=True, text=True, timeout=1200
    )
    last = [line for line in done.stdout.splitlines() if line.startswith(str(tmp_path))][-1:]
    case = cases[int(Path(last[0]).name)] if last else None
    assert done.returncode == 0 and done.stdout.endswith("END\n"), (case, done.returncode, done.stderr[-2000:])
    assert "Traceback" not in done.stderr and "\x1b" not in done.stderr + done.stdout
    return done.stderr.count("draftwood: error: ")


def cases_of(bundle: Path) -> list[tuple[tuple[str, ...], Any]]:
    content = json.loads((bundle / "manifest.json").read_text())
    paths = [path for path in fields_of(content) if path[0] not in ("checksum", "files") or len(path) == 1]
    file = next(name for name in content["files"] if name.startswith("target."))
    paths += [("files", file, name) for name in ("bytes", "sha256")]
    return [(path, value) for path in paths if path != ("checksum",) for value in HOSTILE]


def most_telling_of(bundle: Path) -> list[tuple[tuple[str, ...], Any]]:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    paths: list[tuple[str, ...]] = [("engines", role, "model", size) for role in ("target", "draft") for size in sizes]
    paths += [("engines", "target", name) for name in ("widths", "capacity", "precision", "outputs", "file", "plan")]
    paths += [("max_length",), ("eos_token_ids",), ("parity", "target"), ("files", "target.weights", "bytes")]
    cases: list[tuple[tuple[str, ...], Any]] = [(path, value) for path in paths for value in (0, 100_000, -1, [2**40])]
    few: tuple[Any, ...] = (None, 2**63, 0.5, "\x1b[31mred", [-5], {})
    cases += [(path, value) for path in paths[:3] for value in few]
    return cases + [(("engines", role, "precision"), "fp8") for role in ("target", "draft")]  # of another backend


@pytest.mark.parametrize(
    ("kind", "cases"),
    [
        ("native", most_telling_of),
        *(pytest.param(kind, cases_of, marks=pytest.mark.full) for kind in ("native", "onnxruntime")),
    ],
)
def test_nothing_of_a_manifest_is_more_than_an_error(
    kind: str, cases: Any, native_bundle: Path, tiny_bundle: Path, tmp_path: Path
) -> None:
    """vocab_size 100000 ended in SIGSEGV, head_dim 0 in SIGFPE, eight others in a traceback."""
    bundle = native_bundle if kind == "native" else tiny_bundle
    tried = cases(bundle)
    assert survive(bundle, tmp_path, tried) > len(tried)
