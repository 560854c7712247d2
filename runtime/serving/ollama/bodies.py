"""The bodies of Ollama's API, and the chats and completions that they mean."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ....models.errors import RequestError
from ...sampling.params import LARGEST_COUNT, REPETITION_PENALTIES
from ...text.conversation import MAX_MESSAGES
from ..openai.bodies import ChatBody, CompletionBody, Effort, Message, ModelBody, conversation, no_many_parts
from ..openai.infill import at
from ..openai.tool_use import Tools
from ..openai.translated import B, TranslatedBody

# How Ollama loads a model and cuts its context, which the bundle and the server's options say; and of mirostat.
LOADING = frozenset(("f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_keep"))
LOADING |= {"num_thread", "numa", "use_mlock", "use_mmap", "mirostat_eta", "mirostat_tau"}
OF_OPTIONS: dict[str, tuple[Any, ...]] = {"embedding_only": (False,), "mirostat": (0,), "penalize_newline": (True,)}
OF_OPTIONS |= {"repeat_last_n": (-1,), "tfs_z": (1,), "typical_p": (1,), "vocab_only": (False,)}
OF_BODIES: dict[str, tuple[Any, ...]] = {"logprobs": (False,), "top_logprobs": (0,)}
LEAST, MOST = REPETITION_PENALTIES
# Below 1 it means: as the context has room for.
Limit = Annotated[int | None, Field(ge=-2, le=LARGEST_COUNT), AfterValidator(lambda most: max(0, most or 0) or None)]
OF_TEXTS = {"context": ([],), "height": (0,), "images": ([],), "steps": (0,), "template": ("",), "width": (0,)}


class Options(TranslatedBody):
    """Settings of sampling, also those of this server that Ollama has not."""

    ignored, neutral = LOADING, OF_OPTIONS

    max_tokens: Limit = Field(None, alias="num_predict")
    repetition_penalty: float | None = Field(None, ge=LEAST, le=MOST, alias="repeat_penalty")


class OllamaBody(ModelBody):
    """The fields that both endpoints share."""

    ignored, neutral = frozenset(("keep_alive",)), OF_BODIES

    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] = Field("", description="json, or a schema")
    options: Options = Options.model_validate({})
    think: bool | Effort | None = Field(None, description="by default as the model's chat template does")

    def asked(self, kind: type[B], **fields: Any) -> B:
        """The chat or completion that has these fields. Raises RequestError."""
        fields |= {"model": self.model, "stream": self.stream}
        if self.format:
            fields["structured_outputs"] = {"json_object": True} if self.format == "json" else {"json": self.format}
        for name in self.options.model_fields_set:
            if name not in kind.model_fields or fields.get(name) is not None:
                raise RequestError(f"options.{name} has no place here, or is said twice: leave it out")
        return self.options.as_body(kind, **fields)

    def as_turns(self, messages: list[dict[str, Any]], **fields: Any) -> ChatBody:
        """The chat of these messages. It goes on with the last one, if that is the assistant's text."""
        effort = self.think if isinstance(self.think, str) else {True: "medium", False: "none", None: None}[self.think]
        goes_on = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        fields |= {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
        return self.asked(ChatBody, messages=messages, reasoning_effort=effort, **fields)


class OllamaChatBody(OllamaBody):
    """POST /api/chat."""

    messages: Annotated[
        list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES), BeforeValidator(no_many_parts)
    ] = Field([])
    tools: Tools | None = None

    def meant(self, has_template: bool) -> ChatBody | None:
        """None without messages. Raises RequestError."""
        return self.as_turns(to_messages(self.messages), tools=self.tools) if self.messages else None


class WholeText(CompletionBody):
    """A completion of as many tokens as the context has room for."""

    default_tokens = None


class OllamaGenerateBody(OllamaBody):
    """POST /api/generate."""

    neutral = OF_BODIES | OF_TEXTS

    prompt: str = ""
    suffix: str = Field("", description="the text stands between the prompt and this, for models that infill")
    system: str = ""
    raw: bool = Field(False, description="the prompt as it is, without the chat template")

    def meant(self, has_template: bool) -> ChatBody | CompletionBody | None:
        """None without prompt and suffix. A model without a chat template completes. Raises RequestError."""
        if not (self.prompt or self.suffix):
            return None
        if has_template and not (self.raw or self.suffix):
            system = [{"role": "system", "content": self.system}] if self.system else []
            return self.as_turns([*system, {"role": "user", "content": self.prompt}])
        if self.system or self.think or (self.raw and self.suffix):
            raise RequestError("raw and suffix use no chat template: leave system and think out, and one of both")
        return self.asked(WholeText, prompt=self.prompt, suffix=self.suffix)


class ShowBody(ModelBody):
    """POST /api/show."""

    ignored = frozenset(("verbose",))


def to_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages of a chat. Ollama's calls need no ids: a result without one is that of the first call of its tool,
    in the latest message with calls, that has none."""
    written, waiting = conversation(messages), list[dict[str, Any]]()
    for index, message in enumerate(written):
        message |= {"content": message.get("content", ""), "reasoning_content": message.get("thinking")}
        given = enumerate(message.get("tool_calls", ()))
        calls = [{**call, "id": call.get("id") or f"call_{index}_{number}"} for number, call in given]
        message["tool_calls"], waiting = calls, calls or waiting
        if message["role"] == "tool":
            name = message.get("tool_name")
            found = next((call for call in waiting if name in (None, at(call, "function/name"))), {"id": ""})
            waiting = [call for call in waiting if call is not found]
            message.setdefault("tool_call_id", found["id"])
    return written
