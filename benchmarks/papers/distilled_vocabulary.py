"""What a smaller output vocabulary costs a distilled draft: its acceptance if it wrote only its N most frequent tokens.

    python -m benchmarks.papers.distilled_vocabulary DRAFT.state DRAFT --output benchmarks/results

The figures are the estimates of `draftwood distill`, on the same held-out texts of the state folder. Tokens are counted
in all texts. The draft is not trained anew for each N, so a draft that was trained for N may lose less.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.tools.record import add_output, write_results
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.distillation.distill import held_out_batches
from draftwood.builder.distillation.loss import estimate
from draftwood.builder.distillation.network import DraftNetwork
from draftwood.builder.distillation.state import TextStore
from draftwood.builder.distillation.target import COLUMNS
from draftwood.builder.kept_tokens import expected_counts

SIZES = (512, 1024, 2048, 4096, 8192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", type=Path, help="state folder of the distillation")
    parser.add_argument("draft", type=Path, help="the draft that it wrote")
    parser.add_argument("--context", type=int, default=512, help="tokens of a sequence (default %(default)s)")
    add_output(parser, "papers_distilled_vocabulary")
    args = parser.parse_args()
    draft = Checkpoint(args.draft)
    vocab_size = draft.config.vocab_size
    store = TextStore(args.state / "texts", vocab_size, COLUMNS)
    counts, held_out = expected_counts(store.read(), vocab_size), held_out_batches(store, args.context)
    written = np.arange(vocab_size) if draft.kept_tokens is None else draft.kept_tokens
    config = replace(draft.config, draft_vocab_size=None, tie_embeddings=True)
    most_frequent = written[np.argsort(-counts[written], kind="stable")]
    rows = []
    for size in (size for size in SIZES if size <= len(written)):
        kept = np.sort(most_frequent[:size])
        network = DraftNetwork(config, args.context, kept)
        with torch.no_grad():
            for name, parameter in network.llama.named_parameters():
                parameter.copy_(torch.from_numpy(draft.tensor(name).astype(np.float32)))
        coverage = round(float(counts[kept].sum() / counts.sum()), 4)
        rows.append({"tokens": size, "coverage": coverage, **estimate(network, held_out).to_dict()})
        print(*rows[-1].values(), flush=True)
    write_results(args.output, args.name, {"draft": args.draft.name, "vocab_size": vocab_size, "rows": rows})


if __name__ == "__main__":
    main()
