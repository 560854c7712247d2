"""The synthetic pair: both models do what was asked, by margins that rounding does not touch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from benchmarks.tools import pair
from benchmarks.tools.pair import FIRST_WORD, SIZES, Agreement, make_tokenizer, write_pair
from draftwood.builder.tokenizer import check_same_vocabulary
from draftwood.models.errors import CheckpointError, ConfigError
from draftwood.runtime.text.tokenizer import Tokenizer

TINY = SIZES["tiny"]
AGREEMENT, SECOND = 0.7, 0.4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("pair") / "tiny"
    write_pair(TINY, AGREEMENT, SECOND, 1, output)
    return output


@pytest.fixture(scope="module")
def table() -> Agreement:
    return Agreement(TINY.vocab_size, AGREEMENT, SECOND, 1)


def best_two(model: Any, text: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The two most probable tokens behind every position of a text, [N, 2], and their logits."""
    with torch.no_grad():
        top = model(torch.from_numpy(text)[None]).logits[0].topk(2)
    return top.indices.numpy(), top.values.numpy()


def load(folder: Path) -> Any:
    """A checkpoint as transformers reads it. Any: the stubs do not fit the class they describe."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


@given(
    vocab_size=st.integers(FIRST_WORD + 4, FIRST_WORD + 300),
    agreement=st.floats(0, 1),
    second=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_one_cycle_and_exact_shares(vocab_size: int, agreement: float, second: float, seed: int) -> None:
    table = Agreement(vocab_size, agreement, second, seed)
    count = len(table.words)
    seen, word = set(), 0
    while word not in seen:
        seen.add(word)
        word = int(table.following[word])
    assert len(seen) == count == vocab_size - FIRST_WORD
    assert len(set(table.marked)) == len(table.marked) == round((1 - agreement) * count)
    assert set(table.seconds) <= set(table.marked) and len(table.seconds) == round(second * len(table.marked))
    assert not np.any(table.wrong == table.following)


def test_the_target_follows_the_cycle_and_the_draft_agrees_on_the_share(folder: Path, table: Agreement) -> None:
    order = np.random.default_rng(0).permutation(len(table.words))
    text, right = table.words[order], table.words[table.following[order]]
    chosen, logits = best_two(load(folder / "target"), text)
    assert np.array_equal(chosen[:, 0], right)
    assert np.min(logits[:, 0] - logits[:, 1]) > 4
    proposed, _ = best_two(load(folder / "draft"), text)
    # Every word is read once, so that only chance likeness of two random embeddings can move the shares.
    assert np.mean(proposed[:, 0] == right) == pytest.approx(AGREEMENT, abs=0.02)
    assert np.sum(proposed[:, 1] == right) / np.sum(proposed[:, 0] != right) == pytest.approx(SECOND, abs=0.08)


def test_greedy_text_neither_loops_nor_ends(folder: Path) -> None:
    (prompt,) = torch.tensor([Tokenizer.load(folder / "target").encode(first_prompt(folder))])
    text = load(folder / "target").generate(prompt[None], max_new_tokens=100, do_sample=False)[0, len(prompt) :]
    assert len(set(text.tolist())) == 100 and min(text.tolist()) >= FIRST_WORD


def first_prompt(folder: Path) -> str:
    line = (folder / "prompts.jsonl").read_text(encoding="utf-8").partition("\n")[0]
    return str(json.loads(line)["prompt"])


def four_bits(weight: torch.Tensor) -> torch.Tensor:
    """Rounded to 16 levels in blocks of 32, the coarsest any peer stores."""
    blocks = weight.reshape(-1, 32)
    scale = blocks.abs().amax(1, keepdim=True) / 7
    return torch.where(scale > 0, (blocks / scale).round().clamp(-8, 7) * scale, blocks).reshape(weight.shape)


@pytest.mark.parametrize("rounding", ["bf16", "int4"])
def test_the_text_survives_rounding(folder: Path, table: Agreement, rounding: str) -> None:
    model = load(folder / "target")
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16().float() if rounding == "bf16" or weight.dim() == 1 else four_bits(weight))
    text = table.words[np.random.default_rng(0).permutation(len(table.words))]
    chosen, logits = best_two(model, text)
    assert np.array_equal(chosen[:, 0], table.words[table.following[text - FIRST_WORD]])
    assert np.min(logits[:, 0] - logits[:, 1]) > 2


def test_the_same_seed_writes_the_same_files(folder: Path, tmp_path: Path) -> None:
    write_pair(TINY, AGREEMENT, SECOND, 1, tmp_path / "again")
    write_pair(TINY, AGREEMENT, SECOND, 2, tmp_path / "other")
    for file in ("target/model.safetensors", "draft/model.safetensors", "prompts.jsonl"):
        assert (folder / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
        assert (folder / file).read_bytes() != (tmp_path / "other" / file).read_bytes()


def test_both_tokenizers_are_one(folder: Path) -> None:
    target, draft = Tokenizer.load(folder / "target"), Tokenizer.load(folder / "draft")
    check_same_vocabulary(target, draft)
    assert target.vocab_size == TINY.vocab_size


@pytest.mark.parametrize("name", SIZES)
def test_the_vocabulary_has_the_size_of_the_model_and_loses_no_text(name: str) -> None:
    tokenizer = make_tokenizer(SIZES[name].vocab_size)
    assert tokenizer.get_vocab_size() == SIZES[name].vocab_size
    text = "The quick brown fox: 42 jumps, déjà vu\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_bad_input_is_refused_and_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--agreement is a share"):
        write_pair(TINY, 1.5, SECOND, 0, tmp_path / "pair")
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="choose another --output"):
        write_pair(TINY, AGREEMENT, SECOND, 0, folder)
    monkeypatch.setattr(sys, "argv", ["pair.py", "--size", "tiny", "--second", "2", "--output", str(tmp_path / "pair")])
    with pytest.raises(SystemExit) as ended:
        pair.main()
    assert ended.value.code == 2
