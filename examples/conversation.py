"""Hold a conversation. A message that the model has read is not read again for the next answer.

The bundle needs a chat template, so take one of an instruct model.

python examples/conversation.py [BUNDLE]
"""

import sys

from draftwood import LLM, ChatSession, SamplingParams

bundle = sys.argv[1] if len(sys.argv) > 1 else "bundles/smollm2"
messages = ("What is the capital of France?", "And of Italy?")

with LLM(bundle) as llm, ChatSession(llm, system="Answer briefly.") as session:
    for message in messages:
        print(f"> {message}")
        for chunk in session.send(message, SamplingParams(max_tokens=40, temperature=0)):
            print(chunk.text, end="", flush=True)
        if session.last is not None:
            print(f"\n({session.last.stats.num_cached_tokens} tokens of the conversation were not read again)")
