"""The forms of questions from which the demo's draft learned can be filled."""

from __future__ import annotations

import random

from draftwood.models.demo.questions import NOUNS, PLACEHOLDER, WEIGHTS, fill, read_forms

GIVEN = {"arguments", "call", "type", "result"}  # by a signature
PAIRED = ("functions", "about", "definitions", "translations")  # forms with two placeholders of their own


def test_every_form_is_filled() -> None:
    words, forms = read_forms("words"), read_forms("forms")
    assert set(WEIGHTS) | {"arguments", "types"} == set(forms)
    banks = {**{kind: ["house"] for kind in [*NOUNS, "noun"]}, **words}
    for kind, found in forms.items():
        for form in [] if kind in PAIRED else found:
            filled = fill(form, banks, random.Random(0), dict.fromkeys(GIVEN, "x"))
            assert not PLACEHOLDER.search(filled), form
