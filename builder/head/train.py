"""SpecDec++ (arXiv 2405.19715): trains the acceptance head of a pair, calibrates it, and writes it with its curves.

    loss = Σ[w_rej (1 - p_acc)(-log P_0) + p_acc (-log P_1)] / Σ[w_rej (1 - p_acc) + p_acc]

Both models stay frozen, so the draft's hidden states are computed once, and the head is trained on these states alone.
Unlike the paper, some prompts are held out of training and read in the contexts of decoding. On these prompts the best
epoch is chosen, and the temperature of the de-biased head is fitted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from ...models.acceptance_head import DESCRIPTION, write_head
from ...models.bindings import DRAFT, TARGET
from ...models.errors import CheckpointError, ConfigError, RequestError
from ...models.head_config import ACCEPT, REJECT
from ...models.layers import num_parameters
from ...runtime.bundle.staging import staging_folder
from ...runtime.text.tokenizer import Tokenizer
from ..checkpoints.checkpoint import Checkpoint, check_same_tokens
from ..pipeline import one_vocabulary, refuse_draft
from ..plots import training_svg
from ..progress import Begin, Step
from ..tokenizer import check_known
from ..torch_settings import is_half_fast, torch_settings
from .calibration import Floats, calibration, fit_temperature
from .data import Collected, Examples, collect, load_frozen
from .network import AcceptanceHead, log_odds
from .training import HeadResult, HeadTraining, Point

FIGURES, PLOT = "training.json", "training.svg"
TRAINING, HELD_OUT = "training", "held-out"
ROWS_PER_STEP = 512  # examples per optimizer step
WARM_UP = 0.03  # share of the steps with a rising learning rate, as published
WEIGHT_DECAY = 0.01
# Targets with fewer parameters train on one thread: waking threads costs more than a small model's passes, and threads
# stall each other if another program uses a core.
SMALL_MODEL = 30_000_000


def train_head(options: HeadTraining, prompts: Sequence[str], begin: Begin) -> HeadResult:
    """Train a head and write its folder atomically. begin: called for every step.

    The same options, prompts and number of threads give the same head, also after an interruption: examples that were
    collected stay in a folder beside the output until the head is written. Raises CheckpointError, ConfigError or
    RequestError.
    """
    start = perf_counter()
    advance = begin(Step("Reading checkpoints", 2))
    checkpoints: dict[str, Checkpoint] = {}
    for role, folder in ((TARGET, options.target), (DRAFT, options.draft)):
        checkpoints[role] = Checkpoint(folder, None, checkpoints.get(TARGET))
        if checkpoints[role].config.reads is not None:
            raise CheckpointError(f"{folder} reads its target's states: no acceptance head can be trained for it")
        advance()
    refuse_draft(checkpoints[TARGET])
    tokenizer = shared_tokenizer(checkpoints)
    checkpoints = one_vocabulary(checkpoints, tokenizer, begin)
    encoded = encode(options, checkpoints, tokenizer, prompts)
    threads = options.threads or (1 if num_parameters(checkpoints[TARGET].config) < SMALL_MODEL else 0)
    with torch_settings(threads), staging_folder(options.output, DESCRIPTION, CheckpointError) as staging:
        generator, collected = torch.Generator().manual_seed(options.seed), Collected(options, encoded, begin)
        train, held = [
            gather(options, checkpoints, part, count, kind, begin, generator, collected)
            for part, count, kind in split(options, encoded, generator)
        ]
        head = AcceptanceHead(options.head(checkpoints[DRAFT].config.hidden_size))
        training, validation = fit(head, train, held, options, begin, generator)
        result = judge(head, held, training, validation, train, perf_counter() - start)
        write_head(staging, head.trained(result.config))
        write_figures(staging, result)
    collected.remove()
    return result


def shared_tokenizer(checkpoints: Mapping[str, Checkpoint]) -> Tokenizer:
    """The target's, which is the draft's, too. Raises CheckpointError otherwise."""
    check_same_tokens(checkpoints[TARGET], checkpoints[DRAFT])
    return checkpoints[TARGET].tokenizer()


def encode(
    options: HeadTraining, checkpoints: Mapping[str, Checkpoint], tokenizer: Tokenizer, prompts: Sequence[str]
) -> Sequence[Sequence[int]]:
    """Token ids of every prompt, truncated on the left so that prompt and answer fit both models."""
    room = min(checkpoint.config.longest for checkpoint in checkpoints.values()) - options.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"max_new_tokens {options.max_new_tokens} leaves no room for a prompt in the models' context: "
            f"ask for fewer than {room + options.max_new_tokens}"
        )
    encoded = [tokenizer.encode(prompt)[-min(room, options.max_prompt_tokens) :] for prompt in prompts]
    encoded = [list(prompt) for prompt in dict.fromkeys(map(tuple, encoded))]  # none is both trained on and held out
    if len(encoded) < 2:
        raise RequestError("a head needs at least 2 different prompts: one to train on and one to hold out")
    if not all(encoded):
        raise RequestError("a prompt is empty and this tokenizer adds no begin-of-text token: give it some text")
    check_known(chain(*encoded), tokenizer, checkpoints[TARGET].config.vocab_size, "a prompt")
    return encoded


def split(
    options: HeadTraining, prompts: Sequence[Sequence[int]], generator: torch.Generator
) -> list[tuple[Sequence[Sequence[int]], int, str]]:
    """Split the prompts into training and held-out prompts, at least one each, with the number of texts for each."""
    order = torch.randperm(len(prompts), generator=generator).tolist()
    count = min(max(1, round(options.held_out * len(prompts))), len(prompts) - 1)
    texts = min(max(1, round(options.held_out * options.texts)), options.texts - 1)
    shuffled = [prompts[index] for index in order]
    return [(shuffled[count:], options.texts - texts, TRAINING), (shuffled[:count], texts, HELD_OUT)]


def gather(
    options: HeadTraining,
    checkpoints: Mapping[str, Checkpoint],
    prompts: Sequence[Sequence[int]],
    texts: int,
    kind: str,
    begin: Begin,
    generator: torch.Generator,
    collected: Collected,
) -> Examples:
    """Generate `texts` texts from the prompts in turn, and collect their examples."""
    # Sorted by length, for little padding in a batch.
    chosen = sorted((prompts[index % len(prompts)] for index in range(texts)), key=len)
    batches = [chosen[first : first + options.batch_size] for first in range(0, texts, options.batch_size)]
    advance = begin(Step(f"Sampling and labelling {texts} {kind} texts", len(batches)))
    positions = max(map(len, chosen)) + options.max_new_tokens
    target, draft = (load_frozen(checkpoints[role], positions, dtype_of(checkpoints[role])) for role in (TARGET, DRAFT))
    ratio = options.mixing_ratio if options.contexts == "mixed" and kind == TRAINING else None
    eos, kept = checkpoints[TARGET].eos_token_ids(), checkpoints[DRAFT].kept_tokens
    settings = eos, options.max_new_tokens, options.temperature, ratio, generator, kept
    parts = []
    for number, batch in enumerate(batches):
        make = partial(collect, target, draft, batch, *settings)
        parts.append(collected.examples(f"{kind}-{number}", generator, make))
        advance()
    hidden, p_acc = (torch.cat(columns) for columns in zip(*parts, strict=True))
    if not len(p_acc):
        raise ConfigError(f"the {kind} texts hold no draft token: ask for more texts, or a smaller mixing_ratio")
    return Examples(hidden, p_acc)


def dtype_of(checkpoint: Checkpoint) -> torch.dtype:
    """In which a model reads and writes texts: a large one in bf16, where its products are faster."""
    fast = num_parameters(checkpoint.config) >= SMALL_MODEL and is_half_fast(torch.device("cpu"))
    return torch.bfloat16 if fast else torch.float32


def acceptance_loss(logits: Tensor, p_acc: Tensor, w_rej: float) -> Tensor:
    """The weighted cross-entropy of logits [N, 2] with soft labels [N]; see the module's docstring."""
    log_P = logits.log_softmax(-1)
    reject, accept = w_rej * (1 - p_acc), p_acc
    return -(reject * log_P[:, REJECT] + accept * log_P[:, ACCEPT]).sum() / (reject + accept).sum()


