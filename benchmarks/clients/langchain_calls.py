"""The calls of `langchain.py`: python langchain_calls.py URL MODEL. It prints the results as JSON, and fails if one is
not of the demanded form. It runs where langchain-openai is installed, without Draftwood."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage  # type: ignore[import-not-found]
from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]
from pydantic import BaseModel, Field


class Weather(BaseModel):
    """The weather that somebody asks for."""

    city: Literal["Bern", "Oslo"]
    days: int = Field(ge=1, le=9)


def main() -> None:
    url, model = sys.argv[1:]
    llm = ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=120)
    question = "What is the weather in Oslo in the next three days?"
    results: dict[str, Any] = {}
    for method in ("json_schema", "function_calling"):
        answer = llm.with_structured_output(Weather, method=method).invoke(question)
        assert isinstance(answer, Weather)
        results[f"with_structured_output, {method}"] = answer.model_dump()
    forced = llm.bind_tools([Weather], tool_choice="Weather")
    message = forced.invoke(question)
    (call,) = message.tool_calls
    results["bind_tools"] = Weather(**call["args"]).model_dump()
    chunks = list(forced.stream(question))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    (streamed,) = whole.tool_calls
    assert streamed["args"] == call["args"] and len(chunks) > 2
    results["stream"] = {"args": streamed["args"], "several chunks": True}
    answer = llm.bind_tools([Weather]).invoke(
        [HumanMessage(question), message, ToolMessage("sunny, 20 degrees", tool_call_id=call["id"])]
    )
    assert answer.content or answer.tool_calls
    results["answer to a tool's result"] = answer.content[:200]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
