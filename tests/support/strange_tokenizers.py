"""Files of tokenizers with parts that no published one has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftwood.runtime.text.tokenizer import TOKENIZER

ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "special": True}
BPE: dict[str, Any] = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "\u00e9": 3}, "merges": ["a b"]}


def template(*pieces: dict[str, Any]) -> dict[str, Any]:
    both = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {"type": "TemplateProcessing", "single": list(pieces), "pair": both, "special_tokens": {}}


def write(folder: Path, **changes: Any) -> Path:
    sound: dict[str, Any] = {"version": "1.0", "added_tokens": [], "model": BPE, "padding": None, "truncation": None}
    steps: dict[str, Any] = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    folder.mkdir(exist_ok=True)
    (folder / TOKENIZER).write_text(json.dumps(sound | steps | changes))
    return folder
