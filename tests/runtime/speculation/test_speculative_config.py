"""SpeculativeConfig: everything it refuses, by its message, and that nothing is computed from what it refuses."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.models.errors import ConfigError
from draftwood.runtime.speculation.bounds import (
    INTEGERS,
    MAX_NGRAM,
    MAX_PROPOSAL,
    NAMED,
    NUMBERS,
    ONLY_WITH,
    SHARES,
    fits,
)
from draftwood.runtime.speculation.config import CHOICES, SpeculativeConfig
from draftwood.runtime.speculation.growers import kinds as module
from draftwood.runtime.speculation.growers.baseline import k_ary


def made(**settings: Any) -> SpeculativeConfig:
    return SpeculativeConfig(**settings)


def message(**settings: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        SpeculativeConfig(**settings)
    return str(refused.value)


def used(name: str, value: Any) -> dict[str, Any]:
    """A setting, beside the one without which it changes nothing."""
    other, values = ONLY_WITH.get(name, ("grow", ("auto",)))
    return {other: values[0], "max_total_draft_tokens": MAX_PROPOSAL, name: value}


def test_the_drafts_probabilities_are_corrected_where_values_of_drawn_tokens_decide() -> None:
    assert made(grow="dyspec").calibration(greedy=False) is not None
    assert made(grow="dyspec", stop_rule="specdec++").calibration(greedy=True) is not None
    for settings in ({"grow": "dyspec", "key": "draft"}, {"grow": "chain"}, {"grow": "k-ary", "branching": (2, 2)}):
        assert made(**settings).calibration(greedy=False) is None
    assert made(grow="dyspec").calibration(greedy=True) is None


def test_the_rows_of_draft_passes_follow_the_shape() -> None:
    """A pass over each layer but the last one, whose tokens get no children."""
    chain, tree = made(grow="chain", max_draft_len=4), made(grow="k-ary", branching=(3, 2, 1))
    assert (chain.max_frontier, chain.max_draft_rows) == (1, 3)
    assert (tree.max_frontier, tree.max_draft_rows) == (6, 9)
    assert made(grow="lookup", lookup_ngram=2).max_draft_rows == 0


def test_every_field_is_bounded_by_its_kind() -> None:
    names = {field.name for field in fields(SpeculativeConfig)}
    assert names == {*INTEGERS, *NUMBERS, *CHOICES, "branching", "topology"}


@pytest.mark.parametrize("name", INTEGERS)
def test_whole_numbers_end_where_they_should(name: str) -> None:
    value: Any
    least, most = INTEGERS[name]
    for value in (least - 1, most + 1, -(10**5000), 10**5000):
        assert f"{name} must be at least {least} and not more than {most}" in message(**{name: value})
    for value in (True, 2.0, "2", None, [2]):
        assert f"{name} must be a whole number" in message(**{name: value})
    for value in (least, np.int64(most)):
        assert getattr(made(**used(name, value)), name) == value


@pytest.mark.parametrize("name", NUMBERS)
def test_shares_end_where_they_should(name: str) -> None:
    value: Any
    for value in (-0.01, 1.01, float("nan"), float("inf"), 10**5000):
        assert f"{name} must be in" in message(**{name: value})
    for value in (False, "0.5", None, [0.5]):
        assert f"{name} must be a number" in message(**{name: value})
    for value in (1, 0.25, np.float32(0.25)):
        assert getattr(made(**used(name, value)), name) == value
    if name in SHARES:
        assert getattr(made(**used(name, 0)), name) == 0
    else:
        assert "(0, 1]" in message(**{name: 0})


@pytest.mark.parametrize("name", CHOICES)
def test_names_are_those_there_are(name: str) -> None:
    papers = NAMED if name == "grow" else ()
    assert f"{name} must be one of {', '.join((*CHOICES[name], *papers))}, not 'other'" in message(**{name: "other"})
    assert f"{name} must be text" in message(**{name: ["chain"]})
    assert len(message(**{name: "x" * 100_000})) < 400


@pytest.mark.parametrize("name", ["branching", "topology"])
def test_shapes_are_lists_of_whole_numbers(name: str) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in ("1", {1: 1}, None, 3):
        assert f"{name} must be a list of whole numbers" in message(**{name: value})
    for item in (True, 1.0, "1", None, [1], deep):
        assert "not one with" in message(**{name: [item]})
    for item in (-1, MAX_PROPOSAL + 1, 10**5000):
        assert f"{name} must hold numbers from 0" in message(**{name: [item]})
    assert f"has {MAX_PROPOSAL + 1} items" in message(**{name: [0] * (MAX_PROPOSAL + 1)})
    assert made(**used(name, [1] * MAX_PROPOSAL if name == "branching" else [0] * MAX_PROPOSAL))
    given = made(**used(name, [1, 1] if name == "branching" else [0, 1]))
    assert hash(given) == hash(made(**used(name, (1, 1) if name == "branching" else (0, 1))))


def test_a_shape_is_not_built_before_its_size_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(branching: Any) -> None:
        raise AssertionError(f"built {branching}")

    monkeypatch.setattr(module, "k_ary", never)
    for branching in ([1000, 1000, 1000], [2] * 11, [MAX_PROPOSAL, 1]):
        assert "branching makes more than 1024 tokens" in message(grow="k-ary", branching=branching)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_the_size_of_a_k_ary_tree_is_known_without_it(branching: list[int]) -> None:
    assert fits(branching) == (len(k_ary(branching)) <= MAX_PROPOSAL)


def test_the_largest_tree_is_the_largest() -> None:
    assert fits((512, 1)) and not fits((512, 1, 1))
    assert fits((MAX_PROPOSAL,)) and not fits((MAX_PROPOSAL + 1,))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"branching": ()}, "branching must name at least one child per depth"),
        ({"branching": (2, 0)}, "branching must name at least one child per depth"),
        ({"topology": (0, 2)}, "an earlier position; 0 is the root"),
        ({"topology": (1,)}, "an earlier position; 0 is the root"),
        ({"grow": "static"}, "grow='static' needs a topology, such as 0,0,1"),
        ({"grow": "static", "topology": (0,) * 16}, "draws 16 tokens, more than max_total_draft_tokens (15)"),
        ({"grow": "k-ary", "branching": (4, 3)}, "draws 16 tokens, more than max_total_draft_tokens (15)"),
        ({"grow": "dyspec-heap", "stop_rule": "entropy"}, "needs growth by layers"),
    ],
)
def test_what_contradicts_itself_or_is_not_lossless(settings: dict[str, Any], named: str) -> None:
    assert named in message(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"grow": "static", "topology": (0,) * 15},
        {"grow": "static", "topology": (0, 1, 2)},
        {"grow": "k-ary", "branching": (3, 4)},
        {"grow": "topk", "merge": "gsd"},
        {"lookup_ngram": 1, "lookup_len": 3},
        {"grow": "dyspec-threshold", "merge": "gsd"},
        {"grow": "dyspec", "stop_rule": "entropy"},
        {"grow": "topk", "merge": "gsd", "merge_ngram": MAX_NGRAM},
    ],
)
def test_what_stands_beside_it_is_taken(settings: dict[str, Any]) -> None:
    assert made(**settings)


@pytest.mark.parametrize("name", ONLY_WITH)
def test_a_setting_that_changes_nothing_is_refused(name: str) -> None:
    other, values = ONLY_WITH[name]
    value = 3 if name in INTEGERS else 0.9 if name in NUMBERS else (0,) if name == "topology" else (1,)
    unused = {"grow": "chain"} if getattr(made(), other) in values else {}
    assert f"{name} changes nothing with {other}=" in message(**unused, **{name: value})
    assert f"or use {other}={values[0]!r}" in message(**unused, **{name: value})
    for chosen in values:
        assert getattr(made(**used(name, value) | {other: chosen}), name) == value
    if name != "topology":  # the default changes nothing anywhere
        assert made(**{name: getattr(made(), name)}) == made()


def test_auto_draws_unless_it_is_matched() -> None:
    for settings in ({}, {"lookup_ngram": 1}, {"verify": "rejection"}):
        assert made(**settings).proposal == "drawn tree"
    assert SpeculativeConfig(verify="match").proposal == "chosen graph"
    assert "not lossless" in message(verify="block")
