"""ResponseWriter: converts chunks of text to the output tensors of Triton responses."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...decoding.stats import SpecDecodeStats
from ...text.writer import StreamChunk
from .request import TritonRequest


class ResponseWriter:
    """The responses of one request: one per chunk of a stream, otherwise one at the end.

    A response has the text, two indices that are always 0 (one prompt, one sequence), and the outputs of the request's
    `return_…` flags. As with TensorRT-LLM, a stream never repeats the prompt, and a whole text begins with the prompt
    unless `exclude_input_in_output` is set. Counts and log-probabilities are those of the response; `cum_log_probs`
    covers the whole text so far.
    """

    def __init__(self, request: TritonRequest, num_input_tokens: int) -> None:
        self._request = request
        self._num_input_tokens = num_input_tokens
        self._text = "" if request.stream or request.exclude_input_in_output else request.prompt
        self._num_tokens = 0
        self._logprobs: list[float] = []
        self._cum_logprob = 0.0

    def write(self, chunk: StreamChunk) -> dict[str, NDArray[Any]] | None:
        """The tensors of the next response by name, each with a batch axis of 1; None if nothing is to be sent yet."""
        self._text += chunk.text
        self._num_tokens += len(chunk.token_ids)
        self._logprobs += [logprob.logprob for logprob in chunk.logprobs]
        self._cum_logprob += sum(logprob.logprob for logprob in chunk.logprobs)
        if not self._request.stream and chunk.finish_reason is None:
            return None
        tensors = self._tensors(chunk.finish_reason, chunk.stats)
        self._text, self._num_tokens, self._logprobs = "", 0, []
        return tensors

    def _tensors(self, finish_reason: str | None, stats: SpecDecodeStats) -> dict[str, NDArray[Any]]:
        wanted = self._request.returns
        tensors = {"text_output": strings(self._text), "sequence_index": integer(0), "batch_index": integer(0)}
        if "return_num_input_tokens" in wanted:
            tensors["num_input_tokens"] = integer(self._num_input_tokens)
        if "return_num_output_tokens" in wanted:
            tensors["num_output_tokens"] = integer(self._num_tokens)
        if "return_log_probs" in wanted:
            tensors["output_log_probs"] = np.array([[self._logprobs]], np.float32)
            tensors["cum_log_probs"] = np.array([[self._cum_logprob]], np.float32)
        if finish_reason is not None and "return_finish_reason" in wanted:
            tensors["finish_reason"] = strings(finish_reason)
        if finish_reason is not None and "return_perf_metrics" in wanted:
            tensors["acceptance_rate"] = np.array([[stats.acceptance_rate]], np.float32)
            tensors["total_accepted_draft_tokens"] = integer(stats.num_accepted_tokens)
            tensors["total_draft_tokens"] = integer(stats.num_draft_tokens)
        return tensors


def strings(text: str) -> NDArray[np.object_]:
    """[1, 1] of UTF-8 bytes, Triton's form of text."""
    return np.array([[text.encode("utf-8")]], np.object_)


def integer(value: int) -> NDArray[np.int32]:
    """[1, 1] int32."""
    return np.array([[value]], np.int32)
