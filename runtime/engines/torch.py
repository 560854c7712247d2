"""torch: the parity reference on any machine, and a way to a GPU. The only file of the runtime that imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...models import bindings
from ...models.acceptance_head import AcceptanceHead, TrainedHead
from ...models.errors import EngineError
from ...models.llama import Llama
from .base import EngineSpec, ForwardOutput, StackedKVCache, TokenBatch

DEVICES = ("cpu", "cuda")
Weights = Callable[[str], NDArray[Any]]  # Hugging Face's name of a tensor -> the tensor, of any floating dtype


class TorchKVCache(StackedKVCache):
    """The buffer lives on the engine's device."""

    buffer: torch.Tensor

    def __init__(self, engine: TorchEngine) -> None:
        self._device = engine.device
        super().__init__(engine.spec)

    def _allocate(self, capacity: int) -> None:
        model = self._spec.model
        shape = (2 * model.num_layers, 1, model.num_kv_heads, capacity, model.head_dim)
        self.buffer = torch.zeros(shape, dtype=torch.float32, device=self._device)


class TorchEngine:
    """`models/llama.py` in fp32 behind the Engine protocol. What goes in and comes out are arrays in host memory."""

    def __init__(
        self, weights: Weights, spec: EngineSpec, device: str = "cpu", head: TrainedHead | None = None
    ) -> None:
        """Copy the weights to `device`, "cpu" or "cuda". head: for a spec whose outputs name `acceptance`.

        Raises EngineError when there is no such device, or no head.
        """
        if device not in DEVICES:
            raise EngineError(f"device {device!r} is unknown; choose one of {', '.join(DEVICES)}")
        if device == "cuda" and not torch.cuda.is_available():
            raise EngineError(
                "torch finds no CUDA device: install a CUDA build of torch and a driver, or choose device cpu"
            )
        if head is None and bindings.ACCEPTANCE.name in spec.outputs:
            raise EngineError("this engine's outputs name acceptance: open it with the acceptance head they come from")
        self.spec = spec
        self.device = torch.device(device)
        with torch.device("meta"):  # neither memory nor time for weights that are about to be replaced
            model = Llama(spec.model, spec.capacity)
        state = {name: self._tensor(np.array(weights(name), np.float32)) for name in model.state_dict()}
        model.load_state_dict(state, assign=True)
        self._model = model.to(self.device)
        wanted = head if bindings.ACCEPTANCE.name in spec.outputs else None
        self._head = None if wanted is None else AcceptanceHead.from_trained(wanted).to(self.device)

    def new_cache(self) -> TorchKVCache:
        return TorchKVCache(self)

    def forward(self, batch: TokenBatch, cache: TorchKVCache) -> ForwardOutput:
        """See Engine.forward."""
        width, columns = batch.mask.shape
        start = cache.reserve(batch)
        mask = np.zeros((1, 1, width, cache.length + columns), np.float32)
        mask[0, 0, :, cache.length :][~batch.mask] = bindings.MASKED
        with torch.inference_mode():
            scored = self._model(
                self._tensor(batch.token_ids[None]),
                self._tensor(batch.position_ids[None]),
                self._tensor(mask),
                cache.buffer,
                start,
                self._tensor(batch.output_rows),
            )
            logits = scored.logits[0]
            cache.speculative += batch.num_tokens
            if bindings.TOP_IDS.name not in self.spec.outputs:
                return ForwardOutput(logits.cpu().numpy(), None, None)
            top = torch.log_softmax(logits, dim=-1).topk(bindings.top_columns(self.spec.model.vocab_size))
            ranked = ForwardOutput(logits.cpu().numpy(), top.indices.cpu().numpy(), top.values.cpu().numpy())
            if self._head is None:
                return ranked
            return ranked._replace(acceptance=self._head.acceptance(scored.hidden[0].float()).cpu().numpy())

    def close(self) -> None:
        del self._model

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
