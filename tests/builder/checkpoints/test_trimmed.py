"""Drafts with a trimmed output vocabulary: a stranger's folder is checked, and its engines compute the kept columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bundling import resigned
from checkpoints import VOCAB_SIZE, edit_weights, transformers_logits, write_checkpoint, write_tokenizer
from steps import noted, quiet

from draftwood.builder import kept_tokens, pipeline
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.distillation.distill import distill
from draftwood.builder.distillation.options import DistillOptions
from draftwood.builder.head import data
from draftwood.builder.head.data import load_frozen, soft_labels
from draftwood.builder.head.train import train_head
from draftwood.builder.head.training import HeadTraining
from draftwood.builder.options import ALL, BuildOptions
from draftwood.builder.pipeline import build
from draftwood.models.bindings import DRAFT, TARGET
from draftwood.models.errors import BundleError, CheckpointError, ConfigError, EngineError
from draftwood.models.layers import HEAD_WEIGHT
from draftwood.runtime import LLM, SamplingParams, SpeculativeConfig
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.engines.passes import causal_batch

KEPT = [*range(3, 60), 70, 100, 280]  # ascending, with gaps
TEXT = [1, 20, 33, 47, 5, 100, 7]


def write_trimmed(folder: Path, shape: str = "gqa", kept: list[int] = KEPT, whole_head: bool = False) -> Path:
    """A trimmed draft's folder as `draftwood distill` writes it. whole_head: an untied projection has all rows."""
    write_checkpoint(folder, shape, seed=1)
    write_tokenizer(folder)
    tokens = torch.tensor(kept)

    def trim(tensors: dict[str, torch.Tensor]) -> None:
        tensors["d2t"] = tokens - torch.arange(len(kept))
        if HEAD_WEIGHT in tensors and not whole_head:
            tensors[HEAD_WEIGHT] = tensors[HEAD_WEIGHT][tokens].contiguous()

    edit_weights(folder, trim)
    return configured(folder, draft_vocab_size=len(kept))


