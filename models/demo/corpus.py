"""Text for the demo pair: Python sources and documentation that packages install, and the tokenizer made from them.

Everything used is permissively licensed (PSF, BSD, MIT); README.md lists it. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

UNK, BOS, EOS = "<unk>", "<s>", "</s>"
VOCAB_SIZE = 2048
PACKAGES = ["numpy", "scipy", "sklearn", "pandas", "matplotlib", "networkx"]
SKIPPED = {"test", "tests", "testing", "encodings", "idlelib", "lib2to3", "site-packages", "dist-packages", "_vendor"}
SKIPPED |= {"__pycache__", "turtledemo", "pydoc_data", "msilib", "externals", "parsing", "conftest.py"}
# Digits one by one, words with their space, runs of punctuation, indentation: what code is made of.
PIECES = r"\d| ?\p{L}+|[ \t]*[^\s\p{L}\d]{1,3}|\n+|[ \t]+(?!\S)|[ \t]+"


def default_roots() -> list[Path]:
    """The standard library, and every listed package that is installed."""
    paths = sysconfig.get_paths()
    installed = [Path(paths["purelib"]) / name for name in PACKAGES]
    return [Path(paths["stdlib"]), *(path for path in installed if path.is_dir())]


def documents(roots: list[Path]) -> list[str]:
    """Source files (.py) and documentation (.txt, .rst) below `roots`, shuffled, each once."""
    seen: set[bytes] = set()
    texts = []
    for file in sorted(file for root in roots for file in walk(root)):
        text = file.read_text(encoding="utf-8", errors="ignore").replace("\r\n", "\n").strip() + "\n"
        digest = hashlib.sha256(text.encode()).digest()
        if digest not in seen and reads_well(text):
            seen.add(digest)
            texts.append(text)
    random.Random(0).shuffle(texts)
    return texts


def walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name in SKIPPED:
            continue
        if path.is_dir() and not path.is_symlink():
            yield from walk(path)
        elif path.suffix in (".py", ".txt", ".rst"):
            yield path


def reads_well(text: str) -> bool:
    """Neither a stub nor a table: mostly ASCII, few digits, ordinary lines."""
    if not 400 < len(text) < 120_000:
        return False
    digits = sum(character.isdigit() for character in text)
    exotic = sum(ord(character) > 126 for character in text)
    longest = max(len(line) for line in text.split("\n"))
    return digits < 0.06 * len(text) and exotic < 0.005 * len(text) and longest < 200


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE that begins every text with <s>."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[UNK, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:4000], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> NDArray[np.uint16]:
    """All texts one after the other, each between <s> and </s>."""
    end = tokenizer.token_to_id(EOS)
    parts = [np.array([*encoding.ids, end], np.uint16) for encoding in tokenizer.encode_batch(texts)]
    return np.concatenate(parts)
