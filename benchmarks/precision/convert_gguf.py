"""Run llama.cpp's converter on tokenizers whose pre-tokenizer it does not know.

Peers get token ids, so the pre-tokenizer does not matter here. GPT-2's is recorded.
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
    find_known = text_model.get_vocab_base_pre

    def find_pre_tokenizer(self: object, tokenizer: object) -> str:
        try:
            return str(find_known(self, tokenizer))
        except NotImplementedError:
            return "gpt-2"

    text_model.get_vocab_base_pre = find_pre_tokenizer
    sys.argv = ["convert_hf_to_gguf.py", *arguments]
    runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
