"""The builder's tokenizer: copied as it is, converted from SentencePiece, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from checkpoints import write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from pieces import train
from sentencepiece import sentencepiece_model_pb2
from transformers import AutoTokenizer

from draftwood.builder.tokenizer import (
    ADDED,
    MAX_TEMPLATES,
    SENTENCEPIECE,
    TEMPLATES,
    check_same_vocabulary,
    convert_tokenizer,
)
from draftwood.models.errors import CheckpointError
from draftwood.runtime.text.chat_prompt import write_conversation
from draftwood.runtime.text.conversation import ChatSettings
from draftwood.runtime.text.tokenizer import SETTINGS, TEMPLATE, TOKENIZER, Tokenizer, read_templates


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def converted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    source, destination = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    return train(source, request.param), convert_tokenizer(source, destination)


ODD = ["", " ", "  two  spaces ", "tab\tnew\nline", "🙂 naïve 漢字", "x = 12345", "▁literal", "a▁b"]


@settings(max_examples=60)
@given(text=st.text("abcdefghilnoprstuy .,12\n🙂é", max_size=40) | st.sampled_from(ODD))
def test_conversion_encodes_as_sentencepiece_does(
    converted: tuple[sentencepiece.SentencePieceProcessor, Tokenizer], text: str
) -> None:
    theirs, ours = converted
    expected = theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == expected
    assert ours.encode(text) == [theirs.bos_id(), *expected]
    assert ours.decode(expected) == theirs.decode(expected)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"add_eos_token": True},
        {"add_prefix_space": False},
        {"flags": {"rstrip": True}},
        {"flags": {"lstrip": True, "special": False}},
        {"flags": {"single_word": True}},
    ],
    ids=str,
)
def test_settings_and_pieces_give_the_tokens_that_transformers_has(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Pieces that a user defined, and a token that was added later."""
    source, added = tmp_path / "in", {"content": "<|end|>", "special": True, "normalized": False}
    train(source, "bpe", user_defined_symbols=["<|tool|>", "<|im|>"], control_symbols=["[INST]"])
    given = {**changes, "added_tokens_decoder": {"340": added | changes.get("flags", {})}, "legacy": False}
    (source / SETTINGS).write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, **given}))
    (source / "config.json").write_text('{"model_type": "llama"}')
    theirs = AutoTokenizer.from_pretrained(source)
    (tmp_path / "out").mkdir()
    ours = convert_tokenizer(source, tmp_path / "out")
    for mark in ("<|end|>", "<|tool|>", "<|im|>", "[INST]", "<s>"):
        for text in ("Lily", " Lily", f"Lily {mark} girl", f"Lily{mark}\n girl", f"{mark}girl", f"{mark}{mark}"):
            assert ours.encode(text) == theirs(text).input_ids


def test_a_tokenizer_json_is_copied_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    write_tokenizer(tmp_path / "in")
    convert_tokenizer(tmp_path / "in", tmp_path / "out")
    for name in (TOKENIZER, SETTINGS):
        assert (tmp_path / "in" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


LISTED_BESIDE: dict[str, dict[str, Any]] = {
    "added_tokens.json": {ADDED: {"<X>": 300}},
    "by id": {
        SETTINGS: {"added_tokens_decoder": {"300": {"content": "<X>"}, "1": {"content": "<s>", "special": True}}}
    },
    "by name": {SETTINGS: {"extra_special_tokens": {"x_token": "<X>"}}},
    "as a list": {SETTINGS: {"additional_special_tokens": ["</s>", "<X>"]}},
}


@pytest.mark.parametrize("name", LISTED_BESIDE)
def test_tokens_that_only_files_beside_a_tokenizer_json_list_are_added(tmp_path: Path, name: str) -> None:
    source, destination = write_tokenizer(tmp_path / "in", 300), tmp_path / "out"
    destination.mkdir()
    for file, content in LISTED_BESIDE[name].items():
        (source / file).write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **content} if file == SETTINGS else content)
        )
    wanted = AutoTokenizer.from_pretrained(source)("a<X>b</s>", add_special_tokens=False).input_ids
    ours = convert_tokenizer(source, destination).encode("a<X>b</s>", add_special_tokens=False)
    assert ours == wanted and 300 in ours


def test_thousands_of_added_tokens_are_added_together(tmp_path: Path) -> None:
    """One by one they took a quarter of an hour: each addition looks at all."""
    source = tmp_path / "in"
    train(source)
    (source / SETTINGS).write_text(json.dumps({"add_bos_token": False}))
    (source / ADDED).write_text(json.dumps({f"<|{index}|>": 340 + index for index in range(30_000)}))
    (tmp_path / "out").mkdir()
    ours = convert_tokenizer(source, tmp_path / "out")
    assert ours.encode("<|0|><|29999|>", add_special_tokens=False)[-1] == 340 + 29_999 and not ours.adds_bos


