"""Tokenizer and chat template: as transformers reads the same folder; damage and mischief refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bundling import DEMO, optional
from checkpoints import write_tokenizer
from transformers import AutoTokenizer

from draftwood.models.errors import BundleError, RequestError
from draftwood.runtime.text.tokenizer import SETTINGS, TEMPLATE, TOKENIZER, Tokenizer, token_sequences

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
