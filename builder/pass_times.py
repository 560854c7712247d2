"""Measures the seconds of passes on this machine under the conditions of a round.

In plain decoding every pass follows another one of the target at once. In a round with a proposal the engines
alternate, so each engine finds the processor's caches full of the other engine's weights, and the time on the host
before a pass is long enough for helping threads to fall asleep. The same holds here. A wider pass of the target is
measured as a multiple of the narrowest one beside it: the speed of memory changes from minute to minute, and wide
passes make the narrow ones after them slower. A draft's pass that follows another one of the draft is measured apart,
since it finds the draft's weights near. The results are medians, because other programs run at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..models.bindings import DRAFT, TARGET
from ..runtime.engines.base import Engine, TokenBatch
from ..runtime.engines.cache import GrowingKVCache
from ..runtime.engines.passes import prefill_passes, run

PAUSE = 2e-4  # seconds on the host before a pass of a round with a proposal
DRAFT_PAUSE = 5e-5  # the same between two passes of the draft


@dataclass(frozen=True, slots=True)
class Pair:
    """The engines of a bundle, opened with the settings of their later use."""

    engines: Mapping[str, Engine]  # by role
    max_length: int  # most tokens of prompt and output
    machine: Mapping[str, str | int]  # see `fingerprint` of `bundle/costs.py`


class Passes(NamedTuple):
    """The measured passes of one engine after one context, by width."""

    widths: tuple[int, ...]
    seconds: tuple[float, ...]  # medians
    # Upper quartile / least of the repeats; of the target's narrowest passes for a width that was measured once.
    spreads: tuple[float, ...]
    further: tuple[float, ...] = ()  # of a draft: seconds of passes that follow another one of its passes


def thinned_out(widths: Sequence[int], step: float, every: int = 1) -> tuple[int, ...]:
    """Those up to `every`, the narrowest, the widest, and between them each `step` times the one before, or more."""
    found = [widths[0]]
    for width in widths[1:]:
        if width <= every or width >= step * found[-1] or width == widths[-1]:
            found.append(width)
    return tuple(found)


def interpolated(
    widths: Sequence[int], measured: Sequence[int], seconds: Sequence[float], before: Sequence[Sequence[float]]
) -> tuple[float, ...]:
    """Seconds of passes of all widths after a context, where only some widths were measured. before: seconds of all
    widths after each shorter context, if any. Then each measured time is a multiple of that after the shortest context,
    and the multiples of the other widths are interpolated; else the times are."""
    if len(measured) == len(widths):
        return tuple(seconds)
    if not before:
        return smoothed(widths, np.interp(widths, measured, seconds).tolist())
    first = dict(zip(widths, before[0], strict=True))
    multiples = [each / first[width] for width, each in zip(measured, seconds, strict=True)]
    return smoothed(widths, (np.asarray(before[0]) * np.interp(widths, measured, multiples)).tolist())


def measure_after(
    pair: Pair,
    context: int,
    widths: Sequence[int],
    repeats: int,
    advance: Callable[[], None],
    share: float = math.inf,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Passes]:
    """Measure each engine's passes of these widths after `context` committed rows. share: seconds after which a width
    has been measured for long enough. stopped: whether once is enough for each."""
    caches = {role: filled_cache(engine, context) for role, engine in pair.engines.items()}
    times: dict[str, dict[int, list[float]]] = {
        role: {width: [] for width in widths if width in engine.spec.widths} for role, engine in pair.engines.items()
    }
    target = pair.engines[TARGET]
    narrowest = target.spec.widths[0]
    beside: dict[int, list[float]] = {width: [] for width in times[TARGET]}  # passes of the narrowest width
    again: dict[int, list[float]] = {width: [] for width in times.get(DRAFT, ())}  # further passes of the draft
    spent = dict.fromkeys(widths, 0.0)
    for repeat in range(repeats + 1):
        for width in widths:
            if spent[width] <= share and not (repeat and stopped()):
                start = perf_counter()
                plain = time_pass(target, caches[TARGET], narrowest)
                if width == narrowest:
                    times[TARGET][width].append(plain)
                for role, engine in reversed(list(pair.engines.items())):  # the draft first
                    if width in times[role] and (role, width) != (TARGET, narrowest):
                        wait(PAUSE)
                        times[role][width].append(time_pass(engine, caches[role], width))
                        if role == TARGET:
                            beside[width].append(plain)
                        else:
                            wait(DRAFT_PAUSE)
                            again[width].append(time_pass(engine, caches[role], width, False))
                spent[width] += perf_counter() - start
            if repeat:
                advance()
    counted = {role: {width: counting(each) for width, each in found.items()} for role, found in times.items()}
    seconds = {role: [median(each) for each in found.values()] for role, found in counted.items()}
    plains = [*counted[TARGET][narrowest], *chain.from_iterable(map(counting, beside.values()))]
    plain = median(plains)
    multiples = [
        median(np.divide(each, counting(beside[width]))) if width != narrowest else 1.0
        for width, each in counted[TARGET].items()
    ]
    seconds[TARGET] = [plain * multiple for multiple in multiples]
    measured = {
        role: Passes(
            tuple(found),
            smoothed([*found], seconds[role]),
            tuple(spread(each if len(each) > 1 else plains) for each in found.values()),
        )
        for role, found in counted.items()
    }
    if DRAFT in measured:  # no further pass takes longer than a first one
        warm = np.minimum([median(counting(each)) for each in again.values()], measured[DRAFT].seconds)
        measured[DRAFT] = measured[DRAFT]._replace(further=smoothed([*again], warm.tolist()))
    return measured


def counting(times: Sequence[float]) -> Sequence[float]:
    """All but the first one, whose pass binds the buffers of its width; that one where it is alone."""
    return times[1:] or times


def filled_cache(engine: Engine, context: int) -> Any:
    """A cache with so many committed rows. Where a cache can repeat rows, only those of one pass are computed."""
    cache = engine.new_cache()
    computed = min(context, engine.spec.max_width) if isinstance(cache, GrowingKVCache) else context
    run(prefill_passes(engine, cache, [0] * computed, states=states_for(engine, computed)))
    if isinstance(cache, GrowingKVCache):
        cache.repeat(context)
    return cache


def wait(seconds: float) -> None:
    """Be busy for so long, as the host is between two passes."""
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass


def states_for(engine: Engine, rows: int, committed: bool = True) -> NDArray[np.float32] | None:
    """Any states for a draft that reads them. committed: whether they are the target's, not the draft's own."""
    model = engine.spec.model
    if model.reads is None:
        return None
    states = np.zeros((rows, model.state_inputs), np.float32)
    part = slice(model.reads.inputs) if committed else slice(model.reads.inputs, None)
    states[:, part] = 1
    return states


def time_pass(engine: Engine, cache: Any, width: int, committed: bool = True) -> float:
    """Seconds of a pass of `width` rows, not committed, with a round's states. committed: see `states_for`."""
    positions, given = np.arange(cache.length, cache.length + width), states_for(engine, width, committed)
    mask, shows = np.tri(width, dtype=np.bool_), engine.spec.model.state_size > 0
    batch = TokenBatch.pad([0] * width, positions, mask, width, states=given, states_read=shows)
    start = perf_counter()
    engine.score(batch, cache)
    elapsed = perf_counter() - start
    cache.truncate(cache.length)
    return elapsed


def spread(times: Sequence[float]) -> float:
    """Upper quartile / least time; close to one on an idle machine."""
    return float(np.quantile(times, 0.75)) / min(times)


def smoothed(widths: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
    """Times without what only noise explains. A few rows share the reading of the weights, many rows keep every core
    busy: so no pass computes more rows a second than the widest one, or than is usual among the three widest. And a
    wider pass never takes less time: where times fall, their mean stands for all of them (isotonic regression)."""
    each = np.asarray(seconds) / np.asarray(widths)
    least = np.asarray(widths) * min(each[-1], median(each[-3:]))
    runs: list[tuple[float, int]] = []  # mean and number of neighbours
    for mean in np.maximum(seconds, least).tolist():
        count = 1
        while runs and runs[-1][0] > mean:
            before, number = runs.pop()
            mean, count = (before * number + mean * count) / (number + count), number + count
        runs.append((mean, count))
    return tuple(mean for mean, count in runs for _ in range(count))
