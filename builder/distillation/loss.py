"""The draft's loss: how often the target refuses it, and its distance from the target's distributions over the tokens
that it can reach.

The draft q has a trimmed vocabulary, and of the target p the K most probable tokens are known, beside the probability
of all others. Let S be the known tokens that the draft has. Both distributions are compared over the tokens of S and
one more event, the *rest*: p's tail and q's probability of everything outside S. A known token that the draft lacks is
left out, and p is normalised over what remains: no draft can learn it, and it would only flatten q. The tail is not
left out, because it tells the draft how much probability to keep from the known tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .batches import Batch
from .network import DraftNetwork
from .state import ANSWER, ANSWER_TEMPERATURES

LEAST = 1e-6  # probability of the rest, whose logarithm must be finite


class Reachable(NamedTuple):
    """The part of the target's distributions that a draft can reach, at N places."""

    places: Tensor  # int64 [N, K], indices of the draft's output for the known tokens; 0 where it lacks the token
    probs: Tensor  # float32 [N, K], the target's probabilities; 0 where the draft lacks the token
    tails: Tensor  # float32 [N]

    def at(self, rows: Tensor | slice) -> Reachable:
        """The places of a mask, bool [N], or of a slice."""
        return Reachable(*(tensor[rows] for tensor in self))


def reachable(ids: Tensor, logprobs: Tensor, tails: Tensor, place_of: Tensor) -> Reachable:
    """ids, logprobs: [N, K]. tails: [N]. place_of: int64 [V], the index of each token in the draft's output, or -1."""
    places = place_of[ids]
    return Reachable(places.clamp_min(0), logprobs.exp().masked_fill(places < 0, 0.0), tails)


def acceptance_loss(logits: Tensor, target: Reachable) -> Tensor:
    """The mean of LK losses (2602.23881): w KL(p || q) + (1 - w) (1 - a), where a = Σ min(p, q) is the acceptance and
    w = exp(-3 a). The more the draft is right, the more the loss is its refusals. logits: [N, outputs] of the draft."""
    q_log = logits.log_softmax(-1, torch.float32).gather(-1, target.places)
    known = target.probs > 0
    q = q_log.exp().masked_fill(~known, 0.0)
    q_rest = (1 - q.sum(-1)).clamp_min(LEAST)
    mass = (target.probs.sum(-1) + target.tails).clamp_min(LEAST)  # of everything that is compared
    p, p_rest = target.probs / mass[:, None], target.tails / mass
    terms = torch.where(known, p * (p.clamp_min(1e-30).log() - q_log), 0.0).sum(-1)
    rest = torch.where(p_rest > 0, p_rest * (p_rest.clamp_min(1e-30).log() - q_rest.log()), 0.0)
    a = torch.minimum(target.probs, q).sum(-1)
    w = (-3 * a.detach()).exp()
    return (w * mass * (terms + rest) + (1 - w) * (1 - a)).mean()


class Acceptance(NamedTuple):
    """Estimates on held-out answers."""

    # Acceptance at each of ANSWER_TEMPERATURES, of answers that were written at it; None where there are none. At 0:
    # the share of places where both models have the same best token. Above: the mean of Σ min(p, q), see `overlap`.
    values: tuple[float | None, ...]
    later: tuple[float, ...]  # of a head: the mean acceptance of the second drafted token, and of those after it
    loss: float
    places: int  # scored tokens

    @property
    def known(self) -> list[float]:
        """Of the temperatures that were measured."""
        return [value for value in self.values if value is not None]

    @property
    def mean(self) -> float:
        """The mean over the temperatures that were measured."""
        return sum(self.known) / max(1, len(self.known))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready figures by temperature."""
        figures = zip(ANSWER_TEMPERATURES, self.values, strict=True)
        named = {f"acceptance_{at:g}": None if value is None else round(value, 4) for at, value in figures}
        later = {"later_tokens": [round(value, 4) for value in self.later]} if self.later else {}
        return {**named, **later, "loss": round(self.loss, 4), "places": self.places}


@torch.no_grad()
def estimate(network: DraftNetwork, batches: Sequence[Batch]) -> Acceptance:
    """Measure a draft on held-out batches."""
    sums = torch.zeros(network.steps, len(ANSWER_TEMPERATURES), dtype=torch.float64)
    counts = torch.zeros_like(sums)
    loss, places = 0.0, 0
    for batch in batches:
        for step, drafted in enumerate(network.drafted(batch)):
            scored, logits = drafted.places, functional.linear(drafted.hidden, network.projection()).float()
            ids, logprobs, tails = batch.ids[scored], batch.logprobs[scored], batch.tails[scored]
            target = reachable(ids, logprobs, tails, network.place_of)
            if step == 0 and len(logits):
                loss += float(acceptance_loss(logits, target)) * len(logits)
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
                sums[step, index] += own.sum().cpu()
                counts[step, index] += len(own)
    means = tuple(mean if count else None for mean, count in zip((sums / counts)[0].tolist(), counts[0], strict=True))
    later = (sums[1:].sum(-1) / counts[1:].sum(-1).clamp_min(1)).tolist()
    return Acceptance(means, tuple(later), loss / max(1, places), places)


def overlap(logits: Tensor, target: Reachable, logprobs: Tensor, tails: Tensor, temperature: float) -> Tensor:
    """Σ min(p, q) [N] at a temperature, from below: only the K known tokens count. logits: [N, outputs]. logprobs: [N,
    K], and tails: [N], see WrittenText.

    Tokens of the tail are at most as probable as the last known one, x. At temperature T their weights p^(1/T) sum to
    at most tail * x^(1/T - 1).
    """
    weights = (logprobs.double() / temperature).exp()
    last = logprobs.double().masked_fill(logprobs.isinf(), 0).amin(-1).exp()
    rest = tails.double() * last ** (1 / temperature - 1)
    p = weights / (weights.sum(-1) + rest)[:, None]
    q = (logits.double() / temperature).log_softmax(-1).gather(-1, target.places).exp()
    return torch.where(target.probs > 0, torch.minimum(p, q), 0.0).sum(-1)
