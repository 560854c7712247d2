"""Training data of the acceptance head (SpecDec++, arXiv 2405.19715, section 4 and appendix): texts, labels, mixing.

For each prompt the target p generates X. The draft q reads prompt + X and draws one token beside each token of X:

    Y_t ~ q(· | prompt, X_<t)        p_acc_t = min(1, p(Y_t) / q(Y_t))        both under that prefix, raw softmax

The draft then reads prompt + Z, where Z_t is X_t with probability r and else Y_t, because the draft's context contains
its own tokens in decoding, too. The hidden state of each Y_t in Z is an example with the soft label p_acc_t ("mixed").

In decoding, the head's estimate of Y_t only matters when all tokens before it are accepted. Such a context is similar
to X, while the tokens of Z were each drawn after another text. Therefore "branched" examples read every Y_t after
prompt + X_<t itself, all in one pass with a tree mask. Held-out examples are always branched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...models.bindings import MASKED
from ...models.errors import ConfigError
from ...models.llama import Llama, LlamaOutput
from ...runtime.bundle.bundle import checksum
from ...runtime.bundle.cache import digest
from ..checkpoints.checkpoint import Checkpoint
from ..distillation.state import replace_file
from ..progress import Begin, remark
from .training import HeadTraining


class Responses(NamedTuple):
    """Texts of the target."""

    prefix: Tensor  # int64 [B, P], prompts, padded on the left
    padding: Tensor  # int64 [B]
    x: Tensor  # int64 [B, T], the generated tokens
    p: Tensor  # float32 [B, T, V], logits of the target before each token
    valid: Tensor  # bool [B, T], true up to the end of the text


class Labels(NamedTuple):
    """One draft token per position."""

    y: Tensor  # int64 [B, T]
    p_acc: Tensor  # float32 [B, T], the probability that the target accepts it


class Examples(NamedTuple):
    """What a head learns from."""

    hidden: Tensor  # float32 [N, d], the draft's state after reading one of its own tokens
    p_acc: Tensor  # float32 [N]


class Reader:
    """Reads a batch of texts, padded on the left, with one model and its KV cache. Texts do not affect each other."""

    def __init__(self, model: Llama, padding: Tensor, capacity: int) -> None:
        config = model.config
        self._model, self._padding, self._read = model, padding, 0
        shape = (2 * config.num_layers, len(padding), config.num_kv_heads, capacity, config.head_dim)
        self._cache = torch.zeros(shape, dtype=model.model.embed_tokens.weight.dtype)

    def read(self, tokens: Tensor, output_rows: Tensor) -> LlamaOutput:
        """Append tokens, int64 [B, T], to the texts and score their `output_rows`."""
        start, end = self._read, self._read + tokens.shape[1]
        rows, columns = torch.arange(start, end)[None, :, None], torch.arange(end)[None, None, :]
        seen = (columns <= rows) & (columns >= self._padding[:, None, None])
        mask = torch.where(seen, 0.0, MASKED)[:, None].to(self._cache.dtype)
        positions = (torch.arange(start, end)[None] - self._padding[:, None]).clamp(min=0)
        self._read = end
        output: LlamaOutput = self._model(tokens, positions, mask, self._cache, start, output_rows)
        return LlamaOutput(output.logits.float(), output.hidden.float())


@torch.no_grad()
def collect(
    target: Llama,
    draft: Llama,
    prompts: Sequence[Sequence[int]],
    eos: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    mixing_ratio: float | None,
    generator: torch.Generator,
    kept_tokens: NDArray[np.int64] | None = None,
) -> Examples:
    """All examples of one batch of prompts. eos: ids that end a text. mixing_ratio: r of mixed examples; None makes
    branched ones. kept_tokens: of a trimmed draft."""
    responses = sample_responses(target, prompts, eos, max_new_tokens, temperature, generator)
    prefix, padding, x, p, valid = responses
    capacity, rows = prefix.shape[1] + x.shape[1], prefix.shape[1] + torch.arange(x.shape[1])
    # The logits for x[t] are those of the row before it.
    q = Reader(draft, padding, capacity).read(torch.cat((prefix, x), 1), rows - 1).logits
    if kept_tokens is not None:  # the draft never draws another token
        q = torch.full_like(p, -torch.inf).index_copy(-1, torch.from_numpy(kept_tokens), q)
    drawn = [soft_labels(p[i : i + 1], q[i : i + 1], generator) for i in range(len(x))]  # bounds the memory
    y, p_acc = map(torch.cat, zip(*drawn, strict=True))
    if mixing_ratio is None:
        return Examples(branched(draft, responses, y)[valid], p_acc[valid])
    z, drafted = mix(x, y, mixing_ratio, generator)
    hidden = Reader(draft, padding, capacity).read(torch.cat((prefix, z), 1), rows).hidden
    kept = drafted & valid
    return Examples(hidden[kept], p_acc[kept])


@torch.no_grad()
def sample_responses(
    target: Llama,
    prompts: Sequence[Sequence[int]],
    eos: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> Responses:
    """Continue every prompt with the target, one token at a time, until all texts have ended. eos: ids that end a text.
    temperature: 0 is greedy."""
    longest = max(map(len, prompts))
    padding = torch.tensor([longest - len(prompt) for prompt in prompts])
    prefix = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    ends = torch.tensor(eos, dtype=torch.int64)
    reader = Reader(target, padding, longest + max_new_tokens)
    rows, going = prefix, torch.ones(len(prompts), dtype=torch.bool)
    x, valid = [], []
    p = torch.empty(len(prompts), max_new_tokens, target.config.vocab_size)  # once: it is the most of the memory
    for step in range(max_new_tokens):
        logits = reader.read(rows, torch.tensor([rows.shape[1] - 1])).logits[:, 0]
        if temperature == 0:
            rows = logits.argmax(-1, keepdim=True)
        else:
            rows = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        x.append(rows[:, 0])
        p[:, step] = logits
        valid.append(going)
        going = going & ~torch.isin(rows[:, 0], ends)
        if not going.any():
            break
    return Responses(prefix, padding, torch.stack(x, 1), p[:, : len(x)], torch.stack(valid, 1))


def soft_labels(p: Tensor, q: Tensor, generator: torch.Generator) -> Labels:
    """Draw Y_t ~ q, and compute min(1, p(Y_t) / q(Y_t)), from the logits [B, T, V] of both models."""
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    y = torch.multinomial(log_q.exp().flatten(0, 1), 1, generator=generator).view(*q.shape[:2], 1)
    ratio = (log_p.gather(-1, y) - log_q.gather(-1, y)).clamp(max=0).exp()
    return Labels(y[..., 0], ratio[..., 0])


def mix(x: Tensor, y: Tensor, ratio: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Z [B, T], and a mask of the positions with Y. Each position has X with probability `ratio`, else Y."""
    drafted = torch.rand(x.shape, generator=generator) >= ratio
    return torch.where(drafted, y, x), drafted


