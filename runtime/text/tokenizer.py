"""Tokenizer: a `tokenizer.json` with its special tokens and its chat template."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Any

from tokenizers import Tokenizer as TokenizerJson

from ...models.closing import Closing
from ...models.errors import BundleError, RequestError, shown
from ...models.plain_files import MAX_TOKENIZER, parse_object, read_object, read_plain
from . import tokenizer_worker
from .chat_template import ChatTemplate
from .token_length import BYTES, longest_token, parts
from .tokenizer_check import is_proved, problems
from .tokenizer_worker import first_problem, is_failure
from .workers import Task, WorkerPool

TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
INFILL = tuple(f"fim_{kind}_token" for kind in ("pre", "suf", "mid", "rep", "sep", "pad"))  # of GGUF's metadata
DEFAULT, TOOL_USE = "default", "tool_use"  # names of chat templates; others, as "rag", are kept and not used
USED = {DEFAULT, TOOL_USE}
# For tokenizers whose cost is not proved (`tokenizer_check.is_proved`): a regular expression may go back any number of
# times, and steps may each write a hundred characters for one. Four million usual characters take ten seconds.
ENCODING = Task(Path(tokenizer_worker.__file__), 2, 20.0, 2.0, RequestError)

# A batch of one text leaves further threads nothing to do. Without this the library starts one for each core.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer(Closing):
    """Converts text to token ids and back. May be used from several threads."""

    def __init__(
        self,
        backend: TokenizerJson,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        process: WorkerPool | None = None,
        infill_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """special_tokens: texts of "bos_token", "eos_token" and other special tokens. chat_templates: Jinja sources by
        name, see `template_for`. process: encodes the texts in place of `backend`, whose cost is not proved, see
        `read_backend`. infill_tokens: those that the settings name, see `infill.py`."""
        self.infill_tokens = dict(infill_tokens or {})
        self._backend, self._process = backend, process
        self._special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        used = USED & self.chat_templates.keys()
        self._renderers = {name: ChatTemplate(self.chat_templates[name]) for name in used}
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        empty = self.encode("")
        bos = self._special_tokens.get("bos_token")
        self.bos_token_id: int | None = backend.token_to_id(bos) if bos is not None else next(iter(empty), None)
        self.adds_bos = bool(empty)
        added = backend.get_added_tokens_decoder()
        self.added_token_ids = frozenset(added)  # of tokens that are found in a text as a whole, before it is split
        self.special_token_ids = frozenset(index for index, token in added.items() if token.special)
        self.byte_values = byte_values(backend)
        self._byte_letters = byte_letters(backend)
        # Whether a text is that of its tokens' bytes, one after the other.
        self.is_byte_level = [part["type"] for part in parts(backend.decoder)] == ["ByteLevel"]
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read a folder's tokenizer. Raises BundleError if it is missing or damaged."""
        settings = read_settings(folder / SETTINGS)
        backend, process = read_backend(folder / TOKENIZER)
        infill = {name: text for name in INFILL if isinstance(text := settings.get(name), str)}
        return cls(backend, special_tokens(settings), read_templates(folder), process, infill)

    def close(self) -> None:
        """End the processes that render chat templates, and those that encode texts."""
        for each in (*self._renderers.values(), self._process):
            if each is not None:
                each.close()

    @property
    def has_chat_template(self) -> bool:
        return bool(self._renderers)

    def template_for(self, tools: bool) -> str:
        """The Jinja source; empty for a model without one. tools: a model may have another, as in transformers."""
        return self.chat_templates.get(self._template_name(tools), "")

    def _template_name(self, tools: bool) -> str:
        return TOOL_USE if tools and TOOL_USE in self._renderers else DEFAULT

    def encode(self, text: str, add_special_tokens: bool = True, given_up: Event | None = None) -> list[int]:
        """Token ids of `text`, with the begin-of-text token if the model uses one. given_up: see WorkerPool.ask.

        Raises RequestError for half of a surrogate pair, which JSON can express and UTF-8 cannot, and for a text at
        which this tokenizer fails.
        """
        try:
            text.encode()  # half of a surrogate pair, found faster than by any loop
        except UnicodeEncodeError as error:
            raise RequestError(
                "the text holds half of a surrogate pair, which is no character: send valid Unicode"
            ) from error
        try:
            if self._process is not None:
                return self._encode_apart(self._process, text, add_special_tokens, given_up)
            # As a batch: other threads run meanwhile, while `encode` stops them, for seconds if the text is long.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except BaseException as error:
            if not is_failure(error):
                raise
            raise RequestError(
                f"this model's tokenizer cannot read the text ({error}): send another one, or rebuild the bundle with "
                f"a {TOKENIZER} that reads every text, quickly and in little memory"
            ) from error
        ids: list[int] = encoding.ids
        return ids

    def _encode_apart(self, process: WorkerPool, text: str, special: bool, given_up: Event | None) -> list[int]:
        """Raises RequestError, the reason alone, if the tokenizer fails, exceeds its limits, or was given up."""
        answer = process.ask([text, special], given_up)
        if "ids" not in answer:
            raise RequestError(answer["error"])
        return [int(index) for index in answer["ids"].split()]

    def fewest_tokens(self, text: str) -> int:
        """A lower bound on the tokens of a text, from its length alone; 0 if the tokenizer gives no bound."""
        return 0 if self._longest_token is None else -(-len(text) // self._longest_token)

    @cached_property
    def _longest_token(self) -> int | None:
        return None if self._process is not None else longest_token(self._backend)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; invalid UTF-8 becomes U+FFFD. Raises BundleError where the tokenizer fails."""
        try:
            text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if not is_failure(error):
                raise
            raise BundleError(
                f"the bundle's {TOKENIZER} cannot write these tokens ({error}): correct its decoder and rebuild the "
                "bundle"
            ) from error
        return text

    def to_json(self) -> str:
        """The content of tokenizer.json, without truncation and padding."""
        return str(self._backend.to_str())

    def added_id(self, text: str | None) -> int | None:
        index: int | None = None if text is None else self._backend.token_to_id(text)
        return index if index in self.added_token_ids else None

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes of a token, of which a character may need several; None where tokens are text."""
        if token in self.byte_values or not self._byte_letters or token in self.added_token_ids:
            return self.byte_values.get(token)
        name = self._backend.id_to_token(token) or ""
        known = all(letter in self._byte_letters for letter in name)
        return bytes(self._byte_letters[letter] for letter in name) if known else None

    def piece(self, token: int) -> bytes:
        """A byte-level token's bytes, as its decoder has them: a name with no byte's letter stands for itself."""
        piece = self._pieces.get(token)
        if piece is None:
            name, letters = self._backend.id_to_token(token) or "", self._byte_letters
            known = all(letter in letters for letter in name)
            piece = self._pieces[token] = bytes(letters[letter] for letter in name) if known else name.encode()
        return piece

    def vocabulary(self) -> dict[str, int]:
        """Every token with its id, added tokens included."""
        tokens: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return tokens

    @cached_property
    def num_ids(self) -> int:
        """One more than the largest id of a token."""
        return 1 + max(self.vocabulary().values(), default=-1)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        given_up: Event | None = None,
        **kwargs: Any,
    ) -> str:
        """A conversation of {"role", "content"} messages as text, in the format of the model's training.

        The template comes with the model and runs in a sandbox, in a process that is killed if it takes too long.
        Raises RequestError if the model has no template, or if the template refuses the conversation, tries to leave
        the sandbox or exceeds its limits. given_up: see WorkerPool.ask. kwargs: other variables of the template,
        such as `tools`.
        """
        renderer = self._renderers.get(self._template_name(kwargs.get("tools") is not None))
        if renderer is None:
            known = f", only one for {TOOL_USE}: send tools, or" if self._renderers else ":"
            raise RequestError(f"this model has no chat template{known} pass plain text instead of a conversation")
        # As in transformers: templates test `tools is none`, not whether `tools` is undefined.
        variables = {"tools": None, "documents": None, **self._special_tokens, **kwargs}
        variables |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        return renderer.render(variables, given_up)