def fit(
    head: AcceptanceHead,
    train: Examples,
    held: Examples,
    options: HeadTraining,
    begin: Begin,
    generator: torch.Generator,
) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """Train with AdamW, warm-up and cosine decay; keep the weights of the best epoch. Returns both loss curves."""
    advance = begin(Step(f"Training the head on {len(train.p_acc)} tokens", options.epochs))
    w_rej = options.reject_weight
    # Training begins at the best constant prediction, so that a head that learns nothing is unbiased.
    mean = train.p_acc.mean().clamp(1e-4, 1 - 1e-4)
    with torch.no_grad():
        head.output.bias[ACCEPT] = mean.logit() - math.log(w_rej)
    optimizer = torch.optim.AdamW(head.parameters(), options.learning_rate, weight_decay=WEIGHT_DECAY)
    steps = options.epochs * math.ceil(len(train.p_acc) / ROWS_PER_STEP)
    training, validation, step = list[Point](), [Point(0, held_out_loss(head, held, w_rej))], 0
    best = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    for _ in range(options.epochs):
        order = torch.randperm(len(train.p_acc), generator=generator)
        for first in range(0, len(order), ROWS_PER_STEP):
            rows = order[first : first + ROWS_PER_STEP]
            optimizer.param_groups[0]["lr"] = options.learning_rate * rate(step, steps)
            loss = acceptance_loss(head(train.hidden[rows]), train.p_acc[rows], w_rej)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            training.append(Point(step, loss.item()))
        validation.append(Point(step, held_out_loss(head, held, w_rej)))
        if validation[-1].loss <= min(point.loss for point in validation):
            best = {name: tensor.clone() for name, tensor in head.state_dict().items()}
        advance()
    head.load_state_dict(best)
    return tuple(training), tuple(validation)


