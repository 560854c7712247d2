"""The training of a draft for a given time, with checkpoints from which it goes on after an interruption."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from ...models.errors import ConfigError
from ...models.typed import typed
from .batches import Batch
from .loss import Acceptance, acceptance_loss, estimate, reachable
from .network import DraftNetwork
from .state import ANSWER_TEMPERATURES, replace_file

WARM_UP = 50  # steps
LAST_RATE = 0.02  # the learning rate at the end, over the highest
DECAY = 0.01  # weight decay of the layers' matrices
CLIP = 1.0
FADE = 0.8  # weight of a drafted token in a head's loss, over that of the token before
MEASURED_SECONDS = 120.0  # between two estimates, each with a checkpoint
PLACES = 256  # whose logits are in memory at a time, in a training step
MATRIX_RATE = 13  # Muon's learning rate over AdamW's: its updates are orthogonal, so that each has the same size


class Point(NamedTuple):
    """One estimate."""

    seconds: float  # of training
    tokens: int  # seen by the draft, repeated ones included
    text_tokens: int  # stored by then
    training_loss: float | None  # the mean since the last point; None at the first one
    acceptance: tuple[float | None, ...]  # see Acceptance
    loss: float | None  # held out


class Progress(NamedTuple):
    """What a checkpoint knows besides tensors."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    best: float = 0.0  # the highest mean acceptance so far
    judged: tuple[int, ...] = ()  # held-out places and written tokens, of which it is the estimate
    curve: tuple[Point, ...] = ()

    def pictured(self) -> list[dict[str, list[tuple[float, float]]]]:
        """Acceptance at each temperature, over minutes of training and over millions of tokens."""
        places = [[point.seconds / 60 for point in self.curve], [point.tokens / 1e6 for point in self.curve]]
        return [
            {
                f"temperature {temperature:g}": [
                    (place, value)
                    for place, point in zip(each, self.curve, strict=True)
                    if (value := point.acceptance[index]) is not None
                ]
                for index, temperature in enumerate(ANSWER_TEMPERATURES)
            }
            for each in places
        ]


class Schedule(NamedTuple):
    """When a training ends and measures."""

    seconds: float  # of training in all
    clock: Callable[[], float]  # the present time in seconds; tests count steps instead
    measured: float = MEASURED_SECONDS  # between two estimates
    # Called after each step with the seconds of training so far and the loss.
    heard: Callable[[float, float], None] = lambda seconds, loss: None


