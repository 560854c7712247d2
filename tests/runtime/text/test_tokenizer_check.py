"""Files at which the tokenizers library panics, or ends the process: refused when a bundle is built or opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_tokenizer
from strange_tokenizers import ADDED, BPE, template, write

from draftwood.builder.tokenizer import convert_tokenizer
from draftwood.models.errors import BundleError, CheckpointError, RequestError
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.runtime.text.tokenizer_worker import is_panic

STRIP = {"type": "Strip", "content": "a", "start": 0, "stop": 3}

# What is changed of a sound file, and what the error names.
PANICS: dict[str, tuple[dict[str, Any], str]] = {
    "a decoder that strips more than there is": ({"decoder": STRIP}, "set stop 0"),
    "the same inside a sequence": ({"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, STRIP]}}, "stop"),
    "an unreadable table": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "Precompiled"),
    "a damaged table": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}},
        "correct its normalizer",
    ),
    "a template of an unknown token": ({"post_processor": template({"SpecialToken": {"id": "<x>"}})}, "special_tokens"),
    "a template of two texts": ({"post_processor": template({"Sequence": {"id": "B", "type_id": 0}})}, "sequence B"),
    "pieces of length 0": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "another length"),
    "an added token that is normalized away": (
        {
            "added_tokens": [{"id": 4, "content": "A", "normalized": True, **ADDED}],
            "normalizer": {"type": "Replace", "pattern": {"String": "A"}, "content": ""},
        },
        "set normalized to false",
    ),
    "a merge without the prefix": (
        {"model": BPE | {"continuing_subword_prefix": "####"}},
        "continuing_subword_prefix",
    ),
    "a merge inside a character": (  # ends the whole process when the library opens it
        {"model": BPE | {"vocab": {"a": 0, "\u00e9": 1, "a\u00e9": 2}, "merges": ["a \u00e9"]}}
        | {"model": BPE | {"continuing_subword_prefix": "#", "merges": ["a \u00e9"]}},
        "continuing_subword_prefix",
    ),
}


@pytest.mark.parametrize("name", PANICS)
def test_a_file_at_which_the_library_panics_is_refused(tmp_path: Path, name: str) -> None:
    changes, named = PANICS[name]
    folder = write(tmp_path / "source", **changes)
    with pytest.raises(BundleError, match=named):
        Tokenizer.load(folder)
    (tmp_path / "bundle").mkdir()
    with pytest.raises(CheckpointError, match=named):
        convert_tokenizer(folder, tmp_path / "bundle")


def test_padding_of_any_length_is_never_allocated(tmp_path: Path) -> None:
    endless = {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None}
    folder = write(tmp_path, padding=endless | {"pad_id": 0, "pad_type_id": 0, "pad_token": ""})
    assert Tokenizer.load(folder).encode("ab") == [2]


@pytest.mark.parametrize(
    "changes",
    [
        {"model": BPE | {"unk_token": "[UNK]"}},
        {"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]], "byte_fallback": False}},
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "x"}},
    ],
)
def test_characters_that_a_tokenizer_does_not_know_are_the_requests_fault(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, **changes))
    assert tokenizer.encode("a") == [0]
    with pytest.raises(RequestError, match="cannot read the text"):
        tokenizer.encode("\u6f22")


def test_what_panics_all_the_same_ends_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own panic, by a file that is not looked at."""
    monkeypatch.setattr("draftwood.runtime.text.tokenizer.problems", lambda content: iter(()))
    monkeypatch.setattr("draftwood.runtime.text.tokenizer.first_problem", lambda backend: None)
    tokenizer = Tokenizer.load(write(tmp_path / "decoder", decoder=STRIP))
    with pytest.raises(BundleError, match="rebuild") as caught:
        tokenizer.decode([0])
    assert caught.value.__cause__ is not None and is_panic(caught.value.__cause__)
    assert tokenizer.decode([1, 2]) == "bab"
    tokenizer = Tokenizer.load(write(tmp_path / "encoder", pre_tokenizer={"type": "FixedLength", "length": 0}))
    for _ in range(2):
        with pytest.raises(RequestError, match="cannot read the text"):
            tokenizer.encode("a")


def test_signals_are_no_failures_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)

    class Interrupted:
        def decode(self, *_: Any, **__: Any) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer, "_backend", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        tokenizer.decode([1])
