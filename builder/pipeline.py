"""The build: two checkpoint folders -> tokenizer, ONNX graphs, parity -> one engine bundle, or nothing at all."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from ..models.acceptance_head import TrainedHead, read_head
from ..models.bindings import ADDITIVE, COMPACT, DRAFT, LOW_BIT, ROLES, TARGET, activations, output_names
from ..models.config import token_ids
from ..models.errors import BundleError, CheckpointError, ConfigError
from ..runtime.bundle import MANIFEST, EngineBundle, Manifest, file_record, write_manifest
from ..runtime.engines.base import Engine, EngineSpec
from ..runtime.engines.compatibility import PACKAGES
from ..runtime.engines.onnxruntime import OnnxRuntimeEngine
from ..runtime.engines.openvino import OpenVinoEngine
from ..runtime.engines.torch import TorchEngine
from ..runtime.staging import staging_folder
from .checkpoint import Checkpoint, read_json
from .compile import PRECISIONS, CompileOptions, check_compiler, compile_plan, runs_here
from .export import export
from .parity import largest_difference
from .progress import Begin, Step
from .quantize import FORMATS, QuantizedCheckpoint, WeightFormat, refuse_dynamic
from .tokenizer import convert_tokenizer, same_vocabulary

EXPORTED = {"onnxruntime": OnnxRuntimeEngine, "openvino": OpenVinoEngine}  # backends whose engine is the graph itself
# And the precisions each can build, the default first.
BACKENDS = {**dict.fromkeys(EXPORTED, ("fp32", *LOW_BIT)), **dict.fromkeys(PACKAGES, PRECISIONS)}
LONGEST = 8192  # default context where the models would allow more: rotary tables and masks grow with it
SPECULATIVE_PASSES = 4  # widest passes a cache has room for behind the longest text


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What to build. Raises ConfigError for what this release cannot build.

    target, draft: Hugging Face checkpoint folders. output: the bundle's folder. max_length: tokens of prompt and output
    together; None takes what both models were trained for, up to 8192. widths: rows a pass may have. acceptance_head:
    a folder of draftwood train-head, whose head becomes part of the draft's graph. draft_backend, draft_precision: None
    takes the target's, with two exceptions. Beside OpenVINO the draft runs in ONNX Runtime: OpenVINO's passes take a
    millisecond however small the model is. Beside int4 it is int8: a draft gains no time by 4 bits and loses
    acceptance. graphs: a folder that keeps the ONNX graphs TensorRT's plans were compiled from. The rest is for the
    TensorRT backends, too: see CompileOptions.
    """

    target: Path
    draft: Path
    output: Path
    backend: str = "onnxruntime"
    precision: str | None = None  # None: the backend's first
    draft_backend: str | None = None
    draft_precision: str | None = None
    max_length: int | None = None
    widths: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
    acceptance_head: Path | None = None
    compute_capability: tuple[str, ...] = ()
    plugin: bool | None = None
    workspace: int | None = None
    timing_cache: Path | None = None
    graphs: Path | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend {self.backend!r} is not available; choose one of {', '.join(BACKENDS)}")
        for role in ROLES:
            backend = self.backend_of(role)
            if backend not in BACKENDS or (backend != self.backend and {backend, self.backend} & {*PACKAGES}):
                raise ConfigError(f"backend {backend!r} is not available for the {role} beside {self.backend}")
            precision = self.precision_of(role)
            refuse_dynamic(precision)
            if precision not in BACKENDS[backend]:
                choices = ", ".join(BACKENDS[backend])
                raise ConfigError(f"precision {precision!r} is not available for {backend}; choose {choices}")
            if backend == "openvino" and importlib.util.find_spec("openvino") is None:
                raise ConfigError("backend openvino is not installed: pip install 'draftwood[openvino]'")
        if not self.widths or self.widths[0] != 1 or list(self.widths) != sorted(set(self.widths)):
            raise ConfigError(f"widths must ascend from 1, not {','.join(map(str, self.widths))}")
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(f"max_length must be at least 2 (one token in, one out), not {self.max_length}")
        if self.backend in PACKAGES:
            for role in ROLES:
                self.compile_options(role)
        elif self.compute_capability or any(
            value is not None for value in (self.plugin, self.workspace, self.timing_cache, self.graphs)
        ):
            raise ConfigError(
                "--compute-capability, --plugin, --workspace, --timing-cache and --graphs are for the backends "
                f"{' and '.join(PACKAGES)}: leave them out, or choose one of these with --backend"
            )

    def backend_of(self, role: str) -> str:
        """What runs a role's engine, chosen or default."""
        if role == TARGET:
            return self.backend
        return self.draft_backend or ("onnxruntime" if self.backend == "openvino" else self.backend)

    def precision_of(self, role: str) -> str:
        """A role's precision, chosen or default."""
        chosen = self.precision or BACKENDS[self.backend_of(role)][0]
        if role == TARGET:
            return chosen
        return self.draft_precision or ("int8" if chosen == "int4" else chosen)

    def widths_of(self, role: str) -> tuple[int, ...]:
        """Rows a pass of a role's engine may have."""
        # Kernels for one row add in another order than those for more, and low-bit matrices make much of the little
        # difference. There, plain decoding takes two rows, too, and gives the text that speculative decoding gives.
        low_bit = role == TARGET and self.precision_of(role) in LOW_BIT
        least = 2 if low_bit or self.backend_of(role) == "openvino" else 1
        return tuple(sorted({max(least, width) for width in self.widths}))

    @property
    def columns(self) -> int:
        """Speculative slots a cache has room for behind the longest text."""
        return SPECULATIVE_PASSES * self.widths[-1]

    def compile_options(self, role: str = TARGET) -> CompileOptions:
        """What TensorRT is to do. Raises ConfigError when it cannot."""
        return CompileOptions(
            self.backend,
            self.precision_of(role),
            self.widths,
            self.columns,
            self.compute_capability,
            self.plugin,
            self.workspace,
            self.timing_cache,
        )


