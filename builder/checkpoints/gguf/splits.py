"""How byte-level BPE tokenizers split a text before they merge tokens, by the names that GGUF files use.

Patterns are those of the models' own tokenizer.json, as llama.cpp's src/llama-vocab.cpp cites them.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as TokenizerJson

from ....runtime.text.split_patterns import (
    CASED,
    DEEPSEEK_HAN,
    DEEPSEEK_MARKS,
    DEEPSEEK_WORD,
    ENGLISH,
    HAN,
    MARKS,
    SPACES,
    WORD,
)

REST = rf"{MARKS}[\r\n]*|{SPACES}"
CASED_REST = rf"{MARKS}[\r\n/]*|{SPACES}"


class Split(NamedTuple):
    """The steps of a split, in this order. nfc: characters are composed (Unicode NFC). patterns: each regular
    expression splits the pieces of the one before. digits: each digit becomes a piece. gpt2: GPT-2's pattern splits
    last.

    whole: a piece that is a token is used without merges. bos: a text begins with BOS unless the file says otherwise.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    gpt2: bool = False
    nfc: bool = False
    whole: bool = False
    bos: bool = False

    def apply(self, tokenizer: TokenizerJson) -> None:
        """Give a tokenizer its normalizer and its pre-tokenizer."""
        if self.nfc:
            tokenizer.normalizer = normalizers.NFC()
        steps: list[pre_tokenizers.PreTokenizer] = []
        steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        steps += [pre_tokenizers.Digits(individual_digits=True)] if self.digits else []
        steps += [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)


GPT2 = Split(gpt2=True)
CODE = Split(digits=True, gpt2=True)
LLAMA3 = Split((rf"{ENGLISH}|{WORD}|\p{{N}}{{1,3}}|{REST}",), whole=True, bos=True)
QWEN2 = Split((rf"{ENGLISH}|{WORD}|\p{{N}}|{REST}",), nfc=True)
GPT4O = Split((rf"{CASED % (f'{ENGLISH}?', f'{ENGLISH}?')}|\p{{N}}{{1,3}}|{CASED_REST}",))
SPLITS = {
    **dict.fromkeys(("gpt-2", "mellum", "gigachat", "a.x-4.0", "trillion", "granite-docling", "phi-2"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b"), CODE),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), LLAMA3._replace(whole=False, bos=False)),
    **dict.fromkeys(("qwen2", "kormo", "f2llmv2", "megrez"), QWEN2),
    "deepseek-r1-qwen": QWEN2._replace(nfc=False),
    "tekken": Split((rf"{CASED % ('', '')}|\p{{N}}|{CASED_REST}",), whole=True, bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie"), GPT4O),
    "seed-coder": Split(
        (rf"{ENGLISH}|{WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
    ),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN), digits=True),
    "deepseek-v3": Split(
        (
            r"\p{N}{1,3}",
            DEEPSEEK_HAN,
            rf"{DEEPSEEK_MARKS}|{DEEPSEEK_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}",
        ),
    ),
}
