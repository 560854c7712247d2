"""The calls of `sdks.py` with LiteLLM: python litellm_calls.py URL MODEL. It prints the results as JSON, and fails if
one is not what it should be. It runs where litellm is installed, without Draftwood."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise the import loads prices from the network
import litellm  # type: ignore[import-not-found]

MESSAGES = [{"role": "user", "content": "What is the capital of Norway?"}]


def main() -> None:
    url, model = sys.argv[1:]
    litellm.suppress_debug_info = True  # it is printed among the results
    own: dict[str, Any] = {"api_base": url, "api_key": "none", "max_tokens": 24, "temperature": 0}
    asked = own | {"model": f"openai/{model}", "messages": MESSAGES}
    chat = litellm.completion(**asked).choices[0].message.content
    chunks = list(litellm.completion(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat and len(chunks) > 3
    text = litellm.text_completion(**own, model=f"text-completion-openai/{model}", prompt="Once upon a time")
    try:
        litellm.completion(**{**asked, "top_p": 2})
    except litellm.BadRequestError:
        pass
    else:
        raise AssertionError("top_p 2 was accepted")
    results = {
        "completion": text.choices[0].text,
        "chat": chat,
        "streamed chunks": len(chunks),
        "top_p 2": "BadRequestError",
    }
    print(json.dumps({"versions": {"litellm": version("litellm")}, "results": results}))


if __name__ == "__main__":
    main()
