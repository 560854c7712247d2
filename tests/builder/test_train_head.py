"""SpecDec++ training: labels, loss, calibration, and a head that says the same in torch and in the engine (I13)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from steps import noted, quiet

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.head import train as train_module
from draftwood.builder.head.calibration import calibration, fit_temperature, sigmoid
from draftwood.builder.head.data import Collected, Examples, collect, load_frozen, mix, sample_responses, soft_labels
from draftwood.builder.head.network import AcceptanceHead
from draftwood.builder.head.train import HELD_OUT, acceptance_loss, fit, gather, judge
from draftwood.builder.head.training import HeadResult, HeadTraining
from draftwood.models import bindings
from draftwood.models.errors import RequestError
from draftwood.models.head_config import HeadConfig
from draftwood.models.llama import Llama

EOS = (2,)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def pair(tiny_pair: Path) -> tuple[Llama, Llama]:
    target, draft = (load_frozen(Checkpoint(tiny_pair / role), 128) for role in bindings.ROLES)
    return target, draft


def test_an_interrupted_training_goes_on_and_gives_the_same_head(
    tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small: dict[str, int] = {"texts": 6, "batch_size": 2, "epochs": 1, "max_new_tokens": 6, "layers": 1}
    models, prompts = (tiny_pair / "target", tiny_pair / "draft"), ["one", "two", "three", "four"]
    plain, resumed = (HeadTraining(*models, tmp_path / name, **small) for name in ("plain", "resumed"))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="2 different prompts"):
        train_module.train_head(plain, ["one", "one"], quiet)
    train_module.train_head(plain, prompts, quiet)
    calls, titles = list[int](), list[str]()

    def collected_twice(*arguments: Any) -> Examples:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return collect(*arguments)

    monkeypatch.setattr(train_module, "collect", collected_twice)
    with pytest.raises(KeyboardInterrupt):
        train_module.train_head(resumed, prompts, quiet)
    train_module.train_head(resumed, prompts, noted(titles))
    assert len(calls) == 5 and any("has the examples of 1 batches" in title for title in titles)
    heads = [(options.output / "head.safetensors").read_bytes() for options in (plain, resumed)]
    assert heads[0] == heads[1] and sorted(tmp_path.iterdir()) == [plain.output, resumed.output]


@pytest.mark.parametrize("contexts", ["mixed", "branched"])
def test_large_models_read_in_bf16_where_it_is_fast(
    contexts: str, tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their labels are those of fp32 up to rounding, and the head is in fp32."""
    found: dict[torch.dtype, Examples] = {}
    options = HeadTraining(tiny_pair / "target", tiny_pair / "draft", tmp_path / "head", contexts=contexts, texts=8)
    checkpoints = {role: Checkpoint(tiny_pair / role) for role in bindings.ROLES}
    monkeypatch.setattr(train_module, "is_half_fast", lambda device: True)
    for smallest, dtype in ((1 << 40, torch.float32), (1, torch.bfloat16)):
        monkeypatch.setattr(train_module, "SMALL_MODEL", smallest)
        assert train_module.dtype_of(checkpoints["target"]) is dtype
        collected = Collected(options, [[1, 5], [1, 7, 9]], quiet)
        collected.folder = tmp_path / str(dtype)
        found[dtype] = gather(options, checkpoints, [[1, 5], [1, 7, 9]], 8, "training", quiet, seeded(), collected)
    wide, half = found[torch.float32], found[torch.bfloat16]
    assert half.hidden.dtype == half.p_acc.dtype == torch.float32
    assert abs(float(wide.p_acc.mean() - half.p_acc.mean())) < 0.1
    assert not torch.equal(wide.hidden[:4], half.hidden[:4])
    monkeypatch.setattr(train_module, "is_half_fast", lambda device: False)
    assert train_module.dtype_of(checkpoints["target"]) is torch.float32


# Labels


def test_texts_of_a_padded_batch_are_those_the_target_writes_alone(pair: tuple[Llama, Llama]) -> None:
    """p holds the logits each token was sampled from, whatever stands beside it in the batch."""
    prompts = [[1, 5, 9], [1, 7, 30, 40, 50, 60, 70], [1]]
    prefix, padding, x, p, valid = sample_responses(pair[0], prompts, EOS, 8, 1.0, seeded())
    assert prefix.shape == (3, 7) and padding.tolist() == [4, 0, 6] and valid[:, 0].all()
    for row, prompt in enumerate(prompts):
        text = torch.tensor([[*prompt, *x[row].tolist()]])
        alone = pair[0].full(text).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(p[row], alone, rtol=0, atol=2e-4)


