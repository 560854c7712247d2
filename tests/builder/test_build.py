"""The build of a bundle: it succeeds as a whole or leaves nothing, refuses pairs and options that cannot work, and
chooses by itself the precision of the target's file and a draft that this package knows."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint, write_tokenizer
from disk import largest_file
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_gguf
from steps import failing, noted, quiet

from draftwood.builder import pipeline
from draftwood.builder import pipeline as module
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.export import export as original_export
from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build, suited
from draftwood.models.errors import BundleError, ConfigError, DraftwoodError
from draftwood.runtime.bundle.bundle import MANIFEST, EngineBundle


@pytest.fixture
def options(tiny_pair: Path, tmp_path: Path) -> BuildOptions:
    return BuildOptions(tiny_pair / "target", tiny_pair / "draft", tmp_path / "out" / "bundle")


def test_a_build_says_what_it_replaces_and_what_cannot_pay(
    options: BuildOptions, tiny_pair: Path, tmp_path: Path
) -> None:
    told: list[str] = []

    build(options, noted(told))
    assert not [title for title in told if title.startswith(("Replacing", "Warning"))]
    told.clear()
    build(replace(options, draft=options.target), noted(told))
    assert f"Replacing the bundle in {options.output} at the end" in told
    assert any(title.startswith("Warning: draft and target are the same checkpoint") for title in told)
    told.clear()
    larger = write_checkpoint(tmp_path / "draft", "gqa", num_hidden_layers=3)
    write_tokenizer(larger, add_bos=True)
    build(replace(options, draft=larger, output=tmp_path / "larger"), noted(told))
    assert any(title.startswith("Warning: the draft is larger than its target") for title in told)


@pytest.mark.parametrize("backend", ["onnxruntime", "native"])
def test_a_full_disk_is_named_whatever_is_written(options: BuildOptions, backend: str) -> None:
    """numpy counts bytes, and gives no number of an error."""
    for size in (20_000, 60_000):
        with largest_file(size), pytest.raises(BundleError, match=r"no room to write .*: free some space"):
            build(replace(options, backend=backend), quiet)
        assert not options.output.exists() and not list(options.output.parent.glob(".*"))


@pytest.mark.parametrize("title", ["Reading", "Converting", "Exporting the draft", "Comparing", "Sealing"])
def test_an_interrupted_build_leaves_nothing(options: BuildOptions, title: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        build(options, failing(title, KeyboardInterrupt))
    assert not options.output.exists() and not list(options.output.parent.glob(".*"))


def test_a_rebuild_that_fails_keeps_the_old_bundle(options: BuildOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    build(options, quiet)
    before = (options.output / MANIFEST).read_text()
    with pytest.raises(KeyboardInterrupt):
        build(options, failing("Sealing", KeyboardInterrupt))
    assert (options.output / MANIFEST).read_text() == before
    with pytest.raises(BundleError, match="an eos_token_id is outside"), monkeypatch.context() as patch:
        patch.setattr(pipeline, "end_of_text", lambda *given: (1 << 20,))  # a manifest that nobody could open
        build(options, quiet)
    assert (options.output / MANIFEST).read_text() == before
    EngineBundle.open(options.output)
    build(options, quiet)
    assert [file.name for file in options.output.parent.iterdir()] == ["bundle"]


def test_what_is_no_bundle_is_never_replaced(options: BuildOptions) -> None:
    options.output.mkdir(parents=True)
    precious = options.output / "thesis.txt"
    precious.write_text("years of work")
    for output in (options.output, precious / "bundle"):
        with pytest.raises(BundleError, match="choose another --output"):
            build(replace(options, output=output), quiet)
    assert precious.read_text() == "years of work"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"backend": "abacus"}, "onnxruntime"),
        ({"precision": "fp3"}, "fp32"),
        ({"widths": (2, 4)}, "widths"),
        ({"widths": (1, 4, 2)}, "widths"),
        ({"widths": ()}, "widths"),
        ({"widths": (1,)}, "widths must reach 2"),
        ({"max_length": 1}, "max_length"),
        ({"widths": (1, 20_000)}, "widths must be at most 16384"),
        ({"backend": "tensorrt", "precision": "fp16", "max_batch": 5000}, "max_batch must be at most 4096"),
        ({"precision": "int8-dynamic"}, "a row's logits then depend on its siblings.*Choose int8"),
        ({"draft_precision": "bf16"}, "'bf16' is not available for onnxruntime; choose fp32, int8, int4"),
        ({"draft_backend": "abacus"}, "'abacus' is not available for the draft beside onnxruntime"),
        ({"draft_backend": "tensorrt-rtx"}, "'tensorrt-rtx' is not available for the draft beside onnxruntime"),
        ({"backend": "tensorrt", "draft_backend": "tensorrt-rtx"}, "not available for the draft beside tensorrt"),
    ],
)
def test_impossible_options_are_refused(options: BuildOptions, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        BuildOptions(options.target, options.draft, options.output, **change)


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

    monkeypatch.setattr("draftwood.builder.engines.export.export", wrong)
    with pytest.raises(BundleError, match="differs from the reference"):
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

    bundle = build(BuildOptions(target, options.draft, options.output), noted(told))
    assert bundle.manifest.eos_token_ids == (2, 5, 7)
    assert any("eos_token_id [5000]" in title for title in told)


Chosen = tuple[BuildOptions, list[str]]
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}


def chosen(target: Path, backend: str = "native", has_draft: bool = True, precision: str | None = None) -> Chosen:
    """The options that a build of the target ends up with, and what its user hears."""
    heard = list[str]()

    options = BuildOptions(target, None, Path("unwritten"), backend, precision)
    return suited(options, has_draft, noted(heard)), heard


@pytest.mark.parametrize(
    ("kind", "precision", "kept"),
    [
        ("Q4_1", "int4", None),
        ("Q4_K", "int4", None),
        ("Q2_K", "int4", None),
        ("Q5_0", "int5", None),
        ("Q6_K", "int6", None),
        ("Q8_0", "int8", None),
        ("F16", "int8", "bf16"),
        ("BF16", "int8", "bf16"),
        ("F32", "int8", "fp32"),
    ],
)
def test_the_precision_is_that_of_the_file(kind: str, precision: str, kept: str | None, tmp_path: Path) -> None:
    """Who gives more bits than the integers have hears how to keep them."""
    folder = write_tokenizer(write_checkpoint(tmp_path / "folder", **WIDE))
    options, heard = chosen(write_gguf(folder, tmp_path / "model.gguf", Kind[kind]))
    assert options.precision == precision
    assert [kept is not None and f"--precision {kept} keeps them" in text for text in heard] == ([True] if kept else [])


def test_a_folder_is_rounded_to_int8_where_its_sizes_allow(tmp_path: Path) -> None:
    usual = write_checkpoint(tmp_path / "usual", dtype="bfloat16", **WIDE)
    assert chosen(usual)[0].precision == chosen(usual, "onnxruntime")[0].precision == "int8"
    assert chosen(usual, precision="fp32")[0].precision == "fp32"
    odd = write_checkpoint(tmp_path / "odd", "head_dim 6")
    assert chosen(odd) == (chosen(odd, precision="fp32")[0], [])


def test_most_weights_decide(tmp_path: Path) -> None:
    """llama.cpp stores some matrices of a 4-bit file in 6 or 8 bits."""
    folder = write_tokenizer(write_checkpoint(tmp_path / "folder", **WIDE))
    others = {"token_embd.weight": Kind.Q8_0, "blk.0.ffn_down.weight": Kind.Q6_K}
    assert Checkpoint(write_gguf(folder, tmp_path / "model.gguf", Kind.Q4_0, others=others)).stored_bits() == 4


def test_a_draft_of_this_package_is_found(tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For targets of its target's shape and tokenizer alone."""
    target, draft = tiny_pair / "target", tiny_pair / "draft"
    config = Checkpoint(target).config
    assert chosen(target, has_draft=False)[0].draft is None
    shape = (config.num_layers, config.hidden_size, config.intermediate_size)
    monkeypatch.setattr(module, "KNOWN", {shape: draft})
    options, heard = chosen(target, has_draft=False)
    assert options.draft == draft and "--draft none builds without it" in heard[-1]
    assert chosen(target)[0].draft is None, "the user wants none"
    other = write_tokenizer(write_checkpoint(tmp_path / "other", vocab_size=300), vocab_size=300)
    assert chosen(other, has_draft=False)[0].draft is None


def test_the_known_drafts_are_there() -> None:
    for folder in module.KNOWN.values():
        assert Checkpoint(folder).kept_tokens is not None
