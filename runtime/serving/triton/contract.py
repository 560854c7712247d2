"""The contract of a draftwood model with Triton Inference Server: its tensors, and its settings in config.pbtxt.

Names, types and shapes are those of TensorRT-LLM's `ensemble` and `tensorrt_llm_bls` models, with the additions of
Triton's vLLM backend, so that clients of either work unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from ....models.errors import ConfigError
from ...decoding.prefill import MAX_PAUSE_MS, check_pause
from ...decoding.queue import FairQueue
from ...decoding.scheduler import MAX_RUNNING
from ...engines.shared.pool import PREFIX_CACHE_SLOTS
from ...requests.async_llm import MAX_WAITING
from ...speculation.bounds import Lowerable
from ...speculation.config import SpeculativeConfig

VARIABLE = (-1,)
# Type of a parameter -> what reads it as `to_parameters` writes it.
READ: dict[type, Callable[[str], Any]] = {
    bool: {"True": True, "False": False}.__getitem__,
    int: int,
    float: float,
    str: str,
}


class TensorSpec(NamedTuple):
    """A tensor of config.pbtxt. dims: without the batch axis, which comes first and is always 1; -1 is any length."""

    name: str
    data_type: str
    dims: tuple[int, ...] = (1,)


PROMPT = TensorSpec("text_input", "TYPE_STRING")
OPTIONAL_INPUTS = (
    TensorSpec("max_tokens", "TYPE_INT32"),
    TensorSpec("min_tokens", "TYPE_INT32"),
    TensorSpec("min_length", "TYPE_INT32"),  # the older name of min_tokens
    TensorSpec("stream", "TYPE_BOOL"),
    TensorSpec("stop_words", "TYPE_STRING", VARIABLE),
    TensorSpec("bad_words", "TYPE_STRING", VARIABLE),
    TensorSpec("end_id", "TYPE_INT32"),
    TensorSpec("pad_id", "TYPE_INT32"),
    TensorSpec("top_k", "TYPE_INT32"),
    TensorSpec("top_p", "TYPE_FP32"),
    TensorSpec("temperature", "TYPE_FP32"),
    TensorSpec("repetition_penalty", "TYPE_FP32"),
    TensorSpec("presence_penalty", "TYPE_FP32"),
    TensorSpec("frequency_penalty", "TYPE_FP32"),
    TensorSpec("length_penalty", "TYPE_FP32"),
    TensorSpec("seed", "TYPE_UINT64"),
    TensorSpec("beam_width", "TYPE_INT32"),
    TensorSpec("num_return_sequences", "TYPE_INT32"),
    TensorSpec("num_draft_tokens", "TYPE_INT32"),
    TensorSpec("use_draft_logits", "TYPE_BOOL"),
    TensorSpec("exclude_input_in_output", "TYPE_BOOL"),
    TensorSpec("return_log_probs", "TYPE_BOOL"),
    TensorSpec("return_context_logits", "TYPE_BOOL"),
    TensorSpec("return_generation_logits", "TYPE_BOOL"),
    TensorSpec("return_perf_metrics", "TYPE_BOOL"),
    TensorSpec("return_num_input_tokens", "TYPE_BOOL"),
    TensorSpec("return_num_output_tokens", "TYPE_BOOL"),
    TensorSpec("return_finish_reason", "TYPE_BOOL"),
    TensorSpec("sampling_parameters", "TYPE_STRING"),  # JSON, as in vLLM's backend
)
OUTPUTS = (
    TensorSpec("text_output", "TYPE_STRING", VARIABLE),
    TensorSpec("cum_log_probs", "TYPE_FP32", VARIABLE),
    TensorSpec("output_log_probs", "TYPE_FP32", (-1, -1)),
    TensorSpec("finish_reason", "TYPE_STRING", VARIABLE),
    TensorSpec("sequence_index", "TYPE_INT32"),
    TensorSpec("batch_index", "TYPE_INT32"),
    TensorSpec("num_input_tokens", "TYPE_INT32"),
    TensorSpec("num_output_tokens", "TYPE_INT32"),
    TensorSpec("acceptance_rate", "TYPE_FP32"),
    TensorSpec("total_accepted_draft_tokens", "TYPE_INT32"),
    TensorSpec("total_draft_tokens", "TYPE_INT32"),
)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The settings of a model; each field is a parameter of config.pbtxt. Raises ConfigError."""

    bundle: str  # its folder, absolute or relative to the model's folder
    speculative: SpeculativeConfig | None = SpeculativeConfig()  # noqa: RUF009 - frozen; None does not open the draft
    threads: int = 0  # as of LLM, and the next two
    draft_threads: int = 0
    provider: str = "cpu"
    max_running: int = MAX_RUNNING  # requests that are decoded at the same time
    max_waiting: int = MAX_WAITING  # requests that wait; further ones are refused
    kv_cache_bytes: int = 0  # as of AsyncLLM, and the next two; 0 means its default
    prefix_cache_slots: int = PREFIX_CACHE_SLOTS
    max_pause_ms: float = MAX_PAUSE_MS
    private_weights: bool = False  # as of LLM

    def __post_init__(self) -> None:
        FairQueue(self.max_running, self.max_waiting)  # refuses limits under which no request could run
        check_pause(self.max_pause_ms)

    def to_parameters(self) -> dict[str, str]:
        """Every field as a text for config.pbtxt."""
        values = {field.name: str(getattr(self, field.name)) for field in fields(self)}
        return values | {"speculative": json.dumps(changed(self.speculative))}

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> ModelSettings:
        """The inverse of `to_parameters`; missing fields keep their defaults. Raises ConfigError."""
        try:
            values = {
                field.name: READ[type(field.default)](parameters[field.name])
                for field in fields(cls)
                if field.name in parameters and type(field.default) in READ
            }
            if "speculative" in parameters:
                content = json.loads(parameters["speculative"])
                values["speculative"] = None if content is None else SpeculativeConfig(**content)
            return cls(bundle=parameters["bundle"], **values)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"a parameter of config.pbtxt is missing or not what it should be ({error}): "
                "write the model again with `draftwood triton`"
            ) from error


def changed(config: SpeculativeConfig | None) -> dict[str, Any] | None:
    """The fields that are not left at their defaults, JSON-ready; None for None. A number that a user wrote is kept
    even if it is equal, see Lowerable."""
    if config is None:
        return None
    values = {field.name: (getattr(config, field.name), field.default) for field in fields(config)}
    return {
        name: value
        for name, (value, default) in values.items()
        if value != default or isinstance(value, Lowerable) != isinstance(default, Lowerable)
    }