def test_greedy_texts_follow_the_best_token(pair: tuple[Llama, Llama]) -> None:
    responses = sample_responses(pair[0], [[1, 5, 9]], EOS, 8, 0.0, seeded())
    assert torch.equal(responses.x, responses.p.argmax(-1))


def test_nothing_counts_behind_the_end_of_text(pair: tuple[Llama, Llama]) -> None:
    even = range(0, pair[0].config.vocab_size, 2)
    responses = sample_responses(pair[0], [[1, 5], [1, 6, 7], [1, 8]], even, 20, 1.0, seeded())
    for x, valid in zip(responses.x, responses.valid, strict=True):
        ends = [place for place, token in enumerate(x.tolist()) if token % 2 == 0]
        last = ends[0] if ends else len(x) - 1
        assert valid.tolist() == [place <= last for place in range(len(x))]


def test_texts_end_where_generation_config_says(tiny_pair: Path, tmp_path: Path) -> None:
    """As those of a bundle do; config.json may know fewer ids."""
    target = Path(shutil.copytree(tiny_pair / "target", tmp_path / "target"))
    checkpoints = {bindings.TARGET: Checkpoint(target), bindings.DRAFT: Checkpoint(tiny_pair / "draft")}
    every = list(range(checkpoints[bindings.TARGET].config.vocab_size))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": every}))
    options = HeadTraining(target, tiny_pair / "draft", tmp_path / "head", max_new_tokens=8)
    examples = gather(
        options, checkpoints, [[1, 5, 9], [1, 6]], 2, HELD_OUT, quiet, seeded(), Collected(options, [], quiet)
    )
    assert len(examples.p_acc) == 2  # a token of each text


def test_i13_labels_by_hand() -> None:
    """p_acc = min(1, p(Y) / q(Y)) of raw softmaxes; their mean over Y ~ q is 1 - TV(p, q)."""
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    y, p_acc = soft_labels(p.log().expand(1, 4000, 3), q.log().expand(1, 4000, 3), seeded())
    torch.testing.assert_close(p_acc, torch.tensor([1.0, 2 / 3, 0.25])[y])
    assert abs(float(p_acc.mean()) - (0.3 + 0.2 + 0.1)) < 0.03
    assert np.allclose(np.bincount(y.flatten().numpy()) / 4000, q, atol=0.03)


def test_i13_an_example_is_the_state_of_a_drafted_token_after_the_final_norm(pair: tuple[Llama, Llama]) -> None:
    """X positions of the mixed text are in its context and in no example: the loss cannot see them."""
    target, draft = pair
    prompt = [1, 5, 9]
    found = collect(target, draft, [prompt], EOS, 16, 1.0, 0.5, seeded(3))
    generator = seeded(3)
    responses = sample_responses(target, [prompt], EOS, 16, 1.0, generator)
    q = draft.full(torch.cat((responses.prefix, responses.x), 1)).logits[:, len(prompt) - 1 : -1]
    y, p_acc = soft_labels(responses.p, q, generator)
    z, drafted = mix(responses.x, y, 0.5, generator)
    hidden = draft.full(torch.cat((responses.prefix, z), 1)).hidden[:, len(prompt) :]
    kept = drafted & responses.valid
    assert 0 < int(kept.sum()) < 16 and torch.equal(z[~drafted], responses.x[~drafted])
    torch.testing.assert_close(found.hidden, hidden[kept], rtol=0, atol=2e-4)
    torch.testing.assert_close(found.p_acc, p_acc[kept], rtol=0, atol=2e-4)


def test_a_branched_example_is_the_state_behind_the_targets_own_text(pair: tuple[Llama, Llama]) -> None:
    """Every Y_t as if the draft had read prompt + X_<t + Y_t alone, whatever the padding."""
    prompts = [[1, 5, 9, 8, 7], [1, 6]]
    found = collect(*pair, prompts, EOS, 6, 1.0, None, seeded(3))
    generator = seeded(3)
    _, _, x, p, valid = sample_responses(pair[0], prompts, EOS, 6, 1.0, generator)
    texts = [[*prompt, *x[row].tolist()] for row, prompt in enumerate(prompts)]
    q = torch.stack([pair[1].full(torch.tensor([text])).logits[0, -x.shape[1] - 1 : -1] for text in texts])
    y, p_acc = soft_labels(p, q, generator)
    states = []
    for row, place in valid.nonzero().tolist():
        text = [*prompts[row], *x[row, :place].tolist(), int(y[row, place])]
        states.append(pair[1].full(torch.tensor([text])).hidden[0, -1])
    torch.testing.assert_close(found.hidden, torch.stack(states), rtol=0, atol=2e-4)
    torch.testing.assert_close(found.p_acc, p_acc[valid], rtol=0, atol=2e-4)


# Loss and calibration


