"""How often the target would accept the draft's tokens, estimated on held-out text that the target wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .batches import Batch
from .loss import Reachable, distillation_loss, reachable
from .network import DraftNetwork
from .shards import ANSWER, ANSWER_TEMPERATURES


class Acceptance(NamedTuple):
    """Estimates on held-out answers, each at the temperature at which the answer was written; nan where there is no
    such answer. top1: the share of places where both models have the same best token (temperature 0). overlaps: the
    mean of Σ min(p, q) at the other temperatures of ANSWER_TEMPERATURES, from below: only the target's K most probable
    tokens count, and its tail takes as much as it can. loss: KL, see loss.py. places: scored tokens."""

    top1: float
    overlaps: tuple[float, ...]
    loss: float
    places: int

    @property
    def mean(self) -> float:
        """The mean over the temperatures that were measured."""
        known = [value for value in (self.top1, *self.overlaps) if value == value]
        return sum(known) / max(1, len(known))

    def to_dict(self) -> dict[str, float | None]:
        """JSON-ready figures by temperature."""
        figures = zip(ANSWER_TEMPERATURES, (self.top1, *self.overlaps), strict=True)
        named = {f"acceptance_{temperature:g}": none_or_rounded(value) for temperature, value in figures}
        return {**named, "loss": none_or_rounded(self.loss), "places": self.places}


def none_or_rounded(value: float) -> float | None:
    """JSON has no nan."""
    return round(value, 4) if value == value else None


@torch.no_grad()
def estimate(network: DraftNetwork, batches: Sequence[Batch]) -> Acceptance:
    """Measure a draft on held-out batches."""
    sums = torch.zeros(len(ANSWER_TEMPERATURES), dtype=torch.float64)
    counts = torch.zeros_like(sums)
    loss, places = 0.0, 0
    for batch in batches:
        logits = network(batch).float()
        scored = batch.scored
        ids, logprobs, tails = batch.ids[scored], batch.logprobs[scored], batch.tails[scored]
        target = reachable(ids, logprobs, tails, batch.written[scored], network.place_of)
        loss += float(distillation_loss(logits, target).divergence) * len(logits)
        places += len(logits)
        kinds = batch.kinds[scored]
        for index, temperature in enumerate(ANSWER_TEMPERATURES):
            rows = kinds == ANSWER + index
            if not rows.any():
                continue
            if temperature:
                own = overlap(logits[rows], target.at(rows), logprobs[rows], tails[rows], temperature)
            else:
                own = (network.kept[logits[rows].argmax(-1)] == ids[rows][:, 0]).double()
            sums[index] += own.sum().cpu()
            counts[index] += len(own)
    means = (sums / counts).tolist()
    return Acceptance(means[0], tuple(means[1:]), loss / max(1, places), places)


def overlap(logits: Tensor, target: Reachable, logprobs: Tensor, tails: Tensor, temperature: float) -> Tensor:
    """Σ min(p, q) [N] at a temperature, from below. logits: [N, outputs]. logprobs: [N, K], and tails: [N], see
    WrittenText.

    Tokens of the tail are at most as probable as the last known one, x. At temperature T their weights p^(1/T) sum to
    at most tail * x^(1/T - 1).
    """
    weights = (logprobs.double() / temperature).exp()
    last = logprobs.double().masked_fill(logprobs.isinf(), 0).amin(-1).exp()
    rest = tails.double() * last ** (1 / temperature - 1)
    p = weights / (weights.sum(-1) + rest)[:, None]
    q = (logits.double() / temperature).log_softmax(-1).gather(-1, target.places).exp()
    return torch.where(target.probs > 0, torch.minimum(p, q), 0.0).sum(-1)