class Trainer:
    """A draft, its optimizers and its progress. Muon (2502.16982) updates the matrices of a plain draft's layers, AdamW
    everything else: after the same 150 steps for SmolLM2 the draft's best token was the target's at 25 % of the places,
    and at 17 % with AdamW alone. Matrices of a head are so large that Muon's update takes as long as a step."""

    def __init__(self, network: DraftNetwork, learning_rate: float, device: torch.device, half: bool) -> None:
        """half: compute matrix products in bf16."""
        self.network = network.to(device)
        self._device, self._half = device, half
        self._rate = learning_rate
        adamw = partial(torch.optim.AdamW, lr=learning_rate, betas=(0.9, 0.95), fused=True)
        named = network.learning()
        matrices = [parameter for name, parameter in named.items() if is_matrix(name, parameter)]
        self._others = adamw([each for name, each in named.items() if not is_matrix(name, each)], weight_decay=0.0)
        self._matrices: torch.optim.Optimizer
        if network.by_muon:
            self._matrices = torch.optim.Muon(matrices, lr=MATRIX_RATE * learning_rate, weight_decay=DECAY)
        else:
            self._matrices = adamw(matrices, weight_decay=DECAY)
        self.progress = Progress()

    def step(self, batch: Batch, rate: float) -> float:
        """One update; returns the loss of this batch. rate: the factor on the learning rate."""
        self.network.llama.zero_grad(set_to_none=True)
        loss = self._backward(batch.to(self._device))
        torch.nn.utils.clip_grad_norm_(self.network.llama.parameters(), CLIP)
        for optimizer in (self._matrices, self._others):
            highest = MATRIX_RATE * self._rate if isinstance(optimizer, torch.optim.Muon) else self._rate
            for group in optimizer.param_groups:
                group["lr"] = highest * rate
            optimizer.step()
        return loss

    def _backward(self, batch: Batch) -> float:
        """Add a batch's gradients; returns its loss. The loss takes PLACES places at a time, whose logits stay in a
        processor's cache: on a CPU this takes half of the time of all [N, outputs] logits at once."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._half):
            steps, projection = list(self.network.drafted(batch)), self.network.projection()
        rows = projection.detach().requires_grad_(projection.requires_grad)
        hidden, total = [each.hidden.detach().requires_grad_() for each in steps], torch.zeros((), device=self._device)
        for step, (states, (_, scored)) in enumerate(zip(hidden, steps, strict=True)):
            columns = batch.ids[scored], batch.logprobs[scored], batch.tails[scored]
            target = reachable(*columns, self.network.place_of)
            for first in range(0, len(states), PLACES):
                places = slice(first, first + PLACES)
                with torch.autocast(self._device.type, torch.bfloat16, enabled=self._half):
                    logits = functional.linear(states[places], rows)
                loss = FADE**step * acceptance_loss(logits, target.at(places)) * len(logits) / len(states)
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        ends = [(each.hidden, own.grad) for each, own in zip(steps, hidden, strict=True)] + [(projection, rows.grad)]
        if learned := [(tensor, grad) for tensor, grad in ends if grad is not None]:
            tensors, grads = zip(*learned, strict=True)
            torch.autograd.backward(tensors, grads)
        return float(total)

    def run(
        self, batches: Iterator[Batch], held_out: Sequence[Batch], schedule: Schedule, text_tokens: Callable[[], int]
    ) -> Iterator[Acceptance]:
        """Train until the schedule ends; yields an estimate at the start, now and then, and at the end. The caller
        stores what it needs before it asks for the next one. Ends early when there are no more batches."""
        held_out = [batch.to(self._device) for batch in held_out]
        begin = schedule.clock() - self.progress.seconds
        measured, losses = self.progress.seconds, list[float]()
        if not self.progress.curve:
            yield self._measure(held_out, losses, text_tokens())
            begin = schedule.clock() - self.progress.seconds
        while self.progress.seconds < schedule.seconds:
            batch = next(batches, None)
            if batch is None:
                break
            losses.append(self.step(batch, rate_at(self.progress, schedule.seconds)))
            if not math.isfinite(losses[-1]):
                raise ConfigError(
                    "the training has failed: its loss is no number. Give a smaller --learning-rate; the same command "
                    "goes on from the last estimate"
                )
            seconds = schedule.clock() - begin
            self.progress = self.progress._replace(
                seconds=seconds, steps=self.progress.steps + 1, tokens=self.progress.tokens + batch.tokens.numel()
            )
            schedule.heard(seconds, losses[-1])
            if seconds - measured >= schedule.measured:
                yield self._measure(held_out, losses, text_tokens())
                measured, losses = seconds, []
                begin = schedule.clock() - seconds  # estimates do not count as training
        if losses:
            yield self._measure(held_out, losses, text_tokens())

    def _measure(self, held_out: Sequence[Batch], losses: Sequence[float], text_tokens: int) -> Acceptance:
        found = estimate(self.network, held_out)
        mean = sum(losses) / len(losses) if losses else None
        now = self.progress
        point = Point(now.seconds, now.tokens, text_tokens, mean, found.values, found.loss)
        self.progress = now._replace(curve=(*now.curve, point))
        return found

    def judge_anew(self, held_out: Sequence[Batch]) -> None:
        """Forget the best estimate where more text is held out than before, or other tokens are written."""
        judged = sum(int(batch.scored.sum()) for batch in held_out), len(self.network.kept)
        if self.progress.steps and judged != self.progress.judged:
            best = estimate(self.network, [batch.to(self._device) for batch in held_out]).mean
            self.progress = self.progress._replace(best=best)
        self.progress = self.progress._replace(judged=judged)

    def improve(self, found: Acceptance) -> bool:
        """Whether an estimate is the best so far; remembers it."""
        better = found.mean > self.progress.best
        if better:
            self.progress = self.progress._replace(best=found.mean)
        return better

    def save(self, file: Path) -> None:
        """Replace a checkpoint. Raises ConfigError when there is no room; the older checkpoint is then kept."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.network.learning().items():
            tensors[f"weight.{name}"] = parameter.detach().cpu()
            optimizer, moments = self._optimizer_of(name, parameter)
            state = optimizer.state.get(parameter, {})
            tensors |= {f"{moment}.{name}": state[moment].cpu() for moment in moments if moment in state}
        content = self.progress._asdict() | {"curve": [point._asdict() for point in self.progress.curve]}
        metadata = {"progress": json.dumps(content, allow_nan=False)}
        replace_file(file, lambda partial: save_file(tensors, partial, metadata))

    def _optimizer_of(self, name: str, parameter: Tensor) -> tuple[torch.optim.Optimizer, tuple[str, ...]]:
        """The optimizer of a parameter, and what it remembers of one, by torch's names."""
        optimizer = self._matrices if is_matrix(name, parameter) else self._others
        is_muon = isinstance(optimizer, torch.optim.Muon)
        return optimizer, ("momentum_buffer",) if is_muon else ("exp_avg", "exp_avg_sq")

    def load(self, file: Path) -> None:
        """Go on from a checkpoint. Raises ConfigError for a damaged one, and for one of other sizes."""
        try:
            with safe_open(file, framework="pt") as opened:
                stored = json.loads((opened.metadata() or {}).get("progress", "{}"))
                self.progress = typed(Progress, stored, "progress")
                names = set(opened.keys())
                for name, parameter in self.network.learning().items():
                    weight = opened.get_tensor(f"weight.{name}")
                    if weight.shape != parameter.shape or not weight.isfinite().all():
                        raise ValueError(f"{name} is {tuple(weight.shape)} instead of {tuple(parameter.shape)}, or NaN")
                    with torch.no_grad():
                        parameter.copy_(weight)
                    optimizer, kinds = self._optimizer_of(name, parameter)
                    moments = {
                        moment: opened.get_tensor(f"{moment}.{name}").to(self._device)
                        for moment in kinds
                        if f"{moment}.{name}" in names
                    }
                    if any(tensor.shape != parameter.shape for tensor in moments.values()):
                        raise ValueError(f"the moments of {name} have another shape")
                    if len(moments) == len(kinds):
                        step = torch.tensor(float(self.progress.steps), device=self._device)
                        optimizer.state[parameter] = {"step": step, **moments}
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(
                f"{file} is no checkpoint of this draft ({error}): give the same sizes as before, choose another "
                "--state, or remove the file to train anew"
            ) from error


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix of a layer. The embedding is none: few of its rows have a gradient in a step."""
    return parameter.ndim == 2 and "embed_tokens" not in name


def rate_at(progress: Progress, seconds: float) -> float:
    """The factor on the learning rate: linear warm-up over steps, then half a cosine over time to LAST_RATE."""
    share = min(1.0, progress.seconds / seconds)
    cosine = LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * share))
    return min(1.0, (progress.steps + 1) / WARM_UP) * cosine
