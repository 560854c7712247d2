"""What --draft and --draft-vocabulary can be, through the command line: the demo pair on both backends of a CPU."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from bundling import DEMO

from draftwood.cli.main import main
from draftwood.models.bindings import DRAFT, TARGET
from draftwood.runtime import LLM, AsyncLLM, ConfigError, EngineBundle, SamplingParams, SpeculativeConfig
from draftwood.runtime.inspection.audit import audit
from draftwood.runtime.serving.triton.contract import ModelSettings
from draftwood.runtime.serving.triton.repository import Placement, write_model

BACKENDS = ("onnxruntime", "native")
COPIES = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n    return"  # a prompt lookup finds its end before
GREEDY = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=30, temperature=0.7, seed=4)


def command(output: Path, backend: str, draft: str, *options: str) -> list[str]:
    pair = ["--target", str(DEMO / "target"), "--draft", draft, "--output", str(output)]
    return ["build", *pair, "--backend", backend, "--max-length", "192", "--widths", "1,4,8,16", *options]


def texts(bundle: Path, config: SpeculativeConfig | None) -> tuple[list[int], list[int], int]:
    """Greedy and seeded token ids, and how many greedy ones were accepted."""
    with LLM(bundle, config) as llm:
        first, drawn = llm.generate(COPIES, GREEDY)[0], llm.generate(COPIES, DRAWN)[0]
        assert llm.generate(COPIES, DRAWN)[0].token_ids == drawn.token_ids
        return first.token_ids, drawn.token_ids, first.stats.num_accepted_tokens


@pytest.fixture(scope="module", params=BACKENDS)
def trimmed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trimmed")
    (folder / "text.jsonl").write_text(json.dumps({"prompt": COPIES, "turns": ["while True:\n    pass"]}) + "\n\n")
    options = ("--draft-vocabulary", "512", "--draft-vocabulary-text", str(folder / "text.jsonl"), "--no-profile")
    assert main(command(folder / "bundle", request.param, str(DEMO / "draft"), *options)) == 0
    return folder / "bundle"


def test_a_trimmed_draft(trimmed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(trimmed), "--open"]) == 0
    assert re.search(r"predicted tokens\W+2048 of 2048\W+512 of 2048", capsys.readouterr().out)
    kept = set(EngineBundle.open(trimmed).manifest.engines[DRAFT].kept_tokens)
    plain, _, _ = texts(trimmed, None)
    greedy, _, accepted = texts(trimmed, SpeculativeConfig(budget="fixed"))
    assert greedy == plain and accepted > 5
    with LLM(trimmed) as llm:
        assert kept.issuperset(llm.encode(COPIES + "while True:\n    pass")) and llm.tokenizer.special_token_ids <= kept
        assert audit(llm, COPIES, GREEDY).equal


@pytest.fixture(scope="module", params=BACKENDS)
def own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = tmp_path_factory.mktemp("self") / "bundle"
    assert main(command(bundle, request.param, "self:int4", "--precision", "int8", "--no-profile")) == 0
    return bundle


def test_the_targets_own_copy(own: Path) -> None:
    engines = EngineBundle.open(own).manifest.engines
    assert (engines[TARGET].precision, engines[DRAFT].precision) == ("int8", "int4")
    assert engines[TARGET].model == engines[DRAFT].model
    plain, _, _ = texts(own, None)
    greedy, _, accepted = texts(own, SpeculativeConfig("chain", max_draft_len=3, budget="fixed"))
    assert greedy == plain and accepted > 10


@pytest.fixture(scope="module", params=BACKENDS)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = tmp_path_factory.mktemp("none") / "bundle"
    assert main(command(bundle, request.param, "none")) == 0
    return bundle


def test_no_draft(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not list(alone.glob("draft*"))
    plain, _, _ = texts(alone, None)
    greedy, _, accepted = texts(alone, SpeculativeConfig("lookup", lookup_ngram=2, budget="fixed"))
    assert greedy == plain and accepted > 0
    assert texts(alone, SpeculativeConfig())[0] == plain  # planned by the costs that the build measured
    for arguments in (["inspect", str(alone), "--open"], ["profile", str(alone), "--contexts", "16"]):
        assert main(arguments) == 0
    assert "no draft" in capsys.readouterr().out
    html = tmp_path / "rounds.html"
    said = ["--prompt", COPIES, "--temperature", "0", "--max-tokens", "8"]
    assert main(["generate", str(alone), *said, "--speculative", "budget=fixed", "--explain", str(html)]) == 0
    assert "looked up" in html.read_text()
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": COPIES}) + "\n")
    bench = ["bench", str(alone), "--prompts", str(tmp_path / "prompts.jsonl"), "--repeats", "1", "--json"]
    capsys.readouterr()
    assert main([*bench, "--temperature", "0", "--max-tokens", "12"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["config"] for row in rows] == ["plain", "lookup:8", "auto"]
    assert all(row["same_text"] == 1 and row["draft_passes_per_token"] == 0 for row in rows)
    write_model(alone, tmp_path / "repository", "model", ModelSettings(str(alone)), Placement(), copy_bundle=False)


def test_no_draft_in_requests_of_every_kind(alone: Path) -> None:
    async def served(llm: LLM) -> list[int]:
        with AsyncLLM(llm) as server:
            return [token async for chunk in server.generate(COPIES, GREEDY) for token in chunk.token_ids]

    plain, _, _ = texts(alone, None)
    with LLM(alone, SpeculativeConfig(budget="fixed")) as llm:
        assert len(llm.scheduler(4).pools) == 1, "a draft's cache is open"
        assert [result.token_ids for result in llm.generate([COPIES, COPIES], GREEDY)] == [plain, plain]
        assert asyncio.run(served(llm)) == plain
        assert audit(llm, COPIES, GREEDY).equal


@pytest.mark.parametrize(
    "settings",
    [{"grow": "dyspec"}, {"merge": "gsd"}, {"stop_rule": "confidence"}, {"key": "head"}, {"verify": "rejection"}],
)
def test_what_needs_a_draft_is_refused(alone: Path, settings: dict[str, str]) -> None:
    config = SpeculativeConfig(**settings)  # type: ignore[arg-type]  # each is text
    with pytest.raises(ConfigError, match=r"needs a draft, .* use grow='lookup' .*, or build the bundle with a draft"):
        LLM(alone, config)


def test_threads_of_no_draft_are_refused(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They were ignored, and a note said that the costs were measured elsewhere."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    rests = {"generate": ("--prompt", "x"), "profile": (), "bench": ("--prompts", str(prompts))}
    for command, rest in {**rests, "triton": ("--output", str(tmp_path / "models"))}.items():
        assert main([command, str(alone), *rest, "--draft-threads", "1"]) == 2
        assert "leave out what is of a draft, such as its threads" in capsys.readouterr().err


def test_settings_that_a_draft_is_not_needed_for_stay(alone: Path) -> None:
    with LLM(alone, SpeculativeConfig(lookup_ngram=3, lookup_len=40)) as llm:
        assert llm.speculative is not None and (llm.speculative.grow, llm.speculative.lookup_ngram) == ("lookup", 3)
        assert llm.speculative.max_tokens == 15
