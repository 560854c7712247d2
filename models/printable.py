"""Text that a model, a file or a client supplies, made safe to print: it must not control the terminal."""

from __future__ import annotations

import re
import shlex

# C0 without tab and newline, DEL and C1, which terminals obey; what reverses the order of the text around it; line
# separators; and lone surrogates, which no terminal can be sent.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with control characters but tab and newline as Python escapes: ESC becomes the four characters \\x1b."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def shell_word(text: object) -> str:
    """A path, or another text, as one word of a command that a message tells the user to run."""
    return printable(shlex.quote(str(text)))
