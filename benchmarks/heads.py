"""A draft that reads its target's states against a plain one that learned from the same text.

    draftwood distill --target MODEL.gguf --output DRAFT --minutes 60 --text-minutes 30
    python -m benchmarks.heads states MODEL.gguf DRAFT.state
    python -m benchmarks.heads train MODEL.gguf DRAFT.state --minutes 30
    python -m benchmarks.heads judge MODEL.gguf DRAFT.state --plain DRAFT --output benchmarks/results

The head is EAGLE-3's (2503.01840), one layer over the target's states and the embedding of the token after them, with
the target's own output; a matrix of its own adds the embedding, too. It learns to draft STEPS tokens in a row, by the
LK loss (2602.23881). `judge` replays chains along answers from which neither draft has learned.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.tools.record import add_output, make_parser, write_results
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.distillation.draft import read_start
from draftwood.builder.distillation.loss import Reachable, overlap, reachable
from draftwood.builder.distillation.network import DraftNetwork
from draftwood.builder.distillation.state import ANSWER, ANSWER_TEMPERATURES, GIVEN, TextStore
from draftwood.builder.distillation.target import COLUMNS
from draftwood.builder.torch_settings import is_half_fast, torch_settings
from draftwood.models.layers import EMBEDDING_WEIGHT, HEAD_WEIGHT
from draftwood.models.llama import Llama, causal
from draftwood.models.rope import rope_tables

STEPS = 3  # tokens that are drafted in a row
BRANCHES = 4  # of a tree of one level, which a target checks in the time of a plain pass
LENGTH, SEQUENCES = 512, 3  # of a training step
RATE, WARM_UP, LAST_RATE = 1.2e-3, 40, 0.02  # the last one over the first
FADE = 0.8  # weight of a drafted token in the loss, over that of the one before
INNER = 2  # feed-forward size over the hidden size
TAPS = (0.25, 0.6, 1.0)  # shares of the target's layers
MEASURED = 120.0  # seconds between two estimates
LONGEST = 4096  # tokens of a text
CPU = torch.device("cpu")


class Texts(NamedTuple):
    """Texts one after the other, T tokens in all; K columns as in WrittenText."""

    tokens: Tensor  # int64 [T]
    texts: Tensor  # int64 [T], a number for each text
    kinds: Tensor  # uint8 [T]
    ids: Tensor  # int64 [T, K]
    logprobs: Tensor  # float16 [T, K]
    tails: Tensor  # float16 [T]
    states: Tensor  # float16 [T, taps * H]

    def targets(self, places: Tensor, step: int, place_of: Tensor) -> tuple[Tensor, Reachable]:
        """Which places [N] have a token of their own text to draft at a step, bool [N], and its distributions. A place
        knows its state and the token after it."""
        at = places + 2 + step
        scored = (self.texts[places] == self.texts[at]) & (self.kinds[at] != GIVEN)
        at = at[scored]
        given = self.ids[at], self.logprobs[at].float(), self.tails[at].float(), self.tokens[at]
        return scored, reachable(*given, place_of)


def read(state: Path, vocab_size: int, held_out: bool) -> Texts:
    """The texts of a state folder that have states."""
    numbers, columns = list[NDArray[np.int64]](), list[tuple[NDArray[np.generic], ...]]()
    for text in TextStore(state / "texts", vocab_size, COLUMNS).read():
        file = file_of(state, text.number)
        if text.is_held_out == held_out and file.is_file():
            numbers.append(np.full(len(text.tokens), len(numbers)))
            columns.append((*text[2:], np.load(file)))
    tokens, kinds, ids, logprobs, tails, states = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    whole = tokens.astype(np.int64), np.concatenate(numbers), kinds, ids.astype(np.int64), logprobs, tails, states
    return Texts(*map(torch.from_numpy, whole))


def file_of(state: Path, number: int) -> Path:
    return state / "states" / f"{number}.npy"


@torch.inference_mode()
def write_states(target: Checkpoint, state: Path) -> None:
    """Rows of the target after TAPS of its layers, for every text that has none yet, float16 [T, taps * H]."""
    taps = tuple(round(share * target.config.num_layers) for share in TAPS)
    model = Llama(replace(target.config, taps=taps), LONGEST)
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.from_numpy(target.tensor(name).astype(np.float32)))
    for text in TextStore(state / "texts", target.config.vocab_size, COLUMNS).read():
        file = file_of(state, text.number)
        if not file.is_file():
            with torch.autocast("cpu", torch.bfloat16, enabled=is_half_fast(CPU)):
                tokens = torch.from_numpy(text.tokens.astype(np.int64))[None]
                rotary = model.rotary(torch.arange(tokens.shape[1])[None])
                _, states = model.model(tokens, rotary, causal)
            assert states is not None
            file.parent.mkdir(exist_ok=True)
            np.save(file, states[0].half().numpy())


class Seen(NamedTuple):
    """What a place attends to: the first step's rows of its own text up to itself, and its own rows of the steps
    since."""

    keys: list[Tensor]  # of each step, [B, H, L, D]
    values: list[Tensor]
    hidden: Tensor  # bool [B, 1, L, L]

    def attend(self, query: Tensor) -> Tensor:
        scale, length = query.shape[-1] ** -0.5, query.shape[-2]
        scores = (query @ self.keys[0].transpose(-1, -2) * scale).masked_fill(self.hidden, -1e9)
        own = [(query * keys).sum(-1, keepdim=True) * scale for keys in self.keys[1:]]
        probs = torch.cat([scores, *own], -1).float().softmax(-1).to(query.dtype)
        rows = probs[..., :length] @ self.values[0]
        for step, values in enumerate(self.values[1:]):
            rows = rows + probs[..., length + step, None] * values
        return rows


class Head(nn.Module):
    """See the module. The embedding and the output are the target's and do not learn."""

    embedding: Tensor
    rows: Tensor
    rope: Tensor

    def __init__(self, target: Checkpoint, kept: NDArray[np.int64], inputs: int) -> None:
        """kept: the tokens that it writes. inputs: numbers of a row of states, those of the last layer last."""
        super().__init__()
        config = self.config = target.config
        size, inner, query, kv = config.hidden_size, INNER * config.hidden_size, config.query_size, config.kv_size
        self.fc, self.token = nn.Linear(inputs, size, False), nn.Linear(size, size, False)
        self.qkv, self.output = nn.Linear(2 * size, query + 2 * kv, False), nn.Linear(query, size, False)
        self.gate, self.up, self.down = (nn.Linear(*shape, False) for shape in ((size, inner),) * 2 + ((inner, size),))
        self.norms = nn.ModuleList(nn.RMSNorm(size, config.norm_eps) for _ in range(4))
        output = EMBEDDING_WEIGHT if config.tie_embeddings else HEAD_WEIGHT
        embedding, rows = (target.tensor(name).astype(np.float32) for name in (EMBEDDING_WEIGHT, output))
        self.register_buffer("embedding", torch.from_numpy(embedding).bfloat16(), persistent=False)
        self.register_buffer("rows", torch.from_numpy(rows[kept]), persistent=False)
        tables = torch.from_numpy(np.stack(rope_tables(config, LONGEST)))
        self.register_buffer("rope", tables.repeat(1, 1, 2), persistent=False)
        self.last = torch.from_numpy(target.tensor("model.norm.weight").astype(np.float32))

    def begin(self, states: Tensor) -> None:
        """Start as the target's own last row, at the scale of its norm. states: [N, inputs], of any text."""
        size = self.config.hidden_size
        scale = states[:, -size:].float().square().mean(-1).sqrt().median()
        with torch.no_grad():
            for silent in (self.output, self.down, self.token):
                silent.weight.zero_()
            self.fc.weight.zero_()[:, -size:] = torch.diag(self.last) / scale
            entered: Tensor = self.fc(states.float())
            nn.init.constant_(self.norms[3].get_parameter("weight"), float(entered.square().mean(-1).sqrt().median()))

    def turned(self, rows: Tensor, positions: Tensor) -> Tensor:
        cosine, sine = self.rope[:, None, None, positions].to(rows.dtype).unbind()
        half = rows.shape[-1] // 2
        return rows * cosine + torch.cat((-rows[..., half:], rows[..., :half]), -1) * sine

    def forward(self, tokens: Tensor, states: Tensor, texts: Tensor) -> Iterator[Tensor]:
        """Rows [B, L, size] before the output, of each step. tokens: int64 [B, L + STEPS], those after each state.
        states: [B, L, inputs]. texts: int64 [B, L], a number for each text."""
        config, length = self.config, states.shape[1]
        before, of_token, after, last = self.norms
        hidden = (texts[:, :, None] != texts[:, None, :]) | ~torch.ones(length, length, dtype=torch.bool).tril()
        seen, groups = Seen([], [], hidden[:, None]), config.num_heads // config.num_kv_heads
        rows = self.fc(states).float()
        for step in range(STEPS):
            token = of_token(self.embedding[tokens[:, step : step + length]].float())
            parts = self.qkv(torch.cat((token, before(rows)), -1)).split(
                (config.query_size, config.kv_size, config.kv_size), -1
            )
            query, keys, values = (part.unflatten(-1, (-1, config.head_dim)).transpose(1, 2) for part in parts)
            positions = torch.arange(length) + step
            seen.keys.append(self.turned(keys, positions).repeat_interleave(groups, 1))
            seen.values.append(values.repeat_interleave(groups, 1))
            attended = seen.attend(self.turned(query, positions)).transpose(1, 2).flatten(2)
            rows = rows + self.output(attended) + self.token(token)
            normed = after(rows)
            rows = rows + self.down(functional.silu(self.gate(normed)) * self.up(normed))
            yield last(rows)


