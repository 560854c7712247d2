"""The default settings take what a prompt lookup finds in place of the draft's tokens, where that is faster: exact, and
the draft goes on as if it had proposed these tokens itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from controllers import plan_each_round
from costs import table
from enumeration import decoded, pair, total_variation
from fakes import FakeEngine, random_model
from proposals import SETTINGS

from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.round import Proposal, propose_found
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import RandomStreams, seeded_streams
from draftwood.runtime.sampling.sampler import Sampler, ScoredRows
from draftwood.runtime.speculation.config import SpeculativeConfig, rules_of
from draftwood.runtime.speculation.graph.token_tree import TokenTree
from draftwood.runtime.speculation.planning.controller import Controller, RoundPlan
from draftwood.runtime.speculation.planning.lookups import Match
from draftwood.runtime.speculation.verifier import VERIFIERS, Acceptance, sample_and_match

AUTO = SpeculativeConfig(max_draft_len=2, max_total_draft_tokens=3, frontier_width=2)
DEAR_DRAFT = table(1.0, 0.5, row=0.05)
PROMPT = [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_distribution_is_the_targets(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """I2: rounds of both kinds follow each other, as earlier rounds decide."""
    given = []
    choose = Controller.or_lookup

    def noted(self: Controller, plan: RoundPlan, match: Match) -> RoundPlan:
        chosen = choose(self, plan, match)
        given.append(chosen.looked_up)
        return chosen

    monkeypatch.setattr(Controller, "or_lookup", noted)
    plan_each_round(monkeypatch)
    target, draft = pair(3, 2)
    params = SETTINGS[setting]
    for prompt in ((0, 1, 1, 0), (0, 1, 1, 0, 1)):
        expected = decoded(target, None, None, params, prompt=prompt)
        assert total_variation(decoded(target, draft, AUTO, params, DEAR_DRAFT, prompt=prompt), expected) < 1e-12
    assert {True, False} == set(given)


@pytest.fixture
def fresh_rules() -> Iterator[None]:
    """Rules are computed anew, and forgotten."""
    rules_of.cache_clear()
    yield
    rules_of.cache_clear()


@pytest.mark.usefixtures("fresh_rules")
def test_a_lookup_that_is_believed_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above: what was looked up is accepted unseen."""
    found_trees = list[TokenTree]()

    def noted(root: int, found: Sequence[int], plan: RoundPlan | None) -> Proposal:
        proposal = propose_found(root, found, plan)
        found_trees.append(proposal.tree)
        return proposal

    def believe(tree: TokenTree, target: ScoredRows, streams: RandomStreams) -> Acceptance:
        if not any(tree is each for each in found_trees):
            return sample_and_match(tree, target, streams)
        found = tree.children[0][0]
        return Acceptance([found], target.choose(found, [tree.token_ids[found]], streams.target))

    target, draft = pair(3, 2)
    params, prompt = SETTINGS["plain"], (0, 1, 1, 0)
    expected = decoded(target, None, None, params, prompt=prompt)
    monkeypatch.setattr("draftwood.runtime.decoding.decoder.propose_found", noted)
    monkeypatch.setitem(VERIFIERS, "match", believe)
    assert total_variation(decoded(target, draft, AUTO, params, DEAR_DRAFT, prompt=prompt), expected) > 0.01


def decode(
    config: SpeculativeConfig, temperature: float = 0.0, draft: float = 0.5, prompt: Sequence[int] = PROMPT
) -> tuple[list[int], SpecDecodeStats]:
    """200 tokens of a random model whose draft is the model itself, which costs so much of a target pass."""
    model = random_model(0, 6)
    sampler = Sampler(SamplingParams(max_tokens=200, temperature=temperature, ignore_eos=True), prompt, (), 6)
    engines = FakeEngine(model, 6), FakeEngine(model, 6, "draft")
    stats, decoder = SpecDecodeStats(), SpeculativeDecoder(*engines, config, 4096, (), table(1.0, draft, row=0.05))
    chunks = decoder.generate(prompt, sampler, seeded_streams(0), stats)
    return [token for chunk in chunks for token in chunk.token_ids], stats


def test_the_draft_goes_on_behind_tokens_that_were_looked_up() -> None:
    """A draft that is the target is right about every token, as long as its cache holds the right ones."""
    text, stats = decode(SpeculativeConfig(), draft=0.3)
    plain, _ = decode(SpeculativeConfig(lookups="off", budget="fixed", grow="chain", max_draft_len=1))
    assert text == plain
    assert 0 < stats.num_looked_up < stats.num_drafts
    by_lookup, _ = decode(SpeculativeConfig("lookup"))
    assert by_lookup == plain


@pytest.mark.parametrize("settings", [{}, {"lookups": "off"}], ids=str)
def test_a_lookup_or_a_chain_has_no_more_tokens_than_a_tree_may(settings: dict[str, str]) -> None:
    """Engines, and the answers of servers, have room for `max_tokens` of a proposal."""
    config = SpeculativeConfig(max_total_draft_tokens=2, **settings)  # type: ignore[arg-type]  # each of its own type
    _, stats = decode(config, draft=0.01, prompt=[0, 1, 2] * 20)
    assert len(stats.accepted_per_round) == config.max_tokens + 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("settings", "greedy", "sampled"),
    [
        ({}, True, True),
        ({"verify": "match"}, True, True),
        ({"verify": "rejection"}, True, False),
        ({"lookups": "off"}, False, False),
        ({"grow": "topk"}, False, False),
        ({"merge": "gsd"}, False, False),
        ({"stop_rule": "confidence"}, False, False),
        ({"key": "head"}, False, False),
        ({"budget": "fixed"}, False, False),
    ],
    ids=str,
)
def test_who_asks_for_something_else_gets_it(
    settings: dict[str, str], greedy: bool, sampled: bool, temperature: float
) -> None:
    """Tokens that a lookup found are exact under matching only."""
    config = SpeculativeConfig(**settings)  # type: ignore[arg-type]  # each of its own type
    assert (config.looks_up(True), config.looks_up(False)) == (greedy, sampled)
    if "key" not in settings:  # this draft has no head
        prompt = [0, 1, 2] * 20
        assert bool(decode(config, temperature, 0.9, prompt)[1].num_looked_up) is (sampled if temperature else greedy)
