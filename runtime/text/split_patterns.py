"""The regular expressions by which published byte-level tokenizers split a text, and the proof that a pattern made of
them takes a time that grows only with the text's length.

The library's regular expressions try an alternative, and go back where it fails. A hostile pattern goes back any number
of times. Each of these units either matches all that it has read but one character, or fails at once: the alternatives
of a unit belong together, because a later one takes the run of characters at which an earlier one failed.
"""

from __future__ import annotations

ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s"
MARKS, HAN = r" ?[^\s\p{L}\p{N}]+", "[一-龥ࠀ-一가-퟿]+"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
DEEPSEEK_WORD, DEEPSEEK_HAN = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", "[一-龥぀-ゟ゠-ヿ]+"
DEMO_SPACES = r"[ \t]*[^\s\p{L}\d]{1,3}|\n+|[ \t]+(?!\S)|[ \t]+"  # of models/demo
UNITS = (
    *(ENGLISH, r"'s|'t|'re|'ve|'m|'ll|'d", "'(?i:[sdmt]|ll|ve|re)", "'(?:[sdmt]|ll|ve|re)"),
    *(WORD, r"[^\r\n\p{L}\p{N}]?+\p{L}+", r" ?\p{L}+", r"\s?\p{L}+", DEEPSEEK_WORD),
    *(CASED % ("", ""), CASED % (f"{ENGLISH}?", f"{ENGLISH}?")),
    *(r"\p{N}", r"\p{N}{1}", r"\p{N}{1,3}", r" ?\p{N}+", r"\d", "[0-9]", "[0-9][0-9][0-9]"),
    *(MARKS, rf"{MARKS}[\r\n]*", rf"{MARKS}[\r\n/]*", r" ?[^\s\p{L}\p{N}]++[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+"),
    *(r" ?[\p{P}\p{S}]+[\r\n]*", r"\s?\p{P}+", DEEPSEEK_MARKS, DEEPSEEK_HAN, HAN, r"[\r\n]"),
    *(SPACES, r"\s*[\r\n]|\s+(?!\S)|\s+", r"\s+(?!\S)|\s+", DEMO_SPACES, " {2,}", r"\A | \z"),
)
LONGEST_FIRST = sorted((f"{unit}|" for unit in UNITS), key=len, reverse=True)


def is_linear(pattern: str) -> bool:
    """Whether a pattern consists of the units, each an alternative."""
    rest = f"{pattern}|"
    while rest:
        if (unit := next((unit for unit in LONGEST_FIRST if rest.startswith(unit)), None)) is None:
            return False
        rest = rest[len(unit) :]
    return True
