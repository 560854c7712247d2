"""The commands of a conversation: lines that begin with a slash."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..models.errors import RequestError, nearest, shown
from ..models.plain_files import read_plain
from ..runtime.chat import ChatSession
from ..runtime.decoding.stats import SpecDecodeStats
from ..runtime.llm import Speculation
from ..runtime.sampling.params import SamplingParams
from ..runtime.serving.json_text import parse
from .files import unwritable
from .live import running

SPECULATION = "speculation"
LARGEST_FILE = 16 << 20  # bytes of a conversation that is loaded; a chat template writes no longer one
# Nothing of a conversation in a terminal shows log-probabilities, a schema is no word, and a message has one answer.
UNSETTABLE = ("logits_processors", "logprobs", "structured", "logit_bias", "allowed_token_ids", "prompt_logprobs", "n")
SETTABLE = {field.name: str(field.type) for field in fields(SamplingParams) if field.name not in UNSETTABLE}
NUMBERS: dict[str, tuple[Callable[[str], Any], str]] = {  # readers of numbers by type, and what they read
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "int | None": (int, "none or a whole number"),
    "tuple[int, ...]": (lambda text: tuple(map(int, text.split(","))), "none or token ids separated by commas"),
}


@dataclass
class ChatState:
    session: ChatSession
    params: SamplingParams
    speculative: Speculation
    can_speculate: bool  # the draft is open


class Reply(NamedTuple):
    said: str = ""
    retries: bool = False  # the last message is answered again
    leaves: bool = False  # the conversation ends


class Command(NamedTuple):
    run: Callable[[ChatState, str], str | Reply]  # with its argument; a text is what it says
    arguments: str  # for /help; empty if it takes none
    help: str


def run_command(state: ChatState, line: str) -> Reply:
    """Run a line such as "/set top_p 0.9". Raises RequestError or ConfigError, and then nothing has changed."""
    name, _, argument = line[1:].partition(" ")
    argument = argument.strip()
    if name not in COMMANDS:
        near = nearest(name, COMMANDS, prefix="/")
        raise RequestError(
            f"/{name:.100} is no command{near or ':'} /help lists all; a message that begins so is written //"
        )
    command = COMMANDS[name]
    if argument and not command.arguments:
        raise RequestError(f"/{name} takes no argument, and nothing was done: write /{name}")
    reply = command.run(state, argument)
    return reply if isinstance(reply, Reply) else Reply(reply)


def set_value(state: ChatState, argument: str) -> str:
    name, _, text = argument.partition(" ")
    text = text.strip()
    if not name:
        lines = [f"{each} {written(getattr(state.params, each))}" for each in SETTABLE]
        return "\n".join([*lines, f"{SPECULATION} {'off' if state.speculative is None else 'on'}"])
    if name == SPECULATION:
        wanted = on_or_off(name, text)
        if wanted and not state.can_speculate:
            raise RequestError("the draft was not opened: start draftwood chat without --no-speculation")
        state.speculative = "own" if wanted else None
        return f"speculation {'on' if wanted else 'off'}"
    if name not in SETTABLE:
        near = nearest(name, [*SETTABLE, SPECULATION])
        raise RequestError(f"{name:.100} cannot be set{near or ':'} /set alone lists what can")
    state.params = replace(state.params, **{name: value_of(name, SETTABLE[name], text)})
    return f"{name} {written(getattr(state.params, name))}"


def value_of(name: str, kind: str, text: str) -> Any:
    """The value that a text stands for. kind: the type of the parameter. Raises RequestError."""
    if kind == "bool":
        return on_or_off(name, text)
    if text == "none" and kind not in ("int", "float"):
        return None
    if kind == "Sequence[str]":
        return stop_strings(name, text)
    read, expected = NUMBERS[kind]
    try:
        return read(text)
    except ValueError as error:
        raise RequestError(f"{name} is {expected}, not {shown(text)}") from error


def on_or_off(name: str, text: str) -> bool:
    if text not in ("on", "off"):
        raise RequestError(f"{name} is on or off, not {shown(text)}")
    return text == "on"


def stop_strings(name: str, text: str) -> tuple[str, ...]:
    """One stop string, or several as a JSON list; a JSON text may hold line breaks."""
    if not text.startswith(('"', "[")):
        return (text,)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f'{name} is a text such as END or "\\n\\n", or a JSON list, not {shown(text)}') from error
    return tuple(value) if isinstance(value, list) else (value,)


def written(value: object) -> str:
    """A value as /set takes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value == ():
        return "none"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) if isinstance(value[0], int) else json.dumps(value)
    return str(value)


