"""Text cut anywhere, inside characters too, against bytes decoded by Python: prompts, outputs, chunks, stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import product, takewhile
from typing import NamedTuple

import pytest
from checkpoints import write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as TokenizerJson

from draftwood.runtime.decoding.chunk import TokenChunk
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.text.detokenizer import BegunStop, IncrementalDetokenizer, StopChecker
from draftwood.runtime.text.token_texts import Offsets, TokenTexts
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.runtime.text.writer import TextWriter

ADDED = "<é🙂>"  # an added token that is no special one, written as it stands
LETTERS = "ab é漢🙂\u0301"
texts = st.text(st.one_of(st.sampled_from(LETTERS), st.characters(codec="utf-8", exclude_characters="\0")), max_size=12)


class Cut(NamedTuple):
    """A tokenizer, and what each of its ids stands for. bytes_of: b"" for special tokens."""

    tokenizer: Tokenizer
    bytes_of: list[bytes]

    def ids(self, text: str) -> list[int]:
        """A text as one token per byte."""
        return [self.bytes_of.index(bytes([byte])) for byte in text.encode()]

    def bytes(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.bytes_of[token] for token in tokens)


def byte_letters() -> dict[str, int]:
    """The letter that a byte-level vocabulary writes for each byte: itself where it prints, else the next from U+0100.

    As published with GPT-2; written down again, for the tests' own account of what a token stands for.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + index): byte for index, byte in enumerate(others)}


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Cut:
    """Bytes, pairs of letters, halves of characters that tokens really have, and an added token."""
    backend = TokenizerJson.from_file(str(write_tokenizer(tmp_path_factory.mktemp("bytes"), 320) / "tokenizer.json"))
    letters = {byte: letter for letter, byte in byte_letters().items()}
    halves = ["🙂".encode()[2:] + "🙂".encode()[:2], b" \xf0\x9f", "漢".encode()[1:] + b"a", "é".encode()]
    vocabulary = backend.get_vocab(with_added_tokens=False)
    for half in halves:
        vocabulary["".join(letters[byte] for byte in half)] = len(vocabulary)
    backend.model = models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>")
    backend.add_tokens([AddedToken(ADDED, normalized=False)])
    tokenizer = Tokenizer(backend)
    texts_of = {index: text for text, index in tokenizer.vocabulary().items()}
    meaning = byte_letters()
    entries = [texts_of[index] for index in range(tokenizer.vocab_size)]
    return Cut(
        tokenizer,
        [
            b"" if index in tokenizer.special_token_ids
            # The library maps the letters of added tokens back to bytes, too, unless one of them stands for none.
            else ADDED.encode() if text == ADDED
            else bytes(meaning[letter] for letter in text)
            for index, text in enumerate(entries)
        ],
    )  # fmt: skip


