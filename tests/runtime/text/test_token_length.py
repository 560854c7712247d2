"""How many tokens a text has at least: never more than it has, and nothing where a tokenizer leaves doubt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from bundling import DEMO, optional
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as TokenizerJson

from draftwood.models.errors import RequestError
from draftwood.runtime import LLM
from draftwood.runtime.text.token_length import BYTES, longest_token
from draftwood.runtime.text.tokenizer import Tokenizer

ALPHABET = pre_tokenizers.ByteLevel.alphabet()
BY_BYTES = {token: index for index, token in enumerate(["<unk>", "ab", "a", "b", *BYTES])}


def by_letters(alphabet: list[str], **options: object) -> TokenizerJson:
    """A byte-level BPE as LLaMA-3's."""
    vocabulary = {token: index for index, token in enumerate(["<unk>", "aa", *alphabet])}
    made = TokenizerJson(models.BPE(vocabulary, [("a", "a")] if "a" in alphabet else [], **options))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def by_characters(vocabulary: dict[str, int], **options: object) -> TokenizerJson:
    """A BPE over raw text as LLaMA-2's."""
    made = TokenizerJson(models.BPE(vocabulary, [("a", "b")], unk_token="<unk>", fuse_unk=True, **options))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def real(folder: Path) -> TokenizerJson:
    return Tokenizer.load(folder)._backend


MADE: dict[str, Callable[[], TokenizerJson]] = {
    "the demo's": lambda: real(DEMO / "target"),
    "a trained SentencePiece": lambda: real(optional("stories260K/target")),
    "letters": lambda: by_letters(ALPHABET),
    "an unknown for each": lambda: by_letters(["a"], unk_token="<unk>"),
    "characters": lambda: by_characters(BY_BYTES, byte_fallback=True),
}
texts = st.text(max_size=60) | st.text("ab <>x0\u0301é▁", max_size=60) | st.sampled_from("a éx🙂").map(lambda c: 50 * c)


@pytest.mark.parametrize("name", MADE)
def test_no_text_has_fewer_tokens(name: str) -> None:
    backend = MADE[name]()
    backend.add_special_tokens(["<x0>"])
    tokenizer = Tokenizer(backend)

    @given(texts)
    def check(text: str) -> None:
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))

    check()
    assert tokenizer.fewest_tokens(100 * "x") > 0


def splitting(pre_tokenizer: pre_tokenizers.PreTokenizer) -> TokenizerJson:
    made = by_letters(ALPHABET)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, pre_tokenizers.ByteLevel()])
    return made


def normalizing(normalizer: normalizers.Normalizer) -> TokenizerJson:
    made = by_letters(ALPHABET)
    made.normalizer = normalizers.Sequence([normalizer])
    return made


def swallowing() -> TokenizerJson:
    made = by_letters(ALPHABET)
    made.add_special_tokens([AddedToken("<x>", rstrip=True)])
    return made


SHORTENED: dict[str, tuple[Callable[[], TokenizerJson], str]] = {
    "letters that are missing": (lambda: by_letters(["a"]), "é"),
    "one unknown for a run": (lambda: by_letters(["a"], unk_token="<unk>", fuse_unk=True), "é"),
    "no bytes": (lambda: by_characters({"<unk>": 0, "ab": 1, "a": 2, "b": 3}), "é"),
    "words": (lambda: TokenizerJson(models.WordLevel({"<unk>": 0}, unk_token="<unk>")), "é"),
    "split away": (lambda: splitting(pre_tokenizers.Split(" ", "removed")), " "),
    "split at space": (lambda: splitting(pre_tokenizers.WhitespaceSplit()), " "),
    "stripped": (lambda: normalizing(normalizers.Strip()), " "),
    "replaced": (lambda: normalizing(normalizers.Replace(Regex(" +"), " ")), " "),
    "cut short": (lambda: normalizing(normalizers.Replace("ab", "")), "ab"),
    "swallowed": (swallowing, " "),
}


@pytest.mark.parametrize("name", SHORTENED)
def test_a_tokenizer_that_makes_little_of_much_gives_no_bound(name: str) -> None:
    make, letter = SHORTENED[name]
    backend = make()
    text = "<x>" + 5000 * letter
    assert len(backend.encode(text).ids) < 100, "it does"
    assert longest_token(backend) is None and Tokenizer(backend).fewest_tokens(text) == 0


def test_a_prompt_that_can_never_fit_is_refused_unread(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> list[int]:
        raise AssertionError("it was read")

    with LLM(tiny_bundle) as llm:
        limit = llm.bundle.manifest.max_length
        longest = longest_token(llm.tokenizer._backend)
        assert longest is not None
        with pytest.raises(RequestError, match=f"the prompt has {limit} tokens .*--max-length"):
            llm.encode("x" * (limit - 1))  # and the token that begins a text
        monkeypatch.setattr(llm.tokenizer, "encode", read)
        monkeypatch.setattr(llm.tokenizer, "apply_chat_template", lambda messages, **_: messages[0]["content"])
        long = "x" * (longest * (limit - 1) + 1)
        for encode in (llm.encode, lambda text: llm.encode_chat([{"role": "user", "content": text}])):
            with pytest.raises(RequestError, match=f"the prompt has at least {limit} tokens .*--max-length"):
                encode(long)
            with pytest.raises(AssertionError, match="it was read"):
                encode(long[:-1])
