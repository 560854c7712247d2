"""BuildOptions: the options of a build, checked before any file is read and before torch and onnx are imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from ..models.bindings import BITS, DRAFT, LOW_BIT, ROLES, TARGET
from ..models.errors import ConfigError, EngineError, nearest
from ..runtime.bundle.checks import MAX_BATCH, MAX_ROWS
from ..runtime.engines.backends import BACKENDS, COMPILED
from .engines.plan import CompileOptions
from .setting import flag, setting

TENSORRT = "TensorRT"  # the group of the options for its plans
FINE_WIDTHS = 16  # backends that do not pad get every width up to this one
STORED_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, **BITS}  # of a weight, by precision
ALL: Literal["all"] = "all"
Count = int | Literal["all"]  # of tokens
SPECULATIVE_PASSES = 4  # a cache has slots for this many of the widest passes after the longest text


class SelfDraft(NamedTuple):
    """A draft that is the target's own copy in a precision of fewer bits."""

    precision: str


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The options of a build. Raises ConfigError for options that this release does not support."""

    target: Path  # Hugging Face folder, GGUF file, or id on the Hub, as `draft`, `lora` and `draft_lora` may be one
    draft: Path | SelfDraft | None  # None: the bundle decodes plainly or by prompt lookup
    output: Path  # the bundle's folder
    backend: str = "onnxruntime"  # one of BACKENDS; the command line's default asks `choose_backend`
    precision: str | None = setting(
        None,  # the backend's first precision
        "of the weights: int4, int5, int6, int8, bf16, fp16, fp32; TensorRT: fp8, too",
        "the file's own blocks, or int8; TensorRT: fp16",
        is_further=False,
    )
    max_length: int | None = setting(
        None, "tokens of prompt and output together", "what both models support, up to 8192", is_further=False
    )
    taps: tuple[int, ...] = ()  # of a target without a draft, whose states are recorded
    lora: Path | None = setting(None, "LoRA folder (PEFT) to merge into the target")
    draft_lora: Path | None = setting(None, "LoRA folder to merge into the draft")
    draft_backend: str | None = setting(None, "of the draft", "the target's")
    draft_precision: str | None = setting(
        None, "of the draft", "native: int4, small ones int8; else int8 if the target is int4, else the target's"
    )
    draft_vocabulary: Count | None = setting(
        None,
        "let the draft predict the N most frequent tokens alone, or all",
        "as many as take a thirtieth of the target's time; small drafts all",
    )
    draft_vocabulary_text: Path | None = setting(
        None, "a text, or JSON lines, in which tokens are counted", "the order of their ids, which is BPE's"
    )
    widths: tuple[int, ...] = setting(
        (1, 2, 4, 8, 12, 16, 24, 32, 48, 64),
        "numbers of rows of a pass, separated by commas",
        "1,2,4,8,12,16,24,32,48,64",
    )
    acceptance_head: Path | None = setting(None, "output folder of draftwood train-head")
    cache_precision: str | None = setting(
        None,
        "native: of keys and values; int8 has a scale for each head and token",
        "fp16, but fp32 beside weights in fp32",
    )
    calibration: Path | None = setting(
        None,
        "native int4: a text like those the model will read and write, whose first 8192 tokens are in view while "
        "matrices are rounded: takes minutes, keeps more quality",
    )
    compute_capability: tuple[str, ...] = setting(
        (), "GPUs to compile for, tensorrt-rtx only", "8.0 8.6 8.9 12.0", group=TENSORRT
    )
    plugin: bool | None = setting(
        None, "attention by our kernel or by TensorRT's own", "ours where Triton is installed", group=TENSORRT
    )
    max_batch: int = setting(1, "most requests that share a pass; the plan has caches for this many", group=TENSORRT)
    workspace: int | None = setting(None, "MiB of an engine's scratch memory at most", group=TENSORRT)
    timing_cache: Path | None = setting(None, "file of measurements to reuse and extend, tensorrt only", group=TENSORRT)
    graphs: Path | None = setting(
        None, "folder to keep the ONNX graphs from which the plans were compiled", group=TENSORRT
    )
    keeps_blocks: bool = False  # whether the target's matrices have the integers that hold its file's blocks of them

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            near = nearest(self.backend, BACKENDS)
            raise ConfigError(f"backend {self.backend!r} is not available; choose one of {', '.join(BACKENDS)}{near}")
        for role in self.roles:
            backend = self.backend_of(role)
            if backend not in BACKENDS or (backend != self.backend and {backend, self.backend}.intersection(COMPILED)):
                raise ConfigError(f"backend {backend!r} is not available for the {role} beside {self.backend}")
            precision = self.precision_of(role)
            refuse_dynamic(precision)
            if precision not in BACKENDS[backend].precisions:
                choices = BACKENDS[backend].precisions
                raise ConfigError(
                    f"precision {precision!r} is not available for {backend}; choose {', '.join(choices)}"
                    + nearest(precision, choices)
                )
            if self.cache_precision is not None:
                self._check_cache(self.cache_precision, backend)
            try:
                BACKENDS[backend].check_machine(None)
            except EngineError as error:
                raise ConfigError(str(error)) from error
        self._check_draft()
        if not self.widths or self.widths[0] != 1 or list(self.widths) != sorted(set(self.widths)):
            raise ConfigError(f"widths must ascend from 1, not {','.join(map(str, self.widths))}")
        if self.widths[-1] < 2:
            raise ConfigError("widths must reach 2, because a proposed token and the token before it are two rows")
        if self.widths[-1] > MAX_ROWS:
            raise ConfigError(f"widths must be at most {MAX_ROWS}, not {self.widths[-1]}")
        if self.max_batch > MAX_BATCH:
            raise ConfigError(f"max_batch must be at most {MAX_BATCH}, not {self.max_batch}")
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(f"max_length must be at least 2 (one token in, one out), not {self.max_length}")
        if self.calibration is not None and not any(map(self.is_calibrated, self.roles)):
            raise ConfigError(
                "--calibration is for int4 on the native backend: leave it out, or add --backend native "
                "--precision int4"
            )
        if BACKENDS[self.backend].is_compiled:
            for role in self.roles:
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
                "--compute-capability, --plugin, --workspace, --timing-cache and --graphs are for the "
                f"backends {' and '.join(COMPILED)}: leave them out, or choose one of these with --backend"
            )

    def _check_cache(self, precision: str, backend: str) -> None:
        """Raises ConfigError for keys and values that a backend cannot store so."""
        choices = BACKENDS[backend].caches
        if not choices:
            able = " and ".join(each.name for each in BACKENDS.values() if each.caches)
            raise ConfigError(
                f"--cache-precision is for the backend {able}; {backend} stores keys and values as it computes them: "
                "leave it out, or choose another backend"
            )
        if precision not in choices:
            raise ConfigError(f"cache precision {precision!r} is not available; choose one of {', '.join(choices)}")

    def _check_draft(self) -> None:
        """Raises ConfigError for options of a draft that this draft does not have."""
        own = isinstance(self.draft, SelfDraft)
        for name in ("draft_backend", "draft_precision", "draft_lora", "acceptance_head", "draft_vocabulary"):
            if self.draft is None and getattr(self, name) is not None:
                raise ConfigError(f"{flag(name)} is for a draft, and --draft none builds none: leave one of them out")
            if own and name in ("draft_precision", "draft_lora") and getattr(self, name) is not None:
                raise ConfigError(
                    f"{flag(name)} contradicts --draft self:{self.precision_of(DRAFT)}, the target's own copy in that "
                    "precision: leave one of them out"
                )
        precision = self.precision_of(TARGET)
        if own and STORED_BITS[self.precision_of(DRAFT)] >= STORED_BITS[precision]:
            raise ConfigError(
                f"--draft self:{self.precision_of(DRAFT)} would cost as much as its target in {precision}, and "
                "speculation only time: choose fewer bits, a smaller draft, or --draft none"
            )
        if isinstance(self.draft_vocabulary, int) and self.draft_vocabulary < 1:
            raise ConfigError(f"--draft-vocabulary must be at least 1, not {self.draft_vocabulary}")
        if self.draft_vocabulary_text is not None and not isinstance(self.draft_vocabulary, int):
            raise ConfigError(
                "--draft-vocabulary-text counts tokens to keep: add --draft-vocabulary N, or leave it out"
            )

    @property
    def roles(self) -> tuple[str, ...]:
        return (TARGET,) if self.draft is None else ROLES

    def backend_of(self, role: str) -> str:
        if role == TARGET:
            return self.backend
        return self.draft_backend or self.backend

    def precision_of(self, role: str) -> str:
        backend = BACKENDS[self.backend_of(role)]
        chosen = self.precision or backend.precisions[0]
        if role == TARGET:
            return chosen
        if isinstance(self.draft, SelfDraft):
            return self.draft.precision
        return self.draft_precision or backend.draft_precision or ("int8" if chosen == "int4" else chosen)

    def cache_precision_of(self, role: str, precision: str) -> str:
        """How a role's engine with weights of that precision stores keys and values, see EngineSpec."""
        backend = BACKENDS[self.backend_of(role)]
        chosen = self.cache_precision or backend.beside.get(precision, "")
        return "" if chosen in backend.caches[:1] else chosen

    def lora_of(self, role: str) -> Path | None:
        return self.lora if role == TARGET or isinstance(self.draft, SelfDraft) else self.draft_lora

    def is_calibrated(self, role: str) -> bool:
        """Whether a role's matrices are rounded with a text in view."""
        backend = BACKENDS[self.backend_of(role)]
        return self.calibration is not None and self.precision_of(role) in backend.offsets

    def widths_of(self, role: str) -> tuple[int, ...]:
        """The allowed numbers of rows of a pass of a role's engine."""
        if not BACKENDS[self.backend_of(role)].pads:  # widths are only the measured sizes of passes
            return tuple(sorted({*self.widths, *range(1, min(FINE_WIDTHS, self.widths[-1]) + 1)}))
        # Kernels for one row add in another order than kernels for more rows, and low-bit matrices amplify the small
        # difference. Therefore plain decoding uses two rows there, too, and gives the text of speculative decoding.
        low_bit = role == TARGET and self.precision_of(role) in LOW_BIT
        return tuple(sorted({max(2 if low_bit else 1, width) for width in self.widths}))

    def prompt_widths_of(self, role: str) -> tuple[int, ...]:
        """Additional widths of passes over prompts, as far as the cache has room for them."""
        widths = BACKENDS[self.backend_of(role)].prompt_widths
        return tuple(width for width in widths if self.widths[-1] < width <= self.columns)

    @property
    def columns(self) -> int:
        """The number of speculative slots of a sequence, after the longest text."""
        return SPECULATIVE_PASSES * self.widths[-1]

    def compile_options(self, role: str = TARGET) -> CompileOptions:
        """The options of the TensorRT compilation. Raises ConfigError for impossible ones."""
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
    """Raises ConfigError for int8 with one scale for all rows of a pass, which other programs call dynamic int8."""
    if precision in ("int8-dynamic", "dynamic-int8"):
        raise ConfigError(
            f"{precision} gives all rows of a pass one scale: a row's logits then depend on its siblings, and "
            "speculative decoding no longer gives the target's own text. Choose int8, which rounds each row by itself"
        )
