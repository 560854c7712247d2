"""Programs in turn over HTTP: a trial that finds each one's best setting, and the run that counts.

Every repeat starts all servers anew: the speed of a process depends on where its memory lies, and some servers copy
from texts that they have written before, so that each reads every prompt once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter, sleep
from typing import NamedTuple

from benchmarks.peers.client import Asked, Batch, ask_all
from benchmarks.peers.program import DEFAULT, PLAIN, Program, Setting
from benchmarks.peers.server import Server, ServerError
from benchmarks.peers.texts import Prompt, kind_of
from benchmarks.tools.processor import read_busy_seconds

WARM_UP, WARM_ASKED = Prompt("", ("One, two, three, four,",), raw=True), Asked(8, 0)
Batches = Sequence[Sequence[Prompt]]
Note = Callable[[str], None]  # of progress


class Entry(NamedTuple):
    """What takes turns."""

    program: Program
    setting: Setting

    @property
    def name(self) -> str:
        return f"{self.program.key} {self.setting.name}"


class Turn(NamedTuple):
    """One entry's answers to one batch."""

    entry: Entry
    repeat: int
    # Number and kind of the batch.
    batch: int
    kind: str
    answers: Batch
    # Processor seconds per second that everything else on the machine used meanwhile.
    others: float
    # Bytes that the server's processes occupied after it.
    memory: int

    @property
    def seconds_per_token(self) -> float:
        return self.answers.seconds / self.answers.tokens


class Tried(NamedTuple):
    """The speed of a setting in the trial, in tokens per second; None if it failed, and why."""

    setting: Setting
    speed: float | None
    error: str = ""


class Comparison:
    """failed: the message of everything that was left out, by name."""

    def __init__(self, logs: Path, note: Note) -> None:
        self._logs, self.note = logs, note
        self.failed: dict[str, str] = {}

    def measure(self, entries: Sequence[Entry], batches: Batches, asked: Asked, repeats: int) -> list[Turn]:
        """Turns of the entries that never failed, plain decoding among them."""
        turns = list[Turn]()
        for repeat in range(repeats):
            with ExitStack() as stack:
                servers = self._start(stack, entries, len(batches[0]))
                for number, batch in enumerate(batches):
                    shift = (repeat + number) % len(entries)  # nobody is always first
                    for entry in (*entries[shift:], *entries[:shift]):
                        if entry.name in self.failed:
                            continue
                        self.note(f"repeat {repeat + 1}, prompts {number + 1} of {len(batches)}: {entry.name}")
                        try:
                            turns.append(self._turn(entry, servers[server_key(entry)], batch, asked, repeat, number))
                        except ServerError as error:
                            self.leave_out(entry.name, error)
        plain = {turn.entry.program.key for turn in turns if turn.entry.setting.name == PLAIN}
        return [turn for turn in turns if turn.entry.name not in self.failed and turn.entry.program.key in plain]

    def find_best(self, program: Program, batches: Batches, asked: Asked) -> list[Tried]:
        """The speeds of all settings of a program, and of the mixture of the best two kinds."""
        tried = self._try_all(program, program.settings, batches, asked)
        drafts = [each for each in tried if each.speed and not each.setting.lookups and each.setting.name != PLAIN]
        lookups = [each for each in tried if each.speed and each.setting.lookups]
        if program.mixed is not None and drafts and lookups:
            draft, lookup = (max(kind, key=lambda each: each.speed or 0).setting for kind in (drafts, lookups))
            tried += self._try_all(program, (program.mixed(draft, lookup),), batches, asked)
        return tried

    def _try_all(self, program: Program, settings: Iterable[Setting], batches: Batches, asked: Asked) -> list[Tried]:
        tried = list[Tried]()
        by_start: dict[tuple[str, ...], list[Entry]] = {}
        for setting in settings:
            by_start.setdefault(setting.start, []).append(Entry(program, setting))
        for entries in by_start.values():
            if Entry(program, program.plain).name in self.failed:  # nothing could be compared with it
                break
            with ExitStack() as stack:
                servers = self._start(stack, entries, len(batches[0]))
                for entry in entries:
                    if error := self.failed.get(entry.name):
                        tried.append(Tried(entry.setting, None, error))
                        continue
                    self.note(f"trial: {entry.name}")
                    try:
                        server = servers[server_key(entry)]
                        turns = [
                            self._turn(entry, server, each, asked, 0, number) for number, each in enumerate(batches)
                        ]
                    except ServerError as failure:
                        self.leave_out(entry.name, failure)
                        tried.append(Tried(entry.setting, None, str(failure)))
                        continue
                    tokens = sum(turn.answers.tokens for turn in turns)
                    tried.append(Tried(entry.setting, tokens / sum(turn.answers.seconds for turn in turns)))
        return tried

    def _start(
        self, stack: ExitStack, entries: Iterable[Entry], at_a_time: int
    ) -> dict[tuple[str, tuple[str, ...]], Server]:
        """The servers of entries, each after a short answer to every one of its entries."""
        servers: dict[tuple[str, tuple[str, ...]], Server] = {}
        for entry in entries:
            program, setting = entry
            key = server_key(entry)
            if entry.name in self.failed:
                continue
            try:
                if key not in servers:
                    self.note(f"starting {entry.name}")
                    command = (*program.command, *setting.start)
                    server = Server(command, self.log_of(program), program.environment)
                    servers[key] = stack.enter_context(server)
                ask_all(servers[key].url, program.model, [WARM_UP] * at_a_time, WARM_ASKED, dict(setting.body))
            except ServerError as error:
                self.leave_out(entry.name, error)
        return servers

    def _turn(
        self, entry: Entry, server: Server, batch: Sequence[Prompt], asked: Asked, repeat: int, number: int
    ) -> Turn:
        start, own, everyone = perf_counter(), server.processor_seconds(), read_busy_seconds()
        answers = ask_all(server.url, entry.program.model, batch, asked, dict(entry.setting.body))
        own, everyone = server.processor_seconds() - own, read_busy_seconds() - everyone
        others = max(0.0, everyone - own) / (perf_counter() - start)
        sleep(entry.program.rest)
        return Turn(entry, repeat, number, kind_of(batch), answers, others, server.memory())

    def log_of(self, program: Program) -> Path:
        return self._logs / f"{program.key.replace('/', '-')}.txt"

    def leave_out(self, name: str, error: Exception) -> None:
        self.failed[name] = str(error)
        self.note(f"left out: {name}: {error}")


def server_key(entry: Entry) -> tuple[str, tuple[str, ...]]:
    return entry.program.key, entry.setting.start


def choose(program: Program, tried: Sequence[Tried]) -> list[Entry]:
    """Plain decoding, the fastest setting without lookups and the fastest of all: up to three entries."""
    fast = [each.setting for each in sorted(tried, key=lambda each: -(each.speed or 0)) if each.speed]
    without = [setting for setting in fast if not setting.lookups]
    return [Entry(program, setting) for setting in dict.fromkeys((program.plain, *without[:1], *fast[:1]))]


def with_default(entries: Sequence[Entry]) -> list[Entry]:
    """Ours as a user has it is always measured, whether the trial found it best or not."""
    program = entries[0].program
    default = [Entry(program, setting) for setting in program.settings if setting.name == DEFAULT]
    return list(dict.fromkeys((*entries, *default)))
