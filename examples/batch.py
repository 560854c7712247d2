"""Generate texts for many prompts. Their rows share the passes of the models, so this is faster than a loop.

python examples/batch.py [BUNDLE] > results.jsonl
"""

import json
import sys

from draftwood.runtime import LLM, SamplingParams

bundle = sys.argv[1] if len(sys.argv) > 1 else "bundles/demo"
prompts = [f"def {name}(" for name in ("read", "write", "sort", "search", "merge", "split")]

with LLM(bundle) as llm:
    results = llm.generate(prompts, SamplingParams(max_tokens=32, temperature=0.7, seed=3, stop=("\n\n",)))

for prompt, result in zip(prompts, results, strict=True):
    print(json.dumps({"prompt": prompt, "text": result.text, "finish_reason": result.finish_reason}))
