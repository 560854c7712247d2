"""Print a text while it is generated. Tokens that the draft proposed are green.

python examples/stream.py [BUNDLE]
"""

import sys

from draftwood import LLM, SamplingParams, SpeculativeConfig

GREEN, NORMAL = "\x1b[32m", "\x1b[0m"

bundle = sys.argv[1] if len(sys.argv) > 1 else "bundles/smollm2"
prompt = "import os\nimport sys\n"

print(prompt, end="")
always = SpeculativeConfig(budget="fixed")  # by default only where it pays, which is rarely so with a tiny target
with LLM(bundle, always) as llm:
    for chunk in llm.stream(prompt, SamplingParams(max_tokens=64, temperature=0.7, seed=1)):
        for piece in chunk.pieces:  # a chunk is what one round has added
            print(f"{GREEN}{piece.text}{NORMAL}" if piece.drafted else piece.text, end="", flush=True)
stats = chunk.stats
print(f"\n\n{stats.num_accepted_tokens} of {stats.num_draft_tokens} proposed tokens were accepted")
