"""How costs grow: a pass with its rows, its context and the model's size, over the floor; memory; the first token.

    python benchmarks/cost_growth.py bundles/demo bundles/demo-110m --output benchmarks/results

The floor of a pass is the larger of what its bytes take at the bandwidth (weights once, and the committed keys
and values) and what its products take at the machine's arithmetic, both measured beside it. A prompt's is that of one
pass that reads all of it, without the vocabulary.

Costs do not depend on what a model was trained for: a checkpoint of the demo pair whose config.json says
"max_position_embeddings": 2304 gives a bundle for prompts of 2048 tokens, whose text is worth nothing.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import matplotlib
import numpy as np
import onnxruntime
import torch
from machine import write
from matplotlib.figure import Figure
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

from draftwood.builder.profile import Pair, behind
from draftwood.builder.quantize import FORMATS
from draftwood.models.bindings import DRAFT, LOW_BIT, TARGET
from draftwood.models.layers import num_parameters
from draftwood.runtime.bundle import EngineBundle
from draftwood.runtime.decoder import SpeculativeDecoder
from draftwood.runtime.engines.base import Engine, EngineSpec
from draftwood.runtime.metrics import SpecDecodeStats
from draftwood.runtime.random import seeded_streams
from draftwood.runtime.sampling import Sampler, SamplingParams
from draftwood.runtime.speculation.config import SpeculativeConfig

CONTEXTS = (64, 512, 960, 2048)
PROMPTS = (32, 512, 960, 2048)
REPEATS = 5
COLUMNS = 3  # of the picture
ROWS, SQUARE = 512, 4096  # of the product that measures the arithmetic
T = TypeVar("T")
ITEM_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0}


class Speeds(NamedTuple):
    """What a floor is made of: bytes, and fp32 operations, per second."""

    memory: float
    arithmetic: float


class Machine:
    """This machine, whose clocks and memory give more in one minute than in another: measured beside every row of
    passes."""

    def __init__(self) -> None:
        """A sum over an array far larger than any cache, by all cores; and one large product by ONNX Runtime, whose
        kernels are the fastest here."""
        self._array = torch.ones(1 << 28)
        shapes = {"rows": (ROWS, SQUARE), "weights": (SQUARE, SQUARE), "product": (ROWS, SQUARE)}
        values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
        node = helper.make_node("MatMul", ["rows", "weights"], ["product"])
        weights = numpy_helper.from_array(np.ones(shapes["weights"], np.float32), "weights")
        graph = helper.make_graph([node], "product", [values["rows"]], [values["product"]], [weights])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        self._session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        self._rows = np.ones(shapes["rows"], np.float32)

    def speeds(self) -> Speeds:
        """As they are now."""
        memory = 4 * self._array.numel() / best_of(self._array.sum)
        product = best_of(lambda: self._session.run(None, {"rows": self._rows}))
        return Speeds(memory, 2 * ROWS * SQUARE**2 / product)

    def during(self, work: Callable[[], T]) -> tuple[T, Speeds]:
        """What `work` returns, and the speeds just before or after it, whichever are higher: a floor is lowest then."""
        before = self.speeds()
        result = work()
        return result, Speeds(*map(max, before, self.speeds()))


def best_of(work: Callable[[], object]) -> float:
    """Seconds of the fastest of some runs: a floor."""
    seconds = []
    for _ in range(REPEATS):
        start = perf_counter()
        work()
        seconds.append(perf_counter() - start)
    return min(seconds)


def item_bytes(spec: EngineSpec) -> float:
    """Bytes of a weight, its share of a block's scale included."""
    form = FORMATS.get((spec.backend, spec.precision))
    return ITEM_BYTES[spec.precision] if form is None else form.bytes_of_weight


def floor(spec: EngineSpec, rows: int, context: int, speeds: Speeds, scored: int | None = None) -> float:
    """The least seconds of a pass, of whose rows `scored` go through the vocabulary; None: all."""
    model = spec.model
    head = model.vocab_size * model.hidden_size
    layers = num_parameters(model) - head * (1 if model.tie_embeddings else 2)  # an embedding is looked up
    cache = 2 * model.num_layers * model.num_kv_heads * model.head_dim * (context + rows)
    moved = item_bytes(spec) * (layers + head) + 4 * cache
    seen = context + (rows + 1) / 2  # by a row of a chain
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * seen
    # An instruction multiplies four times as many small integers as floats.
    multiplied = layers + head * (1 if scored is None else scored / rows)
    products = 2 * multiplied / (4 if spec.precision in LOW_BIT else 1) + attention
    return max(moved / speeds.memory, rows * products / speeds.arithmetic)


