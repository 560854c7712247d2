"""How much less often is a draft right without some of its layers? The share of the target's greedy tokens that are the
draft's first choice, in fp32, without each layer and without the least missed ones.

    python -m benchmarks.precision.layers BUNDLE DRAFT.gguf --prompts FILE --output benchmarks/results
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch import Tensor, nn

from benchmarks.tools.record import add_output, make_parser, write_results
from draftwood import LLM, SamplingParams
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.cli.bench import encode_prompts, read_prompts
from draftwood.models.llama import Llama, causal
from draftwood.runtime.text.tokenizer import Tokenizer

LEFT_OUT = (1, 2, 3, 4, 6, 8)  # layers


class Skipped(nn.Module):
    def forward(self, rows: Tensor, *_: object) -> Tensor:
        return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("bundle", type=Path, help="whose target writes the texts")
    parser.add_argument("draft", type=Path, help="a checkpoint")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=32, help="prompts (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=48, help="of a text (default %(default)s)")
    add_output(parser, "precision_layers")
    args = parser.parse_args()
    encoded = encode_prompts(Tokenizer.load(args.bundle), read_prompts(args.prompts), chat=True)
    prompts = sorted(encoded, key=len)[: args.limit]
    with LLM(args.bundle) as llm:
        found = llm.generate(prompts, SamplingParams(max_tokens=args.max_tokens, temperature=0))
    texts = [(prompt, result.token_ids) for prompt, result in zip(prompts, found, strict=True)]
    model = read_model(args.draft, max(len(prompt) + len(answer) for prompt, answer in texts))
    layers = range(len(model.model.layers))
    right = {layer: share_right(model, texts, {layer}) for layer in track(layers, "Without each layer")}
    least_missed = sorted(layers, key=lambda layer: -right[layer])
    figures = {
        "texts": len(texts),
        "tokens": sum(len(answer) for _, answer in texts),
        "all_layers": share_right(model, texts, ()),
        "without_one": right,
        "without_the_least_missed": {n: share_right(model, texts, least_missed[:n]) for n in LEFT_OUT},
    }
    print(figures)
    write_results(args.output, args.name, figures)


def read_model(path: Path, positions: int) -> Llama:
    checkpoint = Checkpoint(path)
    model = Llama(checkpoint.config, positions)
    state = {name: torch.from_numpy(np.array(checkpoint.tensor(name), np.float32)) for name in model.state_dict()}
    model.load_state_dict(state, assign=True)
    return model


@torch.inference_mode()
def share_right(model: Llama, texts: Sequence[tuple[list[int], list[int]]], left_out: Collection[int]) -> float:
    own = model.model.layers
    model.model.layers = nn.ModuleList(Skipped() if index in left_out else layer for index, layer in enumerate(own))
    right = total = 0
    for prompt, answer in texts:
        rows, _ = model.model(
            torch.tensor([prompt + answer[:-1]]), model.rotary(torch.arange(len(prompt + answer) - 1)[None]), causal
        )
        choices = model.score(rows[:, len(prompt) - 1 :]).logits.argmax(-1)[0]
        right += int((choices == torch.tensor(answer)).sum())
        total += len(answer)
    model.model.layers = own
    return round(right / total, 4)


if __name__ == "__main__":
    main()
