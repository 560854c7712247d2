"""Run an engine bundle: `LLM(bundle).generate(prompt, SamplingParams(...))`."""

from ..models.errors import BundleError, CheckpointError, ConfigError, DraftwoodError, EngineError, RequestError
from .async_llm import AsyncLLM
from .bundle import EngineBundle
from .generation_result import GenerationResult
from .llm import LLM
from .metrics import SpecDecodeStats
from .sampling import SamplingParams
from .scheduler import QueueFullError
from .speculation.config import SpeculativeConfig
from .text import StreamChunk, TextPiece

__all__ = [
    "LLM",
    "AsyncLLM",
    "BundleError",
    "CheckpointError",
    "ConfigError",
    "DraftwoodError",
    "EngineBundle",
    "EngineError",
    "GenerationResult",
    "QueueFullError",
    "RequestError",
    "SamplingParams",
    "SpecDecodeStats",
    "SpeculativeConfig",
    "StreamChunk",
    "TextPiece",
]
