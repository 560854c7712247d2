"""Settings of speculation in a bundle whose engines are too small for the defaults."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from draftwood.models.bindings import DRAFT
from draftwood.models.errors import ConfigError
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.bundle.fit import fitted
from draftwood.runtime.serving.triton.contract import changed
from draftwood.runtime.speculation.config import SpeculativeConfig


@pytest.fixture
def small(tiny_bundle: Path) -> EngineBundle:
    """A bundle whose passes have at most four rows."""
    whole = EngineBundle.open(tiny_bundle)
    engines = {role: replace(spec, widths=(1, 2, 4)) for role, spec in whole.manifest.engines.items()}
    return replace(whole, manifest=replace(whole.manifest, engines=engines))


def test_defaults_are_lowered(small: EngineBundle) -> None:
    lowered = fitted(SpeculativeConfig(), small)
    assert (lowered.max_draft_len, lowered.max_total_draft_tokens, lowered.frontier_width) == (3, 3, 4)
    assert fitted(lowered, small) == lowered
    assert fitted(SpeculativeConfig("lookup"), small).max_tokens == 3
    assert changed(SpeculativeConfig()) == {} and "max_draft_len=15" in repr(SpeculativeConfig())


def test_the_draft_has_room_for_every_row_that_a_proposal_can_score_and_no_more(tiny_bundle: Path) -> None:
    """These trees of five tokens score 3 + 3 + 2 + 1 rows, not three at each of nine depths."""
    tree = SpeculativeConfig("topk", max_draft_len=9, max_total_draft_tokens=5, frontier_width=3)
    whole = EngineBundle.open(tiny_bundle)

    def fitted_with(room: int, config: SpeculativeConfig) -> SpeculativeConfig:
        draft = whole.manifest.engines[DRAFT]
        slots = whole.manifest.max_length + draft.max_width + room
        engines = {**whole.manifest.engines, DRAFT: replace(draft, capacity=slots)}
        return fitted(config, replace(whole, manifest=replace(whole.manifest, engines=engines)))

    assert tree.max_draft_rows == 9 and fitted_with(9, tree) == tree
    with pytest.raises(ConfigError, match="scores up to 9 rows on the draft, whose cache has room for 8"):
        fitted_with(8, tree)
    unwritten = SpeculativeConfig("topk", max_total_draft_tokens=5, frontier_width=3)
    assert [fitted_with(room, unwritten).max_draft_len for room in (0, 3, 5, 6, 8, 9, 99)] == [1, 2, 2, 3, 4, 15, 15]


@pytest.mark.parametrize(
    "written",
    [
        SpeculativeConfig(max_total_draft_tokens=15),
        SpeculativeConfig("chain", max_draft_len=15),
        SpeculativeConfig("lookup", lookup_len=4),
    ],
)
def test_a_number_that_somebody_wrote_is_refused_also_where_it_is_the_default(
    small: EngineBundle, written: SpeculativeConfig
) -> None:
    for config in (written, SpeculativeConfig(**json.loads(json.dumps(changed(written))))):
        assert config is not None
        with pytest.raises(ConfigError, match="do not fit the target's widest pass of 4 rows"):
            fitted(config, small)
