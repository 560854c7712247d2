"""Runs the programs of peers in turn, so that slow phases of the machine affect all of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import perf_counter, sleep

from rich.console import Console
from rich.progress import Progress

from benchmarks.peers.figures import MethodKey, MethodRun
from benchmarks.peers.process import Entry, PeerError, PeerProcess, make_command
from benchmarks.peers.protocol import PLAIN, PeerOptions
from benchmarks.peers.settings import Setting
from benchmarks.tools.processor import read_busy_seconds

WARM_UP = 8  # tokens
REST = 0.2  # seconds; some peers' idle threads spin for a while and would take cores from the next

Turns = list[tuple[Entry, str]]  # entries and methods, in the order of their turns


class Comparison:
    """Programs that answer in turn. versions: of all loaded programs. failed: the peer's message for everything that
    was left out."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._programs: dict[Entry, PeerProcess] = {}
        self.versions: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def load(self, entry: Entry, options: PeerOptions) -> None:
        """Start a program. It converts the pair if no earlier run did."""
        log = options.work / "log.txt"
        with self._console.status(f"Loading {entry.name} at {entry.precision}, converting the first time"):
            try:
                program = PeerProcess(make_command(entry, options), log)
            except PeerError as error:
                self._leave_out(entry, "", "", error)
                return
        self._programs[entry], self.versions[entry.name] = program, program.version

    def write_plainly(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The text of the first loaded program. Raises PeerError if none is loaded or if it fails."""
        if not self._programs:
            raise PeerError("no peer could run: see above, and the log each names")
        (text,) = next(iter(self._programs.values())).generate(PLAIN, [prompt], max_tokens).texts
        return text

    def measure(
        self, setting: Setting, methods: Collection[str], max_tokens: int, repeats: int
    ) -> dict[MethodKey, list[MethodRun]]:
        """Run every method `repeats` times, after a short text that warms up. Programs that cannot write as many texts
        at a time have no turn. methods: those that have turns besides plain decoding; all of them if empty."""
        turns = [
            (entry, method)
            for entry, program in self._programs.items()
            for method in program.methods
            if program.at_a_time >= setting.at_a_time and (not methods or method in methods or method == PLAIN)
        ]
        first = setting._replace(batches=setting.batches[:1])
        self._run_all("Warming up", first, turns, min(WARM_UP, max_tokens), 1)
        return self._run_all("Measuring", setting, turns, max_tokens, repeats)

    def close(self) -> None:
        """End all loaded programs. Others may be loaded then."""
        for program in self._programs.values():
            program.close()
        self._programs = {}

    def _run_all(
        self, title: str, setting: Setting, turns: Turns, max_tokens: int, repeats: int
    ) -> dict[MethodKey, list[MethodRun]]:
        """Give every method its turn on every batch, `repeats` times. Returns the runs of the methods that never
        failed; the others lose their turns."""
        runs: dict[MethodKey, list[MethodRun]] = {}
        with Progress(console=self._console, transient=True) as progress:
            described = f"{title}, {setting.name}" if setting.name else title
            task = progress.add_task(described, total=repeats * len(setting.batches) * len(turns))
            for repeat in range(repeats):
                for index, batch in enumerate(setting.batches):
                    for entry, method in list(turns):
                        progress.advance(task)
                        if (entry, method) not in turns:  # its entry's plain method has failed
                            continue
                        try:
                            run = self._run(entry, method, batch, max_tokens, index, repeat)
                        except PeerError as error:
                            self._leave_out(entry, method, setting.name, error)
                            turns[:] = remove_turns(turns, entry, method)
                            continue
                        runs.setdefault(make_key(entry, method, setting), []).append(run)
        kept = {make_key(entry, method, setting) for entry, method in turns}
        return {key: own for key, own in runs.items() if key in kept}

    def _run(
        self, entry: Entry, method: str, batch: Sequence[list[int]], max_tokens: int, index: int, repeat: int
    ) -> MethodRun:
        program = self._programs[entry]
        sleep(REST)
        start, own, everyone = perf_counter(), program.processor_seconds(), read_busy_seconds()
        generation = program.generate(method, list(batch), max_tokens)
        own, everyone = program.processor_seconds() - own, read_busy_seconds() - everyone
        return MethodRun(index, repeat, generation, max(0.0, everyone - own) / (perf_counter() - start))

    def _leave_out(self, entry: Entry, method: str, setting: str, error: PeerError) -> None:
        name = " ".join(filter(None, (entry.name, entry.precision, method, f"({setting})" if setting else "")))
        self.failed[name] = str(error)
        self._console.print(f"Left out: {name}: {error}", style="yellow", markup=False)


def remove_turns(turns: Turns, entry: Entry, method: str) -> Turns:
    """Without a method; with a plain method without its whole entry, which nothing could be compared with."""
    return [(other, name) for other, name in turns if other != entry or (method != PLAIN and name != method)]


def make_key(entry: Entry, method: str, setting: Setting) -> MethodKey:
    return MethodKey(entry.precision, entry.name, method, setting.name)
