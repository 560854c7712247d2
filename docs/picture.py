"""Draw the README's picture: one real generation of the demo bundle, with the colours of the live view.

python docs/picture.py bundles/smollm2 docs/generate.svg
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from draftwood import LLM, SamplingParams
from draftwood.cli.live import DRAFTED, OWN, PROMPT, running

QUESTION = "Why do leaves change their colour in autumn?"
COMMAND = f"draftwood generate bundles/smollm2 --chat '{QUESTION}' --temperature 0 --max-tokens 160"


def main(bundle: Path, picture: Path) -> None:
    console = Console(record=True, width=104, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {COMMAND}\n", style="bold"))
    text = Text(f"{QUESTION}\n\n", style=PROMPT)
    with LLM(bundle) as llm:
        prompt = llm.encode_chat([{"role": "user", "content": QUESTION}])
        for chunk in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=160)):
            for piece in chunk.pieces:
                text.append(piece.text, style=DRAFTED if piece.drafted else OWN)
    console.print(text, soft_wrap=True)
    console.print(Text(f"── {running(chunk.stats)}", style=PROMPT))
    picture.write_text(console.export_svg(title="draftwood"), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
