"""Tokenizers: as transformers reads the same folder, damage and mischief refused; and how many tokens a text has at
least: never more than it has, and nothing where a tokenizer leaves doubt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bundling import DEMO, optional
from checkpoints import write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as TokenizerJson
from transformers import AutoTokenizer

from draftwood.models.errors import BundleError, RequestError
from draftwood.runtime import LLM
from draftwood.runtime.text import tokenizer_worker
from draftwood.runtime.text.token_length import BYTES, longest_token
from draftwood.runtime.text.tokenizer import SETTINGS, TEMPLATE, TOKENIZER, Tokenizer, token_sequences

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


TEXTS = [
    "",
    "Once upon a time",
    "  two  spaces\n\ttab",
    "naïve café – 🙂👩‍👩‍👧 漢字",
    "x = 3.14 * 27",
    "<s>not special?</s>",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def configure(folder: Path, **settings: object) -> Tokenizer:
    content = json.loads((folder / SETTINGS).read_text()) if (folder / SETTINGS).is_file() else {}
    (folder / SETTINGS).write_text(json.dumps(content | settings))
    return Tokenizer.load(folder)


def test_a_line_break_may_be_a_bad_word() -> None:
    """Blanks before a word are left out, as in vLLM; without them a text of blanks would be empty."""
    tokenizer = Tokenizer.load(DEMO / "target")
    line, word = (tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "def"))
    assert token_sequences(tokenizer, ["\n"])[0] == line
    assert token_sequences(tokenizer, ["\n def"])[0] == word


@pytest.mark.parametrize("source", ["stories260K/target", "demo"])
def test_ids_and_text_are_those_of_transformers(source: str) -> None:
    path = DEMO / "target" if source == "demo" else optional(source)
    ours, theirs = Tokenizer.load(path), AutoTokenizer.from_pretrained(path)
    assert (ours.vocab_size, ours.bos_token_id) == (len(theirs), theirs.bos_token_id)
    for text in TEXTS:
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder: (folder / TOKENIZER).unlink(), "missing"),
        (lambda folder: (folder / TOKENIZER).write_text("{"), "not a readable tokenizer"),
        (lambda folder: (folder / SETTINGS).write_text("{"), "not readable JSON"),
        (lambda folder: (folder / SETTINGS).write_text("[1]"), "no JSON object"),
    ],
)
def test_damaged_folders_are_refused(folder: Path, damage, named: str) -> None:  # type: ignore[no-untyped-def]
    damage(folder)
    with pytest.raises(BundleError, match=named):
        Tokenizer.load(folder)


def test_the_template_may_stand_in_its_own_file_or_in_a_list_or_be_missing(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d{{ messages|length }}"}]
    with configure(folder, chat_template=named) as tokenizer:
        assert tokenizer.apply_chat_template([]) == tokenizer.apply_chat_template([], tools=None) == "d0"
        assert tokenizer.apply_chat_template([], tools=[{}]) == "t" == tokenizer.template_for(True)
    with configure(folder, chat_template=named[:1]) as tokenizer:
        assert tokenizer.apply_chat_template([], tools=[{}]) == "t" and tokenizer.template_for(False) == ""
        with pytest.raises(RequestError, match="only one for tool_use: send tools"):
            tokenizer.apply_chat_template([])
    for damaged in ([{"name": "default"}], ["default"], 3, {"a": 1}, [{"name": "default", "template": None}]):
        with pytest.raises(BundleError, match="chat_template is no text"):
            configure(folder, chat_template=damaged)
    (folder / TEMPLATE).write_text("file")
    assert Tokenizer.load(folder).apply_chat_template([]) == "file"
    (folder / TEMPLATE).unlink()
    (folder / SETTINGS).unlink()
    content = json.loads((folder / TOKENIZER).read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (folder / TOKENIZER).write_text(json.dumps(content))
    renamed = folder.rename(os.fsdecode(os.fsencode(folder) + b"\xff"))  # a name that the library cannot be given
    tokenizer = Tokenizer.load(renamed)
    assert tokenizer.adds_bos and tokenizer.bos_token_id == tokenizer.encode("")[0]
    assert len(tokenizer.encode("a long text, longer than four tokens")) > 10, "it is not cut"
    with pytest.raises(RequestError, match="plain text"):
        tokenizer.apply_chat_template([])


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set x = messages.append(1) %}",
        "{{ open('/etc/passwd').read() }}",
        "{% if %}",
        "{{ messages[5].content.missing }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_that_refuses_or_misbehaves_is_an_error(folder: Path, template: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        configure(folder, chat_template=template).apply_chat_template([{"role": "user", "content": "x"}])


def test_surrogates_are_found_without_a_loop(folder: Path) -> None:
    """A loop over the characters of a long text takes some hundred times as long."""

    class Unbroken(str):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("a loop over the characters")

        __getitem__ = None  # type: ignore[assignment]

    tokenizer = Tokenizer.load(folder)
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode(Unbroken("\ud83d"))
    assert tokenizer.encode(Unbroken("a\u00e9")) == tokenizer.encode("a\u00e9")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and fork")
def test_encoding_starts_no_threads_and_continues_after_a_fork(folder: Path) -> None:
    code = (
        "import os, sys, pathlib; from draftwood.runtime.text.tokenizer import Tokenizer\n"
        "tokenizer, threads = Tokenizer.load(pathlib.Path(sys.argv[1])), len(os.listdir('/proc/self/task'))\n"
        "ids = tokenizer.encode('a text')\n"
        "assert len(os.listdir('/proc/self/task')) == threads\n"
        "if child := os.fork(): sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "os._exit(tokenizer.encode('a text') != ids)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_trying_a_tokenizer_ends_when_its_time_is_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[str]()
    monkeypatch.setattr(tokenizer_worker, "attempt", lambda backend, text: tried.append(text))
    tokenizer_worker.first_problem(Tokenizer.load(folder)._backend)
    most = len(tried)
    tried.clear()
    monkeypatch.setattr(tokenizer_worker, "PROBE_SECONDS", -1.0)
    assert tokenizer_worker.first_problem(Tokenizer.load(folder)._backend) is None
    assert 0 < len(tried) < most / 2
