"""Converts the tensors of one Triton request to a TritonRequest: prompt, SamplingParams, speculation, wanted outputs.

A setting may come as an input tensor, as a request parameter (over HTTP any other field of the JSON body), or inside
`sampling_parameters`, the JSON text of Triton's vLLM backend. If it comes more than once, the values must be equal. A
text stands for the JSON in it wherever a setting is no text.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, StringConstraints, ValidationError

from ....models.errors import RequestError, nearest, shown
from ...sampling.params import LARGEST_SEED, MAX_STOP_LENGTH, MAX_STOPS, SamplingParams
from ...speculation.bounds import INTEGERS, MAX_PROPOSAL, NUMBERS, check_bounds
from ...speculation.config import SpeculativeConfig
from ..body import SamplingBody, Stop, names_of, problem_of
from ..json_text import parse
from .contract import OPTIONAL_INPUTS, PROMPT, VARIABLE

ALIASES = {"min_length": "min_tokens", "stop_words": "stop", "user": "client"}
MAX_TEXT_BYTES = 4 << 20  # of one text; tokenizing it takes seconds, and Triton itself has no limit below gigabytes
MAX_SETTINGS = 1 << 18  # characters of settings as JSON; the event loop parses them, in less than a tenth of a second
SEVERAL = {spec.name for spec in OPTIONAL_INPUTS if spec.dims == VARIABLE}
SPECULATION = {field.name for field in fields(SpeculativeConfig)}
SHAPES = {"branching", "topology"}
LISTS = {"allowed_token_ids", "stop_token_ids", *SHAPES}  # "3,4" stands for [3, 4]
WORDS = {"stop", "bad_words"}
TEXTS = {"client", "cache_salt", "guided_json", "guided_regex", "guided_grammar"}
TEXTS |= SPECULATION - {*INTEGERS, *NUMBERS, *SHAPES}

Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS)]


class TritonBody(SamplingBody):
    """The settings of a request beside those of speculation."""

    # Settings of padding, of beam search, and of the choice between two exact verification methods.
    ignored = frozenset({"pad_id", "length_penalty", "use_draft_logits"})
    neutral = {  # noqa: RUF012 - as the base class declares it
        **dict.fromkeys(("beam_width", "best_of", "n", "num_return_sequences"), (1,)),
        **dict.fromkeys(("return_context_logits", "return_generation_logits", "use_beam_search"), (False,)),
    }

    top_p: float | None = Field(None, ge=0, le=1)
    stop: Stop | Stops | None = None
    bad_words: Stops | None = None
    client: Annotated[str, StringConstraints(min_length=1)] | None = None
    end_id: int | None = None
    num_draft_tokens: int | None = Field(None, ge=0, le=MAX_PROPOSAL)
    timeout: int | None = Field(None, ge=0, le=LARGEST_SEED)  # microseconds, as Triton has it
    exclude_input_in_output: bool = False
    return_log_probs: bool = False
    return_perf_metrics: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    return_finish_reason: bool = False

    def params(self, greedy: bool) -> SamplingParams:
        """greedy: whether a request without sampling settings is greedy and `top_p` may be 0, as in TensorRT-LLM; in
        vLLM its temperature is 1. Raises RequestError."""
        chosen = self.sampling()
        if self.max_tokens is not None:
            chosen["max_tokens"] = self.max_tokens
        only_best = greedy and self.top_p == 0 and not chosen.get("top_k")
        if greedy and self.top_p == 0:  # beside top_k it leaves nothing out
            chosen["top_p"] = 1.0
        draws = self.temperature is not None or any((each or 0) > 0 for each in (self.top_k, self.top_p, self.min_p))
        if self.top_k == 1 or only_best or (greedy and not draws):
            chosen["temperature"] = 0.0  # the same token, without a draw
        if self.end_id is not None:  # replaces the model's end tokens; -1 means that no token ends the text
            if chosen["structured"] is not None:
                raise RequestError(
                    "end_id beside a structured output, which ends the text itself: leave one of them out"
                )
            ends = [self.end_id] if self.end_id != -1 else []
            chosen |= {"ignore_eos": True, "stop_token_ids": [*(self.stop_token_ids or ()), *ends]}
        return SamplingParams(**chosen, logprobs=0 if self.return_log_probs else None)


@dataclass(frozen=True, slots=True)
class TritonRequest:
    """One request."""

    prompt: str
    body: TritonBody
    params: SamplingParams
    speculative: SpeculativeConfig | None

    @property
    def deadline_s(self) -> float | None:
        """The time limit in seconds, if the request has one."""
        return None if self.body.timeout is None else self.body.timeout / 1e6


def parse_request(
    tensors: Mapping[str, NDArray[Any]], parameters: Mapping[str, Any], own: SpeculativeConfig | None
) -> TritonRequest:
    """The request in these input tensors and request parameters.

    tensors: by name, [1, 1] or [1, n], strings as bytes. own: the model's settings of speculation, for requests without
    such settings.
    Raises RequestError or ConfigError.
    """
    if PROMPT.name not in tensors:  # Triton lets it through
        raise RequestError(f"{PROMPT.name} is missing: send the prompt in it")
    given = {name: read(name, tensor) for name, tensor in tensors.items()}
    prompt = given.pop(PROMPT.name)
    content = given.pop("sampling_parameters", None)
    values = merged(given, parameters, {} if content is None else json_object("sampling_parameters", content))
    changes = {name: values.pop(name) for name in SPECULATION & values.keys()}
    body = checked(values)
    return TritonRequest(prompt, body, body.params(content is None), speculation(changes, body.num_draft_tokens, own))


def read(name: str, tensor: NDArray[Any]) -> Any:
    """A tensor's only value, or the list of its values if the contract allows several."""
    if name not in SEVERAL:
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


