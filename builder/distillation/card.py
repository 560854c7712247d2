"""The model card of a draft, and what is known of its target: name and licence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...models.config import LlamaConfig
from ...models.layers import num_parameters
from ...models.plain_files import read_plain
from ...models.printable import printable

MAX_CARD = 1 << 20  # bytes of a README or a licence
LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md")
MAX_NAME = 200
EARLIER = ("text_tokens", "tokens_seen", "training_minutes")  # figures of the draft with which a training began


class Origin(NamedTuple):
    """The target of a draft."""

    name: str
    licence: str | None  # its identifier, such as apache-2.0; None where it is unknown
    licence_text: str | None


def origin_of(path: Path, asked: Path) -> Origin:
    """What a target's folder or GGUF file says about itself. asked: the path, or the id on the Hub from which it was
    downloaded: a folder of the Hub's cache is named by its commit."""
    folder = path if path.is_dir() else path.parent
    name = asked.as_posix() if asked != path else path.resolve().name if path.is_dir() else path.stem
    text = next((found for file in LICENCE_FILES if (found := read_text(folder / file)) is not None), None)
    if path.is_dir():
        head, end, _ = (read_text(path / "README.md") or "").partition("\n---\n")
        line = re.search(r"^license: *([\w.+-]+) *$", head, re.MULTILINE) if end and head.startswith("---\n") else None
        licence = line[1] if line else None
    else:
        from ..checkpoints.gguf.header import read_header  # which imports the gguf package

        licence = read_header(path).metadata.get("general.license")
    return Origin(short(name), short(licence) if isinstance(licence, str) else None, text)


def read_text(file: Path) -> str | None:
    """A small text file; None where there is none that can be read."""
    try:
        return read_plain(file, MAX_CARD).decode("utf-8")
    except (OSError, ValueError):
        return None


def short(text: str) -> str:
    """A name in one printable line."""
    return printable(text)[:MAX_NAME]


def card(origin: Origin, config: LlamaConfig, trimmed: int | None, figures: Mapping[str, Any]) -> str:
    """README.md of a draft. trimmed: the tokens that it writes; None for the full vocabulary."""
    licence = [f"license: {origin.licence}"] if origin.licence else []
    front = [
        "---",
        *licence,
        *([] if config.reads else ["library_name: transformers"]),
        "tags: [speculative-decoding, draft]",
        "---",
    ]
    size = num_parameters(config) / 1e6
    sizes = f"{config.num_layers} layers of {config.hidden_size}, {size:.1f}M parameters with the embedding"
    if config.reads is not None:
        own, after = size - config.vocab_size * config.hidden_size / 1e6, ", ".join(map(str, config.reads.taps))
        sizes = (
            f"An EAGLE-3 head of {own:.1f}M parameters, which shares its target's embedding and reads the target's "
            f"rows after {after} layers"
        )
    rows = [f"| temperature {at} | {value:.3f} |" for at, value in estimates(figures).items()]
    written = (
        "It reads and writes the target's whole vocabulary. Tokens that it was not trained to write have one common "
        "row of the projection, which keeps their probability near 0."
        if trimmed is None
        else f"It reads the target's {config.vocab_size:,} tokens and writes {trimmed:,} of them, the most frequent "
        "ones: `draft_vocab_size` in config.json and `d2t` in the weights say which (output i is token i + d2t[i]). "
        "The output of speculative decoding stays exact."
    )
    earlier = figures.get("started_from", {})
    start = ""
    if {*EARLIER} <= earlier.keys():
        start = (
            f" It began with an earlier draft, which was trained for {earlier['training_minutes']:.0f} minutes on "
            f"{earlier['tokens_seen']:,} tokens, of {earlier['text_tokens']:,} tokens of other text."
        )
    return f"""\
{chr(10).join(front)}
# A draft for {origin.name}

A small language model that drafts for {origin.name} in speculative decoding. Its text alone is worth little. \
`draftwood distill` made it: the target wrote conversations of {figures["text_tokens"]:,} tokens, and this model \
learned the target's distributions at each of them.

{sizes}. {written}

| acceptance on held-out answers | estimate |
|---|---|
{chr(10).join(rows)}

Trained for {figures["training_minutes"]:.0f} minutes on {figures["tokens_seen"]:,} tokens, repeated ones included.\
{start} `distillation.json` has all figures, `acceptance.svg` the curve.

    draftwood build --target TARGET --draft THIS_FOLDER --output BUNDLE

The licence of {origin.name}, whose text this model learned, is \
{f"{origin.licence}." if origin.licence else "not stated in its files: look it up before you publish this."}
"""


def estimates(figures: Mapping[str, Any]) -> dict[str, float]:
    """Estimated acceptance by temperature, of the figures of a distillation."""
    named = figures["acceptance"].items()
    return {
        name.removeprefix("acceptance_"): value for name, value in named if name.startswith("acceptance_") and value
    }
