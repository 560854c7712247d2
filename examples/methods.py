"""Compare kinds of proposals: how many tokens does one pass of the target bring? The text is always the same.

python examples/methods.py [BUNDLE]
"""

import sys

from draftwood import LLM, SamplingParams, SpeculativeConfig

METHODS = {
    "plain decoding": None,
    "a chain of 4 tokens": SpeculativeConfig("chain", max_draft_len=4, budget="fixed"),
    "the best 12 tokens as a tree": SpeculativeConfig("topk", max_total_draft_tokens=12, budget="fixed"),
    "the same with merged sequences": SpeculativeConfig("topk", merge="gsd", max_total_draft_tokens=12, budget="fixed"),
    "a prompt lookup": SpeculativeConfig("lookup", budget="fixed"),
    "chosen by measured costs": SpeculativeConfig(),
}

bundle = sys.argv[1] if len(sys.argv) > 1 else "bundles/smollm2"
params = SamplingParams(max_tokens=64, temperature=0)

texts = set()
with LLM(bundle) as llm:
    for name, config in METHODS.items():
        *_, last = chunks = list(llm.stream("class ThreadPool:\n", params, speculative=config))
        texts.add("".join(chunk.text for chunk in chunks))
        print(f"{last.stats.num_tokens / last.stats.target_passes:5.2f} tokens per pass: {name}")
print(f"the same text each time: {len(texts) == 1}")
