"""Measures the costs of a bundle on this machine: the seconds of passes and of the host, as plans need them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter

from ..models.bindings import DRAFT, TARGET
from ..models.errors import ConfigError
from ..runtime.decoding.decoder import SpeculativeDecoder
from ..runtime.decoding.stats import SpecDecodeStats
from ..runtime.engines.backends import describe_backend
from ..runtime.sampling.params import SamplingParams
from ..runtime.sampling.random import seeded_streams
from ..runtime.sampling.sampler import Sampler
from ..runtime.speculation.config import SpeculativeConfig
from ..runtime.speculation.growers.kinds import LOOKUP
from ..runtime.speculation.planning.cost import CostModel, HostCosts, PassCosts
from .pass_times import Pair, interpolated, measure_after, thinned_out
from .progress import Begin, Step

CONTEXTS = (64, 512, 1536)  # and the longest one of a bundle for longer texts
LONGEST = 8192  # of the contexts that are measured unasked: its cache must fit beside the weights
REPEATS = 9
# For the passes after one context, and for the rounds that tell the host's time: of `draftwood profile`, and of a
# build.
SECONDS, BRIEF_SECONDS = 5.5, 3.0
EVERY, STEP, FAR_STEP = 8, 1.25, 4.0  # see `thinned_out`: after the shortest context, and after the others
TEMPERATURES = (0.0, 1.0)
TOKENS = (3, 15)  # of proposals whose rounds give the host's time per round and per token
TURNS, ROUNDS = 5, 12  # of each kind of rounds
BRIEF_TURNS, BRIEF_ROUNDS = 3, 6
LOOKUPS = 24  # measured rounds with a prompt lookup in each turn


def contexts_of(max_length: int) -> tuple[int, ...]:
    """The contexts to measure for so many tokens of prompt and output."""
    contexts = tuple(context for context in CONTEXTS if context <= max_length) or CONTEXTS[:1]
    return contexts if max_length <= CONTEXTS[-1] else (*contexts, min(max_length, LONGEST))


def brief_contexts(max_length: int) -> tuple[int, ...]:
    """The shortest and the longest of these, and one between where they are far apart: costs grow evenly."""
    contexts = contexts_of(max_length)
    middle = {CONTEXTS[-1]} if contexts[-1] > 2 * CONTEXTS[-1] else set()
    return tuple(sorted({contexts[0], contexts[-1], *middle}))


def measure(
    pair: Pair,
    begin: Begin,
    contexts: Sequence[int] = (),
    repeats: int = REPEATS,
    seconds: float = math.inf,
    stopped: Callable[[], bool] = lambda: False,
) -> CostModel:
    """Measure the passes of both engines after each context that fits: many widths after the shortest one, then a few;
    the others lie between them. begin: called for every step. contexts: those of `contexts_of` if none are named.
    seconds: for one context, shared by its narrow widths, which most plans have, and for the time of the host. stopped:
    whether what has been measured so far shall do.

    Raises ConfigError if one does not fit.
    """
    contexts = contexts or contexts_of(pair.max_length)
    if min(contexts) < 1:
        raise ConfigError(f"contexts must be at least 1, the tokens before a pass, not {min(contexts)}")
    if (longest := max(contexts)) > pair.max_length:
        raise ConfigError(f"a context of {longest} exceeds this bundle's {pair.max_length} tokens: name shorter ones")
    contexts = tuple(sorted(set(contexts)))
    medians: dict[str, list[tuple[float, ...]]] = {role: [] for role in pair.engines}
    further: list[tuple[float, ...]] = []
    spreads: list[float] = []
    for context in contexts:
        if spreads and stopped():
            break
        step, least = (STEP, EVERY) if context == contexts[0] else (FAR_STEP, 1)
        asked = sorted(
            {width for engine in pair.engines.values() for width in thinned_out(engine.spec.widths, step, least)}
        )
        advance = begin(Step(f"Passes after {context} tokens", len(asked) * repeats))
        found = measure_after(pair, context, asked, repeats, advance, seconds / min(len(asked), EVERY), stopped)
        for role, passes in found.items():
            every, measured = pair.engines[role].spec.widths, passes.widths
            medians[role].append(interpolated(every, measured, passes.seconds, medians[role]))
            if role == DRAFT:
                further.append(interpolated(every, measured, passes.further, further))
            spreads += passes.spreads
    turns, rounds = (TURNS, ROUNDS) if seconds >= SECONDS else (BRIEF_TURNS, BRIEF_ROUNDS)
    advance = begin(Step("Time outside the engines", units(turns)))
    greedy, sampled = measure_host(pair, turns, rounds, advance, 0.0 if stopped() else seconds)
    costs = {}
    for role, engine in pair.engines.items():
        backend = describe_backend(engine.spec.backend)
        costs[role] = PassCosts(
            engine.spec.widths, contexts[: len(medians[role])], tuple(medians[role]), backend.pads, not backend.panels
        )
    draft = costs.get(DRAFT)
    again = None if draft is None else replace(draft, seconds=tuple(further))
    return CostModel(costs[TARGET], draft, greedy, sampled, pair.machine, median(spreads), further=again)


def measure_host(
    pair: Pair, turns: int, count: int, advance: Callable[[], None], seconds: float = math.inf
) -> tuple[HostCosts, HostCosts]:
    """Measure the time outside the engines at temperature 0 and above, per round and per proposed token, with a small
    chain and a larger tree: most proposals are between these sizes. Both kinds of rounds and plain ones take turns: the
    speed of the machine changes, and the plans compare them with each other. Medians over rounds, because an
    interruption makes one of them much longer.
    turns: of each kind. count: tokens of a turn. seconds: turns that would take longer are left out, but for the first:
    beside passes that take so long, the host's time hardly counts."""
    few, many = (min(size, pair.engines[TARGET].spec.max_width - 1) for size in TOKENS)
    configs = (*proposing(pair, few, many), None)
    rounds: dict[tuple[float, int], list[float]] = {}
    kinds = len(TEMPERATURES) * len(configs)
    start = perf_counter()
    for turn in range(turns):
        if turn and (perf_counter() - start) * (turn + 1) > seconds * turn:
            for _ in range(units(turns - turn)):
                advance()
            break
        for temperature in TEMPERATURES:
            for index, config in enumerate(configs):
                found = host_rounds(pair, config, temperature, turn, count, seconds / kinds)
                rounds.setdefault((temperature, index), []).extend(found)
                advance()

    def costs(temperature: float) -> HostCosts:
        small, large, plain = (median(rounds[temperature, index]) for index in range(3))
        token = max(0.0, large - small) / max(1, many - few)
        return HostCosts(plain, max(plain, small - few * token), token)

    greedy, sampled = map(costs, TEMPERATURES)
    return greedy, sampled


