"""Grammars: compiles the structured outputs of requests with llguidance, and keeps the latest ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from ...models.errors import RequestError
from ..engines.limits import available_bytes
from ..engines.shared.memory import OutOfMemoryError
from ..sampling.structured import StructuredOutput
from ..sampling.thought import Thought
from ..text.tokenizer import Tokenizer
from ..text.tokenizer_worker import is_failure
from ..text.workers import Task, WorkerPool
from . import grammar_worker
from .forced import forced_run
from .forms import written_form
from .grammar_worker import open_matcher, open_tokenizer
from .json_guard import OUTSIDE, JsonGuard, State, Tokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LIBRARY = "llguidance"
PROCESSES = 2
KEPT, KEPT_BYTES = 32, 256 << 20  # most grammars that are kept, and their memory when they were compiled
# The same memory of the grammars of all requests, kept or not. Any grammar that compiles fits beside the kept ones.
MAX_BYTES = grammar_worker.MEMORY_BYTES + KEPT_BYTES
SMALL_BYTES = 4 << 20  # a smaller grammar is never refused: the number of requests bounds how many there are


def refusal(reason: str) -> RequestError:
    return RequestError(f"the structured output cannot be used: {reason}")


# Usual schemas take milliseconds.
COMPILING = Task(Path(grammar_worker.__file__), PROCESSES, 5.0, 1.0, refusal)


class Share:
    """A part of the memory for grammars. It ends with the last object that refers to it."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


class Grammar:
    """A compiled grammar. Requests with the same grammar share what the library learns about it."""

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: LLTokenizer,
        vocab_size: int,
        special: NDArray[np.int64],
        share: Share,
        guard: JsonGuard | None = None,
    ) -> None:
        """matcher: at its beginning. tokenizer: the library's. vocab_size: of the model. special: the tokens that are
        special to the library, and those that end a text. share: of the memory, which the matcher and its copies take.
        guard: further rules of JSON."""
        self.matcher, self.tokenizer, self.vocab_size, self.special = matcher, tokenizer, vocab_size, special
        self.share, self.guard = share, guard

    def start(self) -> MatcherConstraint:
        """The constraint of a new text."""
        return MatcherConstraint(self)

    @property
    def usable(self) -> bool:
        """Whether a new text can begin: not after a request has filled the grammar's tables."""
        copy = self.matcher.deep_copy()
        copy.compute_bitmask()
        return not copy.is_error()


class Prepared(NamedTuple):
    """What takes time between the settings of a call and its texts, for all of its choices."""

    # That of `SamplingParams.structured`; None without one.
    grammar: Grammar | None
    # The token sequences of `SamplingParams.bad_words`.
    bad_words: Sequence[Sequence[int]]
    # What the texts may think before they have the form.
    thought: Thought | None = None


