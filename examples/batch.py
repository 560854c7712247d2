"""Generate texts for many prompts. Their rows share the passes of the models, so this is faster than a loop.

python examples/batch.py [BUNDLE] > results.jsonl
"""

import json
import sys

from draftwood import LLM, SamplingParams

bundle = sys.argv[1] if len(sys.argv) > 1 else "bundles/smollm2"
names = ("read", "write", "sort", "search", "merge", "split")
params = SamplingParams(max_tokens=32, temperature=0.7, seed=3, stop=("\n\n",))

with LLM(bundle) as llm:
    results = llm.generate([f"def {name}(" for name in names], params)

for name, result in zip(names, results, strict=True):
    print(json.dumps({"name": name, "text": result.text, "finish_reason": result.finish_reason}))
