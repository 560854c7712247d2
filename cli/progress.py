"""Progress bars for long work, one per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track

from .streams import say

if TYPE_CHECKING:
    from ..builder.progress import Begin, Step
    from ..runtime import LLM


@contextmanager
def progress(console: Console) -> Iterator[Begin]:
    """A function to which a builder announces steps; it shows progress bars, which vanish at the end."""
    columns = (titles(), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(elapsed_when_finished=True))
    with Progress(*columns, console=console, transient=console.stderr) as bars:

        def begin(step: Step) -> Callable[[], None]:
            if not step.units:
                say(console, step.title)
                return lambda: None
            task = bars.add_task(step.title, total=step.units)
            return lambda: bars.advance(task)

        yield begin


def titles() -> TextColumn:
    """The column of the steps' titles, as they are: brackets in the name of a file are no markup."""
    return TextColumn("{task.description}", markup=False)


def warm_up(llm: LLM, console: Console) -> None:
    """Prepare the engines for a first request. Engines on a CPU need no preparation, and show nothing."""
    if steps := llm.warm_up():
        for step in track(steps, "Preparing passes", console=console):
            step()