def test_loss_by_hand() -> None:
    logits = torch.tensor([[0.0, 1.0], [2.0, -1.0]])
    log_P = logits.log_softmax(-1)
    wanted = -(6 * 0.25 * log_P[0, 0] + 0.75 * log_P[0, 1] + 6 * log_P[1, 0]) / (6 * 0.25 + 0.75 + 6)
    torch.testing.assert_close(acceptance_loss(logits, torch.tensor([0.75, 0.0]), 6.0), wanted)


def test_i13_only_the_head_learns(pair: tuple[Llama, Llama]) -> None:
    before = {name: tensor.clone() for name, tensor in pair[1].state_dict().items()}
    examples = collect(*pair, [[1, 5, 9]], EOS, 12, 1.0, 0.15, seeded())
    head = AcceptanceHead(HeadConfig(pair[1].config.hidden_size))
    acceptance_loss(head(examples.hidden), examples.p_acc, 6.0).backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is None for model in pair for parameter in model.parameters())
    assert head.output.weight.grad is not None and head.output.weight.grad.abs().sum() > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in pair[1].state_dict().items())


def synthetic(count: int, seed: int) -> tuple[Examples, torch.Tensor]:
    """Hidden states whose true acceptance is known, with hard 0/1 labels drawn from it."""
    hidden = torch.randn(count, 8, generator=seeded(seed))
    truth = torch.sigmoid(hidden[:, 0] - hidden[:, 1] + 0.5)
    return Examples(hidden, torch.bernoulli(truth, generator=seeded(seed + 100))), truth


def fitted(w_rej: float) -> tuple[AcceptanceHead, HeadResult, torch.Tensor, Examples]:
    train, _ = synthetic(8000, 0)
    held, truth = synthetic(4000, 1)
    options = HeadTraining(Path(), Path(), Path(), layers=1, reject_weight=w_rej, epochs=8, learning_rate=0.01)
    head = AcceptanceHead(options.head(8))
    training, validation = fit(head, train, held, options, quiet, seeded())
    return head, judge(head, held, training, validation, train, 0.0), truth, held


@pytest.mark.parametrize("w_rej", [6.0, *(pytest.param(each, marks=pytest.mark.full) for each in (1.0, 12.0))])
def test_the_weights_bias_is_removed_exactly(w_rej: float) -> None:
    """As trained, the odds are the true ones divided by w_rej; de-biased, they are the true ones."""
    head, result, truth, held = fitted(w_rej)
    with torch.no_grad():
        logits = head(held.hidden)
        raw = torch.sigmoid(logits[:, 1] - logits[:, 0])
        debiased = head.acceptance(held.hidden)
    biased = truth / (truth + w_rej * (1 - truth))
    assert float((debiased - truth).abs().mean()) < 0.05
    assert float((raw - biased).abs().mean()) < 0.05
    if w_rej > 1:
        assert float(raw.mean()) < float(truth.mean()) - 0.2
        assert result.raw.nll > result.debiased.nll and result.raw.ece > 3 * result.debiased.ece
    assert result.calibrated.nll <= result.debiased.nll < result.constant.nll
    assert result.loss == min(point.loss for point in result.validation) < result.validation[0].loss


@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
def test_temperature_scaling_undoes_a_scale_and_never_hurts(scale: float) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0.5, 1.5, 20_000)
    labels = (rng.random(20_000) < sigmoid(logits)).astype(np.float64)
    temperature = fit_temperature(logits * scale, labels)
    assert temperature == pytest.approx(scale, rel=0.06)
    before, after = calibration(logits * scale, labels), calibration(logits * scale / temperature, labels)
    assert after.nll <= before.nll + 1e-12 and after.ece < max(0.02, before.ece)


def test_calibration_by_hand() -> None:
    """Two bins: three tokens predicted at 0.25 of which 2/3 came true, one at 0.75 that half did."""
    logits = np.log(np.array([1 / 3, 1 / 3, 1 / 3, 3.0]))
    found = calibration(logits, np.array([1.0, 1.0, 0.0, 0.5]))
    assert [(each.tokens, round(each.predicted, 6)) for each in found.bins] == [(3, 0.25), (1, 0.75)]
    assert found.ece == pytest.approx((3 * abs(0.25 - 2 / 3) + 0.25) / 4)
    nll = -(2 * np.log(0.25) + np.log(0.75) + 0.5 * np.log(0.75) + 0.5 * np.log(0.25)) / 4
    assert found.nll == pytest.approx(nll) and found.binary_kl == pytest.approx(nll - np.log(2) / 4)
    extreme = calibration(np.array([-900.0, 900.0]), np.array([0.0, 1.0]))
    assert extreme.nll == 0 and extreme.ece == 0