@pytest.fixture(scope="module")
def byte_fallback() -> Cut:
    """As LLaMA 2 has them: pieces with "▁" for a space, a token for each byte, and an added one."""
    pieces = ["▁", "a", "b", "ab", "▁a", "é", "▁漢", "\u0301"]
    vocabulary = {entry: index for index, entry in enumerate(["<unk>", "<s>", "</s>"])}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary |= {piece: 259 + index for index, piece in enumerate(pieces)}
    backend = TokenizerJson(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    backend.add_tokens([AddedToken(ADDED, normalized=False)])
    replace = decoders.Replace("▁", " ")
    parts = [replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    meanings = [bytes([byte]) for byte in range(256)] + [piece.replace("▁", " ").encode() for piece in pieces]
    return Cut(Tokenizer(backend), [b"", b"", b"", *meanings, ADDED.encode()])


def streamed(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    deltas = [detokenizer.push([token])[0] for token in tokens]
    return "".join(deltas) + detokenizer.finish()


def added_text(before: bytes, after: bytes, final: bool = True) -> str:
    """What bytes add to the text of earlier ones. final: bytes that are not yet a character count as none."""
    prompt = before.decode(errors="replace")
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(before + after, final)
    return text[len(list(takewhile(lambda pair: pair[0] == pair[1], zip(prompt, text, strict=False)))) :]


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@settings(max_examples=100)
@given(data=st.data())
def test_any_token_ids_after_any_prompt(name: str, byte_level: Cut, byte_fallback: Cut, data: st.DataObject) -> None:
    """Prompts that begin, stop or lie inside characters, bytes that never become one, special tokens in between."""
    cut = {"byte_level": byte_level, "byte_fallback": byte_fallback}[name]
    size = cut.tokenizer.vocab_size
    ids = st.one_of(st.sampled_from([*cut.ids("🙂漢é a"), *range(size - 9, size), 1]), st.integers(0, size - 1))
    prompt, tokens = data.draw(st.lists(ids, max_size=15)), data.draw(st.lists(ids, max_size=40))
    prompt = [cut.tokenizer.vocabulary()["a"], *prompt]  # what begins with a space may lose it
    assert streamed(cut.tokenizer, prompt, tokens) == added_text(cut.bytes(prompt), cut.bytes(tokens))


@settings(max_examples=80)
@given(data=st.data())
def test_bad_bytes_spoil_none_of_their_neighbours(byte_fallback: Cut, data: st.DataObject) -> None:
    """The library decodes a run of byte tokens whole and makes all of it U+FFFD for one bad byte."""
    good, bad = st.text("é漢🙂ab ", max_size=4), st.integers(1, 3).map(lambda length: "🙂".encode()[:length])
    tokens, expected = [], ""
    for text, broken in data.draw(st.lists(st.tuples(good, bad), max_size=5)):
        tokens += [*byte_fallback.ids(text), *(3 + byte for byte in broken), byte_fallback.bytes_of.index(b"ab")]
        expected += text + "\ufffdab"
    assert streamed(byte_fallback.tokenizer, byte_fallback.ids("x漢"), tokens) == expected


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.special_token_ids = tokenizer, tokenizer.special_token_ids
        self.byte_values, self.is_byte_level = tokenizer.byte_values, tokenizer.is_byte_level
        self.piece = tokenizer.piece
        self.most = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.most = max(self.most, len(token_ids))
        return self._tokenizer.decode(token_ids)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("unit", [b"\x80", b"\xf0", "\ufffd".encode(), b"\xf0\x9f", "🙂".encode()])
def test_no_token_costs_more_than_another(name: str, unit: bytes, request: pytest.FixtureRequest) -> None:
    """Neither a prompt nor an output of a thousand tokens that never become a character is decoded again and again."""
    cut: Cut = request.getfixturevalue(name)
    tokens = [cut.bytes_of.index(bytes([byte])) for byte in unit * 1000]
    tokenizer = Counting(cut.tokenizer)
    detokenizer = IncrementalDetokenizer(tokenizer, [*cut.ids("x"), *tokens])  # type: ignore[arg-type]
    deltas = detokenizer.push(tokens)
    assert len("".join(deltas)) >= 900 and tokenizer.most < 60
    before, after = b"x" + unit * 1000, unit * 1000
    assert "".join(deltas) + detokenizer.finish() == added_text(before, after)


@settings(max_examples=150)
@given(
    prompt=texts,
    text=st.text("aé漢🙂", max_size=12),
    stop=st.lists(st.text("aé漢🙂", min_size=1, max_size=3), max_size=2),
    data=st.data(),
)
def test_stop_strings_inside_characters_and_chunks(
    byte_level: Cut, prompt: str, text: str, stop: list[str], data: st.DataObject
) -> None:
    """The text ends in front of the stop string, the tokens with the one that completed it, and so does their count."""
    ids = byte_level.ids(prompt + text)
    end = data.draw(st.integers(0, len(ids)))
    before, tokens = ids[:end], ids[end:]
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=len(tokens), max_size=len(tokens)))
    kept, expected = len(tokens), added_text(byte_level.bytes(before), byte_level.bytes(tokens))
    for count in range(1, len(tokens) + 1):
        seen = added_text(byte_level.bytes(before), byte_level.bytes(tokens[:count]), final=False)
        if any(item in seen for item in stop):
            kept, expected = count, seen[: min(seen.find(item) for item in stop if item in seen)]
            break
    writer = TextWriter(byte_level.tokenizer, before, SamplingParams(stop=tuple(stop)))
    stats, written, given_out, pieces = SpecDecodeStats(), "", list[int](), ""
    while tokens:
        size = sizes.pop()
        part, tokens = tokens[:size], tokens[size:]
        stats.num_tokens += len(part)
        chunk = writer.write(TokenChunk(part, 0, [], None if tokens else "length"), stats)
        written, given_out = written + chunk.text, given_out + chunk.token_ids
        pieces += "".join(piece.text for piece in chunk.pieces)
        assert "\ufffd" not in chunk.text or "\ufffd" in expected
        if chunk.finish_reason is not None:
            break
    assert (written, pieces, given_out, stats.num_tokens) == (expected, expected, ids[end : end + kept], kept)


def test_each_piece_knows_whether_the_draft_proposed_it(byte_level: Cut) -> None:
    """Also one that was held back in an earlier chunk, and what is left of a character when nothing follows."""
    writer, stats = TextWriter(byte_level.tokenizer, [], SamplingParams(stop=("cd!",))), SpecDecodeStats()
    drafted = []
    for text, num_drafted, reason in (("abc", 3, None), ("de", 1, None), ("fg", 0, None)):
        drafted += writer.write(TokenChunk(byte_level.ids(text), num_drafted, [], reason), stats).pieces
    half = TokenChunk(byte_level.ids("é")[:1], 1, [], "length")
    drafted += writer.write(half, stats).pieces
    assert drafted == [*((letter, True) for letter in "abcd"), *((letter, False) for letter in "efg\ufffd")]


def test_drafted_tokens_after_a_stop_are_no_part_of_the_text(byte_level: Cut) -> None:
    writer, stats = TextWriter(byte_level.tokenizer, [], SamplingParams(stop=("e",))), SpecDecodeStats()
    counts = []
    for text, accepted, reason in (("abc", 2, None), ("defgh", 4, "length")):
        stats.record_round(6, accepted)
        chunk = writer.write(TokenChunk(byte_level.ids(text), accepted, [], reason), stats)
        counts.append((len(chunk.token_ids), chunk.num_drafted, chunk.num_proposed))
    assert counts == [(3, 2, 6), (2, 2, 6)] and stats.num_accepted_tokens == 6


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, "a"), (1, "a"), (2, "aba"), (3, "aba"), (4, "abab")])
def test_a_stop_string_ends_a_text_after_min_tokens(byte_level: Cut, min_tokens: int, expected: str) -> None:
    params = SamplingParams(stop=("b",), min_tokens=min_tokens, max_tokens=4)
    stats = SpecDecodeStats(num_tokens=4)
    chunk = TextWriter(byte_level.tokenizer, [], params).write(
        TokenChunk(byte_level.ids("abab"), 4, [], "length"), stats
    )
    stopped = min_tokens < 4
    kept = len(expected) + stopped
    assert (chunk.text, chunk.finish_reason) == (expected, "stop" if stopped else "length")
    assert len(chunk.token_ids) == stats.num_tokens == kept


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_every_token_has_its_bytes_and_a_blank_is_one(name: str, request: pytest.FixtureRequest) -> None:
    cut: Cut = request.getfixturevalue(name)
    known = TokenTexts(cut.tokenizer)
    for token, meant in enumerate(cut.bytes_of):
        if token not in cut.tokenizer.special_token_ids:
            assert bytes(known.bytes(token)) == meant
            text = meant.decode(errors="replace")
            assert known.text(token) == text or "\ufffd" in text
    assert known.text(1) == "<s>" and bytes(known.bytes(1)) == b"<s>"


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@settings(max_examples=100)
@given(text=texts, more=texts, data=st.data())
def test_tokens_begin_where_the_text_before_them_ends(
    name: str, byte_level: Cut, byte_fallback: Cut, text: str, more: str, data: st.DataObject
) -> None:
    """With an echo the prompt comes first. Special tokens are in neither text, unless they are shown after it."""
    cut = {"byte_level": byte_level, "byte_fallback": byte_fallback}[name]
    known, ids = TokenTexts(cut.tokenizer), cut.ids("a" + text + more)
    split = data.draw(st.integers(1, len(ids)))
    prompt, tokens = ids[:split], [*ids[split:], 2]
    skips = data.draw(st.booleans())
    detokenizer = IncrementalDetokenizer(cut.tokenizer, prompt, skips)
    lengths = [len(delta) for delta in detokenizer.push(tokens)]
    expected = [sum(lengths[:index]) for index in range(len(tokens))]
    assert list(Offsets(known, prompt, None, skips).next(tokens)) == expected
    echo = ("a" + text + more).encode()[:split].decode(errors="ignore")
    begun = [1, *prompt] if data.draw(st.booleans()) else prompt
    found = list(Offsets(known, begun, echo, skips).next([*begun, *tokens]))
    inside = [
        len(("a" + text).encode()[:index].decode(errors="ignore")) for index in range(min(split, len("a" + text)))
    ]
    assert found[: len(begun) - len(prompt)] == [0] * (len(begun) - len(prompt))
    assert found[len(begun) - len(prompt) :][: len(inside)] == inside
    assert found[-len(tokens) :] == [len(echo) + place for place in expected]


