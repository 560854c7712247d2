"""With a grammar the output distribution is that of plain constrained decoding: exact enumeration, as in
test_lossless.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

import numpy as np
import pytest
from enumeration import PROMPT, decoded, pair, total_variation
from fakes import FakeEngine, random_model
from numpy.typing import NDArray
from proposals import LEGAL, speculative
from toy_grammars import EOS, TABLES, ToyGrammar, constrained

from draftwood.models.errors import RequestError
from draftwood.runtime.decoding.chunk import COMPLETE, STOP
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.round import Round
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.sampling.constraint import PathMasks
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import RandomStreams, seeded_streams
from draftwood.runtime.sampling.sampler import Sampler, ScoredRows
from draftwood.runtime.sampling.thought import Thought, ThoughtConstraint
from draftwood.runtime.speculation.config import LOSSLESS, SpeculativeConfig, rules_of
from draftwood.runtime.speculation.graph.token_tree import TokenTree
from draftwood.runtime.speculation.verifier import VERIFIERS, Acceptance

SETTINGS = {
    "plain": SamplingParams(max_tokens=3),
    "greedy": SamplingParams(max_tokens=3, temperature=0),
    "top-k": SamplingParams(max_tokens=3, top_k=2, temperature=0.7),
    "penalties": SamplingParams(max_tokens=3, repetition_penalty=1.4, presence_penalty=0.5),
    "processor": SamplingParams(
        max_tokens=3, logits_processors=(lambda tokens, logits: logits + 0.8 * (np.arange(len(logits)) == len(tokens)),)
    ),
    "min tokens": SamplingParams(max_tokens=3, min_tokens=2),
}
FULL = pytest.mark.full
FEW = ("chain", "k-ary", "topk merged", "dyspec", "dyspec merged")  # the other growers share their draws with these
BEST = [(name, LOSSLESS[speculative(name, "auto").proposal][0]) for name in FEW]
CASES = [(*legal, "brackets", "plain") for legal in LEGAL]
CASES += [(*legal, grammar, "plain") for legal, grammar in product(BEST, TABLES) if grammar != "brackets"]
CASES += [(*legal, "brackets", setting) for legal, setting in product(BEST, SETTINGS) if setting != "plain"]
LOOKING_UP = [legal for legal in LEGAL if "lookup" in legal[0]]  # these propose what the grammar forces, too
CASES += [(*legal, grammar, "plain") for legal, grammar in product(LOOKING_UP, TABLES) if grammar != "brackets"]
CASES += [("lookup", "match", "three", setting) for setting in SETTINGS if setting != "plain"]
MORE = [
    pytest.param(*legal, grammar, setting, marks=FULL)
    for legal, grammar, setting in product(LEGAL, TABLES, ("plain", "penalties"))
    if (*legal, grammar, setting) not in CASES
]


@pytest.mark.parametrize("name", TABLES)
def test_plain_decoding_follows_the_definition(name: str) -> None:
    target, _ = pair(0, 3)
    found = decoded(target, None, None, SETTINGS["plain"], constraint=partial(ToyGrammar, name), eos=(EOS,))
    assert total_variation(found, constrained(target.predict, name, 3)) < 1e-12


@pytest.mark.parametrize(("grower", "verify", "grammar", "setting"), [*CASES, *MORE])
def test_every_legal_pair_is_exact(grower: str, verify: str, grammar: str, setting: str) -> None:
    target, draft = pair(0, 3)
    decode = partial(decoded, params=SETTINGS[setting], constraint=partial(ToyGrammar, grammar), eos=(EOS,))
    assert total_variation(decode(target, draft, speculative(grower, verify)), decode(target, None, None)) < 1e-12


@pytest.mark.parametrize("kept", [(0,), (1,), pytest.param((0, EOS), marks=FULL)])
@pytest.mark.parametrize("setting", ["plain", "penalties", "greedy"])
@pytest.mark.parametrize(("grower", "verify"), [*BEST, ("dyspec-heap", "traversal"), ("static", "traversal")])
def test_a_branch_ends_where_draft_and_grammar_have_no_token_in_common(
    grower: str, verify: str, setting: str, kept: tuple[int, ...]
) -> None:
    """The draft has a trimmed vocabulary."""
    target, draft = pair(1, 3, kept)
    decode = partial(decoded, params=SETTINGS[setting], constraint=partial(ToyGrammar, "brackets"), eos=(EOS,))
    found = decode(target, draft, speculative(grower, verify))
    assert total_variation(found, decode(target, None, None)) < 1e-12


@pytest.mark.parametrize("setting", ["plain", "penalties", "greedy"])
def test_no_token_is_proposed_that_the_draft_does_not_predict(setting: str) -> None:
    """In "brackets" the first token is 0, which this draft does not predict: nothing is proposed in the first round."""
    target, draft = pair(1, 3, (1, EOS))
    rounds: list[Round] = []
    sampler = Sampler(SETTINGS[setting], PROMPT, (EOS,), 3, ToyGrammar("brackets"))
    decoder = SpeculativeDecoder(target, draft, speculative("k-ary", "auto"), 4096, (EOS,))
    tokens = [
        token
        for chunk in decoder.generate(PROMPT, sampler, seeded_streams(0), SpecDecodeStats(), rounds.append)
        for token in chunk.token_ids
    ]
    assert tokens[0] == 0 and len(rounds[0].proposal.tree) == 1 and rounds[0].token_ids == [0]


class OneUnmasked(PathMasks):
    """Forgets the mask after one path, and every mask after a text that has left the grammar."""

    has_left = False

    def after(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        return np.ones(3, np.bool_) if self.has_left or list(path) == [0] else super().after(path)

    def commit(self, tokens: Sequence[int]) -> None:
        try:
            super().commit(tokens)
        except RequestError:
            self.has_left = True


@pytest.mark.parametrize("grower", ["chain", "k-ary", "dyspec", "dyspec merged", "topk"])
def test_a_mask_that_is_forgotten_on_one_node_is_detected(grower: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the tests above."""
    target, draft = pair(0, 3)
    decode = partial(decoded, params=SETTINGS["plain"], constraint=partial(ToyGrammar, "brackets"), eos=(EOS,))
    expected = decode(target, None, None)
    monkeypatch.setattr("draftwood.runtime.sampling.processing.PathMasks", OneUnmasked)
    assert total_variation(decode(target, draft, speculative(grower, "auto")), expected) > 0.01


