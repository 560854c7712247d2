"""Tokenizers of strangers: what their files may make the library do is bounded, and published ones stay in this
process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest
from bundling import DEMO, optional
from tokenizers import Tokenizer as TokenizerJson

from draftwood.builder.checkpoints.gguf.tokenizer import SPLITS
from draftwood.builder.tokenizer import convert_tokenizer
from draftwood.models.errors import BundleError, CheckpointError, RequestError
from draftwood.runtime.text.split_patterns import is_linear
from draftwood.runtime.text.tokenizer import ENCODING, TOKENIZER, Tokenizer
from draftwood.runtime.text.tokenizer_check import LONGEST_TOKEN, UNIGRAM_BYTES, is_proved, problems
from draftwood.runtime.text.tokenizer_worker import is_panic

ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "special": True}
BPE: dict[str, Any] = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "\u00e9": 3}, "merges": ["a b"]}
LETTERS: dict[str, Any] = {"type": "BPE", "vocab": {"q": 0, "y": 1, "a": 2, "Ж": 3, "qq": 4}, "merges": ["q q"]}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
DECODER = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def template(*pieces: dict[str, Any]) -> dict[str, Any]:
    both = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {"type": "TemplateProcessing", "single": list(pieces), "pair": both, "special_tokens": {}}


def write(folder: Path, **changes: Any) -> Path:
    sound: dict[str, Any] = {"version": "1.0", "added_tokens": [], "model": BPE, "padding": None, "truncation": None}
    steps: dict[str, Any] = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    folder.mkdir(exist_ok=True)
    (folder / TOKENIZER).write_text(json.dumps(sound | steps | changes))
    return folder


def replacing(found: str, written: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: found}, "content": written}


def splitting(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def sequence(name: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: list(steps)}


def many(name: str, step: dict[str, Any], count: int = 10) -> dict[str, Any]:
    return sequence(name, *[step] * count)


A, S = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "s", "type_id": 0}}
TEXT_TWICE = template(A, A)
MANY_AROUND = template(S, A) | {"special_tokens": {"s": {"id": "s", "ids": [0] * 99, "tokens": ["q"] * 99}}}
STRIP = {"type": "Strip", "content": "a", "start": 0, "stop": 3}
# What is changed of a sound file, and what the error names. At the last ones the library panics, or ends the process.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a decoder that writes 100 characters for one, ten times": (
        {"decoder": many("decoders", replacing("e", "e" * 100))},
        "decoder rewrites texts",
    ),
    "a decoder with a regular expression": ({"decoder": replacing("a*a*b", "", "Regex")}, "decoder rewrites texts"),
    "a decoder that puts blanks between letters": (
        {"decoder": many("decoders", {"type": "BPEDecoder", "suffix": ""})},
        "decoder rewrites texts",
    ),
    "a decoder without a kind": ({"decoder": {"decoders": []}}, "step None"),
    "a decoder of CTC": (
        {"decoder": {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}},
        "CTC",
    ),
    "a decoder as a list": ({"decoder": ["Sequence", [replacing("e", "e" * 100)]]}, "step None"),
    "a model as a list": ({"model": ["BPE", {"a": 0}, []]}, "is no object"),
    "an added token as a list": ({"added_tokens": [[4, "A"]]}, "is no object"),
    "a template of lists": ({"post_processor": template({"Sequence": ["A", 0]}, {"Sequence": ["A", 0]})}, "is damaged"),
    "a token of a template with a list for a name": (
        {"post_processor": template({"SpecialToken": {"id": [], "type_id": 0}})},
        "is damaged",
    ),
    "a million steps": ({"normalizer": many("normalizers", {"type": "NFC"}, 1000)}, "more than 32 steps"),
    "as many empty ones": (
        {"decoder": many("decoders", sequence("decoders"), 1000)},
        "decoder has more than 32 steps",
    ),
    "a template that writes the text twice": ({"post_processor": TEXT_TWICE}, "more than once"),
    "the same, many times": ({"post_processor": many("processors", TEXT_TWICE)}, "more than once"),
    "a template of many special tokens": ({"post_processor": MANY_AROUND}, "puts 99 special tokens"),
    "an unknown post-processor": ({"post_processor": {"processors": []}}, "post-processor has a step None"),
    "a long token": (
        {"model": BPE | {"vocab": {"a": 0, "b" * (LONGEST_TOKEN + 1): 1}, "merges": []}},
        "1025 characters",
    ),
    "a long added token": (
        {"added_tokens": [{"id": 4, "content": "A" * 2000, "normalized": False, **ADDED}]},
        "2000 characters",
    ),
    "too many bytes of tokens": (
        {
            "model": {
                "type": "Unigram",
                "vocab": [[f"{index:01000d}", -1.0] for index in range(UNIGRAM_BYTES // 1000 + 1)],
            }
        },
        "bytes, more than",
    ),
    "an id beyond any model's": (
        {"model": BPE | {"vocab": {"a": 0, "b": 2**32 - 1}, "merges": []}},
        "the id 4294967295",
    ),
    "a normalizer that fills the memory when it is tried": (
        {"normalizer": many("normalizers", replacing("x", "x" * 100_000))},
        "its process ended",
    ),
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


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_without_bounds_is_refused(tmp_path: Path, name: str) -> None:
    changes, named = REFUSED[name]
    folder = write(tmp_path / "source", **changes)
    with pytest.raises(BundleError, match=named):
        Tokenizer.load(folder)
    (tmp_path / "bundle").mkdir()
    with pytest.raises(CheckpointError, match=named):
        convert_tokenizer(folder, tmp_path / "bundle")


def test_what_parsers_read_differently_is_refused(tmp_path: Path) -> None:
    """The library takes the first of two normalizers if the second is null, and Python's parser the last."""
    file = write(tmp_path) / TOKENIZER
    evil = json.dumps(many("normalizers", replacing("x", "x" * 100)))
    file.write_text(f'{{"normalizer": {evil}, {file.read_text()[1:]}')
    with pytest.raises(BundleError, match="names a field twice"):
        Tokenizer.load(tmp_path)