def resident_megabytes() -> float:
    """What this process holds in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def first_token(engines: Sequence[Engine], config: SpeculativeConfig | None, longest: int, prompt: int) -> float:
    """Median seconds until a request has its first token."""
    vocab_size = engines[0].spec.model.vocab_size
    decoder = SpeculativeDecoder(engines[0], engines[1], config, longest, ())
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    tokens = np.random.default_rng(0).integers(0, vocab_size, prompt).tolist()
    seconds = []
    for _ in range(REPEATS):
        start = perf_counter()
        chunks = decoder.generate(tokens, Sampler(params, tokens, (), vocab_size), seeded_streams(0), SpecDecodeStats())
        next(chunks)
        seconds.append(perf_counter() - start)
    return median(seconds[1:])


def measure(folder: Path, machine: Machine) -> dict[str, Any]:
    """Everything about one bundle."""
    before = resident_megabytes()
    bundle = EngineBundle.open(folder)
    engines = {TARGET: bundle.open_engine(TARGET), DRAFT: bundle.open_draft()}
    spec, longest = engines[TARGET].spec, bundle.manifest.max_length
    pair = Pair(engines, longest, {})
    passes = {}
    for context in (each for each in CONTEXTS if each <= longest):
        taken, speeds = machine.during(partial(behind, pair, context, spec.widths, REPEATS, lambda: None))
        lowest = [floor(spec, width, context, speeds) for width in spec.widths]
        passes[str(context)] = {
            "speeds": {name: round(speed) for name, speed in speeds._asdict().items()},
            "milliseconds": [round(1e3 * seconds, 3) for seconds in taken[TARGET].seconds],
            "floor": [round(1e3 * seconds, 3) for seconds in lowest],
        }
    both = [engines[TARGET], engines[DRAFT]]
    first = {}
    for prompt in (each for each in PROMPTS if each < longest):
        plain, speeds = machine.during(partial(first_token, both, None, longest, prompt))
        first[str(prompt)] = {
            "floor": round(1e3 * floor(spec, prompt, 0, speeds, scored=1), 1),
            "plain": round(1e3 * plain, 1),
            "speculative": round(1e3 * first_token(both, SpeculativeConfig(), longest, prompt), 1),
        }
    after = resident_megabytes()
    held = sum(bundle.manifest.engine_bytes(role) for role in engines) / 1e6
    caches = sum(8 * m.num_layers * m.num_kv_heads * m.head_dim for m in (each.spec.model for each in both))
    figures = {
        "target": f"{spec.backend} {spec.precision}, {num_parameters(spec.model) / 1e6:.0f}M",
        "widths": list(spec.widths),
        "passes": passes,
        "milliseconds_to_first_token": first,
        "engine_megabytes": round(held, 1),
        "cache_bytes_per_token": caches,
        "resident_megabytes_added": round(after - before, 1),
    }
    for engine in both:
        engine.close()
    return figures


def table(figures: Mapping[str, Any]) -> Table:
    """Milliseconds and what they are of the floor, for the shortest and the longest context."""
    contexts = list(figures["passes"])
    columns = [f"behind {context}" for context in contexts for _ in range(2)]
    result = Table("rows", *columns, title=figures["target"], title_justify="left")
    for index, width in enumerate(figures["widths"]):
        cells = []
        for context in contexts:
            taken, least = (figures["passes"][context][name][index] for name in ("milliseconds", "floor"))
            cells += [f"{taken:.2f} ms", f"{taken / least:.2f} x floor"]
        result.add_row(str(width), *cells)
    return result


def first_tokens(figures: Mapping[str, Any]) -> Table:
    """Milliseconds to the first token, without and with a draft that reads along."""
    result = Table("prompt", "plain", "of the floor", "speculative", title=figures["target"], title_justify="left")
    for prompt, taken in figures["milliseconds_to_first_token"].items():
        ratio = f"{taken['plain'] / taken['floor']:.2f} x"
        result.add_row(prompt, f"{taken['plain']:.0f} ms", ratio, f"{taken['speculative']:.0f} ms")
    return result


def plot(bundles: Mapping[str, Any], file: Path) -> None:
    """One panel per bundle: milliseconds against rows, the floor dashed, one colour per context."""
    matplotlib.rcParams.update({"svg.fonttype": "none", "font.size": 9, "svg.hashsalt": "draftwood"})
    lines = -(-len(bundles) // COLUMNS)
    canvas = Figure(figsize=(4.2 * min(COLUMNS, len(bundles)), 3.4 * lines), layout="constrained")
    panels = [canvas.add_subplot(lines, min(COLUMNS, len(bundles)), index + 1) for index in range(len(bundles))]
    for axes, figures in zip(panels, bundles.values(), strict=True):
        for context, row in figures["passes"].items():
            line = axes.plot(figures["widths"], row["milliseconds"], marker=".", label=f"behind {context} tokens")[0]
            axes.plot(figures["widths"], row["floor"], "--", color=line.get_color(), linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("rows of a pass")
        axes.set_title(figures["target"])
        axes.legend()
    for axes in panels[::COLUMNS]:
        axes.set_ylabel("milliseconds; dashed: the floor")
    canvas.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--name", default="cost_growth", help="of the files in OUTPUT")
    args = parser.parse_args()
    machine = Machine()
    bundles = {folder.name: measure(folder, machine) for folder in args.bundles}
    console = Console()
    for figures in bundles.values():
        console.print(table(figures))
        console.print(first_tokens(figures))
    write(args.output, args.name, {"bundles": bundles})
    plot(bundles, args.output / f"{args.name}.svg")


if __name__ == "__main__":
    main()
