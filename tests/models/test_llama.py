"""The torch model itself: whole sequences, gradients, and batches, which no engine asks it for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import SHAPES, VOCAB_SIZE, write_checkpoint
from transformers import LlamaForCausalLM

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.models import bindings
from draftwood.models.layers import network_of
from draftwood.models.llama import Llama


def loaded(folder: Path, positions: int = 64) -> Llama:
    checkpoint = Checkpoint(folder)
    model = Llama(checkpoint.config, positions)
    names = network_of(checkpoint.config).tensors()
    model.load_state_dict({name: torch.from_numpy(checkpoint.tensor(name).copy()) for name in names})
    return model


def random_ids(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB_SIZE, shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_hidden_states_and_gradients_equal_transformers(shape: str, tmp_path: Path) -> None:
    folder, token_ids = write_checkpoint(tmp_path, shape), random_ids(2, 40)
    model, reference = loaded(folder), LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = model.full(token_ids)
    expected = reference(token_ids, output_hidden_states=True)
    torch.testing.assert_close(output.logits, expected.logits, atol=2e-4, rtol=0)
    torch.testing.assert_close(output.hidden, expected.hidden_states[-1], atol=2e-4, rtol=0)
    for logits in (output.logits, expected.logits):
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), token_ids[:, 1:].flatten())
        torch.autograd.backward(loss)
    gradients = {name: weight.grad for name, weight in reference.named_parameters()}
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name], atol=1e-4, rtol=1e-3, msg=name)


def test_both_ways_in_agree_for_a_batch(tmp_path: Path) -> None:
    """A prompt and a tree behind it, for two sequences at once; only chosen rows are scored."""
    model, tokens = loaded(write_checkpoint(tmp_path)), random_ids(2, 13)
    config = model.config
    cache = torch.zeros(2 * config.num_layers, 2, config.num_kv_heads, 64, config.head_dim)
    causal = torch.full((10, 10), bindings.MASKED).triu(1)[None, None]
    # Rows 10 and 11 are siblings behind the prompt, 12 is the child of 11.
    tree = torch.zeros(1, 1, 3, 13)
    tree[0, 0, 0, 11:] = tree[0, 0, 1, [10, 12]] = tree[0, 0, 2, 10] = bindings.MASKED
    positions, tree_positions = torch.arange(10).expand(2, -1), torch.tensor([[10, 10, 11]]).expand(2, -1)
    with torch.no_grad():
        prompt = model(tokens[:, :10], positions, causal, cache, 0, torch.tensor([9]))
        leaves = model(tokens[:, 10:], tree_positions, tree, cache, 10, torch.tensor([0, 2]))
        short = model.full(tokens[:, :11])
        long = model.full(tokens[:, [*range(10), 11, 12]])
    assert prompt.logits.shape == (2, 1, VOCAB_SIZE) and leaves.hidden.shape == (2, 2, config.hidden_size)
    torch.testing.assert_close(prompt.logits[:, 0], short.logits[:, 9], atol=2e-4, rtol=0)
    for leaf, expected in enumerate((short, long)):
        torch.testing.assert_close(leaves.logits[:, leaf], expected.logits[:, -1], atol=2e-4, rtol=0)
        torch.testing.assert_close(leaves.hidden[:, leaf], expected.hidden[:, -1], atol=2e-4, rtol=0)


def test_half_precision_stays_close(tmp_path: Path) -> None:
    model, token_ids = loaded(write_checkpoint(tmp_path)), random_ids(1, 30)
    with torch.no_grad():
        wide = model.full(token_ids).logits
        narrow = model.to(torch.bfloat16).full(token_ids).logits
    assert narrow.dtype == torch.bfloat16
    assert (narrow.float() - wide).abs().mean() < 0.05 * wide.std()