def acceptance_loss(logits: Tensor, target: Reachable) -> Tensor:
    """LK: KL, and the more the draft is right, the more of 1 - acceptance in its place. logits: [N, outputs]."""
    logs = logits.log_softmax(-1, torch.float32).gather(-1, target.places)
    known = target.probs > 0
    divergence = torch.where(known, target.probs * (target.probs.clamp_min(1e-30).log() - logs), 0.0).sum(-1)
    accepted = torch.minimum(target.probs, torch.where(known, logs.exp(), 0.0)).sum(-1)
    weight = (-3 * accepted.detach()).exp()
    return (weight * divergence + (1 - weight) * (1 - accepted)).mean()


def train(head: Head, place_of: Tensor, found: Texts, held_out: Texts, seconds: float, file: Path) -> None:
    """AdamW on random sequences, for so many seconds. Writes the head at each estimate."""
    decays = [{"params": [each for each in head.parameters() if each.ndim == 2], "weight_decay": 0.01}]
    groups = [*decays, {"params": [each for each in head.parameters() if each.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)
    generator, steps, spent, measured = torch.Generator().manual_seed(0), 0, 0.0, 0.0
    head.begin(found.states[:LONGEST])
    started = monotonic()
    while spent < seconds:
        starts = torch.randint(len(found.tokens) - LENGTH - STEPS - 2, (SEQUENCES, 1), generator=generator)
        places, ahead = starts + torch.arange(LENGTH), starts + 1 + torch.arange(LENGTH + STEPS)
        cosine = LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * spent / seconds))
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (steps + 1) / WARM_UP) * cosine
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half_fast(CPU)):
            drafted = head(found.tokens[ahead], found.states[places].float(), found.texts[places])
            parts = list[Tensor]()
            for step, rows in enumerate(drafted):
                scored, target = found.targets(places.flatten(), step, place_of)
                logits = functional.linear(rows.flatten(0, 1)[scored], head.rows)
                parts.append(FADE**step * acceptance_loss(logits, target))
        torch.stack(parts).sum().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        steps, spent = steps + 1, monotonic() - started
        if spent - measured >= MEASURED or spent >= seconds:
            told = " ".join(f"{np.nanmean(each):.3f}" for each in judge_head(head, place_of, held_out)[0])
            print(f"{spent / 60:.1f} minutes, {steps * SEQUENCES * LENGTH} places, right: {told}", flush=True)
            torch.save(head.state_dict(), file)
            measured, started = spent, monotonic() - spent  # estimates do not count


