"""An engine over `models/llama.py` on the CPU, in fp32 with a growing cache: what other engines are compared with."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from draftwood.builder.head.network import AcceptanceHead
from draftwood.models import bindings
from draftwood.models.acceptance_head import TrainedHead
from draftwood.models.errors import EngineError
from draftwood.models.llama import Llama, LlamaOutput
from draftwood.runtime.engines.base import (
    EngineSpec,
    ForwardOutput,
    KVCache,
    Runner,
    TokenBatch,
    check_cache,
    closed_error,
)
from draftwood.runtime.engines.cache import StackedKVCache
from draftwood.runtime.engines.feeds import output_of

Weights = Callable[[str], NDArray[Any]]  # Hugging Face name of a tensor -> tensor of any floating dtype


class TorchKVCache(StackedKVCache):
    buffer: torch.Tensor

    def _allocate(self, capacity: int) -> None:
        model = self._spec.model
        self.buffer = torch.zeros(2 * model.num_layers, 1, model.num_kv_heads, capacity, model.head_dim)


class TorchEngine(Runner):
    """weights: those of a checkpoint. head: the acceptance head, for a spec with the output `acceptance`."""

    def __init__(self, weights: Weights, spec: EngineSpec, head: TrainedHead | None = None) -> None:
        """Raises EngineError for a missing head."""
        if head is None and bindings.ACCEPTANCE.name in spec.outputs:
            raise EngineError("this engine's outputs name acceptance: open it with the acceptance head they come from")
        self.spec = spec
        self._lock, self._closed = Lock(), False
        with torch.device("meta"):  # the weights are replaced below, so they are not allocated here
            self._model = Llama(spec.model, spec.capacity)
        state = {name: torch.from_numpy(np.array(weights(name), np.float32)) for name in self._model.state_dict()}
        self._model.load_state_dict(state, assign=True)
        used = head if bindings.ACCEPTANCE.name in spec.outputs else None
        self._head = None if used is None else AcceptanceHead.from_trained(used)

    def new_cache(self, salt: str | None = None) -> TorchKVCache:
        return TorchKVCache(self.spec)

    @torch.inference_mode()
    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        """See Engine.forward."""
        own = check_cache(cache, TorchKVCache)
        start = own.reserve(batch)
        width, columns = batch.mask.shape
        mask = np.zeros((1, 1, width, own.length + columns), np.float32)
        mask[0, 0, :, own.length :][~batch.mask] = bindings.MASKED
        feeds = [torch.tensor(array) for array in (batch.token_ids[None], batch.position_ids[None], mask)]
        with self._lock:
            if self._closed:
                raise closed_error(self.spec)
            scored = self._model(*feeds, own.buffer, start, torch.tensor(batch.output_rows))
        own.speculative += batch.num_tokens
        return output_of({name: value.numpy() for name, value in self._outputs(scored).items()})

    def close(self) -> None:
        self._closed = True

    def _outputs(self, scored: LlamaOutput) -> dict[str, torch.Tensor]:
        """The tensors of the spec's outputs by name, [1, R, ...]."""
        outputs = {bindings.LOGITS.name: scored.logits}
        if bindings.TOP_IDS.name in self.spec.outputs:
            top = torch.log_softmax(scored.logits, dim=-1).topk(bindings.top_columns(self.spec.model.num_logits))
            outputs |= {bindings.TOP_IDS.name: top.indices, bindings.TOP_LOGPROBS.name: top.values}
        if self._head is not None:
            outputs[bindings.ACCEPTANCE.name] = self._head.acceptance(scored.hidden)
        return outputs
