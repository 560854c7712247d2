"""EngineBundle: whole or not at all; what was changed, cut or is too new is refused with the fix named."""

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
from checkpoints import write_checkpoint, write_tokenizer
from disk import largest_file

from draftwood.builder.engines import make as engines
from draftwood.builder.engines.export import export as original_export
from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build
from draftwood.builder.progress import Step
from draftwood.models.bindings import DRAFT, TARGET
from draftwood.models.errors import BundleError, CheckpointError, ConfigError, DraftwoodError
from draftwood.plugins.native.compile import SOURCE
from draftwood.runtime.bundle.bundle import COSTS, MANIFEST, EngineBundle, checksum
from draftwood.runtime.engines.backends import NATIVE


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


def test_a_bundle_reads_back_what_was_written(tiny_bundle: Path) -> None:
    bundle = EngineBundle.open(tiny_bundle)
    assert set(bundle.manifest.engines) == {"target", "draft"}
    assert bundle.manifest.to_json() == json.loads((tiny_bundle / MANIFEST).read_text())
    assert set(bundle.manifest.files) == {file.name for file in tiny_bundle.iterdir()} - {MANIFEST}
    assert all(error < 2e-4 for error in bundle.manifest.parity.values())


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda b: shutil.rmtree(b), "not a folder"),
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
        (lambda b: rewrite(b, lambda m: m["files"].update({"../x": m["files"]["draft.onnx"]})), "leaves the bundle"),
        (lambda b: rewrite(b, lambda m: m["files"].update({"/etc/passwd": m["files"]["draft.onnx"]})), "leaves"),
        (lambda b: rewrite(b, lambda m: m["files"].update({"..\\x": m["files"]["draft.onnx"]})), "leaves"),
    ],
)
def test_damage_is_refused_with_the_fix(bundle: Path, damage: Callable[[Path], object], named: str) -> None:
    damage(bundle)
    with pytest.raises(BundleError, match=named):
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


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_what_no_digest_covers_is_not_read(bundle: Path, name: str) -> None:
    """A template beside a bundle was rendered, although the manifest did not list it."""
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
    with pytest.raises(BundleError, match=f"'{name}' is executable code of an older release.*: rebuild it"):
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


def test_a_build_says_what_it_replaces_and_what_cannot_pay(
    options: BuildOptions, tiny_pair: Path, tmp_path: Path
) -> None:
    told: list[str] = []

    def begin(step: Step) -> Callable[[], None]:
        told.append(step.title)
        return lambda: None

    build(options, begin)
    assert not [title for title in told if title.startswith(("Replacing", "Warning"))]
    told.clear()
    build(replace(options, draft=options.target), begin)
    assert f"Replacing the bundle in {options.output} at the end" in told
    assert any(title.startswith("Warning: draft and target are the same checkpoint") for title in told)
    told.clear()
    larger = write_checkpoint(tmp_path / "draft", "gqa", num_hidden_layers=3)
    write_tokenizer(larger, add_bos=True)
    build(replace(options, draft=larger, output=tmp_path / "larger"), begin)
    assert any(title.startswith("Warning: the draft is larger than its target") for title in told)


@pytest.mark.parametrize("backend", ["onnxruntime", "native"])
def test_a_full_disk_is_named_whatever_is_written(options: BuildOptions, backend: str) -> None:
    """numpy counts bytes, and gives no number of an error."""
    for size in (20_000, 60_000):
        with largest_file(size), pytest.raises(BundleError, match=r"no room to write .*: free some space"):
            build(replace(options, backend=backend), quiet)
        assert not options.output.exists() and not list(options.output.parent.glob(".*"))


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_an_unknown_backend_is_refused_by_name(bundle: Path) -> None:
    rewrite(bundle, lambda manifest: manifest["engines"]["target"].update(backend="abacus"))
    with pytest.raises(BundleError, match="abacus"):
        EngineBundle.open(bundle).open_engine("target")


def quiet(step: Step) -> Callable[[], None]:
    return lambda: None


@pytest.fixture
def options(tiny_pair: Path, tmp_path: Path) -> BuildOptions:
    return BuildOptions(tiny_pair / "target", tiny_pair / "draft", tmp_path / "out" / "bundle")


@pytest.mark.parametrize("title", ["Reading", "Converting", "Exporting the draft", "Comparing", "Sealing"])
@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_build_leaves_nothing(
    options: BuildOptions, title: str, interruption: type[BaseException]
) -> None:
    def begin(step: Step) -> Callable[[], None]:
        if step.title.startswith(title):
            raise interruption
        return lambda: None

    with pytest.raises(interruption):
        build(options, begin)
    assert not options.output.exists() and not list(options.output.parent.glob(".*"))


def test_an_interrupted_rebuild_keeps_the_old_bundle(options: BuildOptions) -> None:
    build(options, quiet)
    before = (options.output / MANIFEST).read_text()

    def begin(step: Step) -> Callable[[], None]:
        if step.title.startswith("Sealing"):
            raise KeyboardInterrupt
        return lambda: None

    with pytest.raises(KeyboardInterrupt):
        build(options, begin)
    assert (options.output / MANIFEST).read_text() == before
    EngineBundle.open(options.output)
    build(options, quiet)
    assert [file.name for file in options.output.parent.iterdir()] == ["bundle"]


def test_a_killed_build_is_not_loadable(options: BuildOptions) -> None:
    """What a power cut leaves: the temporary folder before its manifest was written."""
    seen = []

    def begin(step: Step) -> Callable[[], None]:
        if step.title.startswith("Sealing"):
            (staging,) = options.output.parent.glob(".bundle.partial-*")
            seen.append(shutil.copytree(staging, options.output.parent / "left"))
        return lambda: None

    build(options, begin)
    with pytest.raises(BundleError, match="did not finish"):
        EngineBundle.open(seen[0])


