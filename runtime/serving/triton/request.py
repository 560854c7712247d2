"""Converts the tensors of one Triton request to a TritonRequest: prompt, SamplingParams, speculation, wanted outputs.

A setting may come as an input tensor, as a request parameter (over HTTP any other field of the JSON body), or inside
`sampling_parameters`, the JSON text of Triton's vLLM backend. If it comes more than once, the values must be equal.
Unsupported settings that would change the output are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....models.errors import RequestError, nearest, shown
from ...sampling.params import MAX_ALLOWED_TOKENS, MAX_BIASES, MAX_STOP_LENGTH, MAX_STOPS, SamplingParams
from ...speculation.bounds import MAX_PROPOSAL, Lowerable, check_bounds
from ...speculation.config import SpeculativeConfig
from ..json_text import parse
from .contract import OPTIONAL_INPUTS, PROMPT, VARIABLE
from .forms import FORMS, demanded_form

ALIASES = {"min_length": "min_tokens", "stop_words": "stop", "user": "client"}
# Unsupported settings of other servers: name -> neutral values, with which the setting is accepted.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "beam_width": (1,),
    "best_of": (1, None),
    "logprobs": (None,),  # no output for alternatives; return_log_probs reports those of the tokens
    "n": (1,),
    "num_return_sequences": (1,),
    "prompt_logprobs": (None,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "use_beam_search": (False,),
}
# Settings of padding, of beam search, and of the choice between two exact verification methods.
WITHOUT_EFFECT = {"pad_id", "length_penalty", "use_draft_logits"}
LARGEST = 2**64  # integers are below it; the largest ones are seeds
MAX_TEXT_BYTES = 4 << 20  # of one text; tokenizing it takes seconds, and Triton itself has no limit below gigabytes
MAX_SETTINGS = 1 << 18  # characters of settings as JSON; the event loop parses them, in less than a tenth of a second
MAX_WORD = 16  # characters of a value such as "false"; one that is longer is no such word


@dataclass(frozen=True, slots=True)
class TritonRequest:
    """One request. returns: names of the `return_…` flags that are set. deadline_s: time limit in seconds. client: name
    of the client. cache_salt: see AsyncLLM.generate. The last three are None if the request has no such setting."""

    prompt: str
    params: SamplingParams
    speculative: SpeculativeConfig | None
    stream: bool
    exclude_input_in_output: bool
    returns: frozenset[str]
    deadline_s: float | None
    client: str | None
    cache_salt: str | None


def parse_request(
    tensors: Mapping[str, NDArray[Any]], parameters: Mapping[str, Any], own: SpeculativeConfig | None
) -> TritonRequest:
    """The request in these input tensors and request parameters.

    tensors: by name, [1, 1] or [1, n], strings as bytes. own: the model's settings of speculation, for requests without
    such settings.
    Raises RequestError or ConfigError.
    """
    given = {name: read(name, tensor) for name, tensor in tensors.items()}
    prompt = given.pop(PROMPT.name)
    content = given.pop("sampling_parameters", None)
    values = merge_sources(given, parameters, {} if content is None else json_object("sampling_parameters", content))
    params = sampling_params(values, greedy=content is None)
    return TritonRequest(
        prompt=prompt,
        params=params,
        speculative=speculation(values, own),
        stream=values.get("stream", False),
        exclude_input_in_output=values.get("exclude_input_in_output", False),
        returns=frozenset(name for name, value in values.items() if name.startswith("return_") and value),
        deadline_s=values["timeout"] / 1e6 if "timeout" in values else None,
        client=values.get("client"),
        cache_salt=values.get("cache_salt"),
    )


def read(name: str, tensor: NDArray[Any]) -> Any:
    """A tensor's only value, or the list of its values if the contract allows several."""
    if name not in LISTS:
        if tensor.size != 1:
            raise RequestError(f"{name} must hold one value, not {tensor.size}: send one request per prompt")
        return plain(name, tensor.reshape(-1)[0], MAX_TEXT_BYTES)
    if tensor.size > MAX_STOPS:
        raise RequestError(f"{name} has {tensor.size} texts and may have {MAX_STOPS}: send fewer")
    items = [plain(name, item, 4 * MAX_STOP_LENGTH) for item in tensor.reshape(-1)]  # a character has up to four bytes
    return [item for item in items if item]  # clients send an empty string for an empty list