class MatcherConstraint:
    """A Constraint over llguidance's matcher."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar, self._guard = grammar, grammar.guard
        self._matcher = grammar.matcher.deep_copy()  # it holds the grammar's tables, too
        self._states = [] if self._guard is None else [self._guard.start()]  # after each token
        self._written: list[int] = []

    @property
    def ended(self) -> bool:
        """See Constraint."""
        self._check()
        return self._matcher.is_stopped()

    def allowed(self) -> NDArray[np.bool_]:
        """See Constraint."""
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.unpackbits(words, count=self._grammar.vocab_size, bitorder="little").view(np.bool_)
        # The library's masks contain two kinds of tokens that it then refuses: tokens that end a text, where a grammar
        # names them inside the text, and special tokens whose names are part of a text.
        special = self._grammar.special
        refused = [token for token in special[mask[special]] if not self._matcher.validate_tokens([token])]
        mask[refused] = False
        if refused and not mask.any():
            raise RequestError(
                f"the structured output demands the token {refused[0]} where it cannot stand: a token that ends the "
                "text inside the text, or the name of a special token as text: leave it out"
            )
        if self._guard is not None:
            self._guard.forbid(self._states[-1], mask)
            if not mask.any():
                raise RequestError(
                    "the structured output demands a further name of an object, and all names that it allows are "
                    "used: allow more names, or demand fewer"
                )
        return mask

    def advance(self, token: int) -> bool:
        """See Constraint."""
        after = []
        if self._guard is not None:
            state = self._guard.push(self._states[-1], token)
            if state is None or (self._guard.is_long(self._states[-1], token) and not self.allowed()[token]):
                return False
            after.append(state)
        advanced = self._matcher.try_consume_tokens([token]) == 1
        self._check()
        if advanced:
            self._states += after
            self._written.append(token)
        return advanced

    def forced(self) -> list[int]:
        """See Constraint."""
        state = self._states[-1] if self._states else State(OUTSIDE)
        return forced_run(self._matcher, self._grammar.tokenizer, self._guard, state, self._written)

    def roll_back(self, count: int) -> None:
        """See Constraint."""
        self._matcher.rollback(count)
        del self._written[len(self._written) - count :]
        if self._guard is not None:
            del self._states[len(self._states) - count :]
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(
                "the structured output became too complex for its limits in the middle of the text "
                f"({self._matcher.get_error().splitlines()[0]}): simplify it"
            )


class Opened(NamedTuple):
    """pool: of processes, of which the first starts with the first grammar. special: see Grammar."""

    pool: WorkerPool
    tokenizer: LLTokenizer
    tokens: Tokens
    special: NDArray[np.int64]


class Grammars:
    """The grammars of one model. May be used from several threads.

    A grammar is compiled in another process first, with limits of time and memory. The library's own limits do not
    bound all work: the multiples of a large number, for instance, take half a minute.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> None:
        """vocab_size: of the model. eos: the tokens that end a text."""
        self._tokenizer = tokenizer
        self._vocab_size, self._eos = vocab_size, [token for token in eos if 0 <= token < vocab_size]
        self._lock, self._opening = Lock(), Lock()
        self._shares: WeakSet[Share] = WeakSet()  # of grammars that are kept or in use
        self._kept: OrderedDict[StructuredOutput, Grammar] = OrderedDict()  # the least recently used one first
        self._opened: Opened | None = None

    def open(self) -> None:
        """Read the tokenizer, if the library is installed: it lets no other thread run, for a third of a second
        with 49,152 tokens. What the library cannot read, the first request learns."""
        with suppress(RequestError), self._opening:
            self._open()

    def find(self, form: StructuredOutput) -> Grammar | None:
        """The grammar of a form, if it is kept. Computes its first mask, which may take milliseconds."""
        with self._lock:
            known = self._kept.get(form)
            if known is not None:
                self._kept.move_to_end(form)
        if known is None or known.usable:
            return known
        with self._lock:
            if self._kept.get(form) is known:
                del self._kept[form]
        return None

    def compile(self, form: StructuredOutput, given_up: Event | None = None) -> Grammar:
        """The grammar of a form of text. given_up: see WorkerPool.ask. Raises RequestError if the form is wrong or not
        supported, exceeds a limit, or needs a package that is not installed; OutOfMemoryError if the grammars of other
        requests leave too little memory for it."""
        if (known := self.find(form)) is not None:
            return known
        written = written_form(form)
        with self._opening:
            workers, tokenizer, tokens, special = self._open()
        answer = workers.ask({"kind": written.kind, "text": written.text, "parts": written.parts}, given_up)
        if "text" not in answer:
            raise refusal(answer["error"])
        share = self._reserve(int(answer["bytes"]))  # before the memory is taken here, too
        guard = None if written.json is None else JsonGuard(tokens, *written.json)
        matcher = open_matcher(tokenizer, answer["text"])
        grammar = Grammar(matcher, tokenizer, self._vocab_size, special, share, guard)
        if not grammar.usable:
            raise refusal("it exceeds a limit")
        if not (beginning := grammar.start()).ended:
            beginning.allowed()  # raises if no text can begin
        self._keep(form, grammar)
        return grammar

    def _reserve(self, num_bytes: int) -> Share:
        """A share of the memory. Raises OutOfMemoryError."""
        share, available = Share(num_bytes), available_bytes()
        with self._lock:
            taken = sum(each.num_bytes for each in self._shares)
            room = MAX_BYTES - taken if available is None else min(MAX_BYTES - taken, available)
            if num_bytes > max(room, SMALL_BYTES):
                raise OutOfMemoryError(
                    f"the structured output takes {num_bytes >> 20} MiB of memory, and those of other requests leave "
                    f"{max(0, room) >> 20}: simplify it, or send it again later"
                )
            self._shares.add(share)
        return share

    def _keep(self, form: StructuredOutput, grammar: Grammar) -> None:
        """Keep a grammar in the place of those that were not used for the longest time. One that is too large for all
        of the memory drives no others out."""
        if grammar.share.num_bytes > KEPT_BYTES:
            return
        with self._lock:
            self._kept[form] = grammar
            while len(self._kept) > KEPT or sum(kept.share.num_bytes for kept in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)

    def close(self) -> None:
        """End the processes."""
        with self._opening:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.pool.close()

    def _open(self) -> Opened:
        if self._opened is None:
            if find_spec(LIBRARY) is None:
                raise RequestError(f"structured outputs need {LIBRARY}: pip install {LIBRARY} beside this model")
            content = self._tokenizer.to_json()
            # The library refuses a tokenizer with more tokens than it is told of; a mask ends at the model's last one.
            size = max(self._vocab_size, self._tokenizer.num_ids)
            pool = WorkerPool(COMPILING, {"tokenizer": content, "vocab_size": size, "eos": self._eos})
            try:
                tokenizer = open_tokenizer(content, size, self._eos)
            except BaseException as error:
                if not is_failure(error):
                    raise
                raise RequestError(f"{LIBRARY} cannot read this model's tokenizer: {error}") from error
            texts = [bytes(tokenizer.decode_bytes([token])) for token in range(self._vocab_size)]
            # Also tokens named <…> that the tokenizer does not call special.
            special = {token for token in self._tokenizer.added_token_ids if tokenizer.is_special_token(token)}
            refusable = sorted(token for token in special.union(self._eos) if token < self._vocab_size)
            self._opened = Opened(pool, tokenizer, Tokens(texts), np.array(refusable, np.int64))
        return self._opened
