"""Writes a conversation as the text of a prompt: checks it, tells the model of its tools, renders the chat template,
and cuts the text where the last message is to be continued."""

from __future__ import annotations

from threading import Event
from uuid import uuid4

from ...models.errors import RequestError
from .conversation import ASKED, ChatSettings, Conversation, to_template
from .tokenizer import Tokenizer
from .tools import explained, knows_tools


def write_conversation(
    tokenizer: Tokenizer, messages: Conversation, settings: ChatSettings = ASKED, given_up: Event | None = None
) -> str:
    """The text of a conversation. given_up: see WorkerPool.ask. Raises RequestError for an invalid conversation,
    and as `Tokenizer.apply_chat_template` does."""
    written = to_template(messages)
    variables = {str(name): value for name, value in settings.template_kwargs.items()}
    known = knows_tools(tokenizer.template_for(bool(settings.tools)))
    if settings.tools and known:
        variables["tools"] = list(settings.tools)
    elif not known:
        written = explained(written, settings.tools)
    message, mark = written[-1]["content"], uuid4().hex
    if settings.continue_final_message:
        written[-1] = {**written[-1], "content": f"{message}{mark} "}
    text = tokenizer.apply_chat_template(
        written, add_generation_prompt=settings.add_generation_prompt, given_up=given_up, **variables
    )
    return cut_after(text, message, mark) if settings.continue_final_message else text


def cut_after(text: str, message: str, mark: str) -> str:
    """The text up to the end of its last message, which a mark and a blank follow. As in transformers, a template that
    has removed the blank would have removed the message's own. Raises RequestError if the message is not there."""
    found = text.rfind(mark)
    before, after = text[:found], text[found + len(mark) :]
    if found < 0 or not before.endswith(message.lstrip()):
        raise RequestError(
            "continue_final_message: this model's chat template does not write the last message as it is"
        )
    return before if after.startswith(" ") else before.rstrip()