def plain(name: str, item: Any, most_bytes: int) -> Any:
    """An element of a tensor as a Python value. most_bytes: of a text."""
    if isinstance(item, np.float32):
        return float(str(item))  # the client means 0.7, not the nearest fp32 number
    if not isinstance(item, bytes):
        return item.item()
    if len(item) > most_bytes:
        raise RequestError(f"{name} has {len(item)} bytes and may have {most_bytes}: shorten it")
    try:
        return item.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8 text ({error}): encode it as UTF-8") from error


def json_object(name: str, content: str) -> dict[str, Any]:
    """The object in a JSON text. name: of the text, for errors. Raises RequestError."""
    if len(content) > MAX_SETTINGS:
        raise RequestError(f"{name} has {len(content)} characters and may have {MAX_SETTINGS}: send less")
    try:
        settings = parse(content)
    except RequestError as error:
        raise RequestError(f"{name} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise RequestError(f"{name} must be a JSON object, not {shown(content)}")
    return settings


def merge_sources(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """All settings by name, converted to their types. Raises RequestError for unsupported settings and for sources that
    disagree."""
    values: dict[str, Any] = {}
    for source in sources:
        for sent, value in source.items():
            name = ALIASES.get(sent, sent)
            if is_neutral(name, value):
                continue
            converted = convert(name, value)
            if values.setdefault(name, converted) != converted:
                raise RequestError(
                    f"{name} is given twice, as {shown(values[name])} and {shown(converted)}: send it once"
                )
    return values


def is_neutral(name: str, value: Any) -> bool:
    """Whether a setting may be ignored. Raises RequestError for an unsupported setting that may not."""
    if name in NEUTRAL and word(value) not in map(word, NEUTRAL[name]):
        raise RequestError(f"{name}={shown(value)} is not served: leave it out")
    return name in NEUTRAL or name in WITHOUT_EFFECT


def sampling_params(values: Mapping[str, Any], greedy: bool) -> SamplingParams:
    """The SamplingParams of these settings. greedy: whether a request without sampling settings is greedy and `top_p`
    may be 0, as in TensorRT-LLM; in vLLM its temperature is 1."""
    chosen = {name: value for name, value in values.items() if name in SAMPLING}
    if chosen.get("top_k") == -1:  # vLLM's value for keeping all tokens
        chosen["top_k"] = 0
    only_best = greedy and chosen.get("top_p") == 0 and not chosen.get("top_k")
    if greedy and chosen.get("top_p") == 0:  # beside top_k it leaves nothing out
        chosen["top_p"] = 1.0
    draws = "temperature" in chosen or any(values.get(name, 0) > 0 for name in ("top_k", "top_p", "min_p"))
    if chosen.get("top_k") == 1 or only_best or (greedy and not draws):
        chosen["temperature"] = 0.0  # the same token, without a draw
    form = demanded_form(values)
    if form is not None and "end_id" in values:
        raise RequestError("end_id beside a structured output, which ends the text itself: leave one of them out")
    if "end_id" in values:  # replaces the model's end tokens; -1 means that no token ends the text
        ends = () if values["end_id"] == -1 else (values["end_id"],)
        chosen |= {"ignore_eos": True, "stop_token_ids": (*chosen.get("stop_token_ids", ()), *ends)}
    if values.get("return_log_probs"):
        chosen["logprobs"] = 0
    return SamplingParams(**chosen, structured=form)


def speculation(values: Mapping[str, Any], own: SpeculativeConfig | None) -> SpeculativeConfig | None:
    """The model's settings of speculation with the request's changes. num_draft_tokens 0 means plain decoding."""
    changes = {name: value for name, value in values.items() if name in SPECULATION}
    limit = values.get("num_draft_tokens")
    check_bounds(changes, RequestError)
    if limit is not None and not 0 <= limit <= MAX_PROPOSAL:
        raise RequestError(f"num_draft_tokens must be at least 0 and not more than {MAX_PROPOSAL}, but is {limit}")
    if limit == 0:
        return None
    config = own if own is not None or not (changes or limit) else SpeculativeConfig()
    if config is None:
        return None
    if limit is not None:
        depth = limit if changes.get("grow", config.grow) == "chain" else min(limit, config.max_draft_len)
        changes = {"max_total_draft_tokens": limit, "max_draft_len": depth} | changes
    return replace(config, **changes)


def convert(name: str, value: Any) -> Any:
    """Convert a value to the type of its setting; numbers and lists may come as text. Raises RequestError."""
    kind = CONVERTERS.get(name)
    if kind is None:
        raise RequestError(f"{shown(name)} is no setting of this model: leave it out{nearest(name, CONVERTERS)}")
    try:
        return kind(value)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise RequestError(f"{name} must be {kind.__doc__}, not {shown(value)}") from error


def word(value: Any) -> str:
    """A value as text in lower case, so that `true`, True and "True" are equal. A long one is cut."""
    return (value[: MAX_WORD + 1] if isinstance(value, str) else shown(value)).lower()


def boolean(value: Any) -> bool:
    """true or false"""
    if isinstance(value, bool):
        return value
    return {"true": True, "false": False}[word(value)]


def integer(value: Any) -> int:
    """an integer"""
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(value)
    if not -LARGEST <= (number := int(value)) <= LARGEST:
        raise ValueError(value)
    return number


def microseconds(value: Any) -> int:
    """an integer of microseconds, at least 0"""
    if (time := integer(value)) < 0:
        raise ValueError(value)
    return time


def number(value: Any) -> float:
    """a number"""
    if isinstance(value, bool):
        raise ValueError(value)
    return float(value)


def text(value: Any) -> str:
    """text"""
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def named(value: Any) -> str:
    """text that is not empty"""
    if not text(value):
        raise ValueError(value)
    return text(value)


def integers(value: Any) -> tuple[int, ...]:
    """a list of integers (at most 16384)"""
    items = value.split(",", MAX_ALLOWED_TOKENS) if isinstance(value, str) else value
    if isinstance(items, Mapping) or len(items) > MAX_ALLOWED_TOKENS:
        raise ValueError(value)
    return tuple(map(integer, items))


def texts(value: Any) -> tuple[str, ...]:
    """text or a list of texts"""
    if isinstance(value, Mapping):
        raise ValueError(value)
    return (value,) if isinstance(value, str) else tuple(text(item) for item in value)


def allowed(value: Any) -> tuple[int, ...] | None:
    """null or a list of integers (at most 16384)"""
    return None if value is None else integers(value)


def biases(value: Any) -> dict[int, float] | None:
    """null or an object of numbers by token id (at most 1024), each token once"""
    if value is None:
        return None
    content = json_object("logit_bias", value) if isinstance(value, str) else value
    if not isinstance(content, Mapping) or len(content) > MAX_BIASES:
        raise ValueError(value)
    found = {integer(token): number(bias) for token, bias in content.items()}
    if len(found) < len(content):  # two names of one token, such as 3 and 03
        raise ValueError(value)
    return found


CONVERTER_OF: dict[type, Callable[[Any], Any]] = {
    bool: boolean,
    int: integer,
    Lowerable: integer,
    float: number,
    str: text,
    tuple: integers,
    NoneType: integer,
}
LISTS = {spec.name for spec in OPTIONAL_INPUTS if spec.dims == VARIABLE}
FLAGS = {spec.name for spec in OPTIONAL_INPUTS if spec.data_type == "TYPE_BOOL"} - {*NEUTRAL, *WITHOUT_EFFECT}
SAMPLING = {field.name: CONVERTER_OF[type(field.default)] for field in fields(SamplingParams)} | {
    "allowed_token_ids": allowed,
    "bad_words": texts,
    "logit_bias": biases,
    "stop": texts,
}
SPECULATION = {field.name: CONVERTER_OF[type(field.default)] for field in fields(SpeculativeConfig)}
UNSERVED = {"logits_processors", "structured", *NEUTRAL}
# Every setting of a request -> the function that converts its value.
CONVERTERS: dict[str, Callable[[Any], Any]] = {
    **{name: kind for name, kind in SAMPLING.items() if name not in UNSERVED},
    **SPECULATION,
    **FORMS,
    **{name: boolean for name in sorted(FLAGS)},
    "cache_salt": named,
    "client": named,
    "end_id": integer,
    "num_draft_tokens": integer,
    "timeout": microseconds,  # as Triton has it
}
