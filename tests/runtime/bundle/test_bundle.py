"""EngineBundle.open: a damaged, changed or too new bundle is refused with an error that names the fix."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bundling import resigned

from draftwood.cli.main import main
from draftwood.models.bindings import DRAFT, TARGET
from draftwood.models.errors import BundleError, ConfigError
from draftwood.plugins.native.compile import SOURCE
from draftwood.runtime.bundle.bundle import COSTS, MANIFEST, EngineBundle, checksum
from draftwood.runtime.bundle.watch import BundleWatch
from draftwood.runtime.engines.backends import BACKENDS, NATIVE, TENSORRT, TENSORRT_RTX
from draftwood.runtime.llm import LLM


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def rewrite(bundle: Path, change: Callable[[dict[str, Any]], object], sign: bool = True) -> None:
    """Edit the manifest; `sign` renews its checksum, as somebody who means harm would."""
    content = json.loads((bundle / MANIFEST).read_text())
    change(content)
    if sign:
        del content["checksum"]
        content["checksum"] = checksum(content)
    (bundle / MANIFEST).write_text(json.dumps(content))


def wider(rows: int, **sizes: int) -> Callable[[dict[str, Any]], object]:
    """Larger passes of a target with larger sizes."""

    def change(content: dict[str, Any]) -> None:
        target = content["engines"]["target"]
        target.update(widths=[1, rows], prompt_widths=[], capacity=1 << 20)
        target["model"].update(sizes)

    return change


def test_a_bundle_reads_back_what_was_written(tiny_bundle: Path) -> None:
    bundle = EngineBundle.open(tiny_bundle)
    assert set(bundle.manifest.engines) == {"target", "draft"}
    assert bundle.manifest.to_json() == json.loads((tiny_bundle / MANIFEST).read_text())
    assert set(bundle.manifest.files) == {file.name for file in tiny_bundle.iterdir()} - {MANIFEST}
    assert all(error < 2e-4 for error in bundle.manifest.parity.values())


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda b: shutil.rmtree(b), "neither a bundle nor a model"),
        (lambda b: (b / MANIFEST).unlink(), "did not finish"),
        (lambda b: (b / MANIFEST).write_text("{"), "unreadable"),
        (lambda b: (b / MANIFEST).write_bytes(b"\xff\xfe"), "unreadable"),
        (lambda b: (b / MANIFEST).write_text("[]"), "no JSON object"),
        (lambda b: (b / "draft.onnx").unlink(), "draft.onnx is missing"),
        (lambda b: (b / "target.onnx").write_bytes((b / "target.onnx").read_bytes()[:-100]), "bytes instead of"),
        (lambda b: flip_last_byte(b / "target.onnx"), "SHA-256"),
        (lambda b: flip_last_byte(b / "tokenizer.json"), "SHA-256"),
        (lambda b: rewrite(b, lambda m: m.update(max_length=9999), sign=False), "changed after the build"),
        (lambda b: rewrite(b, lambda m: m.pop("checksum"), sign=False), "changed after the build"),
        (lambda b: rewrite(b, lambda m: m.update(format=2)), "newer.*update draftwood"),
        (lambda b: rewrite(b, lambda m: m.update(format="x")), "unknown"),
        (lambda b: rewrite(b, lambda m: m.pop("format")), "unknown"),
        (lambda b: rewrite(b, lambda m: m["engines"].pop("draft")), "draft.*rebuild"),
        (lambda b: rewrite(b, lambda m: m["engines"]["draft"].update(extra=1)), "rebuild"),
        (lambda b: rewrite(b, lambda m: m["engines"]["draft"].update(file="../x")), "file is '../x' instead of"),
        (lambda b: rewrite(b, wider(128, intermediate_size=1 << 24)), "128 rows of up to 16777216 numbers"),
        (lambda b: rewrite(b, wider(16384, num_heads=1 << 17, num_kv_heads=1, head_dim=2)), "rows of up to 262148"),
        (lambda b: rewrite(b, lambda m: m["files"].update({"../x": m["files"]["draft.onnx"]})), "leaves the bundle"),
        (lambda b: rewrite(b, lambda m: m["files"].update({"/etc/passwd": m["files"]["draft.onnx"]})), "leaves"),
        (lambda b: rewrite(b, lambda m: m["files"].update({"..\\x": m["files"]["draft.onnx"]})), "leaves"),
    ],
)
def test_damage_is_refused_with_the_fix(bundle: Path, damage: Callable[[Path], object], named: str) -> None:
    damage(bundle)
    with pytest.raises(BundleError, match=named):
        EngineBundle.open(bundle)


def test_a_manifest_of_any_depth_is_refused(bundle: Path) -> None:
    """How deep Python reads and writes differs, and depends on who calls."""
    content = (bundle / MANIFEST).read_text().rstrip()[:-1]
    for levels in range(600, 1000):
        (bundle / MANIFEST).write_text(f'{content}, "more": {"[" * levels}{"]" * levels}}}')
        with pytest.raises(BundleError, match=r"changed after the build|levels|unreadable"):
            EngineBundle.open(bundle)


@pytest.mark.parametrize("name", ["target.onnx", "tokenizer.json", MANIFEST])
@pytest.mark.parametrize("kind", ["a link", "a pipe", "a folder"])
def test_a_bundle_is_made_of_plain_files(bundle: Path, name: str, kind: str, tmp_path: Path) -> None:
    """A link leads out of it, even to the same content, and a pipe would block whoever opens it."""
    (bundle / name).rename(tmp_path / "elsewhere")
    if kind == "a link":
        (bundle / name).symlink_to(tmp_path / "elsewhere")
    elif kind == "a pipe":
        os.mkfifo(bundle / name)
    else:
        (bundle / name).mkdir()
    with pytest.raises(BundleError, match=r"(cp -rL, or|unreadable.*:) rebuild"):
        EngineBundle.open(bundle)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "target.onnx.data"])
def test_what_no_digest_covers_is_not_read(bundle: Path, name: str) -> None:
    """A template beside a bundle was rendered, and weights beside a graph were read, although the manifest did not list
    them."""
    if (bundle / name).exists():
        rewrite(bundle, lambda manifest: manifest["files"].pop(name))
    else:
        (bundle / name).write_text("{{ 1 }}")
    with pytest.raises(BundleError, match=f"{name} is not listed in manifest.json: remove it, or rebuild"):
        EngineBundle.open(bundle)
    (bundle / name).unlink()
    (bundle / "README.md").write_text("read by people only")
    EngineBundle.open(bundle)


def test_a_copy_holds_what_the_manifest_lists(bundle: Path, tmp_path: Path) -> None:
    """`draftwood triton --copy-bundle` followed any link that lay beside a bundle."""
    (bundle / "notes.txt").symlink_to("/etc/passwd")
    (bundle / COSTS).write_text("{}")
    opened = EngineBundle.open(bundle)
    opened.copy_to(tmp_path / "copy")
    assert {file.name for file in (tmp_path / "copy").iterdir()} == {MANIFEST, COSTS, *opened.manifest.files}
    EngineBundle.open(tmp_path / "copy")


@pytest.mark.parametrize("name", ["kernels.so", "KERNELS.SO", "libx.dylib", "x.dll", "x.py"])
def test_code_in_a_bundle_is_refused(bundle: Path, name: str) -> None:
    """As older native bundles had it: a replaced kernels.so with a re-signed manifest was executed."""
    (bundle / name).write_bytes(b"")
    resigned(bundle)
    with pytest.raises(BundleError, match=f"'{name}' is executable code, which no bundle holds.*rebuild it"):
        EngineBundle.open(bundle)


def test_a_manifest_that_is_no_ones_is_refused(bundle: Path) -> None:
    """Deep, endless or of no numbers: an answer, not a traceback."""
    whole = (bundle / MANIFEST).read_text()
    for text in (
        "[" * 100_000,
        '{"a":' * 50_000,
        whole.replace("200", "NaN", 1).replace("1024", "Infinity", 1),
        "1" * 9999,
    ):
        (bundle / MANIFEST).write_text(text)
        with pytest.raises(BundleError, match="rebuild"):
            EngineBundle.open(bundle)
    with (bundle / MANIFEST).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BundleError, match="more than"):
        EngineBundle.open(bundle)


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_an_unknown_backend_is_refused_by_name(bundle: Path) -> None:
    rewrite(bundle, lambda manifest: manifest["engines"]["target"].update(backend="abacus"))
    with pytest.raises(BundleError, match="abacus"):
        EngineBundle.open(bundle).open_engine("target")


def test_a_provider_that_would_be_ignored_is_refused(tiny_bundle: Path) -> None:
    opened = EngineBundle.open(tiny_bundle)
    engines = {role: replace(spec, backend="native") for role, spec in opened.manifest.engines.items()}
    bundle = replace(opened, manifest=replace(opened.manifest, engines=engines))
    with pytest.raises(ConfigError, match=r"runs on native, which has no provider .*cuda.*: choose one of cpu, or"):
        bundle.open_engine(TARGET, provider="cuda")
    engines = {role: replace(spec, backend="tensorrt") for role, spec in opened.manifest.engines.items()}
    bundle = replace(opened, manifest=replace(opened.manifest, engines=engines))
    with pytest.raises(ConfigError, match=r"runs on tensorrt, which has no provider .*tpu.*: choose one of cpu, cuda$"):
        bundle.open_engine(TARGET, provider="tpu")
    with pytest.raises(ConfigError, match=r"must be 0 .*, as tensorrt computes on a GPU, not 2"):
        bundle.open_engine(TARGET, threads=2)


def test_private_weights_are_refused_where_no_engine_maps_a_file(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There a change of a file that was read is no trouble either."""
    assert EngineBundle.open(bundle, private=True).private and not (TENSORRT.maps or TENSORRT_RTX.maps)
    mapped = BundleWatch(EngineBundle.open(bundle))
    monkeypatch.setitem(BACKENDS, "onnxruntime", replace(BACKENDS["onnxruntime"], maps=False))
    with pytest.raises(ConfigError, match=r"of no use with onnxruntime, .*: leave --private-weights .* out"):
        LLM(bundle, private_weights=True)
    triton = ["triton", str(bundle), "--output", str(tmp_path / "models")]
    for command in (["serve", str(bundle), "--port", "0"], triton):
        assert main([*command, "--private-weights"]) == 2
        assert "error: private weights are of no use" in capsys.readouterr().err
    read_once = BundleWatch(EngineBundle.open(bundle))
    os.truncate(bundle / "draft.onnx", 0)
    assert read_once.trouble is None
    monkeypatch.undo()
    assert mapped.trouble is not None and "draft.onnx was written to" in mapped.trouble


