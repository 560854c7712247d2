"""A head that `distill` trains: its states, its network, and the folder that it becomes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from distilling import COLUMNS, distilled, options
from torch import Tensor

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.distillation import distill as distill_module
from draftwood.builder.distillation.batches import Batch, pack
from draftwood.builder.distillation.card import Origin
from draftwood.builder.distillation.draft import Report, write_draft
from draftwood.builder.distillation.head import STEPS, HeadNetwork, head_config, initialise_head, taps_of
from draftwood.builder.distillation.loss import estimate
from draftwood.builder.distillation.options import DistillOptions
from draftwood.builder.distillation.state import GIVEN, QUESTION, TextStore, WrittenText, states_beside
from draftwood.builder.distillation.training import Trainer
from draftwood.models.errors import ConfigError
from draftwood.models.families import Variant
from draftwood.models.llama import GrowingCache, Llama

pytestmark = pytest.mark.usefixtures("one_thread")
TAPS = (1, 2)  # of the small target


def texts_of(head: Path, target: Path) -> list[WrittenText]:
    size = Checkpoint(target).tapped(TAPS).config.state_size
    return list(TextStore(head.with_name("draft.state") / "texts", 320, COLUMNS, size).read())


def network_of(target: Path, batches: list[Batch], spread: float = 0.0, kept: int = 64) -> HeadNetwork:
    """spread: of weights that learn, about those of the beginning."""
    checkpoint = Checkpoint(target).tapped(TAPS)
    config = head_config(options(target, Path(), kind="states", hidden=None), checkpoint.config)
    network = HeadNetwork(replace(config, draft_vocab_size=kept), 64, np.arange(kept))
    initialise_head(network, checkpoint, batches, 0)
    for parameter in network.learning().values():
        torch.nn.init.normal_(parameter, std=spread) if spread else None
    return network


def test_states_are_those_of_the_reference(head: Path, target: Path) -> None:
    """Those that were recorded while the target wrote, of every token but the last."""
    config, size = Checkpoint(target).tapped(TAPS).config, Checkpoint(target).config.hidden_size
    model = Llama(config, 128)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(Checkpoint(target).tensor(name).astype(np.float32)))
        for text in texts_of(head, target)[:5]:
            expected = model.full(torch.from_numpy(text.tokens[:-1].astype(np.int64))[None]).states
            assert expected is not None and text.states.shape == (len(text.tokens), 2 * size)
            error = (torch.from_numpy(text.states[:-1].astype(np.float32)) - expected[0]).abs()
            assert error.mean() < 0.05 * expected.abs().mean() and not text.states[-1].any()  # weights have 8 bits


def test_a_new_head_repeats_its_target(head: Path, target: Path) -> None:
    """After a state it proposes what the target said there, though that token has come already."""
    batches = list(pack(texts_of(head, target)[:8], 2, 32))
    network = network_of(target, batches, kept=320)
    first = next(network.drafted(batches[0]))
    best = (first.hidden @ network.projection().T).argmax(-1)
    before = torch.zeros_like(first.places)
    before[:, :-1] = first.places[:, 1:]
    assert (best == batches[0].ids[before][:, 0])[batches[0].scored[before]].double().mean() > 0.9


@torch.no_grad()
def test_steps_in_a_row_are_those_of_the_model(head: Path, target: Path) -> None:
    """A chain from the last place of a text, pass by pass over a cache, with the head's own states after the first."""
    text = texts_of(head, target)[0]
    (batch,) = pack([text], 1, len(text.tokens) - 1)
    network = network_of(target, [batch], spread=0.2)
    drafted, model, place = list(network.drafted(batch)), network.llama, len(text.tokens) - 2 - STEPS
    config = network.llama.config
    cache, size = torch.zeros(2, 1, config.num_kv_heads, 64, config.head_dim), config.hidden_size
    tokens, states = batch.written[:, : place + 1], batch.states[:, : place + 1].float()
    given = torch.nn.functional.pad(states, (0, size))
    for step, each in enumerate(drafted):
        start, rows = (0, place + 1) if step == 0 else (place + step, 1)
        mask = torch.full((rows, start + rows), float("-inf")).triu(1 + start)[None, None]
        fused = model.fused(given)
        attention = GrowingCache(cache, start, mask)
        found, _ = model.model(tokens, model.rotary(torch.arange(start, start + rows)[None]), attention, fused)
        assert each.places[0, place + 1 + step]
        own = each.hidden[int(each.places[0, : place + 1 + step].sum())]
        torch.testing.assert_close(own, model.model.norm(found[0, -1]), rtol=1e-4, atol=1e-4)
        tokens = batch.written[:, place + 1 + step, None]
        given = torch.cat((torch.zeros(1, 1, states.shape[-1]), found[:, -1:]), -1)


