"""Grammars by llguidance: what they allow, how they go back, and what hostile ones cost."""

from __future__ import annotations

import gc
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwood.models.errors import RequestError
from draftwood.runtime.engines.shared.memory import OutOfMemoryError
from draftwood.runtime.llm import LLM
from draftwood.runtime.requests.async_llm import AsyncLLM
from draftwood.runtime.sampling.constraint import PathMasks
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.structured import MAX_FORM, StructuredOutput
from draftwood.runtime.structured import grammars as module
from draftwood.runtime.structured.grammar_worker import open_tokenizer
from draftwood.runtime.structured.grammars import COMPILING, KEPT, Grammars
from draftwood.runtime.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tiny_pair: Path) -> Iterator[Tokenizer]:
    with Tokenizer.load(tiny_pair / "target") as tokenizer:
        yield tokenizer


@pytest.fixture(scope="module")
def eos(tokenizer: Tokenizer) -> int:
    return min(tokenizer.special_token_ids)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer, eos: int) -> Iterator[Grammars]:
    """The library's own limits decide here, not the speed of the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "COMPILING", COMPILING._replace(seconds=600.0))
        opened = Grammars(tokenizer, tokenizer.vocab_size + 5, (eos,))  # models have more rows than tokens
        yield opened
        opened.close()


FORMS = {
    "json": (
        StructuredOutput(json=PERSON),
        ['{"name": "Ann", "age": 7}', '{"name":"é","age":-1}'],
        ['{"age": 7}', "x"],
    ),
    "json text": (StructuredOutput(json=json.dumps({"enum": ["a", 1]})), ['"a"', "1"], ["a", "2"]),
    "json_object": (StructuredOutput(json_object=True), ["{}", '{"a": [1, null]}'], ["[]", "1"]),
    "regex": (StructuredOutput(regex="[ab]+c?"), ["ab", "bac"], ["c", "abcc"]),
    "choice": (StructuredOutput(choice=["yes", 'né"q\\\n', "/"]), ["yes", 'né"q\\\n', "/"], ["ye", "no"]),
    "GBNF": (StructuredOutput(grammar='root ::= "x" item*\nitem ::= "y" | "z"'), ["x", "xyz"], ["y", ""]),
    "GBNF's escapes": (
        StructuredOutput(
            grammar=r"""# \u00e9 <x>
