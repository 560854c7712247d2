"""The distributions of the next token after each text of a JSON list, by transformers on a GGUF file's weights in fp32:
SOURCE.gguf TEXTS.json OUTPUT.json. The output has the most probable tokens of each as pairs of text and probability."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MOST = 20  # tokens of a distribution


def write_reference(source: Path, texts: Path, output: Path) -> None:
    named = {"gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **named)
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **named)
    found = []
    for text in json.loads(texts.read_text(encoding="utf-8")):
        with torch.no_grad():
            logits = model(**tokenizer(text, return_tensors="pt"), logits_to_keep=1).logits[0, -1]
        best = logits.double().softmax(-1).topk(MOST)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        found.append([[tokenizer.decode([token]), probability] for token, probability in pairs])
    output.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    write_reference(*map(Path, sys.argv[1:]))
