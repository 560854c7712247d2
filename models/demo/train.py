"""Train the demo pair on CPU cores: a target on text, then a draft on the target's distributions.

    python models/demo/train.py --work FOLDER --output models/demo --target-minutes 70 --draft-minutes 15

FOLDER keeps the tokenizer, the encoded corpus and a checkpoint of each model every two minutes: the same command goes
on where an interrupted one ended. One process per core, each with one thread: two threads in one process stall whenever
something else wants a core. `--roots` names more folders of text than this Python installation has.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import ml_dtypes
import numpy as np
import torch
import torch.distributed as distributed
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

from draftwood.models.config import LlamaConfig
from draftwood.models.demo.corpus import BOS, EOS, UNK, default_roots, documents, encode, train_tokenizer
from draftwood.models.layers import EMBEDDING_WEIGHT, HEAD_WEIGHT, network_of
from draftwood.models.llama import Llama

VOCABULARY = (EMBEDDING_WEIGHT, HEAD_WEIGHT)
CONTEXT = 512  # tokens of a training window
POSITIONS = 1024  # rotary positions the pair is published for
BATCH = 8  # windows per process and step
HELD_OUT = 60  # documents
SAVE_SECONDS = 120
MUON_RATE, ADAM_RATE = 0.02, 3e-3
WARM_UP, STEADY = 100, 0.4  # steps; share of the time before the rate falls to zero
HF_NAMES = {  # LlamaConfig's fields that config.json spells otherwise
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_position": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}


def shape(hidden: int, inner: int, layers: int, heads: int, tied: bool) -> LlamaConfig:
    """Heads of 64, half as many for keys and values."""
    return LlamaConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads // 2,
        head_dim=64,
        max_position=POSITIONS,
        norm_eps=1e-5,
        rope_theta=10000.0,
        tie_embeddings=tied,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


SHAPES = {"target": shape(256, 688, 4, 4, tied=False), "draft": shape(128, 344, 2, 2, tied=True)}


@dataclass(frozen=True, slots=True)
class Job:
    """What every process needs to know."""

    work: Path
    ranks: int
    minutes: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="corpus, tokenizer and checkpoints")
    parser.add_argument("--output", type=Path, required=True, help="where target/ and draft/ are written")
    parser.add_argument("--roots", type=Path, nargs="*", default=[], help="more folders of text")
    parser.add_argument("--target-minutes", type=float, default=70)
    parser.add_argument("--draft-minutes", type=float, default=15)
    parser.add_argument("--ranks", type=int, default=os.cpu_count())
    args = parser.parse_args()
    prepare(args.work, [*default_roots(), *args.roots])
    job = Job(args.work, args.ranks, {"target": args.target_minutes, "draft": args.draft_minutes})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", OMP_NUM_THREADS="1")
    spawn(run, (job,), nprocs=args.ranks)  # type: ignore[no-untyped-call]
    for role in SHAPES:
        export(args.work, role, args.output / role)


def prepare(work: Path, roots: list[Path]) -> None:
    """Tokenizer and encoded corpus, once."""
    if (work / "corpus.npy").is_file():
        return
    work.mkdir(parents=True, exist_ok=True)
    texts = documents(roots)
    tokenizer = train_tokenizer(texts)
    tokenizer.save(str(work / "tokenizer.json"))
    np.save(work / "held_out.npy", encode(tokenizer, texts[:HELD_OUT]))
    corpus = encode(tokenizer, texts[HELD_OUT:])
    characters = sum(map(len, texts))
    print(f"{len(texts)} documents, {characters / 1e6:.1f}M characters, {len(corpus) / 1e6:.1f}M tokens", flush=True)
    np.save(work / "corpus.npy", corpus)


def run(rank: int, job: Job) -> None:
    """One process: train the target, sample from it, train the draft."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=job.ranks)
    corpus = np.load(job.work / "corpus.npy")
    target = train("target", rank, job, [corpus], cross_entropy)
    for parameter in target.parameters():
        parameter.requires_grad_(False)
    sampled = job.work / f"sampled.{rank}.npy"
    if not sampled.is_file():
        np.save(sampled, sample(target, corpus, seconds=job.minutes["draft"] * 6, seed=rank))

    def distillation(logits: Tensor, windows: Tensor) -> Tensor:
        """KL(target ‖ draft): what acceptance depends on."""
        with torch.no_grad():
            teacher = functional.log_softmax(target.full(windows[:, :-1]).logits.float(), -1)
        student = functional.log_softmax(logits.float(), -1)
        return functional.kl_div(student, teacher, log_target=True, reduction="sum") / windows[:, 1:].numel()

    # Half of what the draft learns from is the target's own text: that is what it will be asked about.
    train("draft", rank, job, [corpus, np.load(sampled)], distillation)
    distributed.destroy_process_group()


