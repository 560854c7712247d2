"""The files of a state folder: the texts that the target wrote, with its distributions, and the time spent on them.

A file is replaced by a rename. A file of texts is replaced whenever a text is added, until it holds TEXTS_PER_FILE
texts. A process that is killed therefore loses only the texts that it had not finished. The states of a file's texts
are appended to a file beside it before the text is added: float16, one row for each token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ...models.errors import ConfigError
from ...models.plain_files import read_object
from ...runtime.bundle.staging import try_lock

TEXTS_PER_FILE = 64
MAX_BYTES = 1 << 30  # of a file; one of TEXTS_PER_FILE texts has a few megabytes
HELD_OUT_SHARE = 32  # one of so many questions is held out
NAMES = ("numbers", "questions", "ends", "tokens", "kinds", "ids", "logprobs", "tails")

# What a token of a text is: given by the chat template or by the user, or written by the target at a temperature.
GIVEN, QUESTION, ANSWER = 0, 1, 2  # ANSWER + i: an answer at the temperature ANSWER_TEMPERATURES[i]
ANSWER_TEMPERATURES = (0.0, 0.7, 1.0)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for the only process that writes to it. Raises ConfigError when another process does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}; choose another --state") from error
    lock = try_lock(folder)
    if lock is None and os.name == "posix":
        raise ConfigError(f"another process works in {folder}: wait for it, or choose another --state")
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Replace a file. Raises ConfigError, see `replace_file`."""
    write_text(file, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_text(file: Path, text: str) -> None:
    """Replace a file. Raises ConfigError, see `replace_file`."""
    replace_file(file, lambda partial: partial.write_text(text, encoding="utf-8"))


def replace_file(file: Path, write: Callable[[Path], object]) -> None:
    """Replace a file by what `write` writes to another path. Raises ConfigError when there is no room; the older file
    is then kept."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        write(partial)
        os.replace(partial, file)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise not_written(file, error) from error


def not_written(file: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{file} cannot be written ({error}): free some space and run the same command again; what was written before "
        "is kept"
    )


def read_seconds(file: Path) -> float:
    """The seconds that earlier runs spent on text; 0 where there is no such file. Raises ConfigError."""
    if not file.is_file():
        return 0.0
    try:
        seconds = read_object(file, own=True).get("seconds")
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 <= seconds <= 1e10:
            raise ValueError(f"its seconds are {seconds!r}")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not readable ({error}): remove it; the texts beside it stay usable") from error
    return float(seconds)


class WrittenText(NamedTuple):
    """One conversation of T tokens. `ids`, `logprobs` and `tails` hold nothing of use where the token is GIVEN."""

    number: int  # unique in a state folder
    question: int  # a hash of the first question
    tokens: NDArray[np.uint32]  # [T]
    kinds: NDArray[np.uint8]  # [T], see above
    ids: NDArray[np.unsignedinteger[Any]]  # [T, K], the most probable tokens at each place, best first
    logprobs: NDArray[np.float16]  # [T, K], natural logarithms at temperature 1; -inf where there are fewer
    tails: NDArray[np.float16]  # [T], the probability of all other tokens
    states: NDArray[np.float16]  # [T, S], the target's rows at its taps; the last one is zeros. S is 0 without taps

    @property
    def is_held_out(self) -> bool:
        """Whether the text is kept from training. Texts with the same first question are on the same side."""
        return is_held_out(self.question)


def is_held_out(question: int) -> bool:
    """Whether texts with a first question of this hash are kept from training."""
    return question % HELD_OUT_SHARE == 0


class TextStore:
    """All texts of a state folder. One process at a time adds texts; others may read meanwhile."""

    def __init__(self, folder: Path, vocab_size: int, columns: int, state_size: int = 0) -> None:
        """columns: K. state_size: S. Raises ConfigError for a folder that cannot be written."""
        self._folder = folder
        self._sizes = vocab_size, columns, state_size
        self._pending: list[WrittenText] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write {folder}: {error.strerror}; choose another --state") from error
        files = self.files()
        self._file_number = 1 + max((number_of(file) for file in files), default=-1)

    def files(self) -> list[Path]:
        """Every file, in the order in which they were begun."""
        return sorted(self._folder.glob("texts-*.safetensors"), key=number_of)

    def add(self, text: WrittenText) -> None:
        """Store a text. Raises ConfigError when there is no room; what was stored before is kept."""
        file = self._folder / f"texts-{self._file_number:06}.safetensors"
        if text.states.size:
            try:
                with states_beside(file).open("ab" if self._pending else "wb") as opened:
                    opened.write(text.states.tobytes())
            except OSError as error:
                raise not_written(states_beside(file), error) from error
        self._pending.append(text._replace(states=text.states[:, :0].copy()))
        write_texts(file, self._pending)
        if len(self._pending) == TEXTS_PER_FILE:
            self._pending = []
            self._file_number += 1

    def num_tokens(self) -> int:
        """The stored tokens, by the headers of the files."""
        count = 0
        for file in self.files():
            try:
                with safe_open(file, framework="numpy") as opened:
                    count += int(opened.get_slice("tokens").get_shape()[0])
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{file} holds no texts ({error}): remove it") from error
        return count

    def read(self, files: Sequence[Path] | None = None) -> Iterator[WrittenText]:
        """The texts of these files, or of all. Raises ConfigError for a damaged file."""
        for file in self.files() if files is None else files:
            yield from read_texts(file, *self._sizes)


def number_of(file: Path) -> int:
    """The number in the name of a file."""
    digits = file.stem.removeprefix("texts-")
    return int(digits) if digits.isdecimal() else -1


def write_texts(file: Path, texts: Sequence[WrittenText]) -> None:
    """Replace a file by one with these texts. Raises ConfigError."""
    arrays: dict[str, NDArray[Any]] = {
        "numbers": np.array([text.number for text in texts], np.int64),
        "questions": np.array([text.question for text in texts], np.uint64),
        "ends": np.cumsum([len(text.tokens) for text in texts], dtype=np.int64),
    }
    for name in NAMES[3:]:
        arrays[name] = np.concatenate([getattr(text, name) for text in texts])
    replace_file(file, partial(save_file, arrays))


def states_beside(file: Path) -> Path:
    """The file with the states of a file of texts."""
    return file.with_suffix(".states")


def read_texts(file: Path, vocab_size: int, columns: int, state_size: int) -> Iterator[WrittenText]:
    """The texts of one file; their states stay on the disk until they are read. Raises ConfigError for a file that does
    not hold texts of this vocabulary, and without as many states."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        with safe_open(file, framework="numpy") as opened:
            arrays = {name: opened.get_tensor(name) for name in NAMES}
        check_arrays(arrays, vocab_size, columns)
        states: NDArray[np.float16] = np.zeros((len(arrays["tokens"]), 0), np.float16)
        if state_size and len(states):
            states = np.memmap(states_beside(file), np.float16, "r", shape=(len(states), state_size))
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"{file} holds no texts of this target ({error}): remove it, or choose another --state"
        ) from error
    every = *(arrays[name] for name in NAMES[3:]), states
    begin = 0
    for number, question, end in zip(
        arrays["numbers"].tolist(), arrays["questions"].tolist(), arrays["ends"].tolist(), strict=True
    ):
        yield WrittenText(number, question, *(each[begin:end] for each in every))
        begin = end