def model_of(pieces: list[str], unknown: int = 0) -> bytes:
    model: Any = sentencepiece_model_pb2.ModelProto()
    for piece in pieces:
        model.pieces.add(piece=piece, score=0.0, type=1)
    model.normalizer_spec.precompiled_charsmap = b""
    model.trainer_spec.model_type, model.trainer_spec.unk_id = 2, unknown
    return bytes(model.SerializeToString())


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"not a protobuf \xff\xff", "no SentencePiece model|holds no tokens"),
        (b"", "holds no tokens"),
        (b"\x80\x04K\x01.", "SentencePiece|no tokens"),  # a pickle is just bytes here
        (model_of(["a"], 7), "unk_id 7 is none of its 1 tokens"),
        # Of a piece, each way to cut it in two pieces is a merge.
        (model_of(["a" * 1025]), "1025 characters"),
        (model_of([f"{index:01000d}" for index in range(9000)]), "9000000 bytes"),
        (model_of(["a" * length for length in range(1, 500)]), "cut in too many ways"),
    ],
    ids=["no protobuf", "empty", "a pickle", "no unknown", "a long piece", "many", "all parts of one another"],
)
def test_a_sentencepiece_model_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes, named: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / SENTENCEPIECE).write_bytes(content)
    with pytest.raises(CheckpointError, match=named):
        convert_tokenizer(tmp_path, tmp_path / "out")


def test_other_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    source, other = tmp_path / "in", tmp_path / "other"
    source.mkdir()

    def refused(folder: Path, named: str) -> None:
        (tmp_path / named[:4]).mkdir()
        with pytest.raises(CheckpointError, match=named):
            convert_tokenizer(folder, tmp_path / named[:4])

    refused(source, "copy the model's tokenizer")
    (source / TOKENIZER).write_bytes(b"{")
    refused(source, "cannot be used")
    write_tokenizer(source, 300)
    (source / ADDED).write_text(json.dumps({"<X>": 1000}))
    refused(source, "'<X>' has id 1000, but would have 300")
    train(other, "word", byte_fallback=False)
    refused(other, "neither a BPE nor a unigram")


def test_vocabularies_must_be_the_same(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        write_tokenizer(folder)
    one, two = (Tokenizer.load(folder) for folder in folders)
    check_same_vocabulary(one, two)
    content = json.loads((folders[1] / TOKENIZER).read_text())
    content["added_tokens"].append({**content["added_tokens"][-1], "id": one.vocab_size, "content": "<extra>"})
    (folders[1] / TOKENIZER).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="differ in 1 tokens, for instance '<extra>'"):
        check_same_vocabulary(one, Tokenizer.load(folders[1]))


def test_templates_of_their_own_for_tools_are_kept_and_used(tmp_path: Path) -> None:
    """In the order in which transformers looks for them."""
    said = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    with_tools = "TOOLS={{ tools | tojson }}" + said
    named = [{"name": name, "template": text} for name, text in (("default", said), ("tool_use", with_tools))]
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    further = f"{TEMPLATES}/tool_use.jinja"
    sources: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"chat_template": named}, {}),
        ({"chat_template": named[1:]}, {}),
        ({}, {TEMPLATE: said, further: with_tools, f"{TEMPLATES}/rag.jinja": "R"}),
        ({"chat_template": named}, {TEMPLATE: "file"}),
        ({"chat_template": "old"}, {further: with_tools}),
    ]
    for number, (config, files) in enumerate(sources):
        source, bundle = write_tokenizer(tmp_path / str(number)), tmp_path / f"{number}.bundle"
        bundle.mkdir()
        written = json.loads((source / SETTINGS).read_text()) | config
        (source / SETTINGS).write_text(json.dumps(written))
        for name, text in files.items():
            (source / name).parent.mkdir(exist_ok=True)
            (source / name).write_text(text)
        theirs = AutoTokenizer.from_pretrained(source)
        with convert_tokenizer(source, bundle) as ours:
            for given in (None, tools):
                if given is None and "default" not in ours.chat_templates:
                    continue
                expected = theirs.apply_chat_template(messages, tools=given, tokenize=False)
                assert ours.apply_chat_template(messages, False, tools=given) == expected
            settings = ChatSettings(add_generation_prompt=False, tools=tools)
            assert number == 3 or write_conversation(ours, messages, settings) == expected
            assert ours.chat_templates == read_templates(bundle)
            assert ours.chat_templates.get("rag") == ("R" if number == 2 else None)
    for count in range(MAX_TEMPLATES):
        (tmp_path / "2" / TEMPLATES / f"{count}.jinja").write_text("x")
    with pytest.raises(CheckpointError, match="chat templates and may have 16"):
        convert_tokenizer(tmp_path / "2", bundle)