end ::= "y"
root ::= "\u00e9\U0001F600\x41\xe9\u005c\u0022\"#<a>" [\u0041-\u0043\u005d\]\xe9\u4e2d<] end"""
        ),
        ['é😀Aé\\""#<a>' + letter + "y" for letter in "ABC]é中<"],
        ['é😀Aé\\""#<a>Dy', "é"],
    ),
    "Lark": (StructuredOutput(grammar='start: "x" item*\nitem: "y" | "z"'), ["x", "xyz"], ["y", ""]),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_texts_of_a_form(name: str, grammars: Grammars, tokenizer: Tokenizer, eos: int) -> None:
    form, right, wrong = FORMS[name]
    grammar = grammars.compile(form)
    assert grammars.compile(form) is grammar

    def is_complete(text: str) -> bool:
        constraint = grammar.start()
        for token in tokenizer.encode(text, add_special_tokens=False):
            if constraint.ended or not constraint.allowed()[token]:
                return False
            assert constraint.advance(token)
        return constraint.ended or bool(constraint.allowed()[eos])

    assert [text for text in right if not is_complete(text)] == []
    assert [text for text in wrong if is_complete(text)] == []


@pytest.mark.parametrize("name", FORMS)
def test_masks_and_advances_agree_on_every_path(name: str, grammars: Grammars, tokenizer: Tokenizer, eos: int) -> None:
    """A random walk with all siblings: a token is allowed exactly where it can be appended, and rolling back restores
    the state. A mask by way of other paths is the mask from the start."""
    grammar, draws = grammars.compile(FORMS[name][0]), np.random.default_rng(0)
    masks, path = PathMasks(grammar.start()), list[int]()
    while len(path) < 12 and (mask := masks.after(path)) is not None:
        assert mask.shape == (tokenizer.vocab_size + 5,) and mask.any() and not mask[tokenizer.vocab_size :].any()
        fresh = grammar.start()
        assert all(fresh.advance(token) for token in path)
        assert np.array_equal(fresh.allowed(), mask)
        for token in draws.permutation(tokenizer.vocab_size)[:40].tolist():
            assert fresh.advance(token) == mask[token]
            if mask[token]:
                fresh.roll_back(1)
            assert (masks.after([*path, token]) is None) >= (not mask[token])
        assert np.array_equal(fresh.allowed(), mask)
        path.append(int(draws.choice(np.flatnonzero(mask))))
    if masks.after(path) is None:
        assert masks.ends(path)


HOSTILE: dict[str, tuple[StructuredOutput, str]] = {
    "a remote reference": (StructuredOutput(json={"$ref": "https://example.org/x"}), "not present"),
    "a file's reference": (StructuredOutput(json={"$ref": "file:///etc/passwd"}), "not present"),
    "references in a circle": (
        StructuredOutput(json={"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
        "no text has this form",
    ),
    "an unsupported keyword": (
        StructuredOutput(json={"properties": {"a": {"items": [{"not": {"type": "string"}}]}}}),
        "properties.a.items[0].not: this keyword",
    ),
    "ignored keywords by a hidden setting": (
        StructuredOutput(json={"not": {}, "x-guidance": {"lenient": True}}),
        "not: this keyword",
    ),
    "no text at all": (StructuredOutput(json={"type": "string", "minLength": 3, "maxLength": 2}), "minLength"),
    "an impossible regex": (StructuredOutput(regex=r"[^\x00-\U0010ffff]"), "no text has this form"),
    "half a regex": (StructuredOutput(regex="(a"), "unclosed group"),
    "a regex of parentheses": (StructuredOutput(regex="(" * 30000 + "a" + ")" * 30000), "cannot be used"),
    "a deep schema": (StructuredOutput(json='{"items":' * 900 + "{}" + "}" * 900), "nested too deeply"),
    "a grammar of parentheses": (StructuredOutput(grammar="start: " + "(" * 20000 + '"a"' + ")" * 20000), "deeply"),
    "a grammar that doubles": (
        StructuredOutput(grammar="start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(30)) + 'A30: "x"'),
        "cannot be used",
    ),
    "a token in GBNF": (StructuredOutput(grammar='root ::= "a" <[28]>'), "<[28]> refers to a token, which GBNF here"),
    "a token's name in GBNF": (StructuredOutput(grammar="root ::= !<think> [a]"), "!<think> refers to a token"),
    "half a character in GBNF": (StructuredOutput(grammar=r'root ::= "\ud83d"'), r"\ud83d is no character"),
    "no character in GBNF": (StructuredOutput(grammar=r"root ::= [\U00110000]"), r"\U00110000 is no character"),
    "a grammar without a rule": (StructuredOutput(grammar='root ::= "a" | b'), "'b' not found"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_forms_are_refused_with_the_reason(name: str, grammars: Grammars) -> None:
    form, reason = HOSTILE[name]
    with pytest.raises(RequestError, match="structured output cannot be used") as caught:
        grammars.compile(form)
    assert reason in str(caught.value) and len(str(caught.value)) < 700


def test_a_form_that_takes_too_long_ends_its_process_only(
    tokenizer: Tokenizer, eos: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library has no limit for this one. Others are compiled meanwhile, in the other process."""
    monkeypatch.setattr(module, "COMPILING", COMPILING._replace(seconds=2.0))
    opened = Grammars(tokenizer, tokenizer.vocab_size, (eos,))
    refused = list[str]()

    def compile_slow() -> None:
        try:
            opened.compile(StructuredOutput(json={"type": "integer", "multipleOf": 99999989}))
        except RequestError as error:
            refused.append(str(error))

    slow = threading.Thread(target=compile_slow)
    slow.start()
    opened.compile(StructuredOutput(choice=("yes", "no")))
    slow.join()
    assert "did not finish within" in refused[0] or "process ended" in refused[0]
    opened.compile(StructuredOutput(choice=("yes", "maybe")))
    opened.close()