def build(options: BuildOptions, begin: Begin) -> EngineBundle:
    """Build, check and write a bundle; returns it opened.

    Everything happens in a temporary folder beside the output, which is renamed when all of it succeeded. Raises
    CheckpointError, ConfigError or BundleError.
    """
    advance = begin(Step("Reading checkpoints", 2))
    folders = {TARGET: options.target, DRAFT: options.draft}
    checkpoints = {}
    for role, folder in folders.items():
        checkpoints[role] = Checkpoint(folder)
        advance()
    refuse_different_sizes(checkpoints)
    max_length = context_length(options, checkpoints)
    if options.backend in PACKAGES:
        check_compiler(options.compile_options())
    heads: dict[str, TrainedHead | None] = dict.fromkeys(ROLES)
    if options.acceptance_head is not None:
        heads[DRAFT] = read_head(options.acceptance_head, checkpoints[DRAFT].config.hidden_size)
    with staging_folder(options.output, MANIFEST, BundleError) as staging:
        advance = begin(Step("Converting the tokenizer", 1))
        tokenizer = convert_tokenizer(options.target, staging)
        with tempfile.TemporaryDirectory() as other:
            same_vocabulary(tokenizer, convert_tokenizer(options.draft, Path(other)))
        advance()
        engines = {}
        parity = {}
        for role in ROLES:
            form = FORMATS.get((options.backend_of(role), options.precision_of(role)))
            source = Source(checkpoints[role], role, heads[role], form)
            spec = engine_spec(source, options, max_length)
            make = compiled_engine if options.backend in PACKAGES else exported_engine
            engines[role], parity[role] = make(source, spec, options, staging, begin)
        names = sorted(file.name for file in staging.iterdir())
        advance = begin(Step("Sealing the bundle", len(names)))
        files = {}
        for name in names:
            files[name] = file_record(staging / name)
            advance()
        eos = end_of_text(options.target, checkpoints[TARGET])
        builder = f"draftwood {version('draftwood')}"
        write_manifest(staging, Manifest(builder, max_length, eos, engines, parity, files))
    return EngineBundle.open(options.output)


@dataclass(frozen=True, slots=True)
class Source:
    """What one engine is made from."""

    checkpoint: Checkpoint
    role: str
    head: TrainedHead | None
    form: WeightFormat | None = None

    @property
    def weights(self) -> Checkpoint | QuantizedCheckpoint:
        """What the engine holds."""
        return self.checkpoint if self.form is None else QuantizedCheckpoint(self.checkpoint, self.form)


def engine_spec(source: Source, options: BuildOptions, max_length: int) -> EngineSpec:
    """What one engine is to be."""
    return EngineSpec(
        role=source.role,
        backend=options.backend_of(source.role),
        file=f"{source.role}.{'plan' if options.backend in PACKAGES else 'onnx'}",
        model=source.checkpoint.config,
        widths=options.widths_of(source.role),
        capacity=max_length + options.columns,
        precision=options.precision_of(source.role),
        outputs=output_names(source.role, source.head is not None, graph_form(options.backend_of(source.role))),
    )


def graph_form(backend: str) -> str:
    """Which form of the graph a backend runs."""
    return COMPACT if backend in PACKAGES else ADDITIVE


