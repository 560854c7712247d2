"""Views of a text while it is generated: plain, or coloured by the model that proposed each token."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ..models.printable import printable
from ..runtime.decoding.stats import SpecDecodeStats
from ..runtime.text.writer import StreamChunk

DRAFTED, OWN, PROMPT = "green", "bold", "dim"


class PlainView:
    """Prints text as it is generated, for pipes and files."""

    def show(self, chunk: StreamChunk) -> None:
        sys.stdout.write(chunk.text)
        sys.stdout.flush()

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()


class LiveView:
    """Finished lines scroll up. The unfinished line and the running figures stay below them.

    Accepted draft tokens are green, the target's own tokens bold.
    """

    def __init__(self, console: Console, prompt: str) -> None:
        self._line = Text().append(printable(prompt), style=PROMPT)
        self._live = Live(console=console, refresh_per_second=12, transient=True)
        self._console = console

    def show(self, chunk: StreamChunk) -> None:
        for piece in chunk.pieces:
            self._line.append(printable(piece.text), style=DRAFTED if piece.drafted else OWN)
        *finished, self._line = self._line.split("\n", allow_blank=True)
        for line in finished:
            self._console.print(line, soft_wrap=True)
        self._live.update(Group(self._line, Text(f"── {running(chunk.stats)}", style=PROMPT)))

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.__exit__(None, None, None)
        self._console.print(self._line, soft_wrap=True)


def open_view(console: Console, prompt: str) -> LiveView | PlainView:
    """The live view in a terminal, the plain one elsewhere. prompt: shown before the text by the live view."""
    return LiveView(console, prompt) if console.is_terminal else PlainView()


def costs_note(stale: Sequence[str]) -> str:
    """The note for a non-empty LLM.stale_costs."""
    return f"costs were measured elsewhere ({printable('; '.join(stale))}): run draftwood profile"


def running(stats: SpecDecodeStats) -> str:
    """The figures that change while a text is generated."""
    per_pass = stats.num_tokens / max(1, stats.target_passes)
    figures = f"{stats.num_tokens} tokens, {per_pass:.2f} per target pass, {stats.tokens_per_second:.0f} tokens/s"
    return f"{figures}, acceptance {stats.acceptance_rate:.0%}" if stats.num_drafts else figures


def summary(stats: SpecDecodeStats) -> str:
    parts = [f"── {running(stats)}"]
    if stats.num_drafts:
        parts.append(
            f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} proposed tokens accepted in {stats.num_drafts} "
            f"rounds (mean acceptance length {stats.mean_acceptance_length:.2f})"
        )
    if stats.switches:
        last = stats.switches[-1]
        parts.append(f"{last.reason} from token {last.token} on")
    return "; ".join(parts)
