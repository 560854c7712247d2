"""A command in a pseudo-terminal, as a user at a keyboard sees it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CTRL_C, CTRL_D = "\x03", "\x04"
PATIENCE_S = 120  # how long a test waits for an output before it fails; nothing is measured by it
LOST_S = 30  # without any output: then a ctrl-C was lost
SIGN = "\x1b[?2004h> "  # the prompt of `draftwood chat`; the sequence switches bracketed paste on
LOOKS, PAUSE_S = 100, 0.01  # whether the command waits for a key


class Terminal:
    """A running command and all that it has shown."""

    def __init__(self, process: subprocess.Popen[bytes], controller: int) -> None:
        self.process = process
        self.shown = b""
        self._controller = controller
        self._read = 0  # of `shown`, by `wait_for`

    def type(self, text: str) -> None:
        os.write(self._controller, text.encode())

    def press_ctrl_c(self) -> None:
        """Interrupt the command, and wait until it shows something. Python's readline does not notice a signal between
        its prompt and its wait for a key; a user then presses again."""
        if self.shown.endswith(SIGN.encode()):
            self._wait_for_sleep()
        self.type(CTRL_C)
        while not select.select([self._controller], [], [], LOST_S)[0]:
            self.type(CTRL_C)

    def wait_for(self, text: str) -> str:
        """Wait until a text is shown after the one that was waited for last; returns all up to its end."""
        wanted = text.encode()
        while (found := self.shown.find(wanted, self._read)) < 0:
            assert self._more(), f"{text!r} was not shown: {self.shown[self._read :]!r}"
        start, self._read = self._read, found + len(wanted)
        return self.shown[start : self._read].decode(errors="replace")

    def wait_for_end(self) -> int:
        """Wait until the command has ended; returns its exit code."""
        while self._more():
            pass
        return self.process.wait(PATIENCE_S)

    def _wait_for_sleep(self) -> None:
        """Wait until the command's main thread sleeps: after a prompt, it then waits for a key."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        for _ in range(LOOKS):
            if stat.read_text().rpartition(")")[2].split()[0] == "S":
                return
            time.sleep(PAUSE_S)

    def _more(self) -> bool:
        """Read what is shown next. False at the end."""
        if not select.select([self._controller], [], [], PATIENCE_S)[0]:
            raise AssertionError(f"nothing more is shown: {self.shown[self._read :]!r}")
        try:
            block = os.read(self._controller, 65536)
        except OSError:  # Linux reports the end of a pseudo-terminal as an error
            return False
        self.shown += block
        return bool(block)


@contextmanager
def in_terminal(arguments: Sequence[str], cache: Path) -> Iterator[Terminal]:
    """`draftwood` with these arguments; it is gone afterwards. cache: the user's cache folder."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "DRAFTWOOD_CACHE": str(cache)}
    environment.pop("NO_COLOR", None)

    def own() -> None:  # the terminal sends the signals of its keys to the session that it controls
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    command = [sys.executable, "-m", "draftwood", *arguments]
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, preexec_fn=own
    ) as process:
        os.close(terminal)
        try:
            yield Terminal(process, controller)
        finally:
            process.kill()
            os.close(controller)
