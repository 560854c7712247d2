"""Run an engine bundle: `LLM(bundle).generate(prompt, SamplingParams(...))`."""

from ..models.errors import BundleError, CheckpointError, ConfigError, DraftwoodError, EngineError, RequestError
from .bundle.bundle import EngineBundle
from .chat import ChatSession
from .decoding.queue import QueueFullError
from .decoding.stats import SpecDecodeStats
from .llm import LLM
from .prompt import TextPrompt, TokensPrompt
from .requests.async_llm import AsyncLLM
from .sampling.params import SamplingParams
from .sampling.structured import StructuredOutput
from .speculation.config import SpeculativeConfig
from .text.result import CompletionOutput, Logprob, RequestOutput
from .text.writer import StreamChunk, TextPiece

__all__ = [
    "LLM",
    "AsyncLLM",
    "BundleError",
    "ChatSession",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "DraftwoodError",
    "EngineBundle",
    "EngineError",
    "Logprob",
    "QueueFullError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SpecDecodeStats",
    "SpeculativeConfig",
    "StreamChunk",
    "StructuredOutput",
    "TextPiece",
    "TextPrompt",
    "TokensPrompt",
]
