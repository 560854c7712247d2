"""Write prompts for the acceptance head: beginnings of lines from the documents the pair was not trained on.

    python models/demo/beginnings.py --work FOLDER --output prompts.jsonl

FOLDER is that of the training.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

NUMBER, SHORTEST, LONGEST = 240, 24, 96  # prompts, and tokens of each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    held_out, rng = np.load(args.work / "held_out.npy"), np.random.default_rng(0)
    with args.output.open("w", encoding="utf-8") as file:
        for begin in rng.integers(len(held_out) - LONGEST, size=NUMBER):
            length = int(rng.integers(SHORTEST, LONGEST))
            text = tokenizer.decode(held_out[begin : begin + length].tolist())
            # From the start of a line, as people prompt.
            print(json.dumps({"prompt": text.partition("\n")[2] or text}), file=file)


if __name__ == "__main__":
    main()
