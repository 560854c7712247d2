"""The training of a draft: its network, its checkpoints, and the folder that it becomes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bundling import built
from distilling import distilled, options, watch, written
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional
from transformers import LlamaForCausalLM

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.distillation import distill as distill_module
from draftwood.builder.distillation.batches import Batch, pack
from draftwood.builder.distillation.card import Origin, origin_of
from draftwood.builder.distillation.draft import Report, write_draft
from draftwood.builder.distillation.loss import acceptance_loss, estimate, overlap, reachable
from draftwood.builder.distillation.network import DraftNetwork, draft_config, initialise
from draftwood.builder.distillation.options import DistillOptions
from draftwood.builder.distillation.training import Schedule, Trainer
from draftwood.cli.main import main
from draftwood.models.errors import ConfigError
from draftwood.runtime import LLM, SamplingParams, SpeculativeConfig
from draftwood.runtime.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
FIGURES = {"acceptance": {"acceptance_0": 0.5}, "text_tokens": 10, "tokens_seen": 20, "training_minutes": 1.0}


def network_of(target: Path, kept: int = 64, seed: int = 0) -> DraftNetwork:
    checkpoint = Checkpoint(target)
    ids = np.sort(np.random.default_rng(0).permutation(320)[:kept])
    network = DraftNetwork(draft_config(options(target, Path(), hidden=32), checkpoint.config), 64, ids)
    initialise(network, checkpoint, seed)
    return network


def some_batch(sequences: int = 2, length: int = 32) -> Batch:
    return next(pack([written(number, number) for number in range(10)], sequences, length))


# Network


def test_a_text_does_not_see_the_others_of_its_sequence(target: Path) -> None:
    """The logits of a packed text are those of the text alone."""
    network = network_of(target)
    for parameter in network.llama.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    texts = [written(number, number) for number in range(3)]
    packed, alone = (network.hidden(next(pack(some, 1, length))) for some, length in ((texts, 57), (texts[1:2], 19)))
    counts = [int((text.kinds[1:] > 0).sum()) for text in texts]
    torch.testing.assert_close(packed[counts[0] : counts[0] + counts[1]], alone, rtol=1e-4, atol=1e-4)


# Training


def trained(network: DraftNetwork, batches: list[Batch], seconds: float, file: Path | None = None) -> Trainer:
    trainer = Trainer(network, 0.003, CPU, False)
    if file is not None:
        trainer.load(file)
    schedule = Schedule(seconds, watch().clock, measured=1e9)
    for _ in trainer.run(iter(batches[trainer.progress.steps :]), batches[:1], schedule, lambda: 5):
        pass
    return trainer


def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(target: Path, tmp_path: Path) -> None:
    batches = [some_batch()] * 6
    before = estimate(network_of(target), batches[:1])
    whole = trained(network_of(target), batches, 1e6)
    after = estimate(whole.network, batches[:1])
    assert after.loss < before.loss and after.mean > before.mean
    first = trained(network_of(target), batches[:3], 1e6)
    first.save(tmp_path / "checkpoint.safetensors")
    resumed = trained(network_of(target, seed=5), batches, 1e6, tmp_path / "checkpoint.safetensors")
    assert resumed.progress.steps == 6 and first.progress.steps == 3
    for name, parameter in resumed.network.llama.named_parameters():
        expected = whole.network.llama.get_parameter(name)
        torch.testing.assert_close(parameter, expected, rtol=0, atol=2e-5)  # the schedule counts calls of a clock
    file = tmp_path / "checkpoint.safetensors"
    config = draft_config(options(target, Path(), intermediate=64), Checkpoint(target).config)
    other = Trainer(DraftNetwork(config, 32, np.arange(64)), 0.003, CPU, False)
    with pytest.raises(ConfigError, match="give the same sizes as before"):
        other.load(file)
    best = resumed.progress.best
    for held_out, judged in ((batches[:1], estimate(resumed.network, batches[:1]).mean), (batches[:1], 1.0)):
        resumed.judge_anew(held_out)
        assert resumed.progress.best == judged > best
        resumed.progress = resumed.progress._replace(best=1.0)
    with pytest.raises(ConfigError, match="its loss is no number"):
        trained(network_of(target), [batches[0]._replace(tails=batches[0].tails * torch.nan)], 1e6)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="no checkpoint"):
        other.load(file)


# The whole


def test_a_distilled_draft_is_a_trimmed_llama(draft: Path, target: Path) -> None:
    config = json.loads((draft / "config.json").read_text())
    assert config["draft_vocab_size"] == 64 and config["vocab_size"] == 320 and config["tie_word_embeddings"]
    tensors = load_file(draft / "model.safetensors")
    d2t = tensors["d2t"]
    kept = torch.arange(64) + d2t
    assert d2t.dtype == torch.int64 and (kept.diff() > 0).all() and kept.min() >= 0 and kept.max() < 320
    assert {1, 2} <= set(kept.tolist())  # special tokens
    assert tensors["model.embed_tokens.weight"].shape == (320, 32)
    assert {tensor.dtype for name, tensor in tensors.items() if name != "d2t"} == {torch.bfloat16}
    figures = json.loads((draft / "distillation.json").read_text())
    assert figures["vocabulary"] == 64 and 0 < figures["vocabulary_coverage"] <= 1
    state = draft.with_name("draft.state")
    tokens = [point["tokens"] for point in json.loads((state / distill_module.LOG).read_text())["curve"]]
    assert figures["curve"] and tokens[0] == 0 and len(tokens) >= 2 and tokens == sorted({*tokens})
    assert (state / "acceptance.svg").read_text().count("<polyline") == 6
    for name in ("README.md", "acceptance.svg", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (draft / name).is_file()
    with Tokenizer.load(draft) as own, Tokenizer.load(target) as other:
        assert own.vocabulary() == other.vocabulary()


@pytest.mark.parametrize("kind", ["text", "states"])
def test_a_distilled_draft_drafts(draft: Path, head: Path, target: Path, tmp_path: Path, kind: str) -> None:
    """In a bundle, speculative text is plain text, and tokens of the draft are accepted."""
    draft = head if kind == "states" else draft
    bundle = built(target, draft, tmp_path / "bundle")
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with LLM(bundle, SpeculativeConfig(grow="chain", max_draft_len=3, budget="fixed")) as llm:
        results = llm.generate([[1, token] for token in range(3, 43)], params)
    with LLM(bundle, None) as llm:
        plain = llm.generate([[1, token] for token in range(3, 43)], params)
    assert [each.token_ids for each in results] == [each.token_ids for each in plain]
    assert sum(each.stats.num_accepted_tokens for each in results) > 100


def test_the_same_command_does_nothing_more_and_more_minutes_go_on(draft: Path, target: Path, tmp_path: Path) -> None:
    copied = tmp_path / "draft"
    shutil.copytree(draft, copied)
    shutil.copytree(draft.with_name("draft.state"), tmp_path / "draft.state")
    steps = last_steps(tmp_path)
    result = distilled(options(target, copied))
    assert last_steps(tmp_path) == steps and result.figures["vocabulary"] == 64
    distilled(options(target, copied, full_vocabulary=True))
    assert last_steps(tmp_path) == steps and Checkpoint(copied).config.draft_vocab_size is None
    distilled(options(target, copied, minutes=11, text_minutes=6))
    assert last_steps(tmp_path) > steps and Checkpoint(copied).config.draft_vocab_size == 64


def last_steps(folder: Path) -> int:
    curve = json.loads((folder / "draft.state" / "training.json").read_text())["curve"]
    return int(curve[-1]["tokens"])


def test_the_full_vocabulary_agrees_with_the_trimmed_one_in_transformers(target: Path, tmp_path: Path) -> None:
    """On texts that the rows of the untrained tokens were not made from, the best token is the same."""
    network = trained(network_of(target), [some_batch()] * 120, 1e6).network
    states = network.hidden(next(pack([written(number, 1) for number in range(250)], 64, 60)))
    checkpoint, origin, report = Checkpoint(target), Origin("a target", None, None), Report(FIGURES, "<svg/>")
    write_draft(tmp_path / "trimmed", network, checkpoint, origin, report)
    write_draft(tmp_path / "full", network, checkpoint, origin, report, states.detach())
    model = LlamaForCausalLM.from_pretrained(tmp_path / "full", dtype=torch.float32)
    assert not model.config.tie_word_embeddings and "draft_vocab_size" not in model.config.to_dict()
    trimmed = load_file(tmp_path / "trimmed" / "model.safetensors")
    kept = torch.arange(64) + trimmed.pop("d2t")
    tokens = torch.stack([torch.from_numpy(written(99 + row, 1, 24).tokens.astype(np.int64)) for row in range(8)])
    with torch.no_grad():
        logits = model(tokens).logits
        hidden = model.model(tokens).last_hidden_state
    own = functional.linear(hidden, trimmed["model.embed_tokens.weight"].float()[kept])
    torch.testing.assert_close(logits[..., kept], own, rtol=0, atol=1e-4)
    assert (logits.argmax(-1) == kept[own.argmax(-1)]).float().mean() > 0.9
    others = torch.ones(320, dtype=torch.bool)
    others[kept] = False
    assert logits.softmax(-1)[..., others].sum(-1).mean() < 0.1


def test_a_draft_that_keeps_every_token_is_written_without_offsets(target: Path, tmp_path: Path) -> None:
    network = network_of(target, kept=320)
    report = Report(FIGURES, "<svg/>")
    write_draft(tmp_path / "all", network, Checkpoint(target), Origin("x", None, None), report, torch.ones(3, 32))
    assert Checkpoint(tmp_path / "all").config.tie_embeddings


@pytest.mark.parametrize(
    "changed",
    [
        *({"minutes": minutes} for minutes in (0.0, float("nan"))),
        *({"text_minutes": 9.0}, {"vocabulary": 3}, {"requests": 0}, {"context": 8}, {"batch": 0}, {"threads": 65}),
        *({"learning_rate": 0.0}, {"seed": -1}, {"kind": "eagle"}),
    ],
    ids=str,
)
def test_impossible_options_are_refused(target: Path, tmp_path: Path, changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changed))):
        options(target, tmp_path / "draft", **changed)


@pytest.mark.parametrize(
    "changed",
    [{"layers": 0}, {"hidden": 9999}, {"head_dim": 7}, {"heads": 3, "kv_heads": 2}, {"hidden": 128}, {"heads": 2000}],
    ids=str,
)
def test_impossible_sizes_are_refused_before_any_text(target: Path, tmp_path: Path, changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        distilled(options(target, tmp_path / "draft", **changed))
    assert not (tmp_path / "draft.state").exists()


def test_what_a_better_draft_would_replace_is_refused(target: Path, tmp_path: Path) -> None:
    output = tmp_path / "draft"
    for state in (output, output / "state"):
        with pytest.raises(ConfigError, match="which each better draft replaces"):
            options(target, output, state=state)
    with pytest.raises(ConfigError, match="choose another --output"):
        options(target, output, start=output, full_vocabulary=True, hidden=None)


def test_an_existing_folder_that_is_no_draft_is_kept(target: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is no distilled draft"):
        distilled(options(target, tmp_path))
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("hidden", [64, 576, 8192])
def test_default_sizes_suit_the_target(target: Path, hidden: int) -> None:
    wide = replace(Checkpoint(target).config, hidden_size=hidden)
    config = draft_config(DistillOptions(target, Path(), 1), wide)
    assert config.hidden_size <= hidden and config.num_heads % config.num_kv_heads == 0
    assert config.hidden_size % 32 == config.intermediate_size % 32 == 0
    assert config.head_dim % 2 == 0
    assert draft_config(DistillOptions(target, Path(), 1, hidden=36), wide).head_dim == 8, "rotary positions need pairs"
    if hidden == 576:
        assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (256, 4, 2, 64)


def test_a_target_says_its_name_and_licence(tmp_path: Path) -> None:
    folder = tmp_path / "Some-Model"
    folder.mkdir()
    assert origin_of(folder, folder) == Origin("Some-Model", None, None)
    assert origin_of(folder, Path("org/name@v2")) == Origin("org/name@v2", None, None), "downloaded to a cache"
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Some\nlicense: mit\n")
    (folder / "LICENSE").write_text("a licence")
    assert origin_of(folder, folder) == Origin("Some-Model", "apache-2.0", "a licence")
    (folder / "README.md").write_text("---\n" + "license: mit\n" * 80_000)  # took minutes
    assert origin_of(folder, folder).licence is None


# Command line


def test_the_command_writes_a_draft(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that counts calls, in all else as a user runs it."""
    whole = distill_module.distill

    def counting(options: DistillOptions, begin: Any, told: distill_module.Watch) -> distill_module.DistillResult:
        small = watch()
        return whole(options, begin, told._replace(clock=small.clock, measured=small.measured, limits=small.limits))

    monkeypatch.setattr(distill_module, "distill", counting)
    arguments = ["distill", "--target", str(target), "--output", str(tmp_path / "draft"), "--minutes", "8"]
    small = ["--text-minutes", "6", "--requests", "16", "--context", "32", "--batch", "2", "--hidden", "32"]
    assert main([*arguments, *small, "--vocabulary", "64", "--threads", "1", "--full-vocabulary", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["output"] == str(tmp_path / "draft") and printed["vocabulary"] == 64
    assert 0 <= printed["probability_of_untrained_tokens"] <= 1
    assert "draft_vocab_size" not in json.loads((tmp_path / "draft" / "config.json").read_text())
    assert main([*arguments, *small, "--text-minutes", "8", "--state", str(tmp_path / "s")]) == 0
    assert "Only text was written" in capsys.readouterr().out


# Loss


def test_the_loss_by_hand() -> None:
    """Known tokens 7, 8 and 9 of p; the draft lacks 9. q is (0.5, 0.3, 0.2) over 7, 8 and 5: 0.6 is accepted."""
    place_of = torch.full((12,), -1)
    place_of[torch.tensor([7, 8, 5])] = torch.arange(3)
    ids, p = torch.tensor([[7, 9, 8]]), torch.tensor([[0.4, 0.3, 0.2]])
    target = reachable(ids, p.log(), torch.tensor([0.1]), place_of)
    found = acceptance_loss(torch.tensor([[0.5, 0.3, 0.2]]).log() + 3, target)
    divergence = 0.4 * np.log((0.4 / 0.7) / 0.5) + 0.2 * np.log((0.2 / 0.7) / 0.3) + 0.1 * np.log((0.1 / 0.7) / 0.2)
    weight = np.exp(-3 * 0.6)
    assert found.item() == pytest.approx(weight * divergence + (1 - weight) * 0.4, rel=1e-5)


@given(st.integers(0, 2**31), st.integers(3, 30))
def test_the_loss_is_least_at_the_target(seed: int, size: int) -> None:
    """It is 0 where the draft has the target's distribution, and nowhere negative."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 2, (1, size)).astype(np.float32))
    logprobs, ids = logits.log_softmax(-1).sort(descending=True)
    target = reachable(ids, logprobs, torch.zeros(1), torch.arange(size))
    assert abs(acceptance_loss(logits, target).item()) < 1e-4
    other = torch.from_numpy(rng.normal(0, 2, (1, size)).astype(np.float32))
    assert acceptance_loss(other, target).item() > -1e-5


@given(st.integers(0, 2**31), st.sampled_from([0.7, 1.0]))
def test_overlap_is_exact_where_all_tokens_are_known_and_otherwise_lower(seed: int, temperature: float) -> None:
    rng = np.random.default_rng(seed)
    p, q = (torch.from_numpy(rng.normal(0, 2, (1, 20))) for _ in range(2))
    exact = torch.minimum((p / temperature).softmax(-1), (q / temperature).softmax(-1)).sum().item()
    logprobs, ids = p.log_softmax(-1).sort(descending=True)
    for known in (20, 8):
        tails = logprobs[:, known:].exp().sum(-1)
        target = reachable(ids[:, :known], logprobs[:, :known], tails, torch.arange(20))
        found = overlap(q, target, logprobs[:, :known], tails, temperature).item()
        assert found == pytest.approx(exact, abs=1e-6) if known == 20 else found <= exact + 1e-6
