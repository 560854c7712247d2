"""With banned tokens, allowed tokens and biases the output distribution is that of plain decoding: exact enumeration,
as in test_lossless.py, with a negative control."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import product

import numpy as np
import pytest
from enumeration import PROMPT, Distribution, decoded, pair, total_variation
from fakes import Predict
from numpy.typing import NDArray
from proposals import LEGAL, speculative
from toy_grammars import ToyGrammar

from draftwood.models.errors import RequestError
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.sampling.bans import TokenBans
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.config import LOSSLESS

V, LENGTH = 3, 3
Words = tuple[tuple[int, ...], ...]
# The parameters of a request, and the token sequences of its bad words.
RULES: dict[str, tuple[SamplingParams, Words]] = {
    "bias": (SamplingParams(LENGTH, logit_bias={0: -1.5, 2: 2.0}), ()),
    "allowed": (SamplingParams(LENGTH, allowed_token_ids=(0, 2)), ()),
    "a word": (SamplingParams(LENGTH), ((1,),)),
    "words of two tokens": (SamplingParams(LENGTH), ((0, 1), (2, 2))),
    "a word of three tokens": (SamplingParams(LENGTH), ((1, 0, 1),)),
    "all": (SamplingParams(LENGTH, logit_bias={1: 1.0}, allowed_token_ids=(0, 1)), ((1, 1), (0, 0, 1))),
    "cold": (SamplingParams(LENGTH, temperature=0.6, top_k=2, logit_bias={1: 1.0}), ((0, 1),)),
    "greedy": (SamplingParams(LENGTH, temperature=0, logit_bias={1: 1.0}), ((1, 1), (0, 2))),
}
FEW = ("chain", "k-ary", "topk merged", "dyspec", "dyspec merged", "lookup")
BEST = [(name, LOSSLESS[speculative(name, "auto").proposal][0]) for name in FEW]
FULL = pytest.mark.full
CASES = list(product(BEST, RULES))
MORE = [pytest.param(legal, rule, marks=FULL) for legal, rule in product(LEGAL, RULES) if (legal, rule) not in CASES]


def defined(predict: Predict, params: SamplingParams, words: Words) -> Distribution:
    """The distribution from the definition, for temperature 1 without truncation."""
    texts: Distribution = defaultdict(float)
    open_texts: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while open_texts:
        text, probability = open_texts.pop()
        if len(text) == LENGTH:
            texts[text] += probability
            continue
        p = predict((*PROMPT, *text)) * np.exp([(params.logit_bias or {}).get(token, 0.0) for token in range(V)])
        for token in range(V):
            longer = (*text, token)
            forbidden = any(longer[-len(word) :] == word for word in words)
            if forbidden or token not in (params.allowed_token_ids or range(V)):
                p[token] = 0.0
        open_texts += [((*text, token), probability * p[token] / p.sum()) for token in np.flatnonzero(p).tolist()]
    return texts


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in ("cold", "greedy")])
def test_plain_decoding_follows_the_definition(rule: str) -> None:
    params, words = RULES[rule]
    target, _ = pair(0, V)
    found = decoded(target, None, None, params, bad_words=words)
    assert total_variation(found, defined(target.predict, params, words)) < 1e-12


@pytest.mark.parametrize(("legal", "rule"), [*CASES, *MORE])
def test_every_legal_pair_is_exact(legal: tuple[str, str], rule: str) -> None:
    (grower, verify), (params, words) = legal, RULES[rule]
    target, draft = pair(0, V)
    decode = partial(decoded, params=params, bad_words=words)
    assert total_variation(decode(target, draft, speculative(grower, verify)), decode(target, None, None)) < 1e-12


@pytest.mark.parametrize("kept", [(1,), pytest.param((0,), marks=FULL), pytest.param((1, 2), marks=FULL)])
@pytest.mark.parametrize("rule", ["allowed", "a word", pytest.param("bias", marks=FULL), "all", "greedy"])
@pytest.mark.parametrize(("grower", "verify"), BEST[:-1])
def test_a_trimmed_draft_may_predict_no_allowed_token(
    grower: str, verify: str, rule: str, kept: tuple[int, ...]
) -> None:
    params, words = RULES[rule]
    target, draft = pair(1, V, kept)
    decode = partial(decoded, params=params, bad_words=words)
    assert total_variation(decode(target, draft, speculative(grower, verify)), decode(target, None, None)) < 1e-12


@pytest.mark.parametrize(("grower", "verify"), BEST[:-1])
def test_bans_and_a_grammar_hold_together(grower: str, verify: str) -> None:
    """In "brackets" the first token is 0; two of it in a row are banned."""
    params = SamplingParams(LENGTH, logit_bias={1: 0.5})
    target, draft = pair(0, V)
    decode = partial(decoded, params=params, bad_words=((0, 0),), constraint=partial(ToyGrammar, "brackets"), eos=(2,))
    found = decode(target, draft, speculative(grower, verify))
    assert total_variation(found, decode(target, None, None)) < 1e-12
    assert found and not any(text[:2] == (0, 0) for text in found)


class Forgetful(TokenBans):
    """Forgets the ban after one path."""

    def after(self, output: Sequence[int], path: Sequence[int]) -> NDArray[np.bool_]:
        return np.ones(V, np.bool_) if list(path) == [0] else super().after(output, path)


@pytest.mark.parametrize("grower", ["chain", "k-ary", "dyspec", "topk merged"])
def test_a_ban_that_is_forgotten_on_one_node_is_detected(grower: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the tests above."""
    params, words = RULES["words of two tokens"]
    target, draft = pair(0, V)
    expected = decoded(target, None, None, params, bad_words=words)
    monkeypatch.setattr("draftwood.runtime.sampling.processing.TokenBans", Forgetful)
    found = decoded(target, draft, speculative(grower, "auto"), params, bad_words=words)
    assert total_variation(found, expected) > 0.01


def test_where_every_token_is_banned_the_request_ends_with_the_reason() -> None:
    target, draft = pair(0, V)
    for config in (None, speculative("dyspec", "auto")):
        sampler = Sampler(SamplingParams(9, allowed_token_ids=(1,)), PROMPT, (), V, bad_words=((1, 1),))
        decoder = SpeculativeDecoder(target, draft, config, 4096, ())
        with pytest.raises(RequestError, match=r"no token is left .* bad_words"):
            list(decoder.generate(PROMPT, sampler, seeded_streams(0), SpecDecodeStats()))


@pytest.mark.parametrize("changes", [{"allowed_token_ids": (0, 3)}, {"logit_bias": {3: 1.0}}, {"stop_token_ids": (3,)}])
def test_tokens_outside_the_vocabulary_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(changes))} must be below the vocabulary size 3, not 3"):
        Sampler(SamplingParams(**changes), PROMPT, (), V)  # type: ignore[arg-type]


def test_the_prompt_is_no_part_of_a_bad_word() -> None:
    assert PROMPT[-1] == 1
    bans = TokenBans(None, ((1, 0),), V)
    assert bans.after([], []).all() and bans.after([1], []).tolist() == [False, True, True]
    assert bans.after([], [2, 1]).tolist() == [False, True, True] and bans.after([1], [2]).all()
