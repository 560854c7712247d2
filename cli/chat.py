"""draftwood chat: a conversation in a terminal, or with a program over pipes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from threading import Event
from typing import Any

from rich.console import Console

from ..models.errors import DraftwoodError, RequestError
from ..models.printable import printable, shell_word
from ..runtime.chat import INTERRUPTED, ChatSession
from ..runtime.llm import LLM
from ..runtime.sampling.params import SamplingParams
from .chat_commands import ChatState, left_out, run_command
from .line_editor import LineEditor
from .live import PROMPT, costs_note, open_view, running
from .options import add_decoding, add_model, add_sampling, bundle_for, given, speculative, valid_text
from .progress import warm_up
from .streams import say, standard_input

PROMPT_SIGN = "> "
LONGEST_LINE = 1 << 24  # characters; a chat template writes no longer conversation
WELCOME = "Type a message. /help lists the commands; ctrl-C stops an answer, ctrl-D leaves."
NO_TEMPLATE = "this bundle has no chat template, so its model holds no conversations: use draftwood generate"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="hold a conversation with an instruct model",
        description="In a terminal: a conversation with commands (/help). Otherwise every line of standard input is a "
        "message, and the answers go to standard output.",
    )
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", type=valid_text, help="the system message")
    words = "one JSON object per answer; each line of standard input is a message"
    parser.add_argument("--json", action="store_true", help=words)
    add_sampling(parser)
    add_decoding(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if hasattr(args, "logprobs") and not args.json:
        raise RequestError("--logprobs needs --json: a conversation in text shows no log-probabilities")
    chosen = given(args, SamplingParams)
    SamplingParams(**chosen)  # raises before the model is opened
    config = speculative(args)
    errors = Console(stderr=True)
    bundle = bundle_for(args)
    with LLM(bundle, config, args.threads, args.draft_threads, args.provider) as llm:
        if not llm.tokenizer.has_chat_template:
            raise RequestError(f"{NO_TEMPLATE} {shell_word(bundle)} --prompt TEXT")
        if llm.stale_costs:
            note(errors, costs_note(llm.stale_costs))
        warm_up(llm, errors)
        params = replace(llm.get_default_sampling_params(), **chosen)
        params = replace(params, max_tokens=min(params.max_tokens, llm.bundle.manifest.max_length))
        with ChatSession(llm, args.system) as session:
            state = ChatState(session, params, "own" if config is not None else None, config is not None)
            if args.json:
                answer_in_json(state)
            elif standard_input().isatty() and sys.stdout.isatty():
                converse(state, Console())
            else:
                answer_in_text(state, errors)
    return 0


def answer_in_json(state: ChatState) -> None:
    """Print an object for each line of standard input."""
    for message in messages():
        for _ in state.session.send(message, state.params, state.speculative):
            pass
        assert state.session.last is not None
        fields = {**state.session.last.to_dict(), "num_left_out": state.session.num_left_out}
        print(json.dumps(fields), flush=True)


def answer_in_text(state: ChatState, errors: Console) -> None:
    for message in messages():
        answer(state, message, errors)


def messages() -> Iterator[str]:
    """The lines of standard input, empty ones excepted. Raises RequestError for what is no text."""
    while True:
        try:
            line = standard_input().readline(LONGEST_LINE + 1)
            line.encode()  # in some locales Python reads bytes that are no UTF-8 as lone surrogates
        except (OSError, UnicodeError) as error:
            raise RequestError(f"standard input cannot be read ({error}): send lines of UTF-8 text") from error
        if len(line) > LONGEST_LINE:
            raise RequestError(f"a line of standard input has more than {LONGEST_LINE} characters: send shorter ones")
        if not line:
            return
        if message := line.strip():
            yield message


def converse(state: ChatState, console: Console) -> None:
    """Read messages and commands from the terminal until the user leaves."""
    note(console, WELCOME)
    interrupted = False  # whether ctrl-C came since the last line was read
    with LineEditor() as editor:
        while True:
            try:
                line = editor.read(PROMPT_SIGN).strip()
            except EOFError:
                console.print()
                return
            except KeyboardInterrupt:
                console.print()
                if interrupted:
                    return
                interrupted = True
                note(console, "ctrl-C again, or ctrl-D, leaves")
                continue
            except DraftwoodError as error:
                show_error(console, error)
                continue
            interrupted = False
            if line:
                with editor.stoppable() as stop:
                    try:
                        if obey(state, line, console, stop):
                            return
                    except DraftwoodError as error:
                        show_error(console, error)
                    interrupted = stop.is_set()


def obey(state: ChatState, line: str, console: Console, stop: Event) -> bool:
    """Run a command, or answer a message. Returns whether the user wants to leave."""
    message: str | None = line.removeprefix("/") if line.startswith("//") else line
    if line.startswith("/") and not line.startswith("//"):
        reply = run_command(state, line)
        if reply.said:
            note(console, reply.said)
        if not reply.retries:
            return reply.leaves
        message = None
    answer(state, message, console, stop)
    note(console, outcome(state.session))
    return False


def answer(state: ChatState, message: str | None, notes: Console, stop: Event | None = None) -> None:
    """Write the answer to a message, or, for None, another one to the last. notes: for a line about left-out turns."""
    session, before = state.session, state.session.num_left_out
    if message is None:
        chunks = session.retry(state.params, state.speculative, stop)
    else:
        chunks = session.send(message, state.params, state.speculative, stop)
    if session.num_left_out > before:
        note(notes, left_out(session.num_left_out))
    with open_view(Console(), "") as view:
        for chunk in chunks:
            view.show(chunk)


def outcome(session: ChatSession) -> str:
    """The line below an answer."""
    if session.last is None:
        return "stopped before the first character: the conversation is as it was before"
    figures = running(session.last.stats)
    if session.last.finish_reason == INTERRUPTED:
        return f"{figures}; stopped, and what was written stays in the conversation"
    if session.last.finish_reason == "length":
        return f"{figures}; cut at its most tokens"
    return figures


def note(console: Console, text: str) -> None:
    """Lines that are no part of the conversation."""
    for line in printable(text).split("\n"):
        say(console, f"── {line}", PROMPT)


def show_error(console: Console, error: DraftwoodError) -> None:
    say(console, f"error: {error}", "red")
