"""What requests share is read-only: who wrote to it would change the rounds of all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from controllers import TREES
from numpy.typing import NDArray

from draftwood.runtime.engines.base import causal_mask, every_row
from draftwood.runtime.speculation.planning.cost import PassCosts
from draftwood.runtime.speculation.planning.estimate import tree_steps
from draftwood.runtime.speculation.planning.prices import Costs, even_seconds

COSTS = PassCosts((1, 8), (64,), ((1.0, 2.0),))
SHARED: dict[str, Callable[[], NDArray[Any]]] = {
    "rows": lambda: every_row(4),
    "mask": lambda: causal_mask(4),
    "steps": lambda: tree_steps(10, 10, TREES),
    "prices": lambda: even_seconds(Costs(COSTS, COSTS, None, 9, 9, 1), TREES, 8, 1),
}


@pytest.mark.parametrize("name", SHARED)
def test_nobody_writes_to_what_requests_share(name: str) -> None:
    with pytest.raises(ValueError, match="read-only"):
        SHARED[name]()[0] = 1
