"""How costs grow with rows, context and model size: time of a pass over the floor, time to the first token, memory.

    python -m benchmarks.costs.growth bundles/demo bundles/demo-110m --output benchmarks/results

The floor of a pass is the larger of two times: its bytes (every weight once, and the committed keys and values) over
the memory bandwidth, and its multiplications over the arithmetic speed. Both speeds are measured beside the pass. The
floor of a prompt is that of one pass over all its tokens, of which only the last goes through the vocabulary.

Costs do not depend on training. For prompts of 2048 tokens, set "max_position_embeddings": 2304 in the config.json of
the demo pair before the build; the text of that bundle is meaningless.
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

import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

from benchmarks.tools.record import add_output, write_results
from benchmarks.tools.svg import new_figure, save_svg
from draftwood.builder.pass_times import Pair, measure_after
from draftwood.models.bindings import DRAFT, LOW_BIT, TARGET
from draftwood.models.layers import num_parameters
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.engines.backends import bits_of_weight, slot_bytes
from draftwood.runtime.engines.base import Engine, EngineSpec
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import SpeculativeConfig

CONTEXTS = (64, 512, 960, 2048)
PROMPT_LENGTHS = (32, 512, 960, 2048)
REPEATS = 5
PANELS_PER_LINE = 3  # of the figure
PRODUCT_ROWS, PRODUCT_SIZE = 512, 4096  # shape of the product that measures the arithmetic speed
T = TypeVar("T")


class Speeds(NamedTuple):
    """Bytes, and fp32 operations, per second."""

    memory: float
    arithmetic: float


class SpeedMeter:
    """Measures the speeds of this machine. They vary, so each figure needs its own measurement."""

    def __init__(self) -> None:
        """Prepare a sum over an array far larger than any cache, and one large product by ONNX Runtime, whose kernels
        are the fastest here. Both use all cores."""
        self._array = torch.ones(1 << 28)
        shapes = {
            "rows": (PRODUCT_ROWS, PRODUCT_SIZE),
            "weights": (PRODUCT_SIZE, PRODUCT_SIZE),
            "product": (PRODUCT_ROWS, PRODUCT_SIZE),
        }
        values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
        node = helper.make_node("MatMul", ["rows", "weights"], ["product"])
        weights = numpy_helper.from_array(np.ones(shapes["weights"], np.float32), "weights")
        graph = helper.make_graph([node], "product", [values["rows"]], [values["product"]], [weights])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        self._session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        self._rows = np.ones(shapes["rows"], np.float32)

    def measure(self) -> Speeds:
        """The speeds at this moment."""
        memory = 4 * self._array.numel() / time_fastest(self._array.sum)
        product = time_fastest(lambda: self._session.run(None, {"rows": self._rows}))
        return Speeds(memory, 2 * PRODUCT_ROWS * PRODUCT_SIZE**2 / product)

    def measure_during(self, work: Callable[[], T]) -> tuple[T, Speeds]:
        """Returns the result of `work`, and the higher of the speeds before and after it, which give the lowest
        floor."""
        before = self.measure()
        result = work()
        return result, Speeds(*map(max, before, self.measure()))


def time_fastest(work: Callable[[], object]) -> float:
    """Seconds of the fastest of REPEATS runs."""
    seconds = []
    for _ in range(REPEATS):
        start = perf_counter()
        work()
        seconds.append(perf_counter() - start)
    return min(seconds)


def compute_floor(spec: EngineSpec, rows: int, context: int, speeds: Speeds, scored: int | None = None) -> float:
    """The least seconds of a pass. scored: number of rows that go through the vocabulary; None: all."""
    model = spec.model
    head = model.vocab_size * model.hidden_size
    layers = num_parameters(model) - head * (1 if model.tie_embeddings else 2)  # a pass looks embeddings up
    moved = bits_of_weight(spec) / 8 * (layers + head) + slot_bytes(spec) * (context + rows)
    seen = context + (rows + 1) / 2  # by a row of a chain
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * seen
    # An instruction multiplies four times as many small integers as floats.
    multiplied = layers + head * (1 if scored is None else scored / rows)
    products = 2 * multiplied / (4 if spec.precision in LOW_BIT else 1) + attention
    return max(moved / speeds.memory, rows * products / speeds.arithmetic)


def measure_memory() -> float:
    """Megabytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def time_first_token(engines: Sequence[Engine], config: SpeculativeConfig | None, longest: int, prompt: int) -> float:
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