class Judged(NamedTuple):
    """Of each token of an answer, and of the token drafted for it at each step: [STEPS, T], NaN elsewhere."""

    right: NDArray[np.float64]  # at temperature 0, whether it is the target's best
    accepted: NDArray[np.float64]  # at 0.7, the sum of min(p, q)
    among: NDArray[np.float64]  # at temperature 0, whether the target's best is among the draft's BRANCHES best

    def note(self, step: int, found: Texts, at: Tensor, logits: Tensor, place_of: Tensor) -> None:
        """What logits [N, outputs] say about the tokens at these places [N]."""
        kept = (place_of >= 0).nonzero()[:, 0]
        greedy, drawn = found.kinds[at] == ANSWER, found.kinds[at] == ANSWER + 1
        likely = kept[logits[greedy].topk(BRANCHES).indices] == found.ids[at[greedy], :1]
        self.right[step, at[greedy]], self.among[step, at[greedy]] = likely[:, 0].double(), likely.any(-1).double()
        at, logprobs, tails = at[drawn], found.logprobs[at[drawn]].float(), found.tails[at[drawn]].float()
        target = reachable(found.ids[at], logprobs, tails, found.tokens[at], place_of)
        self.accepted[step, at] = overlap(logits[drawn], target, logprobs, tails, ANSWER_TEMPERATURES[1])

    def tokens_a_pass(self, length: int) -> list[float]:
        """Of chains of this length from every place on, expected, at both temperatures."""
        result = []
        for each in (self.right, self.accepted):
            count = each.shape[1] - length
            chances = np.stack([each[step, step : step + count] for step in range(length)])
            result.append(1 + np.cumprod(chances[:, ~np.isnan(chances).any(0)], 0).sum(0).mean())
        return [round(float(value), 3) for value in result]

    def to_dict(self) -> dict[str, float | list[float] | list[list[float]]]:
        return {
            "right": [round(float(np.nanmean(each)), 3) for each in self.right],
            "accepted": [round(float(np.nanmean(each)), 3) for each in self.accepted],
            "tokens a pass, by length of a chain": [self.tokens_a_pass(length + 1) for length in range(STEPS)],
            f"tokens a pass of {BRANCHES} branches": round(1 + float(np.nanmean(self.among[0])), 3),
        }