def token_sequences(tokenizer: Tokenizer, texts: Sequence[str], given_up: Event | None = None) -> list[list[int]]:
    """The token sequences that may write each of these texts: at a beginning, and after a blank, if by as many tokens
    (vLLM's rule of bad words). A text of blanks alone is taken as it is. Raises RequestError."""
    found: list[list[int]] = []
    for text in texts:
        word = text.lstrip() or text
        first, spaced = (tokenizer.encode(blank + word, False, given_up) for blank in ("", " "))
        if not first:
            raise RequestError(f"bad_words: {shown(text)} has no tokens: leave it out")
        found += [first, spaced] if spaced[0] != first[0] and len(spaced) == len(first) else [first]
    return found


def byte_letters(backend: TokenizerJson) -> dict[str, int]:
    """The byte that each letter of a token stands for, if the decoder writes bytes as letters (GPT-2's)."""
    if not any(part["type"] == "ByteLevel" for part in parts(backend.decoder)):
        return {}
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the others have the letters from U+0100 on
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + place): byte for place, byte in enumerate(others)}


def byte_values(backend: TokenizerJson) -> dict[int, bytes]:
    """The byte of each token that stands for a single byte, if the decoder knows such tokens (SentencePiece's)."""
    if not any(part["type"] == "ByteFallback" for part in parts(backend.decoder)):
        return {}
    ids = [backend.token_to_id(token) for token in BYTES]
    return {index: bytes([byte]) for byte, index in enumerate(ids) if index is not None}


