"""Muon: momentum, orthogonalised (Jordan et al., 2024). For matrices; about twice AdamW's progress per token here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that pushes every singular value towards one
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Matrices of one shape are orthogonalised together, in bfloat16."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update from the gradients."""
        for group in self.param_groups:
            same_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for matrix in group["params"]:
                state: dict[str, Any] = self.state[matrix]
                average = state.setdefault("average", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                nesterov = matrix.grad.lerp(average, group["momentum"])
                same_shape[matrix.shape].append((matrix, nesterov))
            for shape, pairs in same_shape.items():
                updates = orthogonalised(torch.stack([update for _, update in pairs]))
                scale = -group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for (matrix, _), update in zip(pairs, updates, strict=True):
                    matrix.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=scale)


def orthogonalised(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices [N, rows, columns], by Newton-Schulz iteration."""
    wide = matrices.shape[1] <= matrices.shape[2]
    X = matrices if wide else matrices.mT
    X = (X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    orthogonal: Tensor = (X if wide else X.mT).float()
    return orthogonal
