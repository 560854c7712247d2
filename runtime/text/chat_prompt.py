"""Writes a conversation as the text of a prompt: checks it, tells the model of its tools, renders the chat template,
and cuts the text where the last message is to be continued."""

from __future__ import annotations

from threading import Event

from ...models.errors import RequestError
from .conversation import ASKED, ChatSettings, Conversation, to_template
from .tokenizer import Tokenizer
from .tools import explained, knows_tools


def write_conversation(
    tokenizer: Tokenizer, messages: Conversation, settings: ChatSettings = ASKED, given_up: Event | None = None
) -> str:
    """The text of a conversation. given_up: see ChatTemplate.render. Raises RequestError for an invalid conversation,
    and as `Tokenizer.apply_chat_template` does."""
    written = to_template(messages)
    variables = {str(name): value for name, value in settings.template_kwargs.items()}
    if settings.tools and knows_tools(tokenizer.chat_template):
        variables["tools"] = list(settings.tools)
    elif not knows_tools(tokenizer.chat_template):
        written = explained(written, settings.tools)
    text = tokenizer.apply_chat_template(
        written, add_generation_prompt=settings.add_generation_prompt, given_up=given_up, **variables
    )
    return cut_behind(text, str(written[-1]["content"])) if settings.continue_final_message else text


def cut_behind(text: str, message: str) -> str:
    """The text up to the end of its last message, as transformers cuts it: a template may have removed the blanks at
    the ends of the message. Raises RequestError if the text does not contain the message."""
    start = text.rfind(message.strip())
    if start < 0:
        raise RequestError(
            "continue_final_message: this model's chat template does not write the last message as it is"
        )
    whole = message.lstrip()
    return text[: start + len(whole)] if text.startswith(whole, start) else text[: start + len(message.strip())]
