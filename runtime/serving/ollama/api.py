"""The endpoints of Ollama's API, over those of chats and completions, and their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ....models.bindings import TARGET
from ....models.errors import RequestError
from ....models.layers import num_parameters
from ...llm import LLM
from ...text.infill import Infilling
from ...text.tools import tool_format
from ...text.writer import StreamChunk
from ..http.errors import refusal_of
from ..json_text import pieces
from ..openai.answers import Answer, as_json
from ..openai.api import OpenAIApi
from ..openai.content import CALL, TEXT, Blocks, ContentForm
from ..openai.formats import AnswerFormat, ChatFormat
from .bodies import OllamaChatBody, OllamaGenerateBody, ShowBody

VERSION = "0.12.11"  # of Ollama, whose API this is: some clients want a least one
REFUSED = ("copy", "create", "delete", "embed", "embeddings", "pull", "push")
REFUSAL = "no model is changed over HTTP: start `draftwood serve` with yours. Embeddings need another server"


class OllamaAnswer(Answer):
    """One answer, whole or as lines."""

    opens, media = False, "application/x-ndjson"

    def __init__(self, is_chat: bool, arrived: float, format: AnswerFormat, *given: Any, **settings: Any) -> None:
        """is_chat: whether it is a message. arrived: when the request came, by time.monotonic."""
        super().__init__(format, *given, **settings)
        form = format.content if isinstance(format, ChatFormat) else ContentForm()
        self._blocks, self._is_chat, self._arrived = Blocks(form.reader()), is_chat, arrived

    def added(self, index: int, chunk: StreamChunk) -> Iterator[bytes]:
        said = self._read(self._begin(index, chunk).text, chunk.finish_reason is not None)
        if any(said.values()):
            yield self._line(said, {"done": False})

    def ended(self) -> Iterator[bytes]:
        yield self._line({"content": ""}, self._end())

    def failed(self, error: Exception) -> Iterator[bytes]:
        yield refusal_of(error).as_line + b"\n"

    def whole(self) -> Response:
        said = self._read("".join(self.choices[0].texts), ends=True)
        return as_json(content(self.model, self._is_chat, said, self._end()))

    def _read(self, text: str, ends: bool) -> dict[str, Any]:
        """What more text says, in the names of a message. A call is said when it is complete."""
        said: dict[str, Any] = {"content": ""}
        for step in self._blocks.push(text, ends):
            block = step.block
            if block.kind != CALL:
                name = "content" if block.kind == TEXT else "thinking"
                said[name] = said.get(name, "") + step.text
                block.pieces.clear()
            elif step.kind == "closed":
                function = {"name": block.name, "arguments": block.object}
                said.setdefault("tool_calls", []).append({"id": block.id, "function": function})
        return said

    def _line(self, said: dict[str, Any], rest: dict[str, Any]) -> bytes:
        return "".join([*pieces(content(self.model, self._is_chat, said, rest)), "\n"]).encode()

    def _end(self) -> dict[str, Any]:
        """Why the text ends, and how long all took, in nanoseconds. The model was open."""
        (choice,) = self.choices
        seconds = {"total": time.monotonic() - self._arrived, "load": 0}
        seconds |= {"prompt_eval": choice.stats.prompt_seconds, "eval": choice.stats.decode_seconds}
        times = {f"{name}_duration": round(1e9 * value) for name, value in seconds.items()}
        counts = {"prompt_eval_count": sum(map(len, self._prompts)), "eval_count": choice.num_tokens}
        return {"done": True, "done_reason": choice.finish_reason, **times, **counts}


class OllamaApi:
    """The endpoints of one model."""

    def __init__(self, api: OpenAIApi) -> None:
        self._api, self._llm = api, api.async_llm.llm

    async def chat(self, body: OllamaChatBody, request: Request) -> Response:
        return await self._answer(body, request, True)

    async def generate(self, body: OllamaGenerateBody, request: Request) -> Response:
        return await self._answer(body, request, False)

    async def show(self, body: ShowBody) -> Response:
        self._api.begin(body.model)
        return as_json(described(self._llm))

    async def _answer(self, body: OllamaChatBody | OllamaGenerateBody, request: Request, is_chat: bool) -> Response:
        limit, meant = self._api.begin(body.model), body.meant(self._llm.tokenizer.has_chat_template)
        if meant is None:
            return as_json(content(self._api.name, is_chat, {"content": ""}, {"done": True, "done_reason": "load"}))
        write = partial(OllamaAnswer, is_chat, limit.arrived)
        return await self._api.answer(meant, request, await self._api.read(meant, request), write)


def add_models(app: FastAPI, models: Callable[[], Mapping[str, LLM | None]]) -> None:
    """Add the endpoints of all models, and those that are refused. models: by name; None for those that are closed."""
    began = now()

    async def lists(request: Request) -> Response:
        """All models, or those that are open."""
        found = [listed(name, llm, began) for name, llm in models().items()]
        return as_json({"models": [each for each in found if each["digest"] or request.url.path.endswith("tags")]})

    async def version() -> Response:
        return as_json({"version": VERSION})

    async def refused() -> Response:
        raise RequestError(REFUSAL)

    app.add_api_route("/", version, methods=["GET", "HEAD"], include_in_schema=False)  # clients ask it first
    for name, answer in (("ps", lists), ("tags", lists), ("version", version)):
        app.add_api_route(f"/api/{name}", answer, methods=["GET"], response_class=Response)
    for name in REFUSED:
        app.add_api_route(f"/api/{name}", refused, methods=["DELETE", "POST"], include_in_schema=False)


def content(model: str, is_chat: bool, said: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """An answer, or a part of one. said: in the names of a message."""
    text = {"message": {"role": "assistant", **said}} if is_chat else {"response": said.pop("content"), **said}
    return {"model": model, "created_at": now(), **text, **rest}


def now() -> str:
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


def listed(name: str, llm: LLM | None, began: str) -> dict[str, Any]:
    """A model in a list. As Ollama's, its name has a tag."""
    tagged = name if ":" in name else f"{name}:latest"
    entry = {"name": tagged, "model": tagged, "modified_at": began, "size": 0, "digest": "", "details": {}}
    return entry if llm is None else entry | described(llm)


def described(llm: LLM) -> dict[str, Any]:
    """What is said of an open model."""
    manifest, tokenizer, can = llm.bundle.manifest, llm.tokenizer, ["completion"]
    spec, length = manifest.engines[TARGET], manifest.max_length
    can += ["thinking"] * (llm.reasoning is not None)
    can += ["tools"] * (tokenizer.has_chat_template and tool_format(tokenizer.template_for(True)) is not None)
    with suppress(RequestError):
        Infilling(tokenizer)
        can.append("insert")
    kind, count = {"format": spec.backend, "family": "llama", "families": ["llama"]}, num_parameters(spec.model)
    info = {"general.architecture": "llama", "general.parameter_count": count, "llama.context_length": length}
    return {
        "size": sum(file.bytes for file in manifest.files.values()),
        "digest": manifest.digest,
        "details": {**kind, "parameter_size": f"{count / 1e6:.1f}M", "quantization_level": spec.precision},
        "model_info": info,
        "capabilities": can,
        "context_length": length,
        "parameters": f"num_ctx {length}",
        "template": "{{ .Prompt }}{{ .Suffix }}" if "insert" in can else "{{ .Prompt }}",  # as Ollama's clients read it
        "expires_at": "9999-12-31T23:59:59Z",  # nothing closes it because nobody uses it
    }