def read_backend(file: Path) -> tuple[TokenizerJson, WorkerPool | None]:
    """Open a tokenizer.json. Where the cost of encoding is not proved, a process encodes, and what is opened here lacks
    the steps that it does not need: it knows the tokens, and decodes. Raises BundleError."""
    if not file.is_file():
        raise BundleError(f"{file} is missing: rebuild the bundle")
    try:
        read = read_plain(file, MAX_TOKENIZER)
        content = parse_object(read, strict=True)
    except (OSError, ValueError) as error:
        raise BundleError(f"{file} is not a readable tokenizer ({error}): rebuild the bundle") from error
    process, found = None, next(problems(content), None)
    if found is None and not is_proved(content):
        process = WorkerPool(ENCODING, read.decode())
        read = json.dumps(content | dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor"))).encode()
    try:
        if found is None:
            # Not by its name: the library opens no file in a folder whose name is no UTF-8.
            backend = TokenizerJson.from_buffer(read)
            backend.no_truncation()
            backend.no_padding()
            found = first_problem(backend) if process is None else process.ask(None).get("error")
        if found is not None:
            raise BundleError(f"{file} cannot be used: {found}; then rebuild the bundle")
    except BaseException as error:  # the library raises no specific error, and panics are BaseExceptions
        if process is not None:
            process.close()
        if isinstance(error, BundleError) or not is_failure(error):
            raise
        raise BundleError(f"{file} is not a readable tokenizer ({error}): rebuild the bundle") from error
    return backend, process


def read_settings(file: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json; empty if there is no such file. Raises BundleError."""
    if not file.is_file():
        return {}
    try:
        return read_object(file)
    except (OSError, ValueError) as error:
        raise BundleError(f"{file} is not readable JSON ({error}): rebuild the bundle") from error


def read_templates(folder: Path) -> dict[str, str]:
    """A tokenizer's chat templates, Jinja sources by name; a file's replace the settings'. Raises BundleError."""
    if (folder / TEMPLATE).is_file():
        try:
            return {DEFAULT: (folder / TEMPLATE).read_text(encoding="utf-8")}
        except (OSError, ValueError) as error:
            raise BundleError(f"{folder / TEMPLATE} is not readable text ({error}): rebuild the bundle") from error
    found = read_settings(folder / SETTINGS).get("chat_template")
    listed = found if isinstance(found, list) else [{"name": DEFAULT, "template": found}] if found is not None else []
    try:
        templates = {item["name"]: item["template"] for item in listed}
    except (TypeError, KeyError):
        templates = {DEFAULT: None}
    if not all(isinstance(text, str) for pair in templates.items() for text in pair):
        raise BundleError(f"{folder / SETTINGS}: chat_template is no text: correct it and rebuild the bundle")
    return templates


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens, which older files wrap in an object."""
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def token_texts(tokenizer: Tokenizer) -> Callable[[int], str]:
    """A function from a token id to its text, with the leading space that decoding one token would drop. Special tokens
    have their names as text, and bytes that are no character have the vocabulary's form."""
    names = {index: name for name, index in tokenizer.vocabulary().items()}

    def text_of(token: int) -> str:
        alone = tokenizer.decode([token], skip_special_tokens=False)
        twice = tokenizer.decode([token, token], skip_special_tokens=False)
        if not twice or "\ufffd" in twice or not twice.startswith(alone) or token in tokenizer.special_token_ids:
            return names.get(token, f"#{token}")
        return twice[len(alone) :]

    return text_of
