"""llama.cpp's converter, for tokenizers whose way of splitting text it does not know; run by llama_cpp.py.

Peers are given token ids, so how llama.cpp would split text does not matter here: GPT-2's way is written down.
"""

from __future__ import annotations

import runpy
import sys
from importlib import import_module
from pathlib import Path


def main(source: Path, arguments: list[str]) -> None:
    """source: llama.cpp's source folder. arguments: of its convert_hf_to_gguf.py."""
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    text_model = import_module("conversion.base").TextModel
    known = text_model.get_vocab_base_pre

    def splitting(self: object, tokenizer: object) -> str:
        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            return "gpt-2"

    text_model.get_vocab_base_pre = splitting
    sys.argv = ["convert_hf_to_gguf.py", *arguments]
    runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