def show_stats(state: ChatState, argument: str) -> str:
    session = state.session
    if not session.num_prompt_tokens:
        return "no answer yet"
    lines = [f"all answers: {figures(session.stats, session.num_prompt_tokens)}"]
    if session.last is not None:
        lines.insert(0, f"last answer: {figures(session.last.stats, len(session.last.prompt_token_ids))}")
    return "\n".join([*lines, *([left_out(session.num_left_out)] if session.num_left_out else [])])


def figures(stats: SpecDecodeStats, num_prompt_tokens: int) -> str:
    return f"{running(stats)}, {stats.num_cached_tokens} of {num_prompt_tokens} prompt tokens cached"


def left_out(count: int) -> str:
    """The line about turns that the model does not read any more."""
    turns = "the oldest turn is" if count == 1 else f"the {count} oldest turns are"
    return f"the context is full: {turns} left out of what the model reads (/save keeps all, /reset begins anew)"


def set_system(state: ChatState, argument: str) -> str:
    state.session.system = argument or None
    return "the system message applies from the next answer on" if argument else "no system message any more"


def undo(state: ChatState, argument: str) -> str:
    turn = state.session.undo()
    if turn is None:
        raise RequestError("there is nothing to undo: the conversation has no turns")
    return f"removed your message {shown(turn.user)} and its answer"


def reset(state: ChatState, argument: str) -> str:
    state.session.reset()
    return f"a new conversation{'' if state.session.system is None else '; the system message stays'}"


def save(state: ChatState, argument: str) -> str:
    """Keeps an existing file."""
    try:
        return write_messages(state, argument, "/save", "x")
    except FileExistsError as error:
        fix = f"choose another name, or replace it with /save! {argument}"
        raise RequestError(f"{argument} exists and was not changed: {fix}") from error


def write_messages(state: ChatState, argument: str, command: str = "/save!", mode: str = "w") -> str:
    """Write the conversation. mode: of `open`. Raises FileExistsError with mode "x"."""
    if not argument:
        raise RequestError(f"{command} needs the name of a file: write {command} conversation.json")
    file, messages = Path(os.path.expanduser(argument)), state.session.messages
    try:
        existed = file.exists()
        with file.open(mode, encoding="utf-8") as opened:
            opened.write(json.dumps(messages, indent=1) + "\n")
    except FileExistsError:
        raise
    except OSError as error:
        raise unwritable(file, command, error) from error
    except ValueError as error:  # a NUL in its name
        raise RequestError(f"{command} {shown(argument)} is no name of a file ({error}): choose another one") from error
    return f"{'replaced' if existed else 'wrote'} {file}: {len(messages)} messages"


def load(state: ChatState, argument: str) -> str:
    if not argument:
        raise RequestError("/load needs the name of a file: write /load conversation.json")
    file = Path(os.path.expanduser(argument))
    try:
        messages = parse(read_plain(file, LARGEST_FILE).decode("utf-8-sig"))
    except (OSError, ValueError) as error:  # ValueError: also a NUL in its name
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"/load {file} cannot be read ({reason}): give a file of /save") from error
    state.session.load(messages)
    system = "no system message" if state.session.system is None else "its system message"
    return f"loaded {file}: {len(messages)} messages, with {system}, in the place of the conversation before"


def show_help(state: ChatState, argument: str) -> str:
    width = max(len(f"/{name} {command.arguments}") for name, command in COMMANDS.items())
    lines = [f"{f'/{name} {command.arguments}':{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, *KEYS])


RETRY_HELP = "answer the last message again; at temperature 0 or with a seed the answer is the same"
COMMANDS = {
    "set": Command(set_value, "NAME VALUE", "change a sampling parameter, or speculation on or off; alone: list all"),
    "stats": Command(show_stats, "", "speed, acceptance and cached prompt tokens: of the last answer, and of all"),
    "system": Command(set_system, "TEXT", "set the system message; without a text: remove it"),
    "undo": Command(undo, "", "remove the last message and its answer"),
    "retry": Command(lambda state, argument: Reply(retries=True), "", RETRY_HELP),
    "reset": Command(reset, "", "begin a new conversation; the system message and the settings stay"),
    "save": Command(save, "FILE", "write the messages as JSON; never replaces a file"),
    "save!": Command(write_messages, "FILE", "the same, replacing the file"),
    "load": Command(load, "FILE", "go on with the conversation in a file of /save, in the place of this one"),
    "help": Command(show_help, "", "this list"),
    "quit": Command(lambda state, argument: Reply(leaves=True), "", "leave, as ctrl-D does"),
}
KEYS = (
    "Ctrl-C stops an answer; what was written of it stays in the conversation. Ctrl-C again leaves.",
    "A message that begins with a slash is written with two.",
)
