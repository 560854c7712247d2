"""The text from which a draft learns: what the target writes, with which distributions, and what survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_checkpoint
from disk import largest_file
from distilling import CHATML, COLUMNS, LIMITS, distilled, options, write_target, written
from hypothesis import given
from hypothesis import strategies as st
from steps import quiet

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.distillation.batches import pack, training_batches
from draftwood.builder.distillation.conversation import Layout, layout_of
from draftwood.builder.distillation.state import (
    ANSWER,
    GIVEN,
    QUESTION,
    TEXTS_PER_FILE,
    TextStore,
    WrittenText,
    is_held_out,
    locked,
)
from draftwood.builder.distillation.target import TextTarget, TopSelector, compile_target
from draftwood.builder.distillation.text import LOOPS, TextWriter, fingerprint, is_repeating
from draftwood.models.errors import ConfigError
from draftwood.runtime.engines.passes import causal_batch
from draftwood.runtime.sampling.softmax import NumpySoftmax
from draftwood.runtime.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def state(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder with text only."""
    folder = tmp_path_factory.mktemp("state")
    result = distilled(options(target, folder / "draft", minutes=3, text_minutes=3, state=folder / "state"))
    assert not result.figures and not (folder / "draft").exists()
    return folder / "state"


def texts_of(state: Path) -> list[WrittenText]:
    return list(TextStore(state / "texts", 320, COLUMNS).read())


# What the target writes


def test_the_parts_of_a_template_are_those_of_a_whole_conversation(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_target(tmp_path / "chat", CHATML))
    with tokenizer:
        layout = layout_of(tokenizer)
        messages = [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "six"},
        ]
        whole = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
        one, two, six = (tokenizer.encode(text, add_special_tokens=False) for text in ("one", "two", "six"))
    assert layout.between is not None
    after = layout.after
    assert whole == [*layout.before, *one, *after, *two, *layout.between, *six, *after]


def test_a_model_without_a_template_begins_with_its_first_token_or_with_questions(target: Path, tmp_path: Path) -> None:
    with Tokenizer.load(target) as base, Tokenizer.load(write_target(tmp_path / "silent", add_bos=False)) as silent:
        assert layout_of(base) == Layout([1], [], None) and layout_of(silent, asked=True) == Layout([], [], None)
        with pytest.raises(ConfigError, match="--prompts"):
            layout_of(silent)
    deaf = write_target(tmp_path / "deaf", "{{ 'always the same' }}")
    with Tokenizer.load(deaf) as tokenizer, pytest.raises(ConfigError, match="copy a question"):
        layout_of(tokenizer)


def test_recorded_distributions_are_the_engines_own(state: Path, target: Path) -> None:
    """Every place of a text read again in one pass gives the recorded probabilities."""
    checkpoint = Checkpoint(target)
    bundle = compile_target(checkpoint, state / "target", quiet)
    texts = texts_of(state)
    assert len(texts) > 10
    with TextTarget(bundle, 2, 1) as engine:
        select = TopSelector(NumpySoftmax(), 320, COLUMNS).select
        for text in texts[:4]:
            cache = engine.pool.new_cache()
            for place, token in enumerate(text.tokens[:-1].tolist()):
                batch = causal_batch(engine.pool.spec, [token], place)
                output = engine.pool.score(batch, cache)
                expected = select(output.logits[0])
                cache.commit([0])
                if text.kinds[place + 1] == GIVEN:
                    continue
                assert text.ids[place + 1].tolist() == expected.ids.tolist()
                np.testing.assert_allclose(text.logprobs[place + 1], expected.logprobs, atol=0.01)
                assert abs(float(text.tails[place + 1]) - expected.tail) < 1e-3
            cache.close()


def test_texts_have_their_parts_in_order_and_within_bounds(state: Path) -> None:
    texts = texts_of(state)
    assert {int(text.kinds.max()) for text in texts} == {ANSWER, ANSWER + 1, ANSWER + 2}
    for text in texts:
        assert text.kinds[0] == GIVEN and (np.diff(text.kinds.astype(int)) >= 0).all()
        assert (text.kinds == QUESTION).sum() == LIMITS.opening
        assert 1 <= (text.kinds >= ANSWER).sum() <= LIMITS.answer
        opening = text.tokens[text.kinds == QUESTION]
        assert text.question == fingerprint(opening.tolist())
        if text.kinds.max() == ANSWER:  # greedy
            own = text.kinds == ANSWER
            assert (text.tokens[own] == text.ids[own, 0]).all()
    assert len({text.number for text in texts}) == len({text.question for text in texts}) == len(texts)


