"""Settings of speculation in a bundle whose engines are too small for the defaults."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from draftwood.models.errors import ConfigError
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.bundle.fit import fitted
from draftwood.runtime.serving.triton.contract import changed, changed_from
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
    for config in (written, changed_from(json.loads(json.dumps(changed(written))))):
        assert config is not None
        with pytest.raises(ConfigError, match="do not fit the target's widest pass of 4 rows"):
            fitted(config, small)
