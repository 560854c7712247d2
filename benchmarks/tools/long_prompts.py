"""Write prompts of a given length from a folder of Python sources, for `benchmarks.peers.run --prompts`.

python -m benchmarks.tools.long_prompts MODEL.gguf .venv/lib/python3.12/json --tokens 4096 --output build/long.jsonl
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.tools.record import make_parser
from draftwood.builder.checkpoints.checkpoint import Checkpoint

QUESTION = "\n\nExplain what the last class or function above does, then write it once more with comments."


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model", type=Path, help="whose tokens are counted")
    parser.add_argument("folder", type=Path, help="of sources, taken in the order of their names")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384], help="default %(default)s")
    parser.add_argument("--num", type=int, default=2, help="prompts of each length (default %(default)s)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    sources = sorted(args.folder.rglob("*.py"))
    tokenizer, rows, start = Checkpoint(args.model).tokenizer(), list[str](), 0
    ids = tokenizer.encode("\n".join(file.read_text(encoding="utf-8") for file in sources))
    for length in args.tokens:
        for _ in range(args.num):
            part = ids[start : start + length]
            if len(part) < length:
                parser.error(f"{args.folder} has only {len(ids)} tokens: take a larger one, or less --tokens")
            start += length
            turn = tokenizer.decode(part) + QUESTION
            rows.append(json.dumps({"category": f"{length} tokens", "turns": [turn]}) + "\n")
    args.output.write_text("".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
