"""How many requests per second one replica, or several, can serve: simulated from a bundle's measured cost table.

    python -m benchmarks.load.queueing bundles/demo-110m \\
        --measured benchmarks/results/load_concurrency_2026-11-21.json --output benchmarks/results

Requests arrive at random (Poisson). `simulation.py` says what is simulated and what is assumed. The *knee* is the
arrival rate with the largest ratio of throughput to mean request time (Kleinrock's power, 1979): beyond the knee,
waiting times grow faster than throughput. `--measured` names a result of `concurrency.py`: the same closed loops of
clients are simulated and compared with it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.load.concurrency import REQUESTS
from benchmarks.load.simulation import (
    LoadSummary,
    Request,
    Routing,
    Serving,
    Sizes,
    draw_poisson,
    simulate,
    summarise,
)
from benchmarks.tools.record import add_output, write_results
from benchmarks.tools.svg import new_figure, save_svg
from draftwood.cli.bench import read_prompts
from draftwood.runtime.bundle.costs import read_costs
from draftwood.runtime.decoding.scheduler import MAX_RUNNING
from draftwood.runtime.text.tokenizer import Tokenizer

SHARES = (0.1, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0, 1.1)  # of the saturated throughput
SATURATED_ROUNDS = 40  # requests of each client that keeps a saturated replica busy
HALVINGS = 6  # of the interval in which the sustainable rate lies
PROMPTS = Path("models/demo/prompts.jsonl")
MOST_REPLICAS = 64
COLOURS = {"plain": "tab:blue", "speculative": "tab:red"}
LINES = ("-", "--", ":", "-.")  # by number of replicas


class Bounds(NamedTuple):
    """Limits in seconds that 99 % of the requests must keep: time to the first token, and mean time per later token."""

    first_token: float
    per_token: float

    def hold(self, found: LoadSummary) -> bool:
        return found.first_token_p99 <= self.first_token and found.per_token_p99 <= self.per_token


class Workload(NamedTuple):
    """The random requests of one simulation. number: requests per replica."""

    sizes: Sizes
    number: int
    seed: int

    def at(self, serving: Serving, rate: float) -> LoadSummary:
        """Simulate Poisson arrivals, `rate` per second. Every request has a client of its own."""
        requests = draw_poisson(self.sizes, rate, self.number * serving.replicas, self.seed)
        return summarise(simulate(serving, ([request] for request in requests), self.seed))

    def saturation(self, serving: Serving) -> float:
        """Requests per second when every place is always taken. Replicas do not influence each other then."""
        clients = serving.max_running
        drawn = draw_poisson(self.sizes, 1.0, clients * SATURATED_ROUNDS, self.seed)
        requests = [Request(0.0, each.prompt, each.output) for each in drawn]
        loops = [requests[client::clients] for client in range(clients)]
        # The start, when all requests read their prompts, and the end, when places are empty, do not count.
        ends = sorted(each.finished for each in simulate(replace(serving, replicas=1), loops, self.seed))
        first, last = len(ends) // 4, 3 * len(ends) // 4
        return serving.replicas * (last - first) / (ends[last] - ends[first])


def find_knee(sweep: Mapping[float, LoadSummary]) -> float:
    """The rate with the largest ratio of throughput to mean request time."""
    return max(sweep, key=lambda rate: sweep[rate].tokens_per_second / sweep[rate].request_mean)


def find_sustainable_rate(serving: Serving, load: Workload, bounds: Bounds, most: float) -> float:
    """The highest rate up to `most` at which the bounds hold, by bisection; 0 if they fail at a tenth of `most`."""
    if not bounds.hold(load.at(serving, SHARES[0] * most)):
        return 0.0
    low, high = SHARES[0] * most, most
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if bounds.hold(load.at(serving, middle)) else (low, middle)
    return low


def count_replicas(serving: Serving, load: Workload, bounds: Bounds, rate: float) -> int | None:
    """The smallest number of replicas that serve `rate` within the bounds; None if no number does."""
    if not bounds.hold(load.at(replace(serving, replicas=1), rate / MOST_REPLICAS)):
        return None
    low, high = 0, MOST_REPLICAS  # `low` replicas are too few, `high` are enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bounds.hold(load.at(replace(serving, replicas=middle), rate)) else (middle, high)
    return high


def measure(serving: Serving, load: Workload, bounds: Bounds) -> dict[str, Any]:
    """Saturated throughput, knee, sustainable rate, and the figures at every share of the saturated throughput."""
    most = load.saturation(serving)
    sweep = {share * most: load.at(serving, share * most) for share in SHARES}
    return {
        "saturated_requests_per_second": round(most, 3),
        "knee_requests_per_second": round(find_knee(sweep), 3),
        "within_bounds_requests_per_second": round(find_sustainable_rate(serving, load, bounds, most), 3),
        "sweep": [
            {"rate": round(rate, 3)} | {name: round(value, 4) for name, value in found._asdict().items()}
            for rate, found in sweep.items()
        ],
    }


def compare_with_measured(
    serving: Mapping[str, Serving], prompts: Sequence[int], measured: Mapping[str, Any]
) -> dict[str, Any]:
    """Figures that `concurrency.py` measured, beside a simulation of the same closed loops. prompts: lengths of its
    prompts, in order."""
    result: dict[str, Any] = {}
    places = max(map(int, measured["requests"]))
    for clients, modes in measured["requests"].items():
        for mode, each in serving.items():
            loops = [
                [
                    Request(0.0, prompts[turn % len(prompts)], measured["max_tokens"])
                    for turn in range(client, client + REQUESTS)
                ]
                for client in range(int(clients))
            ]
            found = summarise(simulate(replace(each, replicas=1, max_running=places), loops), warm_up=0.0)
            result.setdefault(clients, {})[mode] = {
                name: [round(getattr(found, name), 4), modes[mode][name]]
                for name in ("tokens_per_second", "first_token_p50", "per_token_p50")
            } | {"deviation": round(found.tokens_per_second / modes[mode]["tokens_per_second"] - 1, 3)}
    return result


def plot(modes: Mapping[str, Any], title: str, file: Path) -> None:
    """Draw throughput, time to the first token and time per later token against the arrival rate. p99 is a thin line,
    a vertical line marks a knee."""
    canvas = new_figure(12, 3.8)
    axes = canvas.subplots(1, 3)
    for mode, by_replicas in modes.items():
        for line, (replicas, found) in zip(LINES, by_replicas.items(), strict=False):
            rates = [point["rate"] for point in found["sweep"]]
            style = {"color": COLOURS[mode], "linestyle": line}
            label = f"{mode}, {replicas} replica{'' if replicas == '1' else 's'}"
            axes[0].plot(rates, [point["tokens_per_second"] for point in found["sweep"]], label=label, **style)
            axes[0].axvline(found["knee_requests_per_second"], linewidth=0.5, **style)
            for panel, name in zip(axes[1:], ("first_token", "per_token"), strict=True):
                for quantile, width in (("p50", 1.5), ("p99", 0.7)):
                    values = [1e3 * point[f"{name}_{quantile}"] for point in found["sweep"]]
                    panel.plot(rates, values, linewidth=width, **style)
    for panel, name in zip(axes, ("tokens per second", "first token, ms", "further tokens, ms each"), strict=True):
        panel.set_xlabel("requests per second")
        panel.set_ylabel(name)
    axes[1].set_yscale("log")
    canvas.suptitle(title)
    canvas.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    save_svg(canvas, file)


def make_tables(result: Mapping[str, Any]) -> list[Table]:
    served = Table("serving", "replicas", "saturated, requests/s", "knee", "within bounds", "needed for target")
    for mode, by_replicas in result["modes"].items():
        for replicas, found in by_replicas.items():
            rates = (found[f"{name}_requests_per_second"] for name in ("saturated", "knee", "within_bounds"))
            needed = "" if result["target"] is None else str(result["target"]["replicas"][mode] or "none suffices")
            served.add_row(mode, replicas, *(f"{rate:.2f}" for rate in rates), needed)
    against = Table("clients", "mode", "tokens/s simulated", "measured", "deviation")
    for clients, modes in result["against_measured"].items():
        for mode, row in modes.items():
            simulated, measured = row["tokens_per_second"]
            against.add_row(clients, mode, f"{simulated:.0f}", f"{measured:.0f}", f"{row['deviation']:+.0%}")
    return [served, against]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, help="bundle with measured costs (draftwood profile)")
    parser.add_argument("--prompt-tokens", type=float, default=128)
    parser.add_argument("--output-tokens", type=float, default=128)
    parser.add_argument("--spread", type=float, default=0.5, help="standard deviation of both over their means")
    parser.add_argument("--acceptance", type=float, default=0.7, help="probability that a draft token is accepted")
    parser.add_argument("--max-running", type=int, default=MAX_RUNNING)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--routing", choices=("round-robin", "least-loaded"), default="least-loaded")
    parser.add_argument("--first-token-bound", type=float, default=1.0, help="seconds, for 99 %% of the requests")
    parser.add_argument("--per-token-bound", type=float, default=0.05)
    parser.add_argument("--target-rate", type=float, help="requests per second: how many replicas serve it?")
    parser.add_argument("--requests", type=int, default=400, help="per simulation and replica")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measured", type=Path, help="a result of concurrency.py of this bundle and machine")
    parser.add_argument(
        "--prompts", type=Path, default=PROMPTS, help="the prompts of concurrency.py (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    add_output(parser, "load_queueing", required=False)
    args = parser.parse_args(arguments)
    if not 0 <= args.acceptance < 1:
        parser.error(f"--acceptance must be at least 0 and less than 1, not {args.acceptance}")
    return args


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Simulate what the options ask for. Returns a JSON-ready result."""
    costs = read_costs(args.bundle)
    if costs is None:
        raise SystemExit(f"{args.bundle} has no measured costs: run draftwood profile {args.bundle}")
    routing: Routing = args.routing
    plain = Serving(costs, None, max_running=args.max_running, routing=routing)
    serving = {"plain": plain, "speculative": replace(plain, acceptance=args.acceptance)}
    load = Workload(Sizes(args.prompt_tokens, args.output_tokens, args.spread), args.requests, args.seed)
    bounds = Bounds(args.first_token_bound, args.per_token_bound)
    against: dict[str, Any] = {}
    if args.measured is not None:
        tokenizer = Tokenizer.load(args.bundle)
        prompts = [len(tokenizer.encode(text)) for text in read_prompts(args.prompts)]
        against = compare_with_measured(serving, prompts, json.loads(args.measured.read_text()))
    target = None
    if args.target_rate is not None:
        needed = {mode: count_replicas(each, load, bounds, args.target_rate) for mode, each in serving.items()}
        target = {"requests_per_second": args.target_rate, "replicas": needed}
    return {
        "table": {"bundle": args.bundle.name, "machine": dict(costs.machine)},
        "sizes": asdict(load.sizes),
        "acceptance": args.acceptance,
        "max_running": args.max_running,
        "routing": routing,
        "bounds": bounds._asdict(),
        "against_measured": against,
        "target": target,
        "modes": {
            mode: {str(number): measure(replace(each, replicas=number), load, bounds) for number in args.replicas}
            for mode, each in serving.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    result = run(args)
    if args.json:
        json.dump(result, sys.stdout, indent=2)
    else:
        Console().print(*make_tables(result))
    if args.output is not None:
        file = write_results(args.output, args.name, result)
        sizes = f"prompts of {args.prompt_tokens:g} and outputs of {args.output_tokens:g} tokens on average"
        title = f"simulated from {args.bundle.name}'s cost table: {sizes}; thick p50, thin p99"
        plot(result["modes"], title, file.with_suffix(".svg"))


if __name__ == "__main__":
    main()
