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

MOST_CARD = 1 << 20  # bytes of a README or a licence
LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md")
MOST_NAME = 200


class Origin(NamedTuple):
    """The target of a draft. licence: its identifier, such as apache-2.0; None where it is unknown."""

    name: str
    licence: str | None
    licence_text: str | None


def origin_of(path: Path, asked: Path) -> Origin:
    """What a target's folder or GGUF file says about itself. asked: the path, or the id on the Hub from which it was
    downloaded: a folder of the Hub's cache is named by its commit."""
    name = asked.as_posix() if asked != path else path.resolve().name if path.is_dir() else path.stem
    folder = path if path.is_dir() else path.parent
    texts = (read_text(folder / name) for name in LICENCE_FILES)
    text = next((found for found in texts if found is not None), None)
    if path.is_dir():
        front = read_text(path / "README.md") or ""
        head, end, _ = front.partition("\n---\n")
        found = re.search(r"^license: *([\w.+-]+) *$", head, re.MULTILINE) if end and head.startswith("---\n") else None
        return Origin(short(name), found[1] if found else None, text)
    from ..checkpoints.gguf.header import read_header  # which imports the gguf package

    licence = read_header(path).metadata.get("general.license")
    return Origin(short(name), short(licence) if isinstance(licence, str) else None, text)


def read_text(file: Path) -> str | None:
    """A small text file; None where there is none that can be read."""
    try:
        return read_plain(file, MOST_CARD).decode("utf-8")
    except (OSError, ValueError):
        return None


def short(text: str) -> str:
    """A name in one printable line."""
    return printable(text)[:MOST_NAME]


def card(origin: Origin, config: LlamaConfig, trimmed: int | None, figures: Mapping[str, Any]) -> str:
    """README.md of a draft. trimmed: the tokens that it writes; None for the full vocabulary."""
    acceptance = figures["acceptance"]
    lines = [
        "---",
        *([f"license: {origin.licence}"] if origin.licence else []),
        "library_name: transformers",
        "tags: [speculative-decoding, draft]",
        "---",
        f"# A draft for {origin.name}",
        "",
        f"A small language model that drafts for {origin.name} in speculative decoding. Its text alone is worth "
        f"little. `draftwood distill` made it: the target wrote {figures['text_tokens']:,} tokens of conversations, "
        "and this model learned the target's distributions at each of them.",
        "",
        f"{config.num_layers} layers of {config.hidden_size}, {config.num_heads} heads ({config.num_kv_heads} for keys "
        f"and values) of {config.head_dim}, feed-forward {config.intermediate_size}; "
        f"{num_parameters(config) / 1e6:.1f}M parameters with the embedding.",
        "",
        vocabulary_note(config, trimmed),
        "",
        "| acceptance on held-out answers | estimate |",
        "|---|---|",
        *(
            f"| temperature {name.removeprefix('acceptance_')} | {value:.3f} |"
            for name, value in acceptance.items()
            if name.startswith("acceptance_") and value is not None
        ),
        "",
        f"Trained for {figures['training_minutes']:.0f} minutes on {figures['tokens_seen']:,} tokens, repeated ones "
        f"included{start_note(figures.get('started_from', {}))}. `distillation.json` has all figures, "
        "`acceptance.svg` the curve.",
        "",
        "    draftwood build --target TARGET --draft THIS_FOLDER --output BUNDLE",
        "",
        f"The licence of {origin.name}, whose text this model learned, is "
        + (f"{origin.licence}." if origin.licence else "not stated in its files: look it up before you publish this."),
        "",
    ]
    return "\n".join(lines)


def vocabulary_note(config: LlamaConfig, trimmed: int | None) -> str:
    """What the draft can write."""
    if trimmed is None:
        return (
            "It reads and writes the target's whole vocabulary. Tokens that it was not trained to write have one "
            "common row of the projection, which keeps their probability near 0."
        )
    return (
        f"It reads the target's {config.vocab_size:,} tokens and writes {trimmed:,} of them, the most frequent ones: "
        "`draft_vocab_size` in config.json and `d2t` in the weights say which (output i is token i + d2t[i]). The "
        "output of speculative decoding stays exact."
    )


def start_note(earlier: Mapping[str, Any]) -> str:
    """Of a draft with which the training began: its figures, see start.py."""
    if not {"text_tokens", "tokens_seen", "training_minutes"} <= earlier.keys():
        return ", with an earlier draft as its start" if earlier else ""
    return (
        f". It began with an earlier draft, which was trained for {earlier['training_minutes']:.0f} minutes on "
        f"{earlier['tokens_seen']:,} tokens, of {earlier['text_tokens']:,} tokens of other text"
    )