def check_arrays(arrays: dict[str, NDArray[Any]], vocab_size: int, columns: int) -> None:
    """Raises ValueError unless shapes, dtypes and ranges are those of `write_texts`."""
    _, _, ends, tokens, kinds, ids, logprobs, tails = (arrays[name] for name in NAMES)
    texts, total = (len(ends),), (len(tokens) if tokens.ndim == 1 else -1,)
    shapes = (texts, texts, texts, total, total, (*total, columns), (*total, columns), total)
    types = ("int64", "uint64", "int64", "uint32", "uint8", np.dtype(id_type(vocab_size)), "float16", "float16")
    for name, shape, dtype in zip(NAMES, shapes, types, strict=True):
        found = arrays[name]
        if found.shape != shape or found.dtype != dtype:
            raise ValueError(f"{name} is {found.dtype} {found.shape} instead of {dtype} {shape}")
    if len(ends) and (np.diff(ends, prepend=0).min() < 1 or ends[-1] != len(tokens)):
        raise ValueError("the ends of its texts do not ascend to the number of its tokens")
    if len(tokens) and max(int(tokens.max()), int(ids.max())) >= vocab_size:
        raise ValueError(f"a token is not below the vocabulary size {vocab_size}")
    if len(tokens) and int(kinds.max()) >= ANSWER + len(ANSWER_TEMPERATURES):
        raise ValueError(f"a token is of the unknown kind {int(kinds.max())}")
    if np.isnan(logprobs).any() or not (logprobs <= 0).all() or not ((tails >= 0) & (tails <= 1)).all():
        raise ValueError("a probability is not between 0 and 1")


def id_type(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """The smallest type for the ids of a vocabulary."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32