def units(turns: int) -> int:
    """How often `advance` is called in so many turns."""
    return turns * len(TEMPERATURES) * (len(TOKENS) + 1)


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
    pair: Pair,
    config: SpeculativeConfig | None,
    temperature: float,
    turn: int,
    count: int,
    limit: float = math.inf,
) -> list[float]:
    """Host seconds of rounds with this configuration; None means plain rounds. Of a prompt lookup the first round
    counts, whose prompt is a sequence of tokens that begins again. limit: seconds, after which two rounds suffice."""
    decoder = SpeculativeDecoder(pair.engines[TARGET], pair.engines.get(DRAFT), config, pair.max_length, ())
    vocab_size = pair.engines[TARGET].spec.model.vocab_size
    given = 0 if config is None or config.drafts else config.max_tokens  # tokens of each lookup
    found: list[float] = []
    start = perf_counter()

    def enough() -> bool:
        return len(found) > 1 and perf_counter() - start > limit

    for seed in range(turn * LOOKUPS, (turn + 1) * LOOKUPS) if given else [turn]:
        if enough():
            break
        params = SamplingParams(max_tokens=max(count, given + 1), temperature=temperature, ignore_eos=True)
        stats = SpecDecodeStats()
        prompt = [seed % vocab_size]
        if given:
            prompt = [token % vocab_size for token in (*range(given + 1), 0)]
        before = 0.0
        for _ in decoder.generate(prompt, Sampler(params, prompt, (), vocab_size), seeded_streams(seed), stats):
            found.append(stats.host_seconds - before)
            before = stats.host_seconds
            if given or enough():
                break
    return found