# What is changed of a sound file, and a text at which the library takes a time or memory without bound.
UNPROVED: dict[str, tuple[dict[str, Any], str]] = {
    "a growing normalizer": ({"normalizer": many("normalizers", replacing("Ж", "Ж" * 100_000))}, "Ж"),
    "a cubic pattern": ({"pre_tokenizer": splitting("q*q*q*[yY]")}, ("q" * 330 + "z") * 150 + "y"),
    "an exponential one": ({"pre_tokenizer": splitting("Q(?:[q]|[q])*\x01")}, "Q" + "q" * 40),
    "a word of any length": (
        {
            "model": {
                "type": "WordPiece",
                "unk_token": "q",
                "continuing_subword_prefix": "",
                "max_input_chars_per_word": 10**9,
                "vocab": LETTERS["vocab"],
            }
        },
        "qy" * 20_000,
    ),
}


@pytest.mark.parametrize("name", UNPROVED)
def test_a_text_of_unproved_cost_is_encoded_in_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """At worst the text is refused, and the next one encoded; what was read of the file decodes."""
    monkeypatch.setattr("draftwood.runtime.text.tokenizer.ENCODING", ENCODING._replace(seconds=5.0))
    changes, text = UNPROVED[name]
    folder = write(tmp_path, **({"model": LETTERS, "decoder": DECODER} | changes))
    with Tokenizer.load(folder) as tokenizer:
        assert tokenizer.encode("q") == [0] and tokenizer.decode([0, 1]) == "qy"
        with pytest.raises(RequestError, match="cannot read the text"):
            tokenizer.encode(text)
        assert tokenizer.encode("y") == [1] and tokenizer.fewest_tokens("y" * 1000) == 0


def test_a_text_that_nobody_waits_for_holds_no_thread(tmp_path: Path) -> None:
    given_up = Event()
    with Tokenizer.load(write(tmp_path, model=LETTERS, pre_tokenizer=splitting("q*q*q*[yY]"))) as tokenizer:
        Timer(0.1, given_up.set).start()
        with pytest.raises(RequestError, match="it was given up"):
            tokenizer.encode(("q" * 330 + "z") * 1000 + "y", given_up=given_up)


