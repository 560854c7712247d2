"""benchmarks/heads.py: what a draft that reads its target's states would bring."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from distilling import COLUMNS
from torch.nn import functional

from benchmarks import heads
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.distillation.distill import held_out_batches
from draftwood.builder.distillation.draft import read_start
from draftwood.builder.distillation.loss import estimate
from draftwood.builder.distillation.network import DraftNetwork
from draftwood.builder.distillation.state import GIVEN, TextStore

pytestmark = pytest.mark.usefixtures("one_thread")


def test_heads_and_plain_drafts_are_judged_alike(
    draft: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain draft is right as often as `distill` says. Before it has learned, a head repeats the target's best token
    after each state, and one step changes this. Steps do not mix texts, nor see what comes after."""
    monkeypatch.setattr(heads, "LENGTH", 32)
    monkeypatch.setattr(heads, "is_half_fast", lambda device: False)
    shutil.copytree(draft.with_name("draft.state") / "texts", tmp_path / "texts")
    checkpoint, start = Checkpoint(target), read_start(draft, Checkpoint(target))
    heads.write_states(checkpoint, tmp_path)
    held_out, found = (heads.read(tmp_path, 320, held_out=each) for each in (True, False))
    network = DraftNetwork(start.config, heads.LONGEST, start.kept)
    start.load(network)
    plain = heads.judge_plain(network, held_out)
    expected = estimate(network, held_out_batches(TextStore(tmp_path / "texts", 320, COLUMNS), 2048))
    assert plain.to_dict()["right"] == pytest.approx([expected.values[0]] * heads.STEPS, abs=1e-3)

    head = heads.Head(checkpoint, start.kept, found.states.shape[1])
    head.begin(found.states)
    places = torch.arange(30)
    tokens = found.tokens[1 : 31 + heads.STEPS][None]
    first = next(iter(head(tokens, found.states[places].float()[None], found.texts[places][None])))
    best = torch.from_numpy(start.kept)[functional.linear(first[0], head.rows).argmax(-1)]
    known = torch.isin(found.ids[places + 1, 0], torch.from_numpy(start.kept)) & (found.kinds[places + 1] != GIVEN)
    assert known.any() and (best[known] == found.ids[places + 1, 0][known]).double().mean() > 0.9

    heads.train(head, network.place_of, found, held_out, 1e-9, tmp_path / "head.pt")
    changed = found.states[places].float()[None].clone()
    changed[0, 20:] += 1
    texts = torch.tensor([[0] * 10 + [1] * 20])
    whole, other = (
        torch.stack(list(head(tokens, each, texts)), 0) for each in (found.states[places].float()[None], changed)
    )
    assert torch.equal(whole[:, :, :20], other[:, :, :20]) and not torch.equal(whole[:, :, 20:], other[:, :, 20:])
    alone = torch.stack(list(head(tokens[:, 10:], found.states[places[10:]].float()[None], texts[:, 10:])), 0)
    assert torch.allclose(whole[:, :, 10:], alone, atol=1e-4)
    judged = heads.judge_head(head, network.place_of, held_out).to_dict()
    assert set(judged) == set(plain.to_dict()) and (tmp_path / "head.pt").is_file()
