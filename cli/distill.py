"""draftwood distill: makes a draft for any target, from text that the target writes itself."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TimeRemainingColumn

from ..builder.distillation.options import WORTH_MINUTES, DistillOptions
from ..models.printable import shell_word
from .bench import read_prompts
from .options import HIDDEN, add_settings, folder_or_id, needed_packages, read_options
from .progress import titles
from .streams import say

if TYPE_CHECKING:
    from ..builder.distillation.loss import Acceptance
    from ..builder.distillation.text import TextCounts
    from ..builder.distillation.training import Progress as TrainingProgress
    from ..builder.progress import Step


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("distill", help="make a draft for a target that has none")
    words = "Hugging Face folder, .gguf file, or id on the Hub, org/name or org/name@revision"
    parser.add_argument("--target", type=folder_or_id, required=True, metavar="PATH", help=words)
    parser.add_argument("--output", type=Path, required=True, metavar="DRAFT", help="folder to write")
    words = (
        "time for text and training together, some 30 for a draft worth having; the same command goes on after an "
        "interruption, and with more minutes after the end"
    )
    parser.add_argument("--minutes", type=float, required=True, metavar="N", help=words)
    words = 'questions to answer instead of the target\'s own: JSON lines, each with a "prompt" (or "turns")'
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=words)
    words = "a draft of an earlier distillation for this target, with which the training begins; it has the sizes"
    parser.add_argument("--from", dest="start", type=Path, default=HIDDEN, metavar="OLDER_DRAFT", help=words)
    add_settings(parser, "sizes and training", DistillOptions)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with needed_packages("distilling"):
        if args.prompts is not None:
            args.questions = tuple(read_prompts(args.prompts))
        options = read_options(args, DistillOptions)  # invalid options are refused before torch is imported
        from ..builder.distillation.distill import Watch, distill
    console = Console(stderr=args.json)
    with Progress(titles(), BarColumn(), TimeRemainingColumn(elapsed_when_finished=True), console=console) as shown:
        bars = Bars(shown, options)
        result = distill(options, bars.begin, Watch(bars.text, bars.training, bars.step))
    if args.json:
        print(json.dumps({"output": str(options.output), **result.figures}))
        return 0
    if not result.figures:
        console.print(f"Only text was written, to {options.folder}: give more --minutes for training", markup=False)
        return 0
    acceptance = result.figures["acceptance"]
    say(
        console,
        f"{result.figures['text_tokens']} tokens of text; estimated acceptance on held-out answers at temperature "
        + ", ".join(
            f"{name.removeprefix('acceptance_')}: {value}"
            for name, value in acceptance.items()
            if name.startswith("acceptance_") and value is not None
        ),
    )
    if remark := judged(options, result.figures):
        say(console, remark)
    console.print(f"Curve: {options.output / 'acceptance.svg'}", markup=False)
    say(
        console,
        f"Next: draftwood build --target {shell_word(options.target)} --draft {shell_word(options.output)} "
        "--output BUNDLE",
    )
    return 0


def judged(options: DistillOptions, figures: Mapping[str, Any]) -> str:
    """A line about a draft that had too little training; empty for others. figures: see DistillResult."""
    if figures.get("steps") == 0:
        return "The training has not improved on its beginning yet, which was written: give more --minutes"
    if options.minutes < WORTH_MINUTES:
        return (
            f"A draft worth having takes some {WORTH_MINUTES} minutes, and this one had {options.minutes:g}: the same "
            "command with more --minutes goes on"
        )
    return ""


class Bars:
    """The progress of a distillation: steps, text with its speed, training with loss and estimated acceptance."""

    def __init__(self, bars: Progress, options: DistillOptions) -> None:
        self._bars, self._options = bars, options
        self._tasks: dict[str, TaskID] = {}
        self._estimate = ""

    def begin(self, step: Step) -> Callable[[], None]:
        if not step.units:
            say(self._bars.console, step.title)
            return lambda: None
        task = self._bars.add_task(step.title, total=step.units)
        return lambda: self._bars.advance(task)

    def text(self, counts: TextCounts, seconds: float) -> None:
        self._show("Writing text", f"{counts.texts} texts, {counts.tokens} tokens", self._options.text_seconds, seconds)

    def step(self, seconds: float, loss: float) -> None:
        self._show("Training", f"loss {loss:.3f}{self._estimate}", self._options.training_seconds, seconds)

    def training(self, found: Acceptance, progress: TrainingProgress) -> None:
        self._estimate = f", acceptance {' '.join(f'{value:.3f}' for value in found.known)}"
        figures = f"loss {found.loss:.3f}{self._estimate}"
        self._show("Training", figures, self._options.training_seconds, progress.seconds)

    def _show(self, name: str, figures: str, total: float, done: float) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total)
        self._bars.update(self._tasks[name], completed=min(done, total), description=f"{name}: {figures}")
