"""Measures the cost of passes on this machine under the conditions of a round.

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
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from ..models.bindings import DRAFT, TARGET
from ..models.errors import ConfigError
from ..runtime.decoding.decoder import SpeculativeDecoder
from ..runtime.decoding.stats import SpecDecodeStats
from ..runtime.engines.backends import describe_backend
from ..runtime.engines.base import Engine, TokenBatch
from ..runtime.engines.cache import GrowingKVCache
from ..runtime.engines.passes import prefill
from ..runtime.sampling.params import SamplingParams
from ..runtime.sampling.random import seeded_streams
from ..runtime.sampling.sampler import Sampler
from ..runtime.speculation.config import SpeculativeConfig
from ..runtime.speculation.growers.kinds import LOOKUP
from ..runtime.speculation.planning.cost import CostModel, HostCosts, PassCosts
from .progress import Begin, Step

CONTEXTS = (64, 512, 1536)  # and the longest one of a bundle for longer texts
LONGEST = 8192  # of the contexts that are measured unasked: its cache must fit beside the weights
REPEATS = 9
BRIEF_SECONDS = 3.0  # of a build, for the passes behind one context: after these, only so many repeats as are needed
NEEDED_REPEATS = 3  # for a median
LONG_REPEATS = 2  # where measuring each width once takes all these seconds: long passes vary less
LONGEST_SECONDS = 9.0  # where it takes so long, once is enough
PAUSE = 2e-4  # seconds on the host before a pass of a round with a proposal
DRAFT_PAUSE = 5e-5  # the same between two passes of the draft
HOST_TEMPERATURES = (0.0, 1.0)
HOST_TOKENS = (3, 15)  # proposals whose rounds give the host's time per round and per token
HOST_TURNS, HOST_ROUNDS = 5, 12  # of each kind of rounds
BRIEF_TURNS, BRIEF_ROUNDS = 3, 6
LOOKUPS = 24  # measured rounds with a prompt lookup in each turn


@dataclass(frozen=True, slots=True)
class Pair:
    """The engines of a bundle by role, opened with the settings of their later use. max_length: most tokens of prompt
    and output. machine: see `fingerprint` of `bundle/costs.py`."""

    engines: Mapping[str, Engine]
    max_length: int
    machine: Mapping[str, str | int]


class Passes(NamedTuple):
    """The measured passes of one engine after one context: for every width the median seconds, and the spread of the
    repeats (upper quartile / least), or that of the target's narrowest passes for a width that was measured once.
    further: of a draft, the seconds of passes that follow another one of its passes."""

    seconds: tuple[float, ...]
    spreads: tuple[float, ...]
    further: tuple[float, ...] = ()


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
    of `contexts_of` if none are named. seconds: of the repeats behind one context, after which there are NEEDED_REPEATS
    and no more; and of the rounds that tell the time of the host.

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
    for context in fitting:
        widths = sorted({width for engine in pair.engines.values() for width in engine.spec.widths})
        advance = begin(Step(f"Passes behind {context} tokens", len(widths) * repeats))
        for role, passes in measure_after(pair, context, widths, repeats, advance, seconds).items():
            medians[role].append(passes.seconds)
            further += [passes.further] if passes.further else []
            spreads += passes.spreads
    turns, rounds = (HOST_TURNS, HOST_ROUNDS) if math.isinf(seconds) else (BRIEF_TURNS, BRIEF_ROUNDS)
    advance = begin(Step("Time outside the engines", turns * len(HOST_TEMPERATURES) * (len(HOST_TOKENS) + 1)))
    greedy, sampled = host(pair, turns, rounds, advance, seconds)
    costs = {}
    for role, engine in pair.engines.items():
        backend = describe_backend(engine.spec.backend)
        costs[role] = PassCosts(engine.spec.widths, fitting, tuple(medians[role]), backend.pads, not backend.panels)
    draft = costs.get(DRAFT)
    again = None if draft is None else replace(draft, seconds=tuple(further))
    return CostModel(costs[TARGET], draft, greedy, sampled, pair.machine, median(spreads), further=again)


def measure_after(
    pair: Pair,
    context: int,
    widths: Sequence[int],
    repeats: int,
    advance: Callable[[], None],
    limit: float = math.inf,
) -> dict[str, Passes]:
    """Measure each engine's passes after `context` committed rows."""
    caches: dict[str, Any] = {}
    for role, engine in pair.engines.items():
        caches[role] = filled_cache(engine, context)
    times: dict[str, dict[int, list[float]]] = {
        role: {width: [] for width in engine.spec.widths} for role, engine in pair.engines.items()
    }
    target = pair.engines[TARGET]
    narrowest = target.spec.widths[0]
    beside: dict[int, list[float]] = {width: [] for width in target.spec.widths}  # passes of the narrowest width
    again: dict[int, list[float]] = {width: [] for width in times.get(DRAFT, ())}  # further passes of the draft
    # The first pass of a width binds its buffers, and does not count, unless passes are long: that is little of them.
    start, first, needed = perf_counter(), 1, NEEDED_REPEATS
    for repeat in range(repeats + 1):
        spent = perf_counter() - start
        if repeat == 1 and spent > limit / 2:
            first, needed = 0, NEEDED_REPEATS if spent < limit else LONG_REPEATS if spent < LONGEST_SECONDS else 1
        enough = repeat >= first + needed and spent > limit
        for width in widths:
            if enough:
                advance()
                continue
            plain = time_pass(target, caches[TARGET], narrowest)
            if width == narrowest:
                times[TARGET][width].append(plain)
            for role, engine in reversed(list(pair.engines.items())):  # the draft first
                if width in engine.spec.widths and (role, width) != (TARGET, narrowest):
                    wait(PAUSE)
                    times[role][width].append(time_pass(engine, caches[role], width))
                    if role == TARGET:
                        beside[width].append(plain)
                    else:
                        wait(DRAFT_PAUSE)
                        again[width].append(time_pass(engine, caches[role], width))
            if repeat:
                advance()
    counted = {role: {width: each[first:] for width, each in found.items()} for role, found in times.items()}
    seconds = {role: [median(each) for each in found.values()] for role, found in counted.items()}
    plains = [*counted[TARGET][narrowest], *chain.from_iterable(each[first:] for each in beside.values())]
    plain = median(plains)
    multiples = [
        median(np.divide(each, beside[width][first:])) if width != narrowest else 1.0
        for width, each in counted[TARGET].items()
    ]
    seconds[TARGET] = [plain * multiple for multiple in multiples]
    measured = {
        role: Passes(
            smoothed([*found], seconds[role]),
            tuple(spread(each if len(each) > 1 else plains) for each in found.values()),
        )
        for role, found in counted.items()
    }
    if DRAFT in measured:  # no further pass takes longer than a first one
        warm = np.minimum([median(each[first:]) for each in again.values()], measured[DRAFT].seconds)
        measured[DRAFT] = measured[DRAFT]._replace(further=smoothed([*again], warm.tolist()))
    return measured


