"""Measures the costs of a bundle on this machine: the seconds of passes and of the host, as plans need them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from ..models.bindings import DRAFT, TARGET
from ..models.errors import ConfigError
from ..runtime.engines.backends import describe_backend
from ..runtime.speculation.planning.cost import CostModel, PassCosts
from .host_times import BRIEF_ROUNDS, BRIEF_TURNS, ROUNDS, TURNS, measure_host, units
from .pass_times import Pair, interpolated, measure_after, thinned_out
from .progress import Begin, Step

CONTEXTS = (64, 512, 1536)  # and the longest one of a bundle for longer texts
LONGEST = 8192  # of the contexts that are measured unasked: its cache must fit beside the weights
REPEATS = 9
BRIEF_SECONDS = 2.0  # of a build, for the passes behind one context, and for the rounds that tell the host's time


def contexts_of(max_length: int) -> tuple[int, ...]:
    """The contexts to measure for so many tokens of prompt and output."""
    fitting = tuple(context for context in CONTEXTS if context <= max_length) or CONTEXTS[:1]
    return fitting if max_length <= CONTEXTS[-1] else (*fitting, min(max_length, LONGEST))


def brief_contexts(max_length: int) -> tuple[int, ...]:
    """The shortest and the longest of these, as costs grow evenly between them; one between where they are far
    apart."""
    contexts = contexts_of(max_length)
    middle = {CONTEXTS[-1]} if contexts[-1] > 2 * CONTEXTS[-1] else set()
    return tuple(sorted({contexts[0], contexts[-1], *middle}))


def measure(
    pair: Pair,
    begin: Begin,
    contexts: Sequence[int] = (),
    repeats: int = REPEATS,
    seconds: float = math.inf,
) -> CostModel:
    """Measure every width of both engines after each context that fits. begin: called for every step. contexts: those
    of `contexts_of` if none are named. seconds: to measure briefly, about so long behind one context, of which every
    width has an equal share, and so long for the time of the host. A few widths are then enough behind all contexts but
    the first.

    Raises ConfigError if no context fits.
    """
    contexts = contexts or contexts_of(pair.max_length)
    if min(contexts) < 1:
        raise ConfigError(f"contexts must be at least 1, the tokens before a pass, not {min(contexts)}")
    fitting = tuple(context for context in sorted(set(contexts)) if context <= pair.max_length)
    if not fitting or repeats < 1:
        raise ConfigError(
            f"no context of {list(contexts)} fits this bundle's {pair.max_length} tokens: name shorter ones"
        )
    medians: dict[str, list[tuple[float, ...]]] = {role: [] for role in pair.engines}
    further: list[tuple[float, ...]] = []
    spreads: list[float] = []
    widths = sorted({width for engine in pair.engines.values() for width in engine.spec.widths})
    few = sorted({width for engine in pair.engines.values() for width in thinned_out(engine.spec.widths)})
    for context in fitting:
        asked = few if context > fitting[0] and math.isfinite(seconds) else widths
        advance = begin(Step(f"Passes behind {context} tokens", len(asked) * repeats))
        found = measure_after(pair, context, asked, repeats, advance, seconds / len(widths))
        for role, passes in found.items():
            every, measured = pair.engines[role].spec.widths, passes.widths
            medians[role].append(interpolated(every, measured, passes.seconds, medians[role]))
            if role == DRAFT:
                further.append(interpolated(every, measured, passes.further, further))
            spreads += passes.spreads
    turns, rounds = (TURNS, ROUNDS) if math.isinf(seconds) else (BRIEF_TURNS, BRIEF_ROUNDS)
    advance = begin(Step("Time outside the engines", units(turns)))
    greedy, sampled = measure_host(pair, turns, rounds, advance, seconds)
    costs = {}
    for role, engine in pair.engines.items():
        backend = describe_backend(engine.spec.backend)
        costs[role] = PassCosts(engine.spec.widths, fitting, tuple(medians[role]), backend.pads, not backend.panels)
    draft = costs.get(DRAFT)
    again = None if draft is None else replace(draft, seconds=tuple(further))
    return CostModel(costs[TARGET], draft, greedy, sampled, pair.machine, median(spreads), further=again)
