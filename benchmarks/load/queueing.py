"""How many requests per second one process, or several, can serve: simulated from a bundle's measured cost table.

    python -m benchmarks.load.queueing bundles/demo-110m \\
        --measured benchmarks/results/load_concurrency_2026-11-21.json --output benchmarks/results

Requests arrive at random (Poisson). What is simulated, and what is assumed: see `queueing_simulation.py`. The *knee* is
the arrival rate at which throughput over the mean time of a request is largest (Kleinrock's power, 1979): beyond it,
waiting grows faster than what is served. With `--measured`, a closed loop of as many clients as `load.py` had is
simulated, too, and compared.
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
from benchmarks.load.simulation import Figures, Routing, Serving, Sizes, closed, figures, poisson, simulate
from benchmarks.tools.record import add_output, write_results
from benchmarks.tools.svg import new_figure, save_svg
from draftwood.cli.bench import read_prompts
from draftwood.runtime.batching import MAX_RUNNING
from draftwood.runtime.cost import read_costs
from draftwood.runtime.tokenizer import Tokenizer

SHARES = (0.1, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0, 1.1)  # of what a saturated process serves
SATURATED_ROUNDS = 40  # of requests by as many clients as there are places
HALVINGS = 6
PROMPTS = Path("models/demo/prompts.jsonl")
MOST_REPLICAS = 64
COLOURS = {"plain": "tab:blue", "speculative": "tab:red"}
LINES = ("-", "--", ":", "-.")  # by number of replicas


class Bounds(NamedTuple):
    """99 % of the requests have their first token, and each further one on average, within so many seconds."""

    first_token: float
    per_token: float

    def hold(self, found: Figures) -> bool:
        return found.first_token_p99 <= self.first_token and found.per_token_p99 <= self.per_token


class Load(NamedTuple):
    """Requests of one simulation."""

    sizes: Sizes
    number: int
    seed: int

    def at(self, serving: Serving, rate: float) -> Figures:
        """Poisson arrivals, `rate` per second; as many more requests as there are more replicas."""
        requests = poisson(self.sizes, rate, self.number * serving.replicas, self.seed)
        return figures(simulate(serving, requests, self.seed))

    def saturation(self, serving: Serving) -> float:
        """Requests per second when every place is always taken; replicas do not help each other then."""
        clients = serving.max_running
        drawn = [(each.prompt, each.output) for each in poisson(self.sizes, 1.0, clients * SATURATED_ROUNDS, self.seed)]
        loops = closed([drawn[client::clients] for client in range(clients)])
        # Without the start, when all read their prompts, and the end, when clients that are done leave places empty.
        ends = sorted(each.finished for each in simulate(replace(serving, replicas=1), loops, self.seed))
        first, last = len(ends) // 4, 3 * len(ends) // 4
        return serving.replicas * (last - first) / (ends[last] - ends[first])


def knee(sweep: Mapping[float, Figures]) -> float:
    """The rate with most throughput per second that a request takes."""
    return max(sweep, key=lambda rate: sweep[rate].tokens_per_second / sweep[rate].request_mean)


def sustainable(serving: Serving, load: Load, bounds: Bounds, most: float) -> float:
    """The highest rate up to `most` at which the bounds hold, by bisection; 0 where they do not even at a tenth."""
    if not bounds.hold(load.at(serving, SHARES[0] * most)):
        return 0.0
    low, high = SHARES[0] * most, most
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if bounds.hold(load.at(serving, middle)) else (low, middle)
    return low


def replicas_for(serving: Serving, load: Load, bounds: Bounds, rate: float) -> int | None:
    """The fewest replicas that serve `rate` within the bounds; None when no number of them does."""
    if not bounds.hold(load.at(replace(serving, replicas=1), rate / MOST_REPLICAS)):
        return None
    low, high = 0, MOST_REPLICAS  # low do not suffice, high do
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bounds.hold(load.at(replace(serving, replicas=middle), rate)) else (middle, high)
    return high


def measure(serving: Serving, load: Load, bounds: Bounds) -> dict[str, Any]:
    """Everything about one way to serve."""
    most = load.saturation(serving)
    sweep = {share * most: load.at(serving, share * most) for share in SHARES}
    return {
        "saturated_requests_per_second": round(most, 3),
        "knee_requests_per_second": round(knee(sweep), 3),
        "within_bounds_requests_per_second": round(sustainable(serving, load, bounds, most), 3),
        "sweep": [
            {"rate": round(rate, 3)} | {name: round(value, 4) for name, value in found._asdict().items()}
            for rate, found in sweep.items()
        ],
    }


def compared(serving: Mapping[str, Serving], prompts: Sequence[int], measured: Mapping[str, Any]) -> dict[str, Any]:
    """What `load.py` measured, beside the same closed loops simulated. prompts: lengths of its prompts, in order."""
    result: dict[str, Any] = {}
    places = max(map(int, measured["requests"]))
    for clients, modes in measured["requests"].items():
        sizes = [
            [(prompts[turn % len(prompts)], measured["max_tokens"]) for turn in range(client, client + REQUESTS)]
            for client in range(int(clients))
        ]
        for mode, each in serving.items():
            found = figures(simulate(replace(each, replicas=1, max_running=places), closed(sizes)), warm_up=0.0)
            result.setdefault(clients, {})[mode] = {
                name: [round(getattr(found, name), 4), modes[mode][name]]
                for name in ("tokens_per_second", "first_token_p50", "per_token_p50")
            } | {"deviation": round(found.tokens_per_second / modes[mode]["tokens_per_second"] - 1, 3)}
    return result


def plot(modes: Mapping[str, Any], title: str, file: Path) -> None:
    """Throughput, first token and per-token seconds against the arrival rate; p99 is thin, knees are marked."""
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


def tables(result: Mapping[str, Any]) -> list[Table]:
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
    parser.add_argument("bundle", type=Path, help="its costs.json is read; draftwood profile writes it")
    parser.add_argument("--prompt-tokens", type=float, default=128)
    parser.add_argument("--output-tokens", type=float, default=128)
    parser.add_argument("--spread", type=float, default=0.5, help="standard deviation of both over their means")
    parser.add_argument("--acceptance", type=float, default=0.7, help="chance of a drafted token")
    parser.add_argument("--max-running", type=int, default=MAX_RUNNING)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--routing", choices=("round-robin", "least-loaded"), default="least-loaded")
    parser.add_argument("--first-token-bound", type=float, default=1.0, help="seconds, for 99 %% of the requests")
    parser.add_argument("--per-token-bound", type=float, default=0.05)
    parser.add_argument("--target-rate", type=float, help="requests per second: how many replicas serve it?")
    parser.add_argument("--requests", type=int, default=400, help="per simulation and replica")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measured", type=Path, help="load.json of the same bundle on the same machine")
    parser.add_argument(
        "--prompts", type=Path, default=Path("models/demo/prompts.jsonl"), help="that load.py was given"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    add_output(parser, "load_queueing", required=False)
    args = parser.parse_args(arguments)
    if not 0 <= args.acceptance < 1:
        parser.error(f"--acceptance must be at least 0 and less than 1, not {args.acceptance}")
    return args


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole result, JSON-ready."""
    costs = read_costs(args.bundle)
    if costs is None:
        raise SystemExit(f"{args.bundle} has no measured costs: run draftwood profile {args.bundle}")
    routing: Routing = args.routing
    plain = Serving(costs, None, max_running=args.max_running, routing=routing)
    serving = {"plain": plain, "speculative": replace(plain, acceptance=args.acceptance)}
    load = Load(Sizes(args.prompt_tokens, args.output_tokens, args.spread), args.requests, args.seed)
    bounds = Bounds(args.first_token_bound, args.per_token_bound)
    against: dict[str, Any] = {}
    if args.measured is not None:
        tokenizer = Tokenizer.load(args.bundle)
        prompts = [len(tokenizer.encode(text)) for text in read_prompts(args.prompts)]
        against = compared(serving, prompts, json.loads(args.measured.read_text()))
    target = None
    if args.target_rate is not None:
        needed = {mode: replicas_for(each, load, bounds, args.target_rate) for mode, each in serving.items()}
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
        Console().print(*tables(result))
    if args.output is not None:
        file = write_results(args.output, args.name, result)
        sizes = f"prompts of {args.prompt_tokens:g} and outputs of {args.output_tokens:g} tokens on average"
        title = f"simulated from {args.bundle.name}'s cost table: {sizes}; thick p50, thin p99"
        plot(result["modes"], title, file.with_suffix(".svg"))


if __name__ == "__main__":
    main()
