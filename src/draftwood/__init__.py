"""Draftwood's public names. `from draftwood import LLM, SamplingParams` loads the runtime; `import draftwood` loads
nothing of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runtime import (
        LLM,
        AsyncLLM,
        BundleError,
        ChatSession,
        CheckpointError,
        CompletionOutput,
        ConfigError,
        DraftwoodError,
        EngineBundle,
        EngineError,
        Logprob,
        QueueFullError,
        RequestError,
        RequestOutput,
        SamplingParams,
        SpecDecodeStats,
        SpeculativeConfig,
        StreamChunk,
        StructuredOutput,
        TextPiece,
        TextPrompt,
        TokensPrompt,
    )

    __version__: str

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
    "__version__",
]


def __getattr__(name: str) -> Any:
    """A public name at its first use. Raises AttributeError for other names."""
    if name == "__version__":
        from .models.release import own_version

        value: Any = own_version()
    elif name in __all__:
        from . import runtime

        value = getattr(runtime, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