def rate(step: int, steps: int) -> float:
    """The factor on the learning rate: linear warm-up, then half a cosine to zero."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


@torch.no_grad()
def held_out_loss(head: AcceptanceHead, held: Examples, w_rej: float) -> float:
    return acceptance_loss(head(held.hidden), held.p_acc, w_rej).item()


@torch.no_grad()
def judge(
    head: AcceptanceHead,
    held: Examples,
    training: tuple[Point, ...],
    validation: tuple[Point, ...],
    train: Examples,
    seconds: float,
) -> HeadResult:
    """De-bias, fit the temperature, and measure all three stages on the held-out prompts."""
    logits, labels = head(held.hidden), as_floats(held.p_acc)
    raw = as_floats(logits[:, ACCEPT] - logits[:, REJECT])
    debiased = as_floats(log_odds(head.config, logits))
    mean = train.p_acc.double().mean().expand(len(labels))
    config = replace(head.config, temperature=fit_temperature(debiased, labels))
    return HeadResult(
        config,
        training,
        validation,
        min(point.loss for point in validation),
        calibration(as_floats(mean.logit(1e-9)), labels),
        calibration(raw, labels),
        calibration(debiased, labels),
        calibration(as_floats(log_odds(config, logits)), labels),
        len(train.p_acc),
        len(held.p_acc),
        float(torch.cat((train.p_acc, held.p_acc)).mean()),
        seconds,
    )


def as_floats(tensor: Tensor) -> Floats:
    array: Floats = tensor.double().numpy()
    return array


def write_figures(folder: Path, result: HeadResult) -> None:
    """The figures as JSON and as a picture."""
    (folder / FIGURES).write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
    curves: dict[str, Sequence[tuple[float, float]]] = {"training": result.training, "held out": result.validation}
    bins = {name: figures.bins for name, figures in result.stages().items()}
    (folder / PLOT).write_text(training_svg(curves, bins), encoding="utf-8")