PUBLISHED: dict[str, Callable[[], dict[str, Any]]] = {
    "the demo's": lambda: json.loads((DEMO / "target" / TOKENIZER).read_text()),
    "SmolLM2's": lambda: json.loads((DEMO / "smollm2" / TOKENIZER).read_text()),
    "a trained SentencePiece": lambda: json.loads((optional("stories260K/target") / TOKENIZER).read_text()),
    "Gemma's steps": lambda: {
        "model": LETTERS,
        "normalizer": replacing(" ", "▁"),
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tokenizers_stay_in_this_process(name: str) -> None:
    assert is_proved(PUBLISHED[name]())


@pytest.mark.parametrize("name", SPLITS)
def test_every_known_split_stays_in_this_process(name: str) -> None:
    made = TokenizerJson.from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": BPE}))
    SPLITS[name].apply(made)
    assert is_proved(json.loads(made.to_str()))


NOT_PROVED: dict[str, dict[str, Any]] = {
    "an unknown pattern": {"pre_tokenizer": splitting(r"\p{L}+|\s+$")},
    "a part of a unit alone": {"pre_tokenizer": splitting(r"\s*[\r\n]+")},  # n blanks take n * n steps
    "a pattern that ends otherwise": {"pre_tokenizer": splitting(r"\p{N}||")},
    "bytes as letters, twice": {"pre_tokenizer": sequence("pretokenizers", BYTE_LEVEL, BYTE_LEVEL)},
    "bytes as letters, by a normalizer": {"normalizer": {"type": "ByteLevel"}},
    "compatible forms": {"normalizer": {"type": "NFKC"}},  # 18 characters for U+FDFA
    "two steps that grow": {"normalizer": many("normalizers", {"type": "NFD"}, 2)},
    "a text of nothing replaced": {"normalizer": replacing("", "ab")},
    "a list in the place of a step": {"normalizer": ["Replace", {"String": "x"}, "xx"]},
    "a step without a kind": {"normalizer": {"normalizers": [{"type": "NFC"}]}},
    "long pieces of a unigram model": {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a" * 999, -1.0]]}},
    "a long prefix": {"model": BPE | {"continuing_subword_prefix": "#" * 999}},
}


@pytest.mark.parametrize("name", NOT_PROVED)
def test_what_may_take_more_is_not_proved(name: str) -> None:
    assert is_proved({"model": BPE}) and not is_proved({"model": BPE, **NOT_PROVED[name]})


def test_only_whole_units_are_linear() -> None:
    assert is_linear(r"\p{N}|\s+(?!\S)|\s+") and not is_linear("") and not is_linear(r"\p{N}|")


VALUES: list[Any] = [None, True, 0, -1, 2**70, 1.5, "", "A", [], [[]], ["A", 0], {}, {"type": []}, {"id": {}}]


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every value within, as its container and its name or number there."""
    for key, value in list(content.items()) if isinstance(content, dict) else list(enumerate(content)):
        yield content, key
        if isinstance(value, dict | list):
            yield from places(value)


def test_no_value_at_any_place_is_more_than_refused() -> None:
    """A file in which one value is another one has problems or none: nothing else is raised."""
    around = template(S, A) | {"special_tokens": {"s": {"id": "s", "ids": [0], "tokens": ["q"]}}}
    content: dict[str, Any] = {
        "added_tokens": [{"id": 4, "content": "A", "normalized": False, **ADDED}],
        "normalizer": many("normalizers", replacing("x", "y"), 1),
        "pre_tokenizer": sequence("pretokenizers", splitting(r"\p{N}"), BYTE_LEVEL),
        "post_processor": sequence("processors", around),
        "decoder": sequence("decoders", replacing("x", "y"), {"type": "BPEDecoder", "suffix": "w"}),
        "model": BPE | {"continuing_subword_prefix": "b", "merges": [["a", "b"]]},
    }
    assert not list(problems(content)) and is_proved(content)
    for container, key in places(content):
        before = container[key]
        for value in VALUES:
            container[key] = value
            if not list(problems(content)):
                is_proved(content)
        container[key] = before


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
    tokenizer = Tokenizer.load(write(tmp_path))

    class Interrupted:
        def decode(self, *_: Any, **__: Any) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer, "_backend", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        tokenizer.decode([1])