def test_the_number_of_kept_grammars_is_bounded(grammars: Grammars) -> None:
    first = grammars.compile(StructuredOutput(regex="a"))
    for count in range(KEPT):
        grammars.compile(StructuredOutput(regex=f"b{{{count + 1}}}"))
    assert len(grammars._kept) == KEPT
    assert grammars.compile(StructuredOutput(regex="a")) is not first


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the memory of a process")
def test_the_memory_of_kept_grammars_is_bounded(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = [StructuredOutput(json={"multipleOf": number}) for number in (19997, 19991)]
    first, second = map(grammars.compile, forms)
    least, most = sorted((first.share.num_bytes, second.share.num_bytes))
    assert least > 4 << 20 and all(map(grammars.find, forms))
    monkeypatch.setattr(module, "KEPT_BYTES", most)
    grammars._keep(forms[1], second)
    assert list(grammars._kept) == [forms[1]]
    monkeypatch.setattr(module, "KEPT_BYTES", least - 1)
    grammars._kept.clear()
    small = StructuredOutput(regex="small")
    kept = grammars.compile(small)
    grammars._keep(forms[0], first)
    assert grammars.find(small) is kept and grammars.find(forms[0]) is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the memory of a process")
def test_the_memory_of_grammars_in_use_is_bounded(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one text leaves no room for another grammar, that one is refused until the text has ended. A small grammar
    is not."""
    forms = [StructuredOutput(json={"multipleOf": number}) for number in (19979, 19973)]
    monkeypatch.setattr(module, "KEPT_BYTES", 0)
    grammars._kept.clear()
    gc.collect()  # what other tests have left
    grammar = grammars.compile(forms[0])
    num_bytes, text = grammar.share.num_bytes, grammar.start()
    del grammar
    assert num_bytes > module.SMALL_BYTES
    monkeypatch.setattr(module, "MAX_BYTES", 3 * num_bytes // 2)
    with pytest.raises(OutOfMemoryError, match="those of other requests leave"):
        grammars.compile(forms[1])
    grammars.compile(StructuredOutput(regex="small enough"))
    assert text.allowed().any()
    del text
    grammars.compile(forms[1])
    monkeypatch.setattr(module, "available_bytes", lambda: 0)
    with pytest.raises(OutOfMemoryError, match="leave 0: simplify it, or send it again later"):
        grammars.compile(forms[0])


def test_a_grammar_that_exceeds_a_limit_in_a_text_ends_this_text(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """After the first letter 2,500 rules are possible, more than the library follows."""
    rules = [f"r{number}" for number in range(2500)]
    form = StructuredOutput(
        grammar=f"start: {'|'.join(rules)}\n" + "".join(f'{rule}: "x" "{rule}"\n' for rule in rules)
    )
    with pytest.raises(RequestError, match="too complex for its limits"):
        constraint = grammars.compile(form).start()
        for token in tokenizer.encode("xr1", add_special_tokens=False):
            constraint.advance(token)
            constraint.allowed()


def test_special_tokens_are_allowed_only_where_the_text_can_go_on(
    grammars: Grammars, tokenizer: Tokenizer, eos: int
) -> None:
    """The library's masks contain ends of texts that a grammar names, and names of special tokens that are text."""
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    name = next(text for text, token in tokenizer.vocabulary().items() if token == max(tokenizer.special_token_ids))
    for form in (StructuredOutput(grammar=f'start: "a" <[{eos}]> "b"'), StructuredOutput(choice=(f"a{name}",))):
        masks = PathMasks(grammars.compile(form).start())
        masks.commit([a])
        with pytest.raises(RequestError, match="demands the token"):
            masks.after([])
        with pytest.raises(RequestError, match="leave special tokens out"):
            masks.commit([eos])
    with pytest.raises(RequestError, match="demands the token"):
        grammars.compile(StructuredOutput(grammar=f"start: <[{eos}]>"))
    constraint = grammars.compile(StructuredOutput(grammar='start: <[*]> "b"')).start()
    mask = constraint.allowed()
    assert not mask[eos] and mask[max(tokenizer.special_token_ids)]
    for token in np.flatnonzero(mask).tolist():
        assert constraint.advance(token)
        constraint.roll_back(1)


def test_a_server_reads_the_tokenizer_before_anybody_waits(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library lets no other thread run meanwhile, not even the one that reads from clients."""
    opened = list[str]()

    def read(*given: Any) -> Any:
        opened.append(given[0])
        return open_tokenizer(*given)

    monkeypatch.setattr(module, "open_tokenizer", read)
    with LLM(tiny_bundle) as llm:
        assert not opened
        with AsyncLLM(llm):
            assert len(opened) == 1
        llm.grammars.compile(StructuredOutput(regex="a"))
    assert len(opened) == 1


def test_a_missing_package_is_named(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match="pip install llguidance"):
        Grammars(tokenizer, tokenizer.vocab_size, ()).compile(StructuredOutput(regex="a"))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "exactly one of"),
        ({"regex": "a", "json_object": True}, "exactly one of"),
        ({"json_object": 1}, "True or False"),
        ({"json": "[]"}, "must be a JSON schema"),
        ({"json": "{"}, "no valid JSON"),
        ({"json": "[" * 60_000}, "no valid JSON"),
        ({"json": {"enum": [float("nan")]}}, "no valid JSON"),
        ({"json": {"enum": [object()]}}, "no valid JSON"),
        ({"regex": ""}, "must not be empty"),
        ({"regex": 5}, "must be text"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"regex": "a" * (MAX_FORM + 1)}, "shorten it"),
        ({"choice": ["", "a"]}, "texts that are not empty"),
        ({"choice": "yes"}, "must be a list"),
        ({"choice": ["a"] * 1025}, "may have 1024"),
        ({"choice": ["a" * MAX_FORM, "b"]}, f"choice has {MAX_FORM + 1} characters"),
        ({"json": "[" * (MAX_FORM + 1)}, f"json has {MAX_FORM + 1} characters"),  # before it is parsed
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        StructuredOutput(**fields)  # type: ignore[arg-type]


def test_a_text_without_an_end_has_no_form() -> None:
    with pytest.raises(RequestError, match="ignore_eos must be False"):
        SamplingParams(ignore_eos=True, structured=StructuredOutput(json_object=True))