def test_texts_of_a_sequence_do_not_see_each_other(head: Path, target: Path) -> None:
    """Nor does a place see what comes after the token that follows it."""
    texts = texts_of(head, target)[:3]
    (batch,) = pack(texts, 1, sum(len(text.tokens) - 1 for text in texts))
    network, second = network_of(target, [batch], spread=0.2), len(texts[0].tokens) - 1
    changed = batch._replace(states=batch.states.clone())
    changed.states[:, second:] += 1

    def rows(given: Batch) -> list[Tensor]:
        return [each.hidden[: int(each.places[0, :second].sum())] for each in network.drafted(given)]

    for whole, other in zip(rows(batch), rows(changed), strict=True):
        assert torch.equal(whole, other) and len(whole)
    last = [each.hidden[-1] for each in network.drafted(batch)]
    assert not any(map(torch.equal, last, [each.hidden[-1] for each in network.drafted(changed)]))


def test_a_batch_in_which_a_head_drafts_nothing_changes_nothing(head: Path, target: Path) -> None:
    text = texts_of(head, target)[0]
    short = text._replace(kinds=np.where(np.arange(len(text.kinds)) == 1, QUESTION, GIVEN).astype(np.uint8))
    (batch,) = pack([short], 1, len(text.tokens) - 1)
    trainer = Trainer(network_of(target, [batch]), 0.01, torch.device("cpu"), False)
    before = {name: parameter.clone() for name, parameter in trainer.network.learning().items()}
    assert trainer.step(batch, 1.0) == 0 and estimate(trainer.network, [batch]).places == 0
    assert all(torch.equal(before[name], parameter) for name, parameter in trainer.network.learning().items())


def test_a_head_is_written_in_its_authors_form(head: Path, target: Path, tmp_path: Path) -> None:
    config, figures = (json.loads((head / name).read_text()) for name in ("config.json", "distillation.json"))
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["eagle_aux_hidden_state_layer_ids"] == [
        1,
        2,
    ]
    assert figures["kind"] == "states" and len(figures["acceptance"]["later_tokens"]) == STEPS - 1
    read = Checkpoint(head, target=Checkpoint(target))
    assert read.config.reads is not None and read.config.draft_context == 32 and read.kept_tokens is not None
    assert "EAGLE-3 head" in (head / "README.md").read_text() and not (head / "tokenizer.json").exists()
    whole = network_of(target, list(pack(texts_of(head, target)[:8], 2, 32)), kept=320)
    checkpoint, report = Checkpoint(target).tapped(TAPS), Report(figures, "<svg/>")
    write_draft(tmp_path / "whole", whole, checkpoint, Origin("x", None, None), report)
    assert Checkpoint(tmp_path / "whole", target=Checkpoint(target)).kept_tokens is None


def test_training_goes_on_and_lost_states_are_named(head: Path, target: Path, tmp_path: Path) -> None:
    shutil.copytree(head, tmp_path / "draft")
    shutil.copytree(head.with_name("draft.state"), tmp_path / "draft.state")
    log = tmp_path / "draft.state" / distill_module.LOG
    before, again = (
        len(json.loads(log.read_text())["curve"]),
        options(target, tmp_path / "draft", kind="states", hidden=None),
    )
    distilled(replace(again, minutes=10))
    assert len(json.loads(log.read_text())["curve"]) > before
    with pytest.raises(ConfigError, match="drafts of the other --kind"):
        distilled(options(target, tmp_path / "draft"))
    file = next((tmp_path / "draft.state" / "texts").glob("*.states"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="holds no texts of this target"):
        distilled(replace(again, minutes=12))
    file.unlink()
    with pytest.raises(ConfigError, match="choose another --state"):
        distilled(replace(again, minutes=12))
    assert states_beside(file.with_suffix(".safetensors")) == file


def test_the_kind_suits_the_target(target: Path) -> None:
    small, default = Checkpoint(target).config, DistillOptions(target, Path(), 1)
    large = replace(small, hidden_size=1536, num_layers=28)
    assert taps_of(default, small) == () and taps_of(default, large) == (7, 17, 28)
    assert taps_of(replace(default, kind="text"), large) == taps_of(replace(default, layers=3), large) == ()
    scaled = replace(large, variant=Variant(embedding_multiplier=30.0))
    assert taps_of(default, scaled) == ()
    with pytest.raises(ConfigError, match="choose --kind text"):
        taps_of(replace(default, kind="states"), scaled)
    with pytest.raises(ConfigError, match="kv_heads"):
        head_config(replace(default, kv_heads=3), replace(large, num_heads=4))
    for told, wrong in (
        ("hidden", {"hidden": 64}),
        ("full_voc", {"full_vocabulary": True}),
        ("--from", {"start": target}),
    ):
        with pytest.raises(ConfigError, match=f"{told}.* goes with --kind text"):
            replace(default, kind="states", **wrong)