def filled_cache(engine: Engine, context: int) -> Any:
    """A cache with so many committed rows. Where a cache can repeat rows, only those of one pass are computed."""
    cache = engine.new_cache()
    computed = min(context, engine.spec.max_width) if isinstance(cache, GrowingKVCache) else context
    prefill(engine, cache, [0] * computed)
    if isinstance(cache, GrowingKVCache):
        cache.repeat(context)
    return cache


def wait(seconds: float) -> None:
    """Be busy for so long, as the host is between two passes."""
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass


def time_pass(engine: Engine, cache: Any, width: int) -> float:
    """Seconds of one pass over a chain of `width` rows, which are not committed."""
    positions = np.arange(cache.length, cache.length + width)
    batch = TokenBatch.pad([0] * width, positions, np.tri(width, dtype=np.bool_), width)
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


def host(
    pair: Pair, turns: int, count: int, advance: Callable[[], None], seconds: float = math.inf
) -> tuple[HostCosts, HostCosts]:
    """Measure the time outside the engines at temperature 0 and above, per round and per proposed token, with a small
    chain and a larger tree: most proposals are between these sizes. Both kinds of rounds and plain ones take turns: the
    speed of the machine changes, and the plans compare them with each other. Medians over rounds, because an
    interruption makes one of them much longer. Rounds that an engine runs as a whole are also measured pass by pass.
    turns: of each kind. count: tokens of a turn. seconds: turns that would take longer are left out, but for the first:
    beside passes that take so long, the host's time hardly counts."""
    few, many = (min(size, pair.engines[TARGET].spec.max_width - 1) for size in HOST_TOKENS)
    configs = (*proposing(pair, few, many), None)
    rounds: dict[tuple[float, int, bool], list[float]] = {}
    start = perf_counter()
    for turn in range(turns):
        if turn and (perf_counter() - start) * (turn + 1) > seconds * turn:
            for _ in range((turns - turn) * len(HOST_TEMPERATURES) * len(configs)):
                advance()
            break
        for temperature in HOST_TEMPERATURES:
            for index, config in enumerate(configs):
                for by_pass in (False, True):
                    found = host_rounds(pair, config, temperature, turn, count, by_pass)
                    rounds.setdefault((temperature, index, by_pass), []).extend(found)
                advance()

    def costs(temperature: float, by_pass: bool = False) -> HostCosts:
        proposals = [median(rounds[temperature, index, by_pass]) for index in range(2)]
        (small, large), plain = proposals, median(rounds[temperature, 2, False])
        token = max(0.0, large - small) / max(1, many - few)
        apart = costs(temperature, True) if not by_pass and rounds[temperature, 0, True] else None
        return HostCosts(plain, max(plain, small - few * token), token, apart)

    greedy, sampled = map(costs, HOST_TEMPERATURES)
    return greedy, sampled