def test_an_echo_lacks_the_blank_that_an_encoder_adds_and_has_names_that_were_written(byte_fallback: Cut) -> None:
    known, vocabulary = TokenTexts(byte_fallback.tokenizer), byte_fallback.tokenizer.vocabulary()
    tokens = [1, vocabulary["▁a"], vocabulary["▁"], vocabulary["b"], 2, vocabulary["▁a"]]
    assert list(Offsets(known, tokens, "a b</s> a", True).next(tokens)) == [0, 0, 1, 2, 3, 7]
    assert list(Offsets(known, tokens, "a b a", True).next(tokens)) == [0, 0, 1, 2, 3, 3]
    assert list(Offsets(known, tokens[:2], "<s>a", True).next(tokens[:2])) == [0, 3]


def test_a_letter_of_a_text_that_nearly_stops_takes_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop string that repeats itself, and a text that is one of its beginnings again and again: the steps are as
    many as letters, not their product."""
    steps = 0
    border = BegunStop._border

    def counted(begun: BegunStop, size: int) -> int:
        nonlocal steps
        steps += 1
        return border(begun, size)

    monkeypatch.setattr(BegunStop, "_border", counted)
    checker = StopChecker(["a" * 999 + "b", "a" * 500 + "c"])
    text = "a" * 3000
    assert "".join(checker.push(letter).text for letter in text) + checker.finish() == text
    assert steps < 2 * 2 * len(text)


def words(longest: int) -> list[str]:
    return ["".join(letters) for length in range(1, longest + 1) for letters in product("ab", repeat=length)]


@given(data=st.data())
def test_special_tokens_that_are_not_skipped_stand_between_the_texts_around_them(
    byte_level: Cut, data: st.DataObject
) -> None:
    """A character never spans a special token."""
    tokenizer = byte_level.tokenizer
    parts = data.draw(st.lists(st.lists(st.integers(3, tokenizer.vocab_size - 1), max_size=6), min_size=1, max_size=4))
    name = tokenizer.decode([2], skip_special_tokens=False)
    assert name and 2 in tokenizer.special_token_ids
    tokens = [token for part in parts for token in (*part, 2)]
    before = tokenizer.encode("x")
    shown = IncrementalDetokenizer(tokenizer, before, skip_special_tokens=False)
    written = "".join(shown.push(tokens)) + shown.finish()
    begin = len(tokenizer.decode(before))
    assert written == "".join(tokenizer.decode(before + part)[begin:] + name for part in parts)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("others", [[], ["bab"], ["aab", "b"]])
def test_the_first_stop_string_ends_a_text(keeps: bool, others: list[str]) -> None:
    """Every text of six letters with every stop string of up to four, however the text is cut into pieces: of those
    that are complete at the end of a piece, the one that begins first."""
    for text, stop in product([word for word in words(6) if len(word) == 6], words(4)):
        for size in (1, 2, 6):
            checker, written, end = StopChecker([stop, *others], keeps), "", 0
            stopped: str | None = None
            while stopped is None and end < 6:
                end += size
                delta, stopped = checker.push(text[end - size : end])
                written += delta
            found = [(text[:end].find(each), each) for each in (stop, *others) if each in text[:end]]
            assert stopped == (min(found)[1] if found else None)
            begin, first = min((begin, begin + len(each)) for begin, each in found) if found else (6, 6)
            assert (written if stopped else written + checker.finish()) == text[: first if keeps else begin]
