"""The benchmark of contexts on a small bundle: texts, acceptance and memory are counted as it says."""

from __future__ import annotations

from pathlib import Path

from benchmarks.costs.contexts import Ours, described, first_choices
from draftwood.models.bindings import TARGET
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.speculation.config import SpeculativeConfig

PROMPT = [1, 5, 9, 4]


def test_a_text_is_the_same_plain_and_speculative_and_every_pass_counts(tiny_bundle: Path) -> None:
    bundle = EngineBundle.open(tiny_bundle)
    ours = Ours(bundle, bundle.open_engine(TARGET), bundle.open_draft(), (0.0, 0.0))
    plain, speculative = (ours.write(PROMPT, 12, config) for config in (None, SpeculativeConfig(budget="fixed")))
    assert plain.text == speculative.text and len(plain.text) == plain.passes == 12
    assert speculative.passes < 12 or described([speculative])["tokens_per_pass"] == 1
    row = described([plain, plain])
    assert row["tokens_per_pass"] == 1 and row["private_mb"] > 0 < row["mapped_mb"]


def test_a_draft_proposes_the_whole_of_its_own_text(tiny_bundle: Path) -> None:
    bundle = EngineBundle.open(tiny_bundle)
    draft = bundle.open_draft()
    own = Ours(bundle, draft, draft, (0.0, 0.0)).write(PROMPT, 10, None).text
    assert first_choices(draft, PROMPT, own) == 1
    other = [*own[:-1], (own[-1] + 1) % draft.spec.model.vocab_size]
    assert first_choices(draft, PROMPT, other) == 0.9