def proposing(pair: Pair, few: int, many: int) -> tuple[SpeculativeConfig, SpeculativeConfig]:
    """Configurations that always propose few and many tokens."""
    if DRAFT not in pair.engines:
        shorter, longer = (
            SpeculativeConfig(LOOKUP, lookup_ngram=1, lookup_len=size, budget="fixed") for size in (few, many)
        )
        return shorter, longer
    frontier = min(4, pair.engines[DRAFT].spec.max_width)
    line = SpeculativeConfig("chain", max_draft_len=few, budget="fixed")
    tree = SpeculativeConfig(max_total_draft_tokens=many, max_draft_len=4, frontier_width=frontier, budget="fixed")
    return line, tree


def host_rounds(
    pair: Pair, config: SpeculativeConfig | None, temperature: float, turn: int, count: int, by_pass: bool
) -> list[float]:
    """Host seconds of rounds with this configuration; None means plain rounds. Of a prompt lookup the first round
    counts, whose prompt is a sequence of tokens that begins again. by_pass: of those that an engine would run as a
    whole; none where it does not."""
    decoder = SpeculativeDecoder(pair.engines[TARGET], pair.engines.get(DRAFT), config, pair.max_length, ())
    if by_pass and not decoder.run_pass_by_pass():
        return []
    vocab_size = pair.engines[TARGET].spec.model.vocab_size
    given = 0 if config is None or config.drafts else config.max_given  # tokens of each lookup
    found = []
    for seed in range(turn * LOOKUPS, (turn + 1) * LOOKUPS) if given else [turn]:
        params = SamplingParams(max_tokens=max(count, given + 1), temperature=temperature, ignore_eos=True)
        stats = SpecDecodeStats()
        prompt = [seed % vocab_size]
        if given:
            prompt = [token % vocab_size for token in (*range(given + 1), 0)]
        before = 0.0
        for _ in decoder.generate(prompt, Sampler(params, prompt, (), vocab_size), seeded_streams(seed), stats):
            found.append(stats.host_seconds - before)
            before = stats.host_seconds
            if given:
                break
    return found
