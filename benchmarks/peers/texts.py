"""The prompts of a comparison, in the form of NVIDIA's SPEED-Bench: JSON lines with a `category`, a `question_id` and
the `turns` of a user. A row with a `prompt` in place of the turns is a text to continue, without a chat template.

prompts.jsonl has rows of our own. SPEED-Bench itself is for users to download (11 categories of 80 rows): NVIDIA's
prepare.py writes it in this form.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from draftwood.models.errors import RequestError

OWN = Path(__file__).with_name("prompts.jsonl")
TRIAL = "trial"  # the category of the prompts by which settings are chosen, and that no result contains
MIXED = "mixed"
UNFETCHED = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # in rows of SPEED-Bench as it is published
MOST_BYTES = 1 << 28  # of a file; SPEED-Bench's longest has half of it


class Prompt(NamedTuple):
    """raw: a text to continue, the only turn."""

    kind: str
    turns: tuple[str, ...]
    raw: bool


def read_prompts(file: Path, limit: int, kinds: Sequence[str] = ()) -> list[Prompt]:
    """The first `limit` prompts of each kind, the kinds in turn. kinds: those wanted; all but the trial's if empty.

    Raises RequestError that names the line and the fix.
    """
    found: dict[str, list[Prompt]] = {}
    try:
        if file.stat().st_size > MOST_BYTES:
            raise RequestError(f"{file} has more than {MOST_BYTES >> 20} MiB: take fewer rows")
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{file} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompt = read_row(line, f"{file}, line {number}")
            if prompt.kind in kinds or (not kinds and prompt.kind != TRIAL):
                found.setdefault(prompt.kind, []).append(prompt)
    missing = [kind for kind in kinds if kind not in found]
    if missing or not found:
        raise RequestError(f"{file} has no prompts of {', '.join(missing) or 'any kind'}")
    turns = zip_longest(*(own[:limit] for own in found.values()))
    return [prompt for turn in turns for prompt in turn if prompt is not None]


def read_row(line: str, place: str) -> Prompt:
    try:
        row = json.loads(line)
        raw = "prompt" in row
        turns = [row["prompt"]] if raw else row["turns"]
        kind = row.get("category", MIXED)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        turns, kind, raw = None, None, False
    if not (isinstance(kind, str) and isinstance(turns, list) and turns and all(map(is_text, turns))):
        raise RequestError(f'{place}: expected an object with a "category" and "turns", a list of texts')
    if any(UNFETCHED in turn for turn in turns):
        raise RequestError(f"{place}: its text is not in the published file; fetch it with NVIDIA's prepare.py")
    return Prompt(kind, tuple(turns), raw)


def is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def make_batches(prompts: Sequence[Prompt], at_a_time: int) -> list[list[Prompt]]:
    """Groups that are asked at the same time; a last one that is smaller is left out. Raises RequestError if none is
    full."""
    starts = range(0, len(prompts) - at_a_time + 1, at_a_time)
    if not starts:
        raise RequestError(f"{at_a_time} texts at a time need more prompts than {len(prompts)}: a higher --limit")
    return [list(prompts[start : start + at_a_time]) for start in starts]


def kind_of(batch: Sequence[Prompt]) -> str:
    kinds = {prompt.kind for prompt in batch}
    return kinds.pop() if len(kinds) == 1 else MIXED