def test_a_full_disk_is_named_and_leaves_nothing(options: BuildOptions) -> None:
    with largest_file(20_000), pytest.raises(BundleError, match="free some space"):
        build(options, quiet)
    assert not options.output.exists() and not list(options.output.parent.glob(".*"))


def test_a_folder_that_is_no_bundle_is_never_replaced(options: BuildOptions) -> None:
    options.output.mkdir(parents=True)
    precious = options.output / "thesis.txt"
    precious.write_text("years of work")
    with pytest.raises(BundleError, match="choose another --output"):
        build(options, quiet)
    assert precious.read_text() == "years of work"


def test_an_output_that_cannot_be_written_is_named(options: BuildOptions, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match="choose another --output"):
        build(BuildOptions(options.target, options.draft, tmp_path / "file" / "bundle"), quiet)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"backend": "abacus"}, "onnxruntime"),
        ({"precision": "fp3"}, "fp32"),
        ({"widths": (2, 4)}, "widths"),
        ({"widths": (1, 4, 2)}, "widths"),
        ({"widths": ()}, "widths"),
        ({"max_length": 1}, "max_length"),
    ],
)
def test_impossible_options_are_refused(options: BuildOptions, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        BuildOptions(options.target, options.draft, options.output, **change)


def test_more_context_than_the_models_were_trained_for(options: BuildOptions) -> None:
    longer = BuildOptions(options.target, options.draft, options.output, max_length=1 << 20)
    with pytest.raises(ConfigError, match="ask for at most"):
        build(longer, quiet)


def test_vocabularies_that_differ_in_size(tiny_pair: Path, stories: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="shares the target's tokenizer"):
        build(BuildOptions(tiny_pair / "target", stories / "draft", tmp_path / "bundle"), quiet)


def test_vocabularies_that_differ_in_content(tiny_pair: Path, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(tiny_pair / "draft", tmp_path / "draft"))
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(DraftwoodError, match="vocabular"):
        build(BuildOptions(tiny_pair / "target", draft, tmp_path / "bundle"), quiet)


def test_an_engine_that_computes_something_else_is_not_bundled(
    options: BuildOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of parity: an exporter that scales attention wrongly."""
    export = original_export

    def wrong(checkpoint: Any, role: str, capacity: int, path: Path, *rest: Any, **options: Any) -> None:
        export(checkpoint, role, capacity, path, *rest, **options)
        import onnx

        model = onnx.load(path)
        for node in model.graph.node:
            if node.op_type == "Attention":
                node.attribute[0].f *= 1.01
        onnx.save(model, path)

    monkeypatch.setattr(engines, "export", wrong)
    with pytest.raises(BundleError, match="differs from the torch reference"):
        build(options, quiet)
    assert not options.output.exists()


def test_end_of_text_ids_come_from_both_files_and_the_vocabulary(
    options: BuildOptions, tiny_pair: Path, tmp_path: Path
) -> None:
    target = Path(shutil.copytree(tiny_pair / "target", tmp_path / "target"))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7, 5000]}))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
    told: list[str] = []

    def begin(step: Step) -> Callable[[], None]:
        told.append(step.title)
        return lambda: None

    bundle = build(BuildOptions(target, options.draft, options.output), begin)
    assert bundle.manifest.eos_token_ids == (2, 5, 7)
    assert any("eos_token_id [5000]" in title for title in told)


def test_a_bundle_of_the_removed_engine_is_refused_by_name(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "older"
    EngineBundle.open(tiny_bundle).copy_to(folder)
    resigned(folder, lambda content: content["engines"]["target"].update(backend="openvino"))
    with pytest.raises(BundleError, match=r"target was built for openvino.*--backend native.*onnxruntime") as caught:
        EngineBundle.open(folder)
    assert "pip install 'draftwood[native]'" in str(caught.value)


def test_a_provider_that_would_be_ignored_is_refused(tiny_bundle: Path) -> None:
    opened = EngineBundle.open(tiny_bundle)
    engines = {role: replace(spec, backend="native") for role, spec in opened.manifest.engines.items()}
    bundle = replace(opened, manifest=replace(opened.manifest, engines=engines))
    with pytest.raises(ConfigError, match="runs on native, which has no provider cuda: leave --provider out"):
        bundle.open_engine(TARGET, provider="cuda")


def test_the_native_engine_has_no_more_threads_than_its_kernels_know(tiny_bundle: Path) -> None:
    header = (SOURCE.parent / "threads.h").read_text()
    assert re.search(rf"#define MOST_THREADS {NATIVE.most_threads}$", header, re.MULTILINE)
    opened = EngineBundle.open(tiny_bundle)
    engines = {role: replace(spec, backend="native") for role, spec in opened.manifest.engines.items()}
    with pytest.raises(ConfigError, match=r"threads of the target must be 0 .* to 64, not 65"):
        replace(opened, manifest=replace(opened.manifest, engines=engines)).open_engine(TARGET, threads=65)


def test_a_draft_takes_one_thread_but_natively_those_of_its_target(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int, str]] = []
    monkeypatch.setattr(EngineBundle, "open_engine", lambda self, *how: asked.append(how))
    opened = EngineBundle.open(tiny_bundle)
    for backend, expected in (("onnxruntime", 1), ("native", 3)):
        draft = replace(opened.manifest.engines[DRAFT], backend=backend)
        engines = {**opened.manifest.engines, DRAFT: draft}
        bundle = replace(opened, manifest=replace(opened.manifest, engines=engines))
        asked.clear()
        bundle.open_draft(threads=3)
        bundle.open_draft(threads=3, draft_threads=2)
        assert asked == [(DRAFT, expected, "cpu"), (DRAFT, 2, "cpu")]
