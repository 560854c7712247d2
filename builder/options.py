"""BuildOptions: what a build is asked for, checked before anything is read, or torch and onnx are imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..models.bindings import LOW_BIT, ROLES, TARGET
from ..models.errors import ConfigError, EngineError
from ..runtime.engines.backends import BACKENDS, COMPILED
from .engines.plan import CompileOptions

FINE_WIDTHS = 16  # where a pass computes no padding: every width up to here
SPECULATIVE_PASSES = 4  # widest passes a cache has room for behind the longest text


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What to build. Raises ConfigError for what this release cannot build.

    backend: one of BACKENDS; the command line's default asks `choose_backend`.
    target, draft: Hugging Face folders or GGUF files. output: the bundle's folder. max_length: tokens of prompt and
    output; None takes what both models were trained for, up to 8192. widths: rows a pass may have. max_batch:
    requests that share the passes of a TensorRT plan, which has caches for so many; the CPU backends decide that when
    they run. acceptance_head: a folder of draftwood train-head, whose head becomes part of the draft's graph.
    draft_backend, draft_precision: None takes the target's, with one exception. A native draft is int8, where its
    matrices divide into blocks, and so is any beside int4: 8 bits cost no acceptance, and 4 bits do and gain no time.
    graphs: a folder that keeps the ONNX graphs TensorRT's plans were compiled from. The rest is for the TensorRT
    backends, too: see CompileOptions.
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
    max_batch: int = 1
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
            if backend not in BACKENDS or (backend != self.backend and {backend, self.backend}.intersection(COMPILED)):
                raise ConfigError(f"backend {backend!r} is not available for the {role} beside {self.backend}")
            precision = self.precision_of(role)
            refuse_dynamic(precision)
            if precision not in BACKENDS[backend].precisions:
                choices = ", ".join(BACKENDS[backend].precisions)
                raise ConfigError(f"precision {precision!r} is not available for {backend}; choose {choices}")
            try:
                BACKENDS[backend].check_machine(None)
            except EngineError as error:
                raise ConfigError(str(error)) from error
        if not self.widths or self.widths[0] != 1 or list(self.widths) != sorted(set(self.widths)):
            raise ConfigError(f"widths must ascend from 1, not {','.join(map(str, self.widths))}")
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(f"max_length must be at least 2 (one token in, one out), not {self.max_length}")
        if BACKENDS[self.backend].is_compiled:
            for role in ROLES:
                self.compile_options(role)
        elif self.max_batch != 1:
            raise ConfigError(
                f"--max-batch is for the backends {' and '.join(COMPILED)}, whose caches are compiled in: leave it "
                "out, requests share passes anyway (draftwood serve --max-running)"
            )
        elif self.compute_capability or any(
            value is not None for value in (self.plugin, self.workspace, self.timing_cache, self.graphs)
        ):
            raise ConfigError(
                "--compute-capability, --plugin, --workspace, --timing-cache and --graphs are for the backends "
                f"{' and '.join(COMPILED)}: leave them out, or choose one of these with --backend"
            )

    def backend_of(self, role: str) -> str:
        """What runs a role's engine, chosen or default."""
        if role == TARGET:
            return self.backend
        return self.draft_backend or self.backend

    def precision_of(self, role: str) -> str:
        """A role's precision, chosen or default."""
        backend = BACKENDS[self.backend_of(role)]
        chosen = self.precision or backend.precisions[0]
        if role == TARGET:
            return chosen
        return self.draft_precision or backend.draft_precision or ("int8" if chosen == "int4" else chosen)

    def widths_of(self, role: str) -> tuple[int, ...]:
        """Rows a pass of a role's engine may have."""
        if not BACKENDS[self.backend_of(role)].pads:  # a width is only what a pass is measured at
            return tuple(sorted({*self.widths, *range(1, min(FINE_WIDTHS, self.widths[-1]) + 1)}))
        # Kernels for one row add in another order than those for more, and low-bit matrices make much of the little
        # difference. There, plain decoding takes two rows, too, and gives the text that speculative decoding gives.
        low_bit = role == TARGET and self.precision_of(role) in LOW_BIT
        return tuple(sorted({max(2 if low_bit else 1, width) for width in self.widths}))

    def prompt_widths_of(self, role: str) -> tuple[int, ...]:
        """Rows that only a pass over a prompt may have, as far as a cache has room for them."""
        widths = BACKENDS[self.backend_of(role)].prompt_widths
        return tuple(width for width in widths if self.widths[-1] < width <= self.columns)

    @property
    def columns(self) -> int:
        """Speculative slots a sequence has room for behind the longest text."""
        return SPECULATIVE_PASSES * self.widths[-1]

    def compile_options(self, role: str = TARGET) -> CompileOptions:
        """What TensorRT is to do. Raises ConfigError when it cannot."""
        return CompileOptions(
            self.backend,
            self.precision_of(role),
            self.widths,
            self.columns * self.max_batch,
            self.compute_capability,
            self.plugin,
            self.workspace,
            self.timing_cache,
            self.max_batch,
        )


def refuse_dynamic(precision: str) -> None:
    """Raises ConfigError for int8 with one scale for all rows of a pass, which other programs call dynamic."""
    if precision in ("int8-dynamic", "dynamic-int8"):
        raise ConfigError(
            f"{precision} gives all rows of a pass one scale: a row's logits then depend on its siblings, and "
            "speculative decoding no longer gives the target's own text. Choose int8, which rounds each row by itself"
        )