def exported_engine(
    source: Source, spec: EngineSpec, options: BuildOptions, staging: Path, begin: Begin
) -> tuple[EngineSpec, float]:
    """An engine that is its graph; and how far it is from the reference."""
    write_graph(source, spec, staging / spec.file, begin)
    # Low-bit engines round activations, too. In fp32 the same file must agree with the reference as closely as any.
    precisions = ("fp32", spec.precision) if spec.precision in LOW_BIT else (spec.precision,)
    specs = [replace(spec, precision=precision) for precision in precisions]
    engines = (EXPORTED[spec.backend](staging / spec.file, each) for each in specs)
    return spec, check_parity(source, spec, engines, begin)


def compiled_engine(
    source: Source, spec: EngineSpec, options: BuildOptions, staging: Path, begin: Begin
) -> tuple[EngineSpec, float]:
    """An engine that is a TensorRT plan. Its graph is compared with the reference; so is the plan, if it runs here."""
    with graph_folder(options, staging) as folder:
        graph = Path(folder) / f"{spec.role}.onnx"
        computed = replace(spec, precision=activations(spec.precision, COMPACT))
        # ONNX Runtime has no bf16 on a CPU: what is compared then is the same graph in fp32.
        compared = replace(spec, precision="fp32") if spec.precision == "bf16" else computed
        write_graph(source, compared, graph, begin, form=COMPACT)
        difference = check_parity(source, spec, [OnnxRuntimeEngine(graph, compared)], begin)
        if compared != computed:
            write_graph(source, computed, graph, begin, form=COMPACT)
        plan = compile_plan(graph, staging / spec.file, spec.model, options.compile_options(spec.role), begin)
    spec = replace(spec, plan=plan)
    if not runs_here(plan):
        return spec, difference
    from ..runtime.engines.tensorrt import TensorRTEngine

    executed = TensorRTEngine(staging / spec.file, replace(computed, plan=plan))
    difference = check_parity(source, spec, [executed], begin)
    return replace(spec, plan=plan._replace(executed=True)), difference


def graph_folder(options: BuildOptions, staging: Path) -> AbstractContextManager[str | Path]:
    """Where graphs lie while they are compiled: for good where that was asked for."""
    if options.graphs is None:
        return tempfile.TemporaryDirectory(dir=staging)
    options.graphs.mkdir(parents=True, exist_ok=True)
    return nullcontext(options.graphs)


def write_graph(source: Source, spec: EngineSpec, file: Path, begin: Begin, form: str = ADDITIVE) -> None:
    """Export one role."""
    title = f"Exporting the {spec.role} ({spec.model.num_parameters / 1e6:.1f}M parameters, {spec.precision})"
    advance = begin(Step(title, 1))
    export(
        source.weights,
        spec.role,
        spec.capacity,
        file,
        lambda name: None,
        head=source.head,
        form=form,
        precision=spec.precision,
    )
    advance()


def check_parity(source: Source, spec: EngineSpec, engines: Iterable[Engine], begin: Begin) -> float:
    """Compare engines, one after the other, with the torch reference on the weights they hold, and close them. Returns
    the difference of the last one."""
    advance = begin(Step(f"Comparing the {spec.role} with the torch reference", 1))
    held = replace(spec, precision="fp32", model=source.weights.config)
    reference = TorchEngine(source.weights.tensor, held, head=source.head)
    difference = 0.0
    for engine in engines:
        difference = largest_difference(engine, reference)
        engine.close()
    reference.close()
    advance()
    return difference


def refuse_different_sizes(checkpoints: Mapping[str, Checkpoint]) -> None:
    """Both models must score the same token ids."""
    target, draft = (checkpoints[role].config.vocab_size for role in (TARGET, DRAFT))
    if target != draft:
        raise CheckpointError(
            f"the target's vocabulary has {target} tokens and the draft's {draft}: "
            "choose a draft that shares the target's tokenizer"
        )


def context_length(options: BuildOptions, checkpoints: Mapping[str, Checkpoint]) -> int:
    """Tokens of prompt and output together. Raises ConfigError when a model was not trained for that many."""
    trained = min(checkpoint.config.max_position for checkpoint in checkpoints.values())
    if options.max_length is None:
        return min(trained, LONGEST)
    for role, checkpoint in checkpoints.items():
        if options.max_length > checkpoint.config.max_position:
            raise ConfigError(
                f"max_length {options.max_length} exceeds the {role}'s context of {checkpoint.config.max_position} "
                f"tokens: ask for at most {trained}"
            )
    return options.max_length


def end_of_text(folder: Path, checkpoint: Checkpoint) -> tuple[int, ...]:
    """Ids that end a text: generation_config.json's (chat models list several there) and config.json's."""
    file = folder / "generation_config.json"
    listed = token_ids(read_json(file).get("eos_token_id")) if file.is_file() else ()
    return tuple(sorted({*listed, *checkpoint.config.eos_token_ids}))
