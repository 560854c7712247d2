"""The sampling settings of a text for which nobody chose others: those of the model's generation_config.json, or ours.
They hold for conversations, the chat page, `draftwood generate` and `LLM.generate`; OpenAI's API has OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from ...models.errors import BundleError, RequestError
from ...models.plain_files import read_object
from ..sampling.params import SamplingParams
from .bundle import GENERATION, EngineBundle

TEMPERATURE, TOP_P = 0.7, 0.95  # where the model's authors say nothing; at 1 a small model answers nonsense
FIELDS = {  # of SamplingParams, by the names in the file
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def known(content: Mapping[str, Any]) -> dict[str, Any]:
    """Of the content of a generation_config.json, the settings that are taken from it."""
    return {
        name: value
        for name, value in content.items()
        if name in FIELDS and isinstance(value, Real) and not isinstance(value, bool)
    }


def params_from(content: Mapping[str, Any], max_length: int) -> SamplingParams:
    """The settings of a model. content: see `known`. max_length: tokens of prompt and output; a text without a limit of
    its own ends there. Raises RequestError for values out of range."""
    chosen = {FIELDS[name]: value for name, value in known(content).items()}
    ours = {"temperature": TEMPERATURE, "top_p": TOP_P, "max_tokens": max_length}
    return SamplingParams(**ours | chosen)


def default_params(bundle: EngineBundle) -> SamplingParams:
    """The settings of a bundle's model. Raises BundleError."""
    manifest, file = bundle.manifest, bundle.folder / GENERATION
    try:
        content = read_object(file, own=True) if GENERATION in manifest.files else {}
        return params_from(content, manifest.max_length)
    except (OSError, RequestError, ValueError) as error:
        raise BundleError(f"{file} cannot be used ({error}): rebuild the bundle") from error
