"""Run several requests at a time in an asyncio program. Each one gets the text that it would get alone.

python examples/together.py [BUNDLE]
"""

import asyncio
import sys

from draftwood import AsyncLLM, SamplingParams

bundle = sys.argv[1] if len(sys.argv) > 1 else "bundles/smollm2"
params = SamplingParams(max_tokens=32, temperature=0)


async def answer(llm: AsyncLLM, prompt: str) -> str:
    """The whole text. A request ends when its loop is left, and with an error after deadline_s seconds."""
    return "".join([chunk.text async for chunk in llm.generate(prompt, params, deadline_s=60)])


async def main() -> None:
    prompts = ["import os", "def main():", "class Node:", "for item in"]
    with AsyncLLM(bundle, max_running=4) as llm:
        together = await asyncio.gather(*(answer(llm, prompt) for prompt in prompts))
        alone = [await answer(llm, prompt) for prompt in prompts]
    for prompt, text in zip(prompts, together, strict=True):
        print(repr(prompt + text))
    print(f"the same texts: {together == alone}")


asyncio.run(main())
