"""SamplingParams: the sampling settings of one request, and their bounds."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from numbers import Integral, Real
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...models.errors import RequestError, known_names, shown
from .structured import StructuredOutput

LogitsProcessor = Callable[[Sequence[int], NDArray[np.float64]], NDArray[np.float64]]
REPETITION_PENALTIES = (1e-6, 1e6)  # beyond this range logits overflow
# Besides 0, which is greedy. In this range 1 / T, and a logit over T, are far from the limits of fp32.
TEMPERATURES = (1e-6, 100.0)
LARGEST_COUNT = 2**31 - 1  # tokens; a count is an int32 outside Python
LARGEST_SEED = 2**64 - 1
MAX_TEXTS = 1024  # of one prompt
MAX_STOPS, MAX_STOP_LENGTH = 128, 1000  # strings and characters; the text of every token is searched for stop strings
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024  # tokens of logit_bias
MAX_ALLOWED_TOKENS = 1 << 14
MAX_LOGPROBS = 20  # alternatives of a token
LARGEST_BIAS = 100.0
# The types that each annotation accepts (numpy's numbers included), and their name. Other settings are tuples.
ACCEPTED_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((Integral,), "a whole number"),
    "int | None": ((Integral, NoneType), "None or a whole number"),
    "float": ((Real,), "a number"),
    "bool": ((bool,), "True or False"),
    "StructuredOutput | None": ((StructuredOutput, NoneType), "None or a StructuredOutput"),
}


def as_float(value: Real) -> Real | float:
    """The nearest float. A number beyond all floats stays, and is refused as it is."""
    try:
        return float(value)
    except OverflowError:
        return value


# Numbers of numpy overflow where Python's do not, and a fraction divides no array.
PYTHON_NUMBERS: dict[str, Callable[[Any], Any]] = {"int": int, "int | None": int, "float": as_float}


@known_names(RequestError)
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings with vLLM's names and meanings. Raises RequestError for values out of range or of a wrong type.

    temperature: 0 is greedy, others are in TEMPERATURES. top_k 0 (or -1) and top_p 1 keep all tokens. min_p is relative
    to the most probable token. The repetition penalty (1 = none) counts prompt and output; presence and frequency
    penalties count only the output. A stop string or stop token ends the text and is not part of the text; the token
    that ended the text is the last of the output tokens. include_stop_str_in_output: the text keeps the stop string,
    and the text of a stop token. skip_special_tokens: special tokens have no text. logprobs: number of alternatives to
    report per token; None reports no log-probabilities. prompt_logprobs: the same for the tokens of the prompt; with it
    max_tokens may be 0. A logits processor gets the output tokens so far, the path included, and float64 logits [V]; it
    returns logits [V], which are copied. logit_bias: added to the logits of tokens, by token id, before the processors.
    allowed_token_ids: all other tokens are never chosen; None allows all. bad_words: texts that are never generated;
    one that is several tokens may begin, but its last token is not chosen. structured: the form of the text; the text
    ends where nothing can follow. n: texts of the same prompt, for `LLM.generate` and `LLM.chat`; with a seed they have
    this seed and the next ones. A setting that is a tuple also accepts a list, one value, and None.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    structured: StructuredOutput | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        for name, kind in ((field.name, str(field.type)) for field in fields(self)):
            value = getattr(self, name)
            if value is None and kind.endswith("| None"):
                continue
            if name == "logit_bias":
                object.__setattr__(self, name, biases(value))
                continue
            if kind not in ACCEPTED_TYPES:
                object.__setattr__(self, name, as_tuple(value))  # only here are frozen fields normalised
                continue
            types, expected = ACCEPTED_TYPES[kind]
            require(name, value, isinstance(value, types) and isinstance(value, bool) == (kind == "bool"), expected)
            if kind in PYTHON_NUMBERS:
                object.__setattr__(self, name, PYTHON_NUMBERS[kind](value))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        most_tokens = f"not more than {LARGEST_COUNT}"
        fewest = 1 if self.prompt_logprobs is None else 0
        expected = f"at least {fewest} and {most_tokens}"
        require("max_tokens", self.max_tokens, fewest <= self.max_tokens <= LARGEST_COUNT, expected)
        coldest, hottest = TEMPERATURES
        in_range = self.temperature == 0 or coldest <= self.temperature <= hottest
        require("temperature", self.temperature, in_range, f"0 (greedy) or between {coldest:g} and {hottest:g}")
        require("top_k", self.top_k, 0 <= self.top_k <= LARGEST_COUNT, f"0 (off) or positive and {most_tokens}")
        require("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        require("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        least, most = REPETITION_PENALTIES
        in_range = least <= self.repetition_penalty <= most
        require("repetition_penalty", self.repetition_penalty, in_range, f"between {least:g} and {most:g}")
        require("presence_penalty", self.presence_penalty, -2 <= self.presence_penalty <= 2, "in [-2, 2]")
        require("frequency_penalty", self.frequency_penalty, -2 <= self.frequency_penalty <= 2, "in [-2, 2]")
        require("min_tokens", self.min_tokens, 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens")
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            require(name, texts, len(texts) <= MAX_STOPS, f"at most {MAX_STOPS} strings")
            require(name, texts, all(isinstance(each, str) and each for each in texts), "non-empty strings")
            longest = max(map(len, texts), default=0)
            require(name, texts, longest <= MAX_STOP_LENGTH, f"strings of at most {MAX_STOP_LENGTH} characters")
        few = len(self.stop_token_ids) <= MAX_STOP_TOKENS
        require("stop_token_ids", self.stop_token_ids, few, f"at most {MAX_STOP_TOKENS} token ids")
        allowed = self.allowed_token_ids
        few = allowed is None or 0 < len(allowed) <= MAX_ALLOWED_TOKENS
        require("allowed_token_ids", allowed, few, f"None or between 1 and {MAX_ALLOWED_TOKENS} token ids")
        for name, expected in (("stop_token_ids", "token ids"), ("allowed_token_ids", "None or token ids")):
            given = getattr(self, name)
            tokens = None if given is None else tuple(map(token_id, given))
            require(name, given, min(tokens or (0,)) >= 0, expected)
            object.__setattr__(self, name, tokens)
        require("logits_processors", self.logits_processors, all(map(callable, self.logits_processors)), "functions")
        seeded = self.seed is None or 0 <= self.seed <= LARGEST_SEED
        require("seed", self.seed, seeded, f"None or an integer between 0 and {LARGEST_SEED}")
        free = self.structured is None or not self.ignore_eos
        require("ignore_eos", self.ignore_eos, free, "False with a structured output, which ends the text")
        require("n", self.n, 1 <= self.n <= MAX_TEXTS, f"between 1 and {MAX_TEXTS}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            require(name, count, count is None or 0 <= count <= MAX_LOGPROBS, f"None or in [0, {MAX_LOGPROBS}]")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def choices(self) -> list[SamplingParams]:
        """The settings of each of the `n` texts. Raises RequestError where a seed would be out of range."""
        last = 0 if self.seed is None else self.seed + self.n - 1
        require("seed", self.seed, last <= LARGEST_SEED, f"at most {LARGEST_SEED} for the last of {self.n} texts")
        return [self] if self.n == 1 else [self._choice(index) for index in range(self.n)]

    def _choice(self, index: int) -> SamplingParams:
        """The settings of one of the texts. They are copied, because checking long lists again would take long."""
        choice = copy(self)
        object.__setattr__(choice, "n", 1)
        object.__setattr__(choice, "seed", None if self.seed is None else self.seed + index)
        return choice

    @property
    def is_seeded(self) -> bool:
        """Whether the text is drawn and must be the same each time. Another plan of how much to propose draws another
        text of the same distribution, so the plans of such a text may depend on nothing but itself."""
        return self.seed is not None and not self.greedy


def as_tuple(value: object) -> tuple[Any, ...]:
    """A tuple of `value`, which is a sequence of values, one value, or None."""
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable) or getattr(value, "shape", None) == ():
        return (value,)  # arrays of no dimension say that they are iterable
    return tuple(value)


def biases(value: Any) -> dict[int, float]:
    """The biases of `logit_bias` with Python's numbers. Raises RequestError."""
    require("logit_bias", value, isinstance(value, Mapping), "None or a number by token id")
    require("logit_bias", value, len(value) <= MAX_BIASES, f"of at most {MAX_BIASES} tokens")
    found = {token_id(token): bias for token, bias in value.items()}
    require("logit_bias", value, all(token >= 0 for token in found), "a number by token id")
    for token, bias in found.items():
        value = as_float(bias) if isinstance(bias, Real) and not isinstance(bias, bool) else None
        in_range = isinstance(value, float) and abs(value) <= LARGEST_BIAS
        require(f"logit_bias of token {token}", bias, in_range, f"between -{LARGEST_BIAS:g} and {LARGEST_BIAS:g}")
    return {token: float(bias) for token, bias in found.items()}


def token_id(value: Any) -> int:
    """A token id of any library (numpy, torch) as a Python int; negative if `value` is no token id."""
    try:
        return -1 if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        return -1


def require(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise RequestError(f"{name} must be {expected}, not {shown(value)}")
