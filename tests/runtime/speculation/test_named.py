"""Settings of speculation as texts, and the names of papers."""

from __future__ import annotations

import pytest

from draftwood import ConfigError, SpeculativeConfig
from draftwood.runtime.speculation.named import parse

FIXED = "fixed"


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("plain", None),
        ("auto", SpeculativeConfig()),
        ("gsd", SpeculativeConfig(merge="gsd")),
        ("gsd:8", SpeculativeConfig(merge="gsd", max_total_draft_tokens=8, budget=FIXED)),
        ("specdec++", SpeculativeConfig("chain", stop_rule="specdec++")),
        ("dyspec", SpeculativeConfig("dyspec")),
        ("ngram", SpeculativeConfig("lookup")),
        ("chain:4", SpeculativeConfig("chain", max_draft_len=4, budget=FIXED)),
        ("topk:12/budget=cost", SpeculativeConfig("topk", max_total_draft_tokens=12)),
        ("grow=topk,merge=gsd", SpeculativeConfig("topk", merge="gsd")),
        ("dyspec,max-draft-len=3", SpeculativeConfig("dyspec", max_draft_len=3)),
        ("k-ary/branching=2-2-1", SpeculativeConfig("k-ary", branching=(2, 2, 1))),
        ('{"grow": "static", "topology": [0, 0, 1]}', SpeculativeConfig("static", topology=(0, 0, 1))),
    ],
)
def test_a_text_is_a_configuration(text: str, config: SpeculativeConfig | None) -> None:
    assert parse(text) == config


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no grower"),
        ("gds", "did you mean gsd?"),
        ("chain:x", "write for instance chain:4"),
        ("k-ary:16", "write k-ary/branching=4-2-1"),
        ("static,topology=0-x", "is not understood"),
        ("merg=gsd", "did you mean merge?"),
        ("chain:4/colour=red", "there is no setting 'colour'"),
        ("[1]", "grow must be one of"),
        ('{"grow": 5}', "grow must be text"),
        ('{"colour": 5}', "SpeculativeConfig has no 'colour'"),
        ("{", "is not understood"),
        ("{" + "[" * 100_000, "is not understood"),
        ("topk," * 100_000, "is not understood"),
    ],
)
def test_what_is_no_configuration_is_refused(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=r"configuration '.*") as caught:
        parse(text)
    assert named in str(caught.value) and len(str(caught.value)) < 700
