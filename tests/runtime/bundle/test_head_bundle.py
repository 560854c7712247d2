"""A head on its whole way, on a random tiny pair: trained, written, built into a bundle, used; and every refusal."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from steps import quiet
from trees import Tree

from benchmarks.tools.torch_engine import TorchEngine
from draftwood.builder import parity
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.head.data import load_frozen
from draftwood.builder.head.network import AcceptanceHead
from draftwood.builder.head.train import train_head
from draftwood.builder.head.training import HeadResult, HeadTraining
from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build
from draftwood.cli.main import main
from draftwood.models import bindings
from draftwood.models.acceptance_head import read_head
from draftwood.models.errors import BundleError, CheckpointError, ConfigError, DraftwoodError
from draftwood.models.head_config import HeadConfig
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.engines.passes import causal_batch
from draftwood.runtime.llm import LLM
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.speculation.config import SpeculativeConfig

PROMPTS = ["hello", "a rather longer prompt than that", "the cat", "once", "x y z"]
SMALL: dict[str, Any] = {"texts": 10, "max_new_tokens": 12, "batch_size": 4, "epochs": 3}
BUSHY = Tree((9, 40, 41, 7, 200, 8, 8, 31), (-1, 0, 0, 1, 2, 2, 4, 6))


@pytest.fixture(scope="module")
def trained(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, HeadResult]:
    folder = tmp_path_factory.mktemp("trained") / "head"
    options = HeadTraining(tiny_pair / "target", tiny_pair / "draft", folder, **SMALL)
    return folder, train_head(options, PROMPTS, quiet)


@pytest.fixture(scope="module")
def head_bundle(tiny_pair: Path, trained: tuple[Path, HeadResult], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("head") / "bundle"
    build(BuildOptions(tiny_pair / "target", tiny_pair / "draft", output, acceptance_head=trained[0]), quiet)
    return output


def test_a_training_is_written_whole(trained: tuple[Path, HeadResult]) -> None:
    folder, result = trained
    names = sorted(file.name for file in folder.iterdir())
    assert names == ["head.json", "head.safetensors", "training.json", "training.svg"]
    assert read_head(folder, result.config.hidden_size).config == result.config
    assert json.loads((folder / "training.json").read_text()) == json.loads(json.dumps(result.to_dict()))
    assert [file.name for file in folder.parent.iterdir()] == ["head"]
    assert len(result.validation) == 1 + SMALL["epochs"] and 0 < result.mean_acceptance < 1
    assert result.calibrated.nll <= result.debiased.nll


def test_the_picture_is_one_svg_with_labels(trained: tuple[Path, HeadResult]) -> None:
    text = (trained[0] / "training.svg").read_text()
    root = ElementTree.fromstring(text)
    words = [element.text for element in root.iter() if element.text]
    for word in ("training", "held out", "as trained", "de-biased", "calibrated", "predicted acceptance", "step"):
        assert word in words
    assert "href" not in text and "nan" not in text


def test_engines_agree_on_acceptance(tiny_pair: Path, trained: tuple[Path, HeadResult], head_bundle: Path) -> None:
    """For a prompt's last row and for every row of a token tree, in ONNX Runtime and in torch."""
    bundle = EngineBundle.open(head_bundle)
    compiled = bundle.open_engine(bindings.DRAFT)
    head = read_head(trained[0], 32)
    reference = TorchEngine(Checkpoint(tiny_pair / "draft").tensor, compiled.spec, head=head)
    outputs = []
    for engine in (compiled, reference):
        cache = engine.new_cache()
        first = engine.score(causal_batch(engine.spec, [1, 5, 9, 30], 0), cache).acceptance
        assert first is not None and first.shape == (1,)
        prompt = first.copy()
        cache.commit(range(4))
        tree = engine.score(BUSHY.batch(engine.spec, 4), cache)
        assert tree.acceptance is not None and tree.acceptance.dtype == np.float32
        assert tree.rows([0, 3]).acceptance is not None
        outputs.append((prompt, tree.acceptance[: len(BUSHY.tokens)].copy()))
    for ours, theirs in zip(*outputs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
        assert ((ours > 0) & (ours < 1)).all()
    with torch.no_grad():
        hidden = load_frozen(Checkpoint(tiny_pair / "draft"), 64).full(torch.tensor([[1, 5, 9, 30]])).hidden
        by_hand = AcceptanceHead.from_trained(head).acceptance(hidden)[0, -1:]
    np.testing.assert_allclose(outputs[0][0], by_hand, atol=1e-5)


@pytest.mark.parametrize("grow", ["chain", "topk"])
def test_specdecpp_gives_the_plain_greedy_text(head_bundle: Path, grow: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    config = SpeculativeConfig(grow=grow, stop_rule="specdec++", rejection_threshold=0.7, budget="fixed")
    with LLM(head_bundle, None) as plain, LLM(head_bundle, config) as speculative:
        for prompt in PROMPTS:
            expected, found = plain.generate(prompt, params)[0], speculative.generate(prompt, params)[0]
            assert found.token_ids == expected.token_ids and found.stats.num_drafts > 0


@pytest.mark.parametrize("settings", [{"stop_rule": "specdec++"}, {"key": "head", "grow": "dyspec"}])
def test_without_a_head_the_fix_is_named(tiny_bundle: Path, settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"--acceptance-head.*train-head.*stop_rule='confidence'"):
        LLM(tiny_bundle, SpeculativeConfig(**settings))  # type: ignore[arg-type]


def test_a_head_that_computes_something_else_is_not_bundled(
    tiny_pair: Path, trained: tuple[Path, HeadResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of parity."""
    right = HeadConfig.logit_projection
    monkeypatch.setattr(HeadConfig, "logit_projection", lambda *given: (right(*given)[0], right(*given)[1] + 0.01))
    options = BuildOptions(tiny_pair / "target", tiny_pair / "draft", tmp_path / "b", acceptance_head=trained[0])
    with pytest.raises(BundleError, match="acceptance head differs"):
        build(options, quiet)
    assert parity.HEAD_TOLERANCE == 1e-4 and not options.output.exists()


# Refusals


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"texts": 0}, "texts"),
        ({"texts": 1}, "hold out"),
        ({"epochs": 0}, "epochs"),
        ({"layers": -1}, "layers"),
        ({"reject_weight": 0}, "reject_weight"),
        ({"mixing_ratio": 1.0}, "mixing_ratio"),
        ({"contexts": "none"}, "choose one of mixed, branched"),
        ({"threads": -1}, "threads"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 1e-40}, "temperature"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": 1e30}, "learning_rate"),
        ({"held_out": 1.0}, "held_out"),
        ({"seed": -1}, "seed"),
    ],
)
def test_impossible_options_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        HeadTraining(Path(), Path(), Path(), **change)


@pytest.mark.parametrize(
    ("prompts", "change", "named"),
    [
        (["one"], {}, "at least 2 different prompts"),
        (PROMPTS, {"max_new_tokens": 1024}, "leaves no room"),
        (PROMPTS, {"draft": Path("nowhere")}, "not a folder"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tiny_pair: Path, tmp_path: Path, prompts: list[str], change: dict[str, Any], named: str
) -> None:
    settings = {"target": tiny_pair / "target", "draft": tiny_pair / "draft", "output": tmp_path / "head", **SMALL}
    with pytest.raises(DraftwoodError, match=named):
        train_head(HeadTraining(**settings | change), prompts, quiet)
    assert not any(tmp_path.iterdir())


def test_only_a_head_is_replaced(tiny_pair: Path, trained: tuple[Path, HeadResult], tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    for taken in (tmp_path, tmp_path / "thesis.txt" / "head"):
        with pytest.raises(CheckpointError, match="choose another --output"):
            train_head(HeadTraining(tiny_pair / "target", tiny_pair / "draft", taken, **SMALL), PROMPTS, quiet)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]
    options = HeadTraining(tiny_pair / "target", tiny_pair / "draft", tmp_path / "head", **SMALL)
    train_head(options, PROMPTS, quiet)
    train_head(replace(options, layers=0), PROMPTS, quiet)
    assert read_head(tmp_path / "head", 32).config.layers == 0
    assert {file.name for file in tmp_path.iterdir()} == {"thesis.txt", "head"}


# The command line


@pytest.fixture
def arguments(tiny_pair: Path, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    pair = ["--target", str(tiny_pair / "target"), "--draft", str(tiny_pair / "draft")]
    small = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    return ["train-head", *pair, "--prompts", str(prompts), "--output", str(tmp_path / "head"), *small]


def test_train_head_then_build(
    arguments: list[str], tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.pop("output") == str(tmp_path / "head")
    assert report == json.loads((tmp_path / "head" / "training.json").read_text())
    assert main([*arguments, "--untied", "--reject-weight", "3", "--contexts", "branched"]) == 0
    shown = capsys.readouterr().out
    assert "Training the head" in shown and "calibrated" in shown and "--acceptance-head" in shown
    config = read_head(tmp_path / "head", 32).config
    assert not config.tied and config.reject_weight == 3
    bundle = ["--output", str(tmp_path / "bundle"), "--acceptance-head", str(tmp_path / "head"), "--widths", "1,8,16"]
    assert main(["build", *arguments[1:5], *bundle]) == 0
    generate = ["generate", str(tmp_path / "bundle"), "--prompt", "hello", "--temperature", "0", "--max-tokens", "8"]
    assert main([*generate, "--speculative", "stop_rule=specdec++", "--json"]) == 0


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["--prompts", "nowhere.jsonl"], "cannot be read"),
        (["--target", "nowhere"], "not a folder"),
        (["--mixing-ratio", "1"], "mixing_ratio"),
        (["--layers", "-2"], "layers"),
        (["--max-new-tokens", "5000"], "leaves no room"),
    ],
)
def test_bad_input_ends_with_code_2(
    arguments: list[str], extra: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *extra]) == 2
    assert named in capsys.readouterr().err and not (tmp_path / "head").exists()


def test_a_missing_package_is_named(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    imported = [name for name in sys.modules if name.startswith(("draftwood.builder", "draftwood.models.acceptance"))]
    for name in imported:
        # A second import also sets the parent's attribute: later tests must find the first module there.
        monkeypatch.setattr(name, sys.modules[name])
    for name in imported:
        monkeypatch.delitem(sys.modules, name)
    assert main(arguments) == 2
    assert "training needs safetensors: pip install " in capsys.readouterr().err
