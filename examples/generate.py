"""Generate one text, and show that it is the text of the target alone.

python examples/generate.py [BUNDLE]
"""

import sys

from draftwood import LLM, SamplingParams

bundle = sys.argv[1] if len(sys.argv) > 1 else "bundles/smollm2"
prompt = "def quicksort(items):"
greedy = SamplingParams(max_tokens=48, temperature=0)

with LLM(bundle) as llm:
    (result,) = llm.generate([prompt], greedy)
with LLM(bundle, speculative=None) as llm:  # the target decodes without the draft
    (plain,) = llm.generate([prompt], greedy)

print(prompt + result.text)
print(f"\nended by: {result.finish_reason}")
print(f"passes of the target: {result.stats.target_passes} instead of {plain.stats.target_passes}")
print(f"the same text: {result.text == plain.text}")
