"""What a build chooses by itself: the precision of the target's file, and a draft that this package knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint, write_tokenizer
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_gguf
from steps import noted

from draftwood.builder import pipeline as module
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import suited

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
        ("Q5_0", "int8", None),
        ("Q6_K", "int8", None),
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