def cross_entropy(logits: Tensor, windows: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def train(
    role: str, rank: int, job: Job, sources: list[NDArray[np.uint16]], objective: Callable[[Tensor, Tensor], Tensor]
) -> Llama:
    """Minimise `objective(logits, windows)` for the role's minutes of wall clock, from its checkpoint on."""
    torch.manual_seed(0)
    model = Llama(SHAPES[role], CONTEXT)
    initialise(model)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name not in VOCABULARY]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, MUON_RATE, weight_decay=0.05),
        torch.optim.AdamW(others, ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.01),
    ]
    file = job.work / f"{role}.pt"
    step, spent = 0, 0.0
    if file.is_file():
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, spent = state["step"], state["seconds"]
    budget = 60 * job.minutes[role]
    rng = np.random.default_rng([rank, step])
    start, saved_at = perf_counter() - spent, spent
    while True:
        # The slowest process decides, so that all of them take the same steps.
        clock = torch.tensor(perf_counter() - start)
        distributed.all_reduce(clock, distributed.ReduceOp.MAX)
        seconds = float(clock)
        if rank == 0 and (seconds - saved_at > SAVE_SECONDS or seconds >= budget > saved_at):
            save(file, model, optimizers, step, seconds)
            saved_at = seconds
        if seconds >= budget:
            return model
        rate = min(1.0, (step + 1) / WARM_UP, (1 - seconds / budget) / (1 - STEADY))
        for optimizer, full in zip(optimizers, (MUON_RATE, ADAM_RATE), strict=True):
            optimizer.param_groups[0]["lr"] = full * rate
        windows = draw(sources, rng)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.full(windows[:, :-1]).logits
            loss = objective(logits, windows)
        loss.backward()  # type: ignore[no-untyped-call]
        average_gradients(model, job.ranks)
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if rank == 0 and step % 50 == 0:
            tokens = step * job.ranks * BATCH * CONTEXT
            print(f"{role} {seconds:6.0f} s  {tokens / 1e6:6.2f}M tokens  loss {loss.item():.3f}", flush=True)


def initialise(model: Llama) -> None:
    """Small embeddings, orthogonal-scale matrices, silent residual branches at the start."""
    layers = network_of(model.config).layers
    silent = {weight for layer in layers for weight in (*layer.output.weights, *layer.down.weights)}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02 if name in VOCABULARY else parameter.shape[1] ** -0.5)
        if name in silent:
            torch.nn.init.zeros_(parameter)


def draw(sources: list[NDArray[np.uint16]], rng: np.random.Generator) -> Tensor:
    """Windows [BATCH, CONTEXT + 1], as many from each source."""
    windows = []
    for index in range(BATCH):
        source = sources[index % len(sources)]
        begin = int(rng.integers(len(source) - CONTEXT - 1))
        windows.append(source[begin : begin + CONTEXT + 1].astype(np.int64))
    return torch.from_numpy(np.stack(windows))


def average_gradients(model: Llama, ranks: int) -> None:
    """One collective for all gradients."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    flat /= ranks
    means = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


def save(file: Path, model: Llama, optimizers: list[torch.optim.Optimizer], step: int, seconds: float) -> None:
    state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
    torch.save(state | {"step": step, "seconds": seconds}, file.with_suffix(".partial"))
    file.with_suffix(".partial").rename(file)


@torch.no_grad()
def sample(model: Llama, corpus: NDArray[np.uint16], seconds: float, seed: int) -> NDArray[np.uint16]:
    """Text the model continues from short pieces of the corpus, at temperatures between 0.5 and 1, for so long."""
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    config, texts, count = model.config, [], 48
    temperatures = torch.linspace(0.5, 1.0, count)[:, None]
    start = perf_counter()
    while perf_counter() - start < seconds:
        prompt = rng.integers(8, 48)
        begins = rng.integers(len(corpus) - 64, size=count)
        tokens = torch.from_numpy(np.stack([corpus[b : b + prompt].astype(np.int64) for b in begins]))
        cache = torch.zeros(2 * config.num_layers, count, config.num_kv_heads, CONTEXT, config.head_dim)
        read, rows = 0, tokens
        while tokens.shape[1] < CONTEXT:
            width = rows.shape[1]
            mask = torch.full((width, read + width), float("-inf")).triu(read + 1)[None, None]
            positions = torch.arange(read, read + width)[None].expand(count, -1)
            logits = model(rows, positions, mask, cache, read, torch.tensor([width - 1])).logits[:, 0]
            read += width
            rows = torch.multinomial((logits / temperatures).softmax(-1), 1, generator=generator)
            tokens = torch.cat((tokens, rows), 1)
        texts.append(tokens.flatten().numpy().astype(np.uint16))
    return np.concatenate(texts)


def export(work: Path, role: str, folder: Path) -> None:
    """The latest checkpoint as a Hugging Face folder in bf16, in the spelling of transformers 4 and 5."""
    config = SHAPES[role]
    state = torch.load(work / f"{role}.pt", weights_only=True)["model"]
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.float().numpy().astype(ml_dtypes.bfloat16) for name, tensor in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = {HF_NAMES.get(name, name): value for name, value in config.to_dict().items() if name != "eos_token_ids"}
    fields |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "eos_token_id": 2}
    fields |= {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    write_json(folder / "config.json", fields)
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    special = {"bos_token": BOS, "eos_token": EOS, "unk_token": UNK, "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | special)
    Tokenizer.from_file(str(work / "tokenizer.json"))  # a damaged file must not be published
    shutil.copy(work / "tokenizer.json", folder / "tokenizer.json")


def write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
