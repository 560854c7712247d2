"""Make one role's engine: an exported graph, packed weights, or a compiled plan; and compare it with the reference."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ...models.acceptance_head import TrainedHead
from ...models.bindings import ADDITIVE, COMPACT, LOW_BIT, activations, output_names
from ...models.layers import num_parameters
from ...runtime.bundle.digests import FileRecord
from ...runtime.engines.backends import BACKENDS, PLAN, WEIGHTS, Opening
from ...runtime.engines.base import Engine, EngineSpec
from ...runtime.engines.onnx.onnxruntime import OnnxRuntimeEngine
from ...runtime.engines.shared.sizes import plan_slots
from ..checkpoints.checkpoint import Checkpoint
from ..options import BuildOptions
from ..parity import Scored, largest_difference, rows_of
from ..progress import Begin, Step
from ..quantization.formats import Quantized, RoundedCheckpoint, WeightFormat, Weights, stored_as
from ..quantization.kept import others_of
from ..reference import Reference, score_rows
from .native import write_weights
from .plan import compile_plan, runs_here


@dataclass(frozen=True, slots=True)
class Source:
    checkpoint: Checkpoint
    role: str
    head: TrainedHead | None
    backend: str
    precision: str
    rounded: Mapping[str, Quantized] = field(default_factory=dict)  # see QuantizedCheckpoint
    form: WeightFormat | None = None  # another one than usual for this precision

    @property
    def weights(self) -> Weights:
        return stored_as(self.checkpoint, BACKENDS[self.backend], self.precision, self.rounded, self.form)


def engine_spec(source: Source, options: BuildOptions, max_length: int) -> EngineSpec:
    backend = BACKENDS[source.backend]
    return EngineSpec(
        role=source.role,
        backend=source.backend,
        file=f"{source.role}.{backend.file}",
        model=source.checkpoint.config,
        widths=options.widths_of(source.role),
        capacity=max_length + options.columns,
        precision=source.precision,
        outputs=output_names(
            source.role, source.head is not None, backend.form, source.checkpoint.config.state_size > 0
        ),
        max_batch=options.max_batch,
        prompt_widths=options.prompt_widths_of(source.role),
        cache_precision=options.cache_precision_of(source.role, source.precision),
        kept_tokens=() if source.checkpoint.kept_tokens is None else tuple(source.checkpoint.kept_tokens.tolist()),
        matrices=others_of(source.weights),
    )


class Made(NamedTuple):
    spec: EngineSpec
    difference: float  # the largest one from the reference, see `largest_difference`
    record: FileRecord | None = None  # of its file, where that is known


def make_engine(source: Source, spec: EngineSpec, options: BuildOptions, staging: Path, begin: Begin) -> Made:
    """Write an engine's files to `staging`. Raises BundleError when it differs too much from the reference."""
    file = BACKENDS[spec.backend].file
    if file == PLAN:
        return compiled_engine(source, spec, options, staging, begin)
    return (packed_engine if file == WEIGHTS else exported_engine)(source, spec, staging, begin)


def exported_engine(source: Source, spec: EngineSpec, staging: Path, begin: Begin) -> Made:
    write_graph(source, spec, staging / spec.file, begin)
    # Low-bit engines round activations, too. In fp32 the same file must agree with the reference as closely as any.
    precisions = ("fp32", spec.precision) if spec.precision in LOW_BIT else (spec.precision,)
    specs = [replace(spec, precision=precision) for precision in precisions]
    engines = (BACKENDS[spec.backend].open(staging / spec.file, each, Opening()) for each in specs)
    return Made(spec, check_parity(source, spec, engines, begin))


def packed_engine(source: Source, spec: EngineSpec, staging: Path, begin: Begin) -> Made:
    """Make an engine that reads packed weights. Its kernels are not part of a bundle."""
    weights = source.weights
    advance = begin(Step(f"Packing the {title(spec)}", spec.model.num_layers))
    reference = Reference(weights.tensor, weights.config, rows_of(spec), source.head)

    def follow(layer: int) -> None:  # the codes of this layer are still in memory
        reference.layer(layer)
        advance()

    record = write_weights(weights, spec.capacity, staging / spec.file, source.head, follow)
    exact = replace(spec, cache_precision="")  # must agree as closely as any
    specs = [exact] if exact == spec else [exact, spec]
    engines = (BACKENDS[spec.backend].open(staging / spec.file, each, Opening()) for each in specs)
    return Made(spec, compare(source, spec, engines, reference.scored(), begin), record)