def test_the_native_engine_has_no_more_threads_than_its_kernels_know(tiny_bundle: Path) -> None:
    header = (SOURCE.parent / "threads.h").read_text()
    assert re.search(rf"#define MOST_THREADS {NATIVE.most_threads}$", header, re.MULTILINE)
    opened = EngineBundle.open(tiny_bundle)
    engines = {role: replace(spec, backend="native") for role, spec in opened.manifest.engines.items()}
    with pytest.raises(ConfigError, match=r"threads of the target must be 0 .* to 1024, not 1025"):
        replace(opened, manifest=replace(opened.manifest, engines=engines)).open_engine(TARGET, threads=1025)


def test_a_draft_takes_one_thread_but_natively_those_of_its_target(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int, str]] = []
    monkeypatch.setattr(EngineBundle, "open_engine", lambda self, *how: asked.append(how))
    opened = EngineBundle.open(tiny_bundle)
    for backend, expected in (("onnxruntime", 1), ("native", 3), ("tensorrt", 0)):
        draft = replace(opened.manifest.engines[DRAFT], backend=backend)
        engines = {**opened.manifest.engines, DRAFT: draft}
        bundle = replace(opened, manifest=replace(opened.manifest, engines=engines))
        asked.clear()
        bundle.open_draft(threads=3)
        bundle.open_draft(threads=3, draft_threads=2)
        assert asked == [(DRAFT, expected, "cpu"), (DRAFT, 2, "cpu")]