@pytest.mark.parametrize("grammar", ["three", "one of a kind"])
def test_a_run_that_is_accepted_unseen_is_detected(grammar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another negative control: where the grammar leaves a choice, its usual continuation is not the model's."""

    def unseen(tree: TokenTree, target: ScoredRows, streams: RandomStreams) -> Acceptance:
        path = list(tree.token_ids[1:])
        return Acceptance(list(range(1, len(tree))), target.choose(len(path), path, streams.target))

    target, _ = pair(0, 3)
    decode = partial(decoded, params=SETTINGS["plain"], constraint=partial(ToyGrammar, grammar), eos=(EOS,))
    expected = decode(target, None, None)
    rules_of.cache_clear()
    monkeypatch.setitem(VERIFIERS, "match", unseen)
    assert total_variation(decode(target, None, speculative("lookup", "match")), expected) > 0.01
    rules_of.cache_clear()


def test_masking_the_target_alone_after_the_draw_is_detected() -> None:
    """Another negative control: an unconstrained text whose forbidden tokens are replaced is not constrained text."""
    target, _ = pair(0, 3)
    free = decoded(target, None, None, SETTINGS["plain"], eos=(EOS,))
    lawful = constrained(target.predict, "brackets", 3)
    kept = {text: probability for text, probability in free.items() if text in lawful}
    repaired = {text: probability / sum(kept.values()) for text, probability in kept.items()}
    assert total_variation(repaired, lawful) > 0.01


def decode_text(
    name: str, config: SpeculativeConfig | None, params: SamplingParams, seed: int = 0
) -> tuple[list[int], str]:
    target, draft = pair(seed, 3)
    sampler = Sampler(params, PROMPT, (EOS,), 3, ToyGrammar(name))
    decoder = SpeculativeDecoder(target, draft, config, 4096, (EOS,))
    chunks = list(decoder.generate(PROMPT, sampler, seeded_streams(seed), SpecDecodeStats()))
    return [token for chunk in chunks for token in chunk.token_ids], str(chunks[-1].finish_reason)


@pytest.mark.parametrize("config", [None, SpeculativeConfig(), SpeculativeConfig(grow="lookup", lookup_ngram=1)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_end_of_the_grammar_ends_the_text(config: SpeculativeConfig | None, temperature: float) -> None:
    """With EOS where the grammar allows it, and without EOS where nothing can follow."""
    for seed in range(5):
        params = SamplingParams(max_tokens=50, temperature=temperature, min_tokens=40)
        tokens, reason = decode_text("three", config, params, seed)
        assert len(tokens) == 3 and reason == (STOP if tokens[-1] == EOS else COMPLETE)


@pytest.mark.parametrize("grower", ["chain", "k-ary", "topk merged", "dyspec", "dyspec merged"])
def test_acceptance_rises_with_a_grammar(grower: str) -> None:
    """A draft that knows nothing is accepted where the grammar leaves no choice."""
    target, _ = pair(0, 3)
    draft = FakeEngine(random_model(77, 3), 3, "draft", accept=lambda context: 0.5)
    rates = []
    for name in ("anything", "brackets"):
        stats = SpecDecodeStats()
        for seed in range(20):
            sampler = Sampler(SamplingParams(max_tokens=12), PROMPT, (EOS,), 3, ToyGrammar(name))
            decoder = SpeculativeDecoder(target, draft, speculative(grower, "auto"), 4096, (EOS,))
            for _ in decoder.generate(PROMPT, sampler, seeded_streams(seed), stats):
                pass
        rates.append(stats.acceptance_rate)
    assert rates[1] > rates[0]


def test_the_state_is_never_computed_from_the_start() -> None:
    """The masks of a round of siblings and children cost a few tokens each, however long the text is."""
    grammar = ToyGrammar("anything")
    masks = PathMasks(grammar)
    for _ in range(1000):
        masks.commit([0])
    grammar.work = 0
    for path in ([], [0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, EOS], [EOS]):
        masks.after(path)
        masks.after(path)
    assert grammar.work <= 30
    assert masks.after([EOS]) is None and masks.ends([EOS]) and masks.after([EOS, 0]) is None


def thoughts(begun: bool, budget: int | None, form: str | None) -> ThoughtConstraint:
    """0 opens a thought and 1 closes it."""
    return ThoughtConstraint(Thought(0, 1, begun, budget), form and ToyGrammar(form), 3, [EOS])  # type: ignore[arg-type]


def may_follow(text: Sequence[int], begun: bool, budget: int | None, form: str | None) -> set[int]:
    """The definition of a text with a thought."""
    inside = text if begun else text[1:]
    if begun or text[:1] == (0,):
        if 1 not in inside:
            return {1} if budget is not None and len(inside) >= budget else {0, 1} if form else {0, 1, EOS}
        text = inside[inside.index(1) + 1 :]
    if form is None:
        return {0, 1, EOS} - ({0} if budget == 0 and not (begun or text) else set())
    grammar = ToyGrammar(form)
    assert all(grammar.advance(token) for token in text)
    opens = {0} if not (begun or inside or text) and budget != 0 else set()
    closed = {0} if not (begun or text) and budget == 0 else set()
    return set() if grammar.ended else set(grammar.allowed().nonzero()[0].tolist()) - closed | opens


THOUGHTS = [(begun, budget, form) for begun in (False, True) for budget in (0, 1, None) for form in (None, "three")]


@pytest.mark.parametrize(("begun", "budget", "form"), [each for each in THOUGHTS if each[1:] != (None, None)])
def test_a_thought_ends_at_its_budget_and_the_form_begins_behind_it(
    begun: bool, budget: int | None, form: str | None
) -> None:
    """Every text that the masks allow, in every order of going there and back; and every way to propose is exact."""
    constraint = thoughts(begun, budget, form)
    masks, texts = PathMasks(constraint), list[tuple[int, ...]]([()])
    for _ in range(4):
        texts = [
            (*text, token)
            for text in texts
            for token in sorted(may_follow(text, begun, budget, form))
            if EOS not in text
        ]
        for text in texts[::-1]:
            expected = may_follow(text[:-1], begun, budget, form)
            allowed = masks.after(text[:-1])
            assert allowed is not None and set(allowed.nonzero()[0].tolist()) == expected
            walked = thoughts(begun, budget, form)
            assert all(map(walked.advance, text[:-1])) and set(walked.forced()[:1]) <= expected
            if (begun or text[0] == 0 != len(text) - 1) and 1 not in text[:-1] and expected == {1}:
                assert walked.forced() == [1], "the end of a thought whose budget is spent"
    target, draft = pair(0, 3)
    decode = partial(decoded, params=SETTINGS["plain"], constraint=partial(thoughts, begun, budget, form), eos=(EOS,))
    plain = decode(target, None, None)
    for grower, verify in BEST:
        assert total_variation(decode(target, draft, speculative(grower, verify)), plain) < 1e-12
