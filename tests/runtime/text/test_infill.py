"""The prompt of each family that infills."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as TokenizerJson

from draftwood.models.errors import RequestError
from draftwood.runtime.text.infill import File, Infill, Infilling
from draftwood.runtime.text.tokenizer import Tokenizer

ASKED = Infill("before", "after", [File("a.py", "x")])
FAMILIES = {
    "Qwen2.5-Coder": (
        ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>"],
        "<|repo_name|>myproject\n<|file_sep|>a.py\nx<|file_sep|>filename\n"
        "<|fim_prefix|>before<|fim_suffix|>after<|fim_middle|>",
    ),
    "StarCoder 2": (
        ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>", "<fim_pad>"],
        "<repo_name>myproject\n<file_sep>a.py\nx<file_sep>filename\n<fim_prefix>before<fim_suffix>after<fim_middle>",
    ),
    "DeepSeek-Coder": (
        ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
        "x<｜fim▁begin｜>before<｜fim▁hole｜>after<｜fim▁end｜>",
    ),
}


def tokenizer_with(added: list[str], settings: dict[str, str] | None = None) -> Tokenizer:
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = TokenizerJson(models.BPE(letters, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, normalized=False) for text in added])
    return Tokenizer(backend, infill_tokens=settings)


def prompt_of(tokenizer: Tokenizer, asked: Infill) -> str:
    tokens = Infilling(tokenizer).encode(asked, lambda text: tokenizer.encode(text, add_special_tokens=False))
    return tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_its_own_tokens(family: str) -> None:
    added, expected = FAMILIES[family]
    tokenizer = tokenizer_with(added)
    assert prompt_of(tokenizer, ASKED) == expected
    alone = prompt_of(tokenizer, ASKED._replace(files=()))
    assert alone == expected[expected.index(added[0]) :]
    assert Infilling(tokenizer).ends == tuple(map(tokenizer.vocabulary().get, added[3:]))


def test_tokens_that_the_settings_name_come_first() -> None:
    named = {"fim_pre_token": "<P>", "fim_suf_token": "<S>", "fim_mid_token": "<M>"}
    tokenizer = tokenizer_with(["<P>", "<S>", "<M>", *FAMILIES["StarCoder 2"][0]], named)
    assert prompt_of(tokenizer, ASKED) == "x<P>before<S>after<M>"


def test_no_blank_comes_before_a_suffix() -> None:
    """CodeLlama's tokenizer puts one before each text."""
    bytes_of = {f"<0x{byte:02X}>": byte for byte in range(256)}
    letters = {letter: 256 + index for index, letter in enumerate("▁abc")}
    backend = TokenizerJson(models.BPE(bytes_of | letters, [], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")])
    tokenizer = Tokenizer(backend)
    assert prompt_of(tokenizer, Infill("a", "b")) == " <PRE> a <SUF>b <MID>"
    assert Infilling(tokenizer).ends == (tokenizer.vocabulary()["▁<EOT>"],)


def test_a_model_without_such_tokens_does_not_infill() -> None:
    with pytest.raises(RequestError, match="does not infill"):
        Infilling(tokenizer_with(["<fim_prefix>", "<fim_suffix>"]))