def branched(draft: Llama, responses: Responses, y: Tensor) -> Tensor:
    """The draft's hidden state [B, T, d] after each y[t] with the context prompt + x[:t]. The rows of y are leaves of a
    tree whose trunk is the text."""
    prefix, padding, x, _, _ = responses
    trunk, leaves = prefix.shape[1] + x.shape[1], prefix.shape[1] + torch.arange(x.shape[1])
    positions = torch.cat((torch.arange(trunk), leaves))  # a leaf has the position of the text's token beside it
    rows = torch.arange(len(positions))
    ancestors = (rows < trunk) & (rows < positions[:, None]) | (rows == rows[:, None])
    seen = ancestors & (rows >= padding[:, None, None])
    config = draft.config
    shape = (2 * config.num_layers, len(padding), config.num_kv_heads, len(rows), config.head_dim)
    cache = torch.zeros(shape, dtype=draft.model.embed_tokens.weight.dtype)
    output: LlamaOutput = draft(
        torch.cat((prefix, x, y), 1),
        (positions - padding[:, None]).clamp(min=0),
        torch.where(seen, 0.0, MASKED)[:, None].to(cache.dtype),
        cache,
        0,
        rows[trunk:],
    )
    return output.hidden.float()


def load_frozen(checkpoint: Checkpoint, positions: int, dtype: torch.dtype = torch.float32) -> Llama:
    """A checkpoint as a model whose weights are not trained. dtype: of the weights, the cache and the products."""
    with torch.device("meta"):  # takes neither memory nor time for weights that are replaced below
        model = Llama(checkpoint.config, positions)
    state = {
        name: torch.from_numpy(np.array(checkpoint.tensor(name), np.float32)).to(dtype) for name in model.state_dict()
    }
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False)


class Collected:
    """The examples of batches that earlier runs of the same command have collected, in a folder beside the output."""

    def __init__(self, options: HeadTraining, prompts: Sequence[Sequence[int]], begin: Begin) -> None:
        asked = {name: str(value) for name, value in asdict(options).items() if name not in ("output", "epochs")}
        contents = [digest(options.target), digest(options.draft)]
        key = checksum({"options": asked, "models": contents, "prompts": [list(prompt) for prompt in prompts]})
        output = options.output.resolve()
        self.folder = output.with_name(f"{output.name}.state")
        self._key = key[:12]
        if found := len(list(self.folder.glob(f"{self._key}-*.safetensors"))):
            remark(begin, f"Going on with {self.folder}: it has the examples of {found} batches")

    def examples(self, name: str, generator: torch.Generator, collect: Callable[[], Examples]) -> Examples:
        """The stored examples of a batch, or those of `collect`, which are stored with the generator's state after
        them. Raises ConfigError if the folder cannot be written or read."""
        file = self.folder / f"{self._key}-{name}.safetensors"
        if not file.is_file():
            found = collect()
            stored = {"hidden": found.hidden, "p_acc": found.p_acc, "generator": generator.get_state()}
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"{self.folder} cannot be written ({error.strerror}): choose another --output"
                ) from error
            replace_file(file, lambda partial: save_file(stored, partial))
            return found
        try:
            read = load_file(file)
            generator.set_state(read["generator"])
            return Examples(read["hidden"], read["p_acc"])
        except (OSError, SafetensorError, KeyError, RuntimeError, TypeError) as error:
            raise ConfigError(f"{file} cannot be used ({error}): remove it") from error

    def remove(self) -> None:
        """Remove the examples, and the folder if nothing else is in it, when the head is written."""
        with suppress(OSError):
            for file in self.folder.glob(f"{self._key}-*.safetensors"):
                file.unlink()
            self.folder.rmdir()