def merged(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """All settings by name. Raises RequestError for sources that disagree."""
    values: dict[str, Any] = {}
    for source in sources:
        for sent, value in source.items():
            name = ALIASES.get(sent, sent)
            found = unquoted(name, value)
            if values.setdefault(name, found) != found:
                raise RequestError(f"{name} is given twice, as {shown(values[name])} and {shown(found)}: send it once")
    return values


def unquoted(name: str, value: Any) -> Any:
    """A setting's value, or the one that a text stands for; other texts stay, and are refused by their type."""
    if name in WORDS:
        return [value] if isinstance(value, str) else value
    if name in TEXTS:
        return value
    if isinstance(value, str):
        text = value.lower() if value in ("True", "False") else value
        with suppress(RequestError):
            value = parse(f"[{text}]" if name in LISTS and text[:1] != "[" else text)
    if name in LISTS and isinstance(value, list):
        return [unquoted("", each) for each in value]
    if name == "logit_bias" and isinstance(value, dict):
        return {token: unquoted("", bias) for token, bias in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def checked(values: Mapping[str, Any]) -> TritonBody:
    """Raises RequestError for an unknown setting, or one of a wrong type or size."""
    try:
        return TritonBody.model_validate(values)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    unknown = next((str(each["loc"][0]) for each in errors if each["type"] == "extra_forbidden"), "")
    if unknown and unknown not in TritonBody.model_fields:
        known = names_of(TritonBody) | SPECULATION
        raise RequestError(f"{shown(unknown)} is no setting of this model: leave it out{nearest(unknown, known)}")
    raise RequestError(problem_of(errors).message)


def speculation(
    changes: Mapping[str, Any], limit: int | None, own: SpeculativeConfig | None
) -> SpeculativeConfig | None:
    """The model's settings of speculation with the request's changes. limit: of draft tokens; 0 means plain
    decoding."""
    check_bounds(changes)
    if limit == 0:
        return None
    config = own if own is not None or not (changes or limit) else SpeculativeConfig()
    if config is None:
        return None
    if limit is not None:
        depth = limit if changes.get("grow", config.grow) == "chain" else min(limit, config.max_draft_len)
        changes = {"max_total_draft_tokens": limit, "max_draft_len": depth, **changes}
    return replace(config, **changes)