def compiled_engine(source: Source, spec: EngineSpec, options: BuildOptions, staging: Path, begin: Begin) -> Made:
    """Make a TensorRT plan. Its graph is compared with the reference; so is the plan, if it runs here."""
    with graph_folder(options, staging) as folder:
        graph = Path(folder) / f"{spec.role}.onnx"
        computed = replace(spec, precision=activations(spec.precision, COMPACT))
        # ONNX Runtime has no bf16 on a CPU: what is compared then is the same graph in fp32.
        compared = replace(spec, precision="fp32") if spec.precision == "bf16" else computed
        compile_options = options.compile_options(spec.role)
        near_slots = plan_slots(spec, compile_options.columns)
        write_graph(source, compared, graph, begin, COMPACT, near_slots)
        alone = replace(compared, capacity=spec.max_batch * spec.capacity)  # a single sequence uses all slots
        difference = check_parity(source, spec, [OnnxRuntimeEngine(graph, alone, unprepared=True)], begin)
        if compared != computed:
            write_graph(source, computed, graph, begin, COMPACT, near_slots)
        plan = compile_plan(graph, staging / spec.file, spec.model, compile_options, begin)
    spec = replace(spec, plan=plan)
    if not runs_here(plan):
        return Made(spec, difference)
    from ...runtime.engines.static.tensorrt import TensorRTEngine

    executed = TensorRTEngine(staging / spec.file, replace(computed, plan=plan))
    difference = check_parity(source, spec, [executed], begin)
    return Made(replace(spec, plan=plan._replace(executed=True)), difference)


def graph_folder(options: BuildOptions, staging: Path) -> AbstractContextManager[str | Path]:
    """The folder of the graphs that are compiled: a temporary one, or the one that the options name."""
    if options.graphs is None:
        return tempfile.TemporaryDirectory(dir=staging)
    options.graphs.mkdir(parents=True, exist_ok=True)
    return nullcontext(options.graphs)


def title(spec: EngineSpec) -> str:
    return f"{spec.role} ({num_parameters(spec.model) / 1e6:.1f}M parameters, {spec.precision})"


def write_graph(
    source: Source, spec: EngineSpec, file: Path, begin: Begin, form: str = ADDITIVE, near_slots: int = 0
) -> None:
    from .export import export  # needed only here: its packages take a second

    advance = begin(Step(f"Exporting the {title(spec)}", 1))
    weights = source.weights
    assert not isinstance(weights, RoundedCheckpoint)  # a graph's own type rounds its weights
    export(
        weights,
        spec.role,
        spec.capacity,
        file,
        lambda name: None,
        head=source.head,
        form=form,
        precision=spec.precision,
        max_batch=spec.max_batch,
        near_slots=near_slots,
    )
    advance()


def check_parity(source: Source, spec: EngineSpec, engines: Iterable[Engine], begin: Begin) -> float:
    advance = begin(Step(f"Computing the {spec.role}'s reference", spec.model.num_layers))
    weights = source.weights
    expected = score_rows(weights.tensor, weights.config, rows_of(spec), source.head, advance)
    return compare(source, spec, engines, expected, begin)


def compare(source: Source, spec: EngineSpec, engines: Iterable[Engine], reference: Scored, begin: Begin) -> float:
    """Compare engines, one after the other, with the reference, and close them. Returns the last one's difference."""
    advance = begin(Step(f"Comparing the {spec.role} with the reference", 1))
    # Rows meet fp16 weights in fp32.
    rounding = "fp32" if isinstance(source.weights, RoundedCheckpoint) and spec.precision == "fp16" else None
    difference = 0.0
    for engine in engines:
        difference = largest_difference(engine, reference, rounding)
        engine.close()
    advance()
    return difference
