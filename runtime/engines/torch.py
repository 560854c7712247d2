"""The torch engine: it computes a checkpoint on any machine, also on GPUs that TensorRT does not support.

On a CPU a pass computes in fp32 over a growing cache. On CUDA a pass is a CUDA graph over a cache of fixed size, with
the plugin's attention kernel, so the speed of the runtime and the kernel can be measured on any GPU. No other file of
the runtime imports torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...models import bindings
from ...models.acceptance_head import AcceptanceHead, TrainedHead
from ...models.errors import EngineError
from ...models.llama import Llama, LlamaOutput, TreeAttention
from .base import EngineSpec, ForwardOutput, KVCache, SoloEngine, TokenBatch, check_cache, closed_error
from .cache import StackedKVCache
from .feeds import feed, output_of
from .layout import Layout, PassShape, check_growth

DEVICES = ("cpu", "cuda")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Weights = Callable[[str], NDArray[Any]]  # Hugging Face name of a tensor -> tensor of any floating dtype


class ScoringKVCache(StackedKVCache):
    """A cache with a method that runs a pass over it."""

    buffer: torch.Tensor

    @abstractmethod
    def score(self, batch: TokenBatch, start: int) -> ForwardOutput:
        """Run a batch whose first row is written to slot `start`."""


class TorchKVCache(ScoringKVCache):
    """A growing cache on the CPU."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        super().__init__(engine.spec)

    def score(self, batch: TokenBatch, start: int) -> ForwardOutput:
        """See ScoringKVCache.score."""
        width, columns = batch.mask.shape
        mask = np.zeros((1, 1, width, self.length + columns), np.float32)
        mask[0, 0, :, self.length :][~batch.mask] = bindings.MASKED
        feeds = [torch.tensor(array) for array in (batch.token_ids[None], batch.position_ids[None], mask)]
        scored = self._engine.model(*feeds, self.buffer, start, torch.tensor(batch.output_rows))
        return output_of({name: value.numpy() for name, value in self._engine.outputs(scored).items()})

    def _allocate(self, capacity: int) -> None:
        self.buffer = self._engine.new_buffer(capacity)


class StaticTorchKVCache(ScoringKVCache):
    """A cache of fixed size on the engine's device, with the passes captured over it."""

    def __init__(self, engine: TorchEngine, attend: TreeAttention) -> None:
        self._engine = engine
        self._attend = attend
        self._passes: dict[PassShape, StaticTorchPass] = {}
        super().__init__(engine.spec)

    def score(self, batch: TokenBatch, start: int) -> ForwardOutput:
        """See ScoringKVCache.score."""
        shape = PassShape.of(batch, self.capacity)
        if shape not in self._passes:
            with self._engine.on_stream():
                self._passes[shape] = StaticTorchPass(self._engine, self.buffer, shape, self._attend)
        return self._passes[shape].run(batch, self.length, start)

    def _allocate(self, capacity: int) -> None:
        check_growth(self._spec, capacity)
        self.buffer = self._engine.new_buffer(self._spec.capacity)

    def _move(self, rows: NDArray[np.int64]) -> None:
        with self._engine.lock, self._engine.on_stream():
            kept = self.buffer.index_select(3, torch.from_numpy(rows).to(self._engine.device))
            self.buffer.narrow(3, self.length, len(rows)).copy_(kept)

    def _free(self) -> None:
        del self.buffer, self._passes


