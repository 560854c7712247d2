"""Sequoia's tree is the best of all shapes."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.sequoia import sequoia
from draftwood.runtime.speculation.growers.baseline import depths_of


def expected(topology: tuple[int, ...], acceptance: list[float]) -> float:
    """Expected accepted nodes of a shape, its root included, by the definition."""
    reach, ranks = [1.0], dict[int, int]()
    for parent in topology:
        rank = ranks.get(parent, 0)
        ranks[parent] = rank + 1
        reach.append(reach[parent] * acceptance[rank] if rank < len(acceptance) else 0.0)
    return sum(reach)


@settings(max_examples=25)
@given(
    acceptance=st.lists(st.floats(0.01, 0.6), min_size=1, max_size=3).map(lambda p: sorted(p, reverse=True)),
    size=st.integers(1, 5),
    depth=st.integers(1, 4),
)
def test_sequoia_finds_the_best_of_all_shapes(acceptance: list[float], size: int, depth: int) -> None:
    shapes = [shape for shape in product(*(range(i + 1) for i in range(size))) if max(depths_of(shape)) <= depth]
    best = max((expected(shape, acceptance) for shape in shapes), default=1.0)
    found = sequoia(acceptance, size, depth)
    assert len(found) <= size and max(depths_of(found)) <= depth
    assert expected(found, acceptance) >= best - 1e-9
