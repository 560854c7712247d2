"""The acceptance head in torch, as it is trained."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ...models.acceptance_head import TrainedHead
from ...models.head_config import ACCEPT, REJECT, HeadConfig


def log_odds(config: HeadConfig, logits: Tensor) -> Tensor:
    """Log-odds of acceptance from the head's two logits [..., 2]: de-biased, then calibrated."""
    return (logits[..., ACCEPT] - logits[..., REJECT] + math.log(config.reject_weight)) / config.temperature


class ResBlock(nn.Module):
    """x + SiLU(W x + b). Starts as the identity."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = rows + functional.silu(self.linear(rows))
        return output


class AcceptanceHead(nn.Module):
    """The trainable head. A new head predicts 1/2 for every token."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(ResBlock(config.hidden_size) for _ in range(config.blocks))
        self.output = nn.Linear(config.hidden_size, 2)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [..., 2] of reject and accept for fp32 hidden states [..., hidden_size], as trained."""
        rows = hidden
        for layer in range(self.config.layers):
            rows = self.blocks[self.config.block_of(layer)](rows)
        logits: Tensor = self.output(rows)
        return logits

    def acceptance(self, hidden: Tensor) -> Tensor:
        """Calibrated probability [...] that the target accepts the token of each hidden state."""
        return torch.sigmoid(log_odds(self.config, self(hidden)))

    @classmethod
    def from_trained(cls, head: TrainedHead) -> AcceptanceHead:
        with torch.device("meta"):
            module = cls(head.config)
        state = {name: torch.from_numpy(np.array(weight, np.float32)) for name, weight in head.weights.items()}
        module.load_state_dict(state, assign=True)
        return module

    def trained(self, config: HeadConfig) -> TrainedHead:
        """A copy of the current weights, with the calibration of `config`."""
        weights = {name: tensor.detach().cpu().numpy().copy() for name, tensor in self.state_dict().items()}
        return TrainedHead(config, weights)