def test_an_instruct_model_answers_the_users_questions(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "chat", CHATML)
    asked = {"questions": ("how?", ":why not?"), "state": tmp_path}  # the template ends with a colon before them
    given = options(folder, tmp_path / "draft", minutes=2, text_minutes=2, **asked)
    distilled(given)
    texts = texts_of(tmp_path)
    with Tokenizer.load(folder) as tokenizer:
        prompts = {
            question: tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": question}]), False)
            for question in given.questions
        }
    beginnings = {tuple(text.tokens[text.kinds == GIVEN].tolist()) for text in texts}
    assert beginnings == {tuple(prompt) for prompt in prompts.values()}
    kinds = {text.number: int(text.kinds.max()) - ANSWER for text in texts}
    assert [kinds[number] for number in range(4)] == [0, 1, 1, 2]  # each question has another temperature
    greedy = [text.tokens.tolist() for text in texts if text.kinds.max() == ANSWER]
    assert len(greedy) == len({tuple(text) for text in greedy}) <= len(prompts)  # written once for each question


def test_questions_of_which_none_is_held_out_are_refused_before_text_is_written(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target")
    with Tokenizer.load(folder) as tokenizer:
        asked = {text: tokenizer.encode(text, add_special_tokens=False) for text in map(str, range(200))}
    trained = tuple(text for text, ids in asked.items() if not is_held_out(fingerprint(ids)))
    assert 2 < len(trained) < 200
    given = options(folder, tmp_path / "draft", minutes=3, text_minutes=2, questions=trained[:2])
    with pytest.raises(ConfigError, match="none of the 2 --prompts is held out"):
        distilled(given)
    assert not texts_of(given.folder)
    other = next(text for text in asked if text not in trained)
    distilled(replace(given, questions=(*given.questions, other)))
    assert texts_of(given.folder)


@given(st.lists(st.integers(0, 5), max_size=20), st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_repetition_is_found_at_the_end(before: list[int], part: list[int]) -> None:
    assert is_repeating(before + LOOPS * part) and not is_repeating([*part, *range(6, 300)])


# What is kept of a distribution


@given(st.integers(0, 2**32), st.integers(2, 90), st.floats(0.1, 8))
def test_selected_tokens_and_tail_are_a_distribution(seed: int, size: int, spread: float) -> None:
    logits = (np.random.default_rng(seed).normal(0, spread, size)).astype(np.float32)
    top = TopSelector(NumpySoftmax(), size, COLUMNS).select(logits)
    exact = np.exp(logits.astype(np.float64) - logits.max())
    exact /= exact.sum()
    known = np.isfinite(top.logprobs)
    np.testing.assert_allclose(np.exp(top.logprobs[known].astype(float)), exact[top.ids[known]], rtol=0.01, atol=1e-6)
    assert abs(exact[top.ids[known]].sum() + top.tail - 1) < 1e-6
    assert (np.diff(top.logprobs[known].astype(float)) <= 0).all() and logits[top.ids[0]] == logits.max()


# What survives


def test_texts_are_read_as_they_were_stored(tmp_path: Path) -> None:
    store = TextStore(tmp_path, 320, COLUMNS)
    texts = [written(number, 7 * number) for number in range(TEXTS_PER_FILE + 3)]
    for text in texts:
        store.add(text)
    assert len(store.files()) == 2 and store.num_tokens() == sum(len(text.tokens) for text in texts)
    for stored, text in zip(store.read(), texts, strict=True):
        assert (stored.number, stored.question) == (text.number, text.question)
        for name in ("tokens", "kinds", "ids", "logprobs", "tails"):
            assert np.array_equal(getattr(stored, name), getattr(text, name))


def test_a_killed_writer_loses_nothing_that_was_finished(target: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; import distilling\n"
        "from draftwood.builder.distillation.text import TextCounts\n"
        "def told(counts, seconds):\n"
        "    print(counts.texts, flush=True)\n"
        "distilling.distilled(distilling.options(Path(sys.argv[1]), Path(sys.argv[2]), minutes=9000,"
        " text_minutes=9000), text=told)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", code, str(target), str(tmp_path / "draft")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        told = [int(next(process.stdout)) for _ in range(40)]
        process.send_signal(signal.SIGKILL)
        process.wait()
        told += [int(line) for line in process.stdout.read().split()]
    state = tmp_path / "draft.state"
    bundle, store = (
        compile_target(Checkpoint(target), state / "target", quiet),
        TextStore(state / "texts", 320, COLUMNS),
    )
    with Tokenizer.load(state / "target") as tokenizer, TextTarget(bundle, 2, 1) as engine:
        store = TextStore(state / "texts", 320, COLUMNS)
        writer = TextWriter(engine, layout_of(tokenizer), store, requests=2, limits=LIMITS)
        assert next(writer.write(lambda: False)).texts == 1
    before = texts_of(state)
    assert len(before) >= told[-1]
    (state / "text.json").write_text('{"seconds": 0}')
    distilled(options(target, tmp_path / "draft", minutes=3, text_minutes=3))
    after = texts_of(state)
    assert len(after) > len(before) and len({text.number for text in after}) == len(after)
    assert {text.question for text in before} <= {text.question for text in after}


def test_a_full_disk_leaves_the_texts_that_were_stored(tmp_path: Path) -> None:
    store = TextStore(tmp_path, 320, COLUMNS)
    store.add(written(0, 5))
    size = store.files()[0].stat().st_size
    with largest_file(size + 100), pytest.raises(ConfigError, match="free some space"):
        store.add(written(1, 6))
    again = TextStore(tmp_path, 320, COLUMNS)
    assert [text.number for text in again.read()] == [0]
    again.add(written(2, 8))
    assert [text.number for text in again.read()] == [0, 2]


def test_a_damaged_file_and_one_of_a_larger_vocabulary_are_refused(tmp_path: Path) -> None:
    store = TextStore(tmp_path, 320, COLUMNS)
    store.add(written(0, 5))
    with pytest.raises(ConfigError, match="not below the vocabulary size 200"):
        list(TextStore(tmp_path, 200, COLUMNS).read())
    file = store.files()[0]
    whole = file.read_bytes()
    cut, renamed, no_number = whole[: len(whole) // 2], whole.replace(b'"kinds"', b'"kinks"'), whole[:-4] + b"\xff" * 4
    for damaged in (cut, b"", renamed, no_number):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match="holds no texts of this target"):
            list(store.read())


def test_held_out_questions_are_never_trained_on(tmp_path: Path) -> None:
    """Each text has its question's number as all of its tokens."""
    store = TextStore(tmp_path, 320, COLUMNS)
    for number in range(3, 150):
        text = written(number, number % 70)
        store.add(text._replace(tokens=np.full_like(text.tokens, 100 + number % 70)))
    seen: set[int] = set()
    batches = training_batches(store, 2, 32, 0)
    for _ in range(60):
        seen |= set(next(batches).tokens.flatten().tolist())
    assert seen == {100 + question for question in range(70) if question % 32}


@pytest.mark.parametrize("fill", [False, True])
def test_no_batch_is_of_a_prompt_alone(fill: bool) -> None:
    """Of a text of 21 tokens the last 4 are an answer; sequences have 4 places."""
    text = written(2, 7, 21)
    kinds = np.where(np.arange(21) < 17, GIVEN, ANSWER).astype(np.uint8)
    batches = list(pack([text._replace(kinds=kinds)] * 3, 1, 4, fill))
    answers = [token for batch in batches for token in batch.written[batch.scored].tolist()]
    assert answers == 3 * text.tokens[17:].tolist() and all(batch.scored.any() for batch in batches)


def test_what_cannot_be_written_is_refused(state: Path, target: Path, tmp_path: Path) -> None:
    with locked(state / "texts"), pytest.raises(ConfigError, match="another process"):
        distilled(options(target, state / "draft", minutes=30, text_minutes=30, state=state))
    with pytest.raises(ConfigError, match="shorten the longest"):
        distilled(options(target, tmp_path / "draft", questions=("x " * 4000,)))
    (tmp_path / "target").mkdir()
    with pytest.raises(ConfigError, match="is no bundle, or one of an older release: remove it"):
        compile_target(Checkpoint(target), tmp_path / "target", quiet)
    other = write_target(tmp_path / "other", CHATML)
    write_checkpoint(other, "gqa", seed=9, vocab_size=320, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="belongs to another target"):
        compile_target(Checkpoint(other), state / "target", quiet)
    for text_minutes in (0, 3):  # nothing is left to write, and the texts are another's
        with pytest.raises(ConfigError, match="belongs to another target"):
            distilled(options(other, tmp_path / "draft", minutes=9, text_minutes=text_minutes, state=state))
