"""The page of an explanation: every drafted node is on it, and the text of tokens is data, never markup."""

from __future__ import annotations

import itertools
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from explanations import CONFIGS, EVIL, GREEDY, WARM, explained

from draftwood.cli.main import main
from draftwood.runtime.inspection.explain_html import HEIGHT, WIDTH, lay_out, to_html
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.speculation.config import SpeculativeConfig


class Page(HTMLParser):
    """Tags must close in order; notes nodes per round, classes, and the text without markup."""

    VOID = ("meta", "!doctype")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.nodes: list[list[str]] = []
        self.classes: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags.append(tag)
        self.classes.append(named.get("class") or "")
        assert not (named.keys() & {"src", "onclick", "onload"})
        assert (named.get("href") or "#").startswith("#")
        if tag == "details":
            self.nodes.append([])
        if "data-node" in named:
            self.nodes[-1].append(named["data-node"] or "")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_drafted_node_of_every_round_is_on_the_page(
    config: SpeculativeConfig | None, params: SamplingParams
) -> None:
    explanation, rounds = explained(config, params)
    page = Page(to_html(explanation))
    assert len(page.nodes) == len(rounds)
    for names, round in zip(page.nodes, rounds, strict=True):
        assert sorted(names) == sorted(["own", *(f"n{node}" for node in range(len(round.proposal.graph)))])
    assert json.loads(json.dumps(explanation.to_json()))["rounds"][-1]["finish_reason"] == "length"


def test_token_texts_are_data() -> None:
    explanation, _ = explained(SpeculativeConfig("topk", max_draft_len=6), WARM)
    html = to_html(explanation)
    page = Page(html)
    assert "script" not in page.tags and "<script" not in html.lower()
    assert EVIL in page.text and "w1·" in page.text  # in tooltips; white space is visible
    assert "a < b" in page.text
    assert "http" not in html and "url(" not in html


@pytest.mark.parametrize(("name", "params"), [("gsd", GREEDY), ("gsd", WARM), ("drawn gsd", WARM)])
def test_merge_edges_are_drawn(name: str, params: SamplingParams) -> None:
    explanation, rounds = explained(CONFIGS[name], params)
    count = sum(len(round.merge_edges) for round in explanation.rounds)
    edges = sum(len(edges) for round in rounds for edges in round.proposal.graph.edges)
    assert count == edges - sum(len(round.proposal.graph) - 1 for round in rounds) > 0
    drawn = [kind for kind in Page(to_html(explanation)).classes if kind.startswith("merge") or "edge merge" in kind]
    assert len(drawn) == count


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_nothing_overlaps(config: SpeculativeConfig | None) -> None:
    for round in explained(config, WARM)[0].rounds:
        layout = lay_out(round)
        places = [*layout.nodes.values(), layout.own]
        for one, two in itertools.combinations(places, 2):
            assert abs(one.x - two.x) >= WIDTH or abs(one.y - two.y) >= HEIGHT
        assert all(0 <= x <= layout.width - WIDTH and 0 <= y <= layout.height - HEIGHT for x, y in places)


def test_a_tree_of_64_tokens_is_drawn() -> None:
    config = SpeculativeConfig("topk", max_total_draft_tokens=63, max_draft_len=6, frontier_width=6)
    explanation, rounds = explained(config, GREEDY)
    assert max(len(round.proposal.tree) for round in rounds) == 64
    assert len(to_html(explanation)) < 60_000 * len(rounds)


OPTIONS = ["--temperature", "0", "--max-tokens", "12", "--ignore-eos"]


@pytest.mark.parametrize("extra", [[], ["--speculative", "topk,merge=gsd"], ["--no-speculation"]])
def test_the_command_writes_a_page(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str]
) -> None:
    command = ["generate", str(tiny_bundle), "--prompt", "say <hello>", *OPTIONS, *extra]
    file = tmp_path / "out.html"
    assert main(command) == 0
    plain = capsys.readouterr().out
    assert main([*command, "--explain", str(file)]) == 0
    captured = capsys.readouterr()
    assert captured.out == plain and "out.html" in captured.err.replace("\n", "")
    page = Page(file.read_text(encoding="utf-8"))
    assert "say <hello>" in page.text and page.nodes


def test_an_unwritable_page_is_refused_before_anything_runs(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (tmp_path / "missing" / "out.html", tmp_path):
        assert main(["generate", str(tiny_bundle), "--prompt", "x", "--explain", str(file)]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and "choose a file" in captured.err
    assert main(["generate", str(tmp_path / "nowhere"), "--prompt", "x", "--explain", str(tmp_path / "o.html")]) == 2
    assert not (tmp_path / "o.html").exists()
