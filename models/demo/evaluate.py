"""Measure the demo pair: loss on held-out text, how often the draft agrees with the target, and samples.

    python models/demo/evaluate.py --work FOLDER --roots FOLDER...

FOLDER and the roots are those of the training. The held-out documents are found again in the corpus, so that each part
of it gets its own figures; the pair is read from where it is published, in the precision it is published in.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.models import bindings
from draftwood.models.demo.corpus import default_roots, documents, encode
from draftwood.models.demo.train import CONTEXT, HELD_OUT, POSITIONS
from draftwood.models.llama import Llama

TEMPERATURES = (0.0, 0.6, 1.0)
PROMPTS = ("def fibonacci(n):\n", 'class Stack:\n    """', "import os\n", "This module provides an interface to")
SAMPLE = 120  # tokens
SHORTEST = 16  # tokens of a window worth measuring
BEGINNING, CONTINUATION = 32, 256  # tokens of a held-out document that the target reads, and then writes


class Pair(NamedTuple):
    target: Llama
    draft: Llama


class Measured(NamedTuple):
    """For every position of some text. loss: nats, [2, N], target and draft. alpha: [temperatures, N]."""

    loss: Tensor
    alpha: Tensor

    def __str__(self) -> str:
        target, draft = self.loss.mean(1).tolist()
        alphas = " | ".join(f"{alpha:.3f}" for alpha in self.alpha.mean(1).tolist())
        return f"{self.loss.shape[1]:,} | {target:.3f} | {draft:.3f} | {alphas}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, default=Path(__file__).parent, help="folder that holds target/ and draft/")
    parser.add_argument("--work", type=Path, required=True, help="the training's folder")
    parser.add_argument("--roots", type=Path, nargs="*", default=[], help="the training's further folders of text")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of a held-out window")
    args = parser.parse_args()
    pair = Pair(load(args.pair / "target"), load(args.pair / "draft"))
    tokenizer = Tokenizer.from_file(str(args.pair / "target" / "tokenizer.json"))
    roots = [*default_roots(), *args.roots]
    held_out = documents(roots)[:HELD_OUT]
    if not np.array_equal(encode(tokenizer, held_out), np.load(args.work / "held_out.npy")):
        raise SystemExit("these roots do not hold the text that the pair was trained on")
    columns = ("text", "tokens", "loss, target", "loss, draft", *(f"alpha, T = {value}" for value in TEMPERATURES))
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    measured = {text: on_document(pair, tokenizer, text, args.context) for text in held_out}
    for root in roots:
        texts = measured.keys() & set(documents([root]))
        report(root.name, joined(measured[text] for text in texts))
    report("all held-out text", joined(measured.values()))
    for temperature in TEMPERATURES:
        report(f"the target's own, T = {temperature}", on_own_text(pair, tokenizer, held_out, temperature))
    for temperature in TEMPERATURES[:2]:
        for prompt in PROMPTS:
            tokens = generate(pair.target, torch.tensor([tokenizer.encode(prompt).ids]), SAMPLE, temperature)
            text = tokenizer.decode(until_end(tokens[0].tolist(), tokenizer))
            print(f"\n--- T = {temperature}, {prompt!r}\n{text}", flush=True)


def load(folder: Path) -> Llama:
    """A published checkpoint, widened to fp32."""
    checkpoint = Checkpoint(folder)
    model = Llama(checkpoint.config, POSITIONS)
    names = list(model.state_dict())
    model.load_state_dict({name: torch.from_numpy(checkpoint.tensor(name).astype(np.float32)) for name in names})
    return model


def report(name: str, measured: Measured) -> None:
    """One row of the table."""
    print(f"| {name} | {measured} |", flush=True)


def on_document(pair: Pair, tokenizer: Tokenizer, text: str, context: int) -> Measured:
    """A document cut into windows that overlap in one token, so that each token but <s> is predicted once."""
    return joined(measure(pair, window[None]) for window in windows(tokenizer, text, context))


def windows(tokenizer: Tokenizer, text: str, context: int) -> Iterator[Tensor]:
    tokens = torch.from_numpy(encode(tokenizer, [text]).astype(np.int64))
    for begin in range(0, len(tokens) - SHORTEST, context):
        yield tokens[begin : begin + context + 1]


def on_own_text(pair: Pair, tokenizer: Tokenizer, texts: list[str], temperature: float) -> Measured:
    """What the target itself writes after the beginnings of documents, up to where it ends them."""
    tokens = encode_beginnings(tokenizer, texts)
    written = generate(pair.target, tokens, CONTINUATION, temperature)
    rows = [torch.tensor([until_end(row, tokenizer)]) for row in written.tolist()]
    return joined(measure(pair, row, skip=BEGINNING - 1) for row in rows if row.shape[1] > BEGINNING)


def encode_beginnings(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """The first tokens of every document that has so many, int64 [N, BEGINNING]."""
    encoded = [encoding.ids[:BEGINNING] for encoding in tokenizer.encode_batch(texts)]
    return torch.tensor([ids for ids in encoded if len(ids) == BEGINNING])


def until_end(tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    """Tokens up to and including the first </s>."""
    end = tokenizer.token_to_id("</s>")
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


@torch.inference_mode()
def measure(pair: Pair, tokens: Tensor, skip: int = 0) -> Measured:
    """Both models on one row of tokens [1, T]; the first `skip` predictions are not counted."""
    target, draft = (model.full(tokens[:, :-1]).logits[0, skip:] for model in pair)
    following = tokens[0, 1 + skip :]
    losses = [torch.nn.functional.cross_entropy(logits, following, reduction="none") for logits in (target, draft)]
    return Measured(torch.stack(losses), torch.stack([overlap(target, draft, value) for value in TEMPERATURES]))


def overlap(target: Tensor, draft: Tensor, temperature: float) -> Tensor:
    """sum(min(p, q)) of every position: the chance that a drafted token is accepted."""
    if temperature == 0:
        return (target.argmax(-1) == draft.argmax(-1)).float()
    return torch.minimum((target / temperature).softmax(-1), (draft / temperature).softmax(-1)).sum(-1)


def joined(parts: Iterable[Measured]) -> Measured:
    losses, alphas = zip(*parts, strict=True)
    return Measured(torch.cat(losses, 1), torch.cat(alphas, 1))


@torch.inference_mode()
def generate(model: Llama, tokens: Tensor, count: int, temperature: float) -> Tensor:
    """Continue every row of `tokens` [B, T] by `count` tokens; seeded by them, so that a sample can be made again."""
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    config, (batch, length) = model.config, tokens.shape
    cache = torch.zeros(2 * config.num_layers, batch, config.num_kv_heads, length + count, config.head_dim)
    read, rows = 0, tokens
    for _ in range(count):
        width = rows.shape[1]
        mask = torch.full((1, 1, width, read + width), bindings.MASKED).triu(read + 1)
        positions = torch.arange(read, read + width).expand(batch, -1)
        logits = model(rows, positions, mask, cache, read, torch.tensor([width - 1])).logits[:, 0]
        read += width
        if temperature == 0:
            rows = logits.argmax(-1, keepdim=True)
        else:
            rows = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat((tokens, rows), 1)
    return tokens


if __name__ == "__main__":
    main()