def configured(folder: Path, **settings: Any) -> Path:
    """A folder with other settings in its config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


def target(folder: Path) -> Path:
    return write_tokenizer(write_checkpoint(folder / "target"))


def built(target: Path, draft: Path, output: Path, backend: str, precision: str = "fp32") -> EngineBundle:
    options = BuildOptions(target, draft, output, backend, precision, draft_precision=precision, max_length=128)
    return build(options, quiet)


@pytest.mark.parametrize("backend", ["onnxruntime", "native"])
@pytest.mark.parametrize(("shape", "whole_head"), [("gqa", False), ("gqa", True), ("tied", False)])
def test_an_engine_computes_the_kept_columns(backend: str, shape: str, whole_head: bool, tmp_path: Path) -> None:
    draft = write_trimmed(tmp_path / "draft", shape, whole_head=whole_head)
    bundle = built(target(tmp_path), draft, tmp_path / "bundle", backend)
    spec = bundle.manifest.engines[DRAFT]
    assert (list(spec.kept_tokens), spec.model.draft_vocab_size) == (KEPT, len(KEPT))
    write_checkpoint(tmp_path / "whole", shape, seed=1)
    expected = transformers_logits(tmp_path / "whole")([TEXT])[0, KEPT]
    engine = bundle.open_engine(DRAFT)
    output = engine.score(causal_batch(engine.spec, TEXT, 0), engine.new_cache())
    last = output.logits[0]
    assert last.shape == (len(KEPT),)
    np.testing.assert_allclose(last, expected, atol=2e-4)
    assert output.top_ids is not None and output.top_ids[0, 0] == expected.argmax()
    engine.close()


@pytest.mark.parametrize(("backend", "precision"), [("onnxruntime", "fp32"), ("native", "fp32"), ("native", "int8")])
def test_greedy_text_is_plain_text_and_seeds_repeat(backend: str, precision: str, tmp_path: Path) -> None:
    draft = write_trimmed(tmp_path / "draft")
    built(target(tmp_path), draft, tmp_path / "bundle", backend, precision)
    greedy = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    configs = [SpeculativeConfig(budget="fixed"), SpeculativeConfig("chain", budget="fixed")]
    with LLM(tmp_path / "bundle", None) as llm:
        plain = llm.generate(TEXT, greedy)[0].token_ids
    for config in configs:
        with LLM(tmp_path / "bundle", config) as llm:
            result = llm.generate(TEXT, greedy)[0]
            assert result.token_ids == plain and result.stats.num_draft_tokens > 0
            assert llm.generate(TEXT, replace(greedy, repetition_penalty=1.2))[0].stats.num_draft_tokens > 0
            drawn = replace(greedy, temperature=0.8, seed=3)
            assert llm.generate(TEXT, drawn)[0].token_ids == llm.generate(TEXT, drawn)[0].token_ids
            together = llm.generate([TEXT, TEXT[:3]], greedy)  # over shared pools
            assert together[0].token_ids == plain


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    return lambda folder: edit_weights(folder, change)


def offset(place: int, value: int) -> Callable[[Path], object]:
    return tensors(lambda t: t["d2t"].__setitem__(place, value))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (tensors(lambda t: t.pop("d2t")), "tensor d2t is missing"),
        (tensors(lambda t: t.update(d2t=t["d2t"].int())), r"d2t is I32"),
        (tensors(lambda t: t.update(d2t=t["d2t"][:-1].clone())), r"asks for I64 \[60\]"),
        *((offset(*wrong), "never fall") for wrong in ((5, 0), (0, -1), (-1, VOCAB_SIZE - 59), (-1, 2**62))),
        (lambda f: configured(f, draft_vocab_size=VOCAB_SIZE + 1), "more than vocab_size"),
        *((lambda f, n=n: configured(f, draft_vocab_size=n), "positive integer") for n in (0, "60", 1 << 40)),
        (tensors(lambda t: t.update({HEAD_WEIGHT: t[HEAD_WEIGHT][:50].clone()})), "has shape"),
        (lambda f: configured(f, tie_word_embeddings=True), "ties it"),
    ],
)
def test_a_wrong_folder_is_refused(change: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    folder = write_trimmed(tmp_path)
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(folder)


def test_a_tied_folder_may_repeat_the_rows(tmp_path: Path) -> None:
    folder = write_trimmed(tmp_path, "tied")
    expected = Checkpoint(folder).tensor(HEAD_WEIGHT)
    edit_weights(folder, lambda t: t.update({HEAD_WEIGHT: t["model.embed_tokens.weight"][torch.tensor(KEPT)].clone()}))
    assert np.array_equal(Checkpoint(folder).tensor(HEAD_WEIGHT), expected)


def test_a_trimmed_draft_is_no_target_and_is_not_trimmed_again(tmp_path: Path) -> None:
    """Neither of a bundle, nor of a distillation, nor of the training of a head."""
    draft = write_trimmed(tmp_path / "draft")
    with pytest.raises(CheckpointError, match="cannot be a target"):
        built(draft, draft, tmp_path / "bundle", "onnxruntime")
    with pytest.raises(CheckpointError, match="cannot be a target"):
        distill(DistillOptions(draft, tmp_path / "other", minutes=1), quiet)
    with pytest.raises(CheckpointError, match="cannot be a target"):
        train_head(HeadTraining(draft, draft, tmp_path / "head"), ["a", "b"], quiet)
    for count in (40, ALL):
        options = BuildOptions(target(tmp_path / f"{count}"), draft, tmp_path / "bundle", draft_vocabulary=count)
        with pytest.raises(CheckpointError, match="predicts 60 of 288 tokens already"):
            build(options, quiet)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineBundle]:
    folder = tmp_path_factory.mktemp("trimmed")
    draft = write_trimmed(folder / "draft")
    return {each: built(target(folder), draft, folder / each, each) for each in ("onnxruntime", "native")}


@pytest.mark.parametrize(
    ("role", "change", "message"),
    [
        ("draft", lambda spec: spec["kept_tokens"].pop(), "other columns than kept tokens"),
        ("draft", lambda spec: spec["kept_tokens"].reverse(), "do not ascend"),
        ("draft", lambda spec: spec["kept_tokens"].__setitem__(1, 3), "do not ascend"),
        ("draft", lambda spec: spec["kept_tokens"].__setitem__(-1, VOCAB_SIZE), "none of its vocabulary"),
        ("draft", lambda spec: spec["model"].pop("draft_vocab_size"), "other columns than kept tokens"),
        ("target", lambda spec: spec["model"].update(draft_vocab_size=3), "target's vocabulary is trimmed"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    role: str, change: Callable[[Any], object], message: str, bundles: dict[str, EngineBundle], tmp_path: Path
) -> None:
    bundles["native"].copy_to(tmp_path / "bundle")
    resigned(tmp_path / "bundle", lambda content: change(content["engines"][role]))
    with pytest.raises(BundleError, match=message):
        EngineBundle.open(tmp_path / "bundle")


@pytest.mark.parametrize("backend", ["onnxruntime", "native"])
def test_a_file_with_other_columns_than_the_manifest_says_is_refused(
    backend: str, bundles: dict[str, EngineBundle], tmp_path: Path
) -> None:
    def shorten(content: dict[str, Any]) -> None:
        spec = content["engines"]["draft"]
        spec["kept_tokens"] = spec["kept_tokens"][:20]
        spec["model"]["draft_vocab_size"] = 20

    bundles[backend].copy_to(tmp_path / "bundle")
    resigned(tmp_path / "bundle", shorten)
    with pytest.raises(EngineError, match="where the manifest says"):
        EngineBundle.open(tmp_path / "bundle").open_engine(DRAFT)


@pytest.mark.parametrize(
    ("count", "message"),
    [(0, "at least 1"), (VOCAB_SIZE, "leave it out"), (3, "leaves no room"), (1 << 40, "is too many")],
)
def test_a_number_of_tokens_that_makes_no_sense_is_refused(count: int, message: str, tmp_path: Path) -> None:
    folder = target(tmp_path)
    with pytest.raises(ConfigError, match=message):
        options = BuildOptions(folder, folder, tmp_path / "bundle", draft_vocabulary=count)
        build(options, quiet)


def test_a_large_draft_is_made_cheap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "LARGE", 1)
    monkeypatch.setattr(kept_tokens, "FEWEST", 64)
    draft, titles = write_tokenizer(write_checkpoint(tmp_path / "draft", "tied", seed=1)), list[str]()
    options = BuildOptions(target(tmp_path), draft, tmp_path / "bundle", "native", "int8", max_length=128)
    spec = build(options, noted(titles)).manifest.engines[DRAFT]
    assert (spec.precision, spec.matrices, len(spec.kept_tokens)) == ("int4", {}, 64)
    assert "--draft-precision" in "".join(titles) and "--draft-vocabulary all" in "".join(titles)


def test_what_the_user_chose_stays_and_small_drafts_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_tokens, "FEWEST", 64)
    draft, distilled = target(tmp_path), write_trimmed(tmp_path / "distilled")
    options = BuildOptions(draft, draft, tmp_path / "bundle", "native")

    def chosen(draft: Path = draft, **given: Any) -> tuple[str | None, Any]:
        checkpoints = {TARGET: Checkpoint(options.target), DRAFT: Checkpoint(draft)}
        found = pipeline.with_cheap_draft(replace(options, **given), checkpoints, quiet)
        return found.draft_precision, found.draft_vocabulary

    assert chosen() == ("int8", None), "it is small"
    monkeypatch.setattr(pipeline, "LARGE", 1)
    assert chosen() == ("int4", 64)
    assert chosen(draft_precision="int5") == ("int5", 64)
    assert chosen(draft_vocabulary=ALL) == ("int4", ALL)
    assert chosen(draft_vocabulary=100) == ("int4", 100)
    assert chosen(distilled) == ("int8", None), "it is trimmed already"


@pytest.mark.parametrize(
    ("target", "row", "vocab_size", "count"),
    [
        (1.5e9 * 4, 896 * 4, 151936, 54 * 1024),  # a thirtieth, in whole thousands
        (8e9 * 4, 2048 * 4, 128256, 1 << 16),  # what a manifest may list
        (135e6 * 8, 576 * 4, 49152, 1 << 14),  # the fewest
        (7e9 * 4, 2048 * 4, 65536, None),  # too few would be left out
    ],
)
def test_a_projection_may_take_a_share_of_the_targets_pass(
    target: float, row: int, vocab_size: int, count: int | None
) -> None:
    assert kept_tokens.affordable(int(target), row, vocab_size) == count


def test_a_head_is_trained_on_tokens_that_the_draft_can_draw(tmp_path: Path) -> None:
    """p_acc of an untrimmed draft's tokens would teach the head what never happens."""
    checkpoint = Checkpoint(write_trimmed(tmp_path / "draft", kept=[5, 200]))
    draft, whole = load_frozen(checkpoint, 64), load_frozen(Checkpoint(target(tmp_path)), 64)
    generator = torch.Generator().manual_seed(0)
    seen: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:

        def recorded(p: torch.Tensor, q: torch.Tensor, generator: torch.Generator) -> Any:
            labels = soft_labels(p, q, generator)
            seen.append(labels.y)
            return labels

        patch.setattr(data, "soft_labels", recorded)
        examples = data.collect(
            whole, draft, [[1, 5], [1, 9, 3]], [2], 12, 1.0, None, generator, checkpoint.kept_tokens
        )
    assert set(seen[0].flatten().tolist()) == {5, 200} and len(examples.p_acc) == 24
