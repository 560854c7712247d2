"""The programs of a comparison: how each is started, and the settings among which a trial finds its best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from benchmarks.peers.program import Conditions, Program
from benchmarks.peers.programs import draftwood, libraries, llama_cpp, vllm
from draftwood.models.errors import RequestError

MAKERS: Mapping[str, Callable[[str, Conditions], Program]] = MappingProxyType(
    {
        "draftwood": draftwood.make,
        "llama.cpp": llama_cpp.make,
        "ik_llama.cpp": llama_cpp.make_ik,
        "openvino-genai": libraries.make_openvino,
        "vllm": vllm.make,
        "transformers": libraries.make_transformers,
    }
)


def make_program(key: str, conditions: Conditions) -> Program:
    """key: NAME/PRECISION. Raises RequestError for an unknown one, SetupError for one that is not installed."""
    name, _, precision = key.partition("/")
    if name not in MAKERS:
        raise RequestError(f"{name!r} is not a program; choose of {', '.join(MAKERS)}")
    return MAKERS[name](precision, conditions)
