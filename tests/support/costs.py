"""Cost tables for tests."""

from __future__ import annotations

from draftwood.runtime.speculation.planning.cost import CostModel, HostCosts, PassCosts

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
FREE = HostCosts(0.0, 0.0, 0.0)


def passes(once: float, row: float = 0.0) -> PassCosts:
    """Every pass costs `once` seconds and `row` more for each further row."""
    return PassCosts(WIDTHS, (0,), (tuple(once + row * (width - 1) for width in WIDTHS),))


def table(target: float = 1.0, draft: float = 0.1, row: float = 0.0, host: HostCosts = FREE) -> CostModel:
    """A machine whose draft pass costs `draft` of a target pass."""
    return CostModel(passes(target, row), passes(draft), host, host, {})
