"""The torch reference of the parity check: a prompt and a token tree through a model, one layer's weights at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ..models.acceptance_head import AcceptanceHead, TrainedHead
from ..models.config import LlamaConfig
from ..models.layers import EMBEDDING_WEIGHT, network_of
from ..models.llama import DecoderLayer, Rotary, norm_of, scaled
from ..models.rope import rope_tables
from .parity import Rows, Scored

ReadTensor = Callable[[str], NDArray[np.generic]]


class Reference:
    """Rows on their way through a model. Call `layer` for each layer in order, then `scored`."""

    def __init__(
        self, tensor: ReadTensor, config: LlamaConfig, rows: Rows, head: TrainedHead | None = None, threads: int = 0
    ) -> None:
        """tensor: reads a tensor of the model by Hugging Face's name; what it raises is passed on. threads: on which
        torch computes layers; 0 leaves this to torch. One is best beside other work, which torch's threads would slow
        down: they wait for each other in loops."""
        self._tensor, self._config, self._head, self._threads = tensor, config, head, threads
        self._network = network_of(config)
        tables = rope_tables(config, int(rows.positions.max(initial=0)) + 1)
        cosine, sine = (torch.from_numpy(table[rows.positions]) for table in tables)
        self._rotary = Rotary(cosine[None, None], sine[None, None])
        self._mask = torch.tensor(rows.mask)
        embedded = np.asarray(tensor(EMBEDDING_WEIGHT)[rows.tokens], np.float32)
        self._rows = scaled(torch.from_numpy(embedded)[None], self._network.embedding_multiplier)

    def layer(self, index: int) -> None:
        """Let the rows pass a layer, whose weights are read and dropped."""
        module = load_layer(self._tensor, self._config, index)
        with torch.inference_mode(), computing_on(self._threads or torch.get_num_threads()):
            self._rows = module(self._rows, self._rotary, self._attend, index)

    def scored(self) -> Scored:
        """The rows after the last layer, scored."""
        network, config = self._network, self._config
        norm = norm_of(network.norm, config)
        norm.load_state_dict({"weight": self._read(network.norm.weight)}, assign=True)
        with torch.inference_mode():
            hidden = norm(self._rows)
            (head,) = network.head.weights
            logits = scaled(functional.linear(hidden, self._read(head)), network.logits_multiplier)
            acceptance = None
            if self._head is not None:
                acceptance = AcceptanceHead.from_trained(self._head).acceptance(hidden)[0].numpy()
        return Scored(logits[0].numpy(), acceptance)

    def _read(self, name: str) -> Tensor:
        return read_tensor(self._tensor, name)

    def _attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """See LayerAttention of models/llama.py."""
        grouped = query.shape[1] != keys.shape[1]
        return functional.scaled_dot_product_attention(query, keys, values, self._mask, scale=scale, enable_gqa=grouped)


@contextmanager
def computing_on(threads: int) -> Iterator[None]:
    """Let torch compute on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_layer(tensor: ReadTensor, config: LlamaConfig, index: int) -> DecoderLayer:
    """One layer in torch. tensor: reads its tensors by Hugging Face's names."""
    with torch.device("meta"):  # neither memory nor time for weights that are about to be replaced
        module = DecoderLayer(network_of(config).layers[index], config)
    prefix = f"model.layers.{index}."
    module.load_state_dict({name: read_tensor(tensor, prefix + name) for name in module.state_dict()}, assign=True)
    return module


def read_tensor(tensor: ReadTensor, name: str) -> Tensor:
    """A tensor in fp32, which may be written to."""
    return torch.from_numpy(np.require(tensor(name), np.float32, ["C", "W"]))


def score_rows(tensor: ReadTensor, config: LlamaConfig, rows: Rows, head: TrainedHead | None = None) -> Scored:
    """All of it at once."""
    reference = Reference(tensor, config, rows, head)
    for index in range(config.num_layers):
        reference.layer(index)
    return reference.scored()