def measure(folder: Path, meter: SpeedMeter) -> dict[str, Any]:
    """All figures of one bundle, JSON-ready."""
    before = measure_memory()
    bundle = EngineBundle.open(folder)
    engines = {TARGET: bundle.open_engine(TARGET), DRAFT: bundle.open_draft()}
    spec, longest = engines[TARGET].spec, bundle.manifest.max_length
    pair = Pair(engines, longest, {})
    passes = {}
    for context in (each for each in CONTEXTS if each <= longest):
        taken, speeds = meter.measure_during(partial(measure_after, pair, context, spec.widths, REPEATS, lambda: None))
        lowest = [compute_floor(spec, width, context, speeds) for width in spec.widths]
        passes[str(context)] = {
            "speeds": {name: round(speed) for name, speed in speeds._asdict().items()},
            "milliseconds": [round(1e3 * seconds, 3) for seconds in taken[TARGET].seconds],
            "floor": [round(1e3 * seconds, 3) for seconds in lowest],
        }
    both = [engines[TARGET], engines[DRAFT]]
    first = {}
    for prompt in (each for each in PROMPT_LENGTHS if each < longest):
        plain, speeds = meter.measure_during(partial(time_first_token, both, None, longest, prompt))
        first[str(prompt)] = {
            "floor": round(1e3 * compute_floor(spec, prompt, 0, speeds, scored=1), 1),
            "plain": round(1e3 * plain, 1),
            "speculative": round(1e3 * time_first_token(both, SpeculativeConfig(), longest, prompt), 1),
        }
    after = measure_memory()
    held = sum(bundle.manifest.engine_bytes(role) for role in engines) / 1e6
    figures = {
        "target": f"{spec.backend} {spec.precision}, {num_parameters(spec.model) / 1e6:.0f}M",
        "widths": list(spec.widths),
        "passes": passes,
        "milliseconds_to_first_token": first,
        "engine_megabytes": round(held, 1),
        "cache_bytes_per_token": sum(slot_bytes(each.spec) for each in both),
        "resident_megabytes_added": round(after - before, 1),
    }
    for engine in both:
        engine.close()
    return figures


def make_pass_table(figures: Mapping[str, Any]) -> Table:
    """Milliseconds of a pass, and their ratio to the floor, by rows and context."""
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


def make_first_token_table(figures: Mapping[str, Any]) -> Table:
    """Milliseconds to the first token: plain, and with a draft that reads the prompt, too."""
    result = Table("prompt", "plain", "of the floor", "speculative", title=figures["target"], title_justify="left")
    for prompt, taken in figures["milliseconds_to_first_token"].items():
        ratio = f"{taken['plain'] / taken['floor']:.2f} x"
        result.add_row(prompt, f"{taken['plain']:.0f} ms", ratio, f"{taken['speculative']:.0f} ms")
    return result


def plot(bundles: Mapping[str, Any], file: Path) -> None:
    """One panel per bundle: milliseconds against rows, the floor dashed, one colour per context."""
    lines = -(-len(bundles) // PANELS_PER_LINE)
    canvas = new_figure(4.2 * min(PANELS_PER_LINE, len(bundles)), 3.4 * lines)
    panels = [canvas.add_subplot(lines, min(PANELS_PER_LINE, len(bundles)), index + 1) for index in range(len(bundles))]
    for axes, figures in zip(panels, bundles.values(), strict=True):
        for context, row in figures["passes"].items():
            line = axes.plot(figures["widths"], row["milliseconds"], marker=".", label=f"behind {context} tokens")[0]
            axes.plot(figures["widths"], row["floor"], "--", color=line.get_color(), linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("rows of a pass")
        axes.set_title(figures["target"])
        axes.legend()
    for axes in panels[::PANELS_PER_LINE]:
        axes.set_ylabel("milliseconds; dashed: the floor")
    save_svg(canvas, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    add_output(parser, "costs_growth")
    args = parser.parse_args()
    meter = SpeedMeter()
    bundles = {folder.name: measure(folder, meter) for folder in args.bundles}
    console = Console()
    for figures in bundles.values():
        console.print(make_pass_table(figures))
        console.print(make_first_token_table(figures))
    plot(bundles, write_results(args.output, args.name, {"bundles": bundles}).with_suffix(".svg"))


if __name__ == "__main__":
    main()