class StaticTorchPass:
    """One shape of pass over one cache. All addresses are fixed. On CUDA the work is captured as a graph after its
    first run, and later runs replay the graph: one copy to the device, one launch, one copy back, one wait."""

    def __init__(self, engine: TorchEngine, cache: torch.Tensor, shape: PassShape, attend: TreeAttention) -> None:
        self._engine, self._cache, self._attend = engine, cache, attend
        on_gpu = engine.device.type == "cuda"
        inputs = Layout.inputs(engine.spec, shape)
        self._outputs = Layout.outputs(engine.spec, shape)
        self._host_inputs = torch.zeros(inputs.nbytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._host_outputs = torch.zeros(self._outputs.nbytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._feeds = inputs.views(self._host_inputs.numpy())
        self._device_inputs = torch.zeros(inputs.nbytes, dtype=torch.uint8, device=engine.device)
        self._device_outputs = torch.zeros(self._outputs.nbytes, dtype=torch.uint8, device=engine.device)
        self._arguments = device_views(inputs, self._device_inputs)
        self._results = device_views(self._outputs, self._device_outputs)
        self._output = output_of(self._outputs.views(self._host_outputs.numpy()))
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, batch: TokenBatch, length: int, start: int) -> ForwardOutput:
        """Score a batch after `length` committed rows. Its first row is written to slot `start`."""
        feed(self._feeds, batch, length, start)
        with self._engine.on_stream():
            if self._graph is None:
                self._compute()
            else:
                self._graph.replay()
            needed = self._outputs.needed_bytes(batch.num_tokens, batch.ranking_only)
            self._host_outputs[:needed].copy_(self._device_outputs[:needed], non_blocking=True)
        self._engine.synchronize()
        if self._graph is None and self._engine.device.type == "cuda":
            self._graph = self._capture()
        return self._output

    def _compute(self) -> None:
        self._device_inputs.copy_(self._host_inputs, non_blocking=True)
        feeds = self._arguments
        scored = self._engine.model.forward_static(
            feeds[bindings.INPUT_IDS.name],
            feeds[bindings.POSITION_IDS.name],
            feeds[bindings.SEQUENCES.name],
            feeds[bindings.TREE_MASK.name],
            self._cache,
            feeds[bindings.WRITE_INDICES.name],
            feeds[bindings.OUTPUT_ROWS.name],
            self._attend,
        )
        for name, value in self._engine.outputs(scored).items():
            self._results[name].copy_(value)

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Capture the work as a graph. It must have run before, so that kernels are compiled and libraries have
        allocated their workspace."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may use their engines during the capture.
        engine = self._engine
        with torch.cuda.graph(graph, engine.graph_pool, engine.stream, capture_error_mode="thread_local"):
            self._compute()
        return graph


def device_views(layout: Layout, block: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a layout as views of a block of bytes."""
    views = {}
    for name, field in layout.fields.items():
        content = block[field.offset : field.offset + field.nbytes]
        views[name] = content.view(getattr(torch, field.dtype.name)).view(field.shape)
    return views


class TorchEngine(SoloEngine):
    """An engine over `models/llama.py`. Inputs and outputs are arrays in host memory."""

    def __init__(
        self,
        weights: Weights,
        spec: EngineSpec,
        device: str = "cpu",
        head: TrainedHead | None = None,
        precision: str = "fp32",
        attend: TreeAttention | None = None,
    ) -> None:
        """Copy the weights to `device`, "cpu" or "cuda".

        head: the acceptance head, for a spec with the output `acceptance`. precision: of weights, activations and
        caches. attend: the tree attention for caches of fixed size; None takes the plugin's kernel on CUDA, and on a
        CPU the model's own attention over growing caches. Raises EngineError for an unknown or unavailable device, an
        unknown precision, or a missing head.
        """
        if device not in DEVICES:
            raise EngineError(f"device {device!r} is unknown; choose one of {', '.join(DEVICES)}")
        if precision not in DTYPES:
            raise EngineError(f"precision {precision!r} is unknown; choose one of {', '.join(DTYPES)}")
        if device == "cuda" and not torch.cuda.is_available():
            raise EngineError(
                "torch finds no CUDA device: install a CUDA build of torch and a driver, or choose device cpu"
            )
        if head is None and bindings.ACCEPTANCE.name in spec.outputs:
            raise EngineError("this engine's outputs name acceptance: open it with the acceptance head they come from")
        self.spec = spec
        self.device = torch.device(device)
        self.dtype = DTYPES[precision]
        # Each engine has its own stream. Its graphs share one memory pool: results are copied out after each run.
        self.stream = torch.cuda.Stream() if device == "cuda" else None  # type: ignore[no-untyped-call]  # of torch
        self.graph_pool = torch.cuda.graph_pool_handle() if device == "cuda" else None
        self._closed = False
        self.lock = Lock()  # one pass at a time: all passes use one stream, which may be in capture mode
        self._attend = kernel_attention() if attend is None and device == "cuda" else attend
        with torch.device("meta"):  # the weights are replaced below, so they are not allocated here
            model = Llama(spec.model, spec.capacity)
        wanted = head if bindings.ACCEPTANCE.name in spec.outputs else None
        with self.on_stream():
            state = {name: self._weight(weights(name)) for name in model.state_dict()}
            model.load_state_dict(state, assign=True)
            self.model = model.to(self.device)
            self._head = None if wanted is None else AcceptanceHead.from_trained(wanted).to(self.device)

    def new_cache(self) -> TorchKVCache | StaticTorchKVCache:
        return TorchKVCache(self) if self._attend is None else StaticTorchKVCache(self, self._attend)

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        """See Engine.forward."""
        cache = check_cache(cache, TorchKVCache if self._attend is None else StaticTorchKVCache)
        start = cache.reserve(batch)
        with torch.inference_mode(), self.lock:
            if self._closed:
                raise closed_error(self.spec)
            output = cache.score(batch, start)
        cache.speculative += batch.num_tokens
        return output

    def close(self) -> None:
        with self.lock:  # waits for the pass of another thread
            if not self._closed:
                del self.model
            self._closed = True

    def outputs(self, scored: LlamaOutput) -> dict[str, torch.Tensor]:
        """The tensors of the spec's outputs by name, [1, R, ...], on the device."""
        logits = scored.logits.float()
        outputs = {bindings.LOGITS.name: logits}
        if bindings.TOP_IDS.name in self.spec.outputs:
            top = torch.log_softmax(logits, dim=-1).topk(bindings.top_columns(self.spec.model.num_logits))
            outputs |= {bindings.TOP_IDS.name: top.indices, bindings.TOP_LOGPROBS.name: top.values}
        if self._head is not None:
            outputs[bindings.ACCEPTANCE.name] = self._head.acceptance(scored.hidden.float())
        return outputs

    def new_buffer(self, capacity: int) -> torch.Tensor:
        """A zeroed cache of `capacity` slots."""
        model = self.spec.model
        shape = (2 * model.num_layers, 1, model.num_kv_heads, capacity, model.head_dim)
        with self.on_stream():
            return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def on_stream(self) -> AbstractContextManager[Any]:
        """A context in which CUDA work is queued on this engine's stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def synchronize(self) -> None:
        """Wait until all work on this engine's stream is done."""
        if self.stream is not None:
            self.stream.synchronize()

    def _weight(self, array: NDArray[Any]) -> torch.Tensor:
        # numpy has bf16 only through the package ml_dtypes, which torch does not accept; such weights become fp32.
        known = array.dtype if array.dtype in (np.float16, np.float32) else np.float32
        return torch.from_numpy(np.array(array, known)).to(self.device, self.dtype)


def kernel_attention() -> TreeAttention:
    """The plugin's attention kernel. Raises EngineError where the package triton is not installed."""
    try:
        from ...plugins.tree_attention.launch import tree_attention
    except ImportError as error:
        raise EngineError(f"the attention kernel needs the package triton ({error}): pip install triton") from error
    return tree_attention
