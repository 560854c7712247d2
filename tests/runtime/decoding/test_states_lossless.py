"""The output distribution is the target's own with a draft that reads its states: exact enumeration."""

from __future__ import annotations

from dataclasses import replace

import pytest
from enumeration import decoded, total_variation
from proposals import LEGAL, SETTINGS, speculative
from state_fakes import reading_pair

from draftwood.runtime.sampling.params import SamplingParams

SHORT = replace(SETTINGS["plain"], max_tokens=3)


@pytest.mark.parametrize(("name", "verify"), LEGAL)
def test_every_legal_pair_is_exact(name: str, verify: str) -> None:
    target, draft = reading_pair(0, 2)
    expected = decoded(target, None, None, SHORT)
    assert total_variation(decoded(target, draft, speculative(name, verify), SHORT), expected) < 1e-12


@pytest.mark.parametrize("setting", ["greedy", "penalties", "top-k"])
@pytest.mark.parametrize("name", ["chain", "topk merged", "dyspec merged"])
def test_settings_are_exact(name: str, setting: str) -> None:
    target, draft = reading_pair(1, 4, (1, 3))
    params = replace(SETTINGS[setting], max_tokens=2)
    expected = decoded(target, None, None, params)
    assert total_variation(decoded(target, draft, speculative(name, "auto"), params), expected) < 1e-12


@pytest.mark.parametrize("prompt", [(0,), (0, 1, 0)])
def test_a_text_of_one_token_begins_without_a_proposal(prompt: tuple[int, ...]) -> None:
    """Its token has no state before it."""
    params = SamplingParams(max_tokens=4)
    target, draft = reading_pair(0, 2)
    expected = decoded(target, None, None, params, prompt=prompt)
    found = decoded(target, draft, speculative("dyspec", "auto"), params, prompt=prompt)
    assert total_variation(found, expected) < 1e-12 and draft.passes