def empty(found: Texts) -> Judged:
    return Judged(*np.full((3, STEPS, len(found.tokens) + STEPS), np.nan))


@torch.inference_mode()
def judge_head(head: Head, place_of: Tensor, found: Texts) -> Judged:
    judged = empty(found)
    for places in texts_of(found):
        tokens = functional.pad(found.tokens[places[1:]], (0, STEPS + 1))[None]
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half_fast(CPU)):
            for step, rows in enumerate(head(tokens, found.states[places].float()[None], found.texts[places][None])):
                usable = places[: len(places) - 2 - step]
                scored, _ = found.targets(usable, step, place_of)
                logits = functional.linear(rows[0, : len(usable)][scored], head.rows).float()
                judged.note(step, found, usable[scored] + 2 + step, logits, place_of)
    return judged


@torch.inference_mode()
def judge_plain(network: DraftNetwork, found: Texts) -> Judged:
    """Along the true text all steps are alike."""
    judged = empty(found)
    for places in texts_of(found):
        rows, _ = network.llama.model(
            found.tokens[places][None], network.llama.rotary(torch.arange(len(places))[None]), causal
        )
        scored = found.kinds[places[1:]] != GIVEN
        logits = functional.linear(network.llama.model.norm(rows[0, :-1][scored]), network.projection()).float()
        for step in range(STEPS):
            judged.note(step, found, places[1:][scored], logits, network.place_of)
    return judged


def texts_of(found: Texts) -> Sequence[Tensor]:
    """The places of each text."""
    return torch.split(torch.arange(len(found.tokens)), torch.bincount(found.texts).tolist())


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("step", choices=("states", "train", "judge"))
    parser.add_argument("target", type=Path, metavar="MODEL")
    parser.add_argument("state", type=Path, metavar="DRAFT.state", help="of draftwood distill")
    parser.add_argument("--plain", type=Path, metavar="DRAFT", required=True, help="whose tokens the head writes, too")
    parser.add_argument("--minutes", type=float, default=30, help="of training (default %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    add_output(parser, "heads_<model>", required=False)
    args = parser.parse_args()
    with torch_settings(args.threads):
        torch.manual_seed(0)
        run(args, Checkpoint(args.target))


def run(args: argparse.Namespace, target: Checkpoint) -> None:
    if args.step == "states":
        write_states(target, args.state)
        return
    plain, size, file = read_start(args.plain, target), target.config.vocab_size, args.state / "head.pt"
    network = DraftNetwork(plain.config, LONGEST, plain.kept)
    plain.load(network)
    held_out = read(args.state, size, held_out=True)
    head = Head(target, plain.kept, held_out.states.shape[1])
    if args.step == "train":
        train(head, network.place_of, read(args.state, size, held_out=False), held_out, 60 * args.minutes, file)
        return
    head.load_state_dict(torch.load(file))
    judged = {"plain": judge_plain(network, held_out), "head": judge_head(head, network.place_of, held_out)}
    figures = {name: each.to_dict() for name, each in judged.items()}
    print(figures)
    if args.output is not None:
        write_results(args.output, args.name.replace("<model>", args.target.stem), figures)


if __name__ == "__main__":
    main()
