"""Audit: decodes a prompt again without the draft, and reports the first difference of the outputs and its size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...models.errors import RequestError
from ..decoding.decoder import SpeculativeDecoder
from ..decoding.round import Round
from ..decoding.stats import SpecDecodeStats
from ..llm import LLM
from ..prompt import Prompt
from ..sampling.params import SamplingParams
from ..sampling.random import seeded_streams
from ..sampling.sampler import Sampler
from ..speculation.growers.baseline import log

NOISE = 1e-3  # greatest difference of logits between passes of different widths, whose sums have different orders


class AuditReport(NamedTuple):
    """How a speculative output compares with plain decoding."""

    equal: bool
    num_tokens: int  # equal tokens from the beginning
    position: int | None = None  # of the first output token that differs; None if none does
    speculative_token: int | None = None  # at this position; None for an output that has ended
    plain_token: int | None = None
    # The target's logit of the plain token minus that of the speculative one, in plain decoding and after the
    # request's processors; None if one output has ended.
    logit_gap: float | None = None

    @property
    def numeric_noise(self) -> bool:
        """Whether the difference may come from rounding in passes of different widths; otherwise it is a bug."""
        return self.logit_gap is not None and self.logit_gap < NOISE

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-ready; numeric_noise is null if nothing differs."""
        gap = self.logit_gap
        finite = gap if gap is None or np.isfinite(gap) else None
        return self._asdict() | {"logit_gap": finite, "numeric_noise": None if self.equal else self.numeric_noise}


def audit(llm: LLM, prompt: Prompt, params: SamplingParams) -> AuditReport:
    """Generate with speculation, then without it over the same open target engine, and compare the outputs.

    Raises RequestError above temperature 0, and if `llm` does not speculate.
    """
    check_auditable(llm.speculative is not None, params)
    (result,) = llm.generate(prompt, params)
    return audit_output(llm, result.prompt_token_ids, params, result.token_ids)


def audit_output(llm: LLM, prompt: Sequence[int], params: SamplingParams, token_ids: Sequence[int]) -> AuditReport:
    """Compare an output that `llm` has already generated. Raises like `audit`."""
    check_auditable(llm.speculative is not None, params)
    manifest = llm.bundle.manifest
    plain = SpeculativeDecoder(llm.target, None, None, manifest.max_length, manifest.eos_token_ids)
    return compare(plain, prompt, llm.sampler(params, prompt), token_ids)


def check_auditable(speculates: bool, params: SamplingParams) -> None:
    """Raises RequestError if the outputs cannot be compared token by token."""
    if not params.greedy:
        raise RequestError(
            "an audit compares greedy decoding token by token: set temperature to 0 (that sampling keeps the target's "
            "distribution is proved by enumeration, in tests/runtime/decoding/test_lossless.py)"
        )
    if not speculates:
        raise RequestError("there is nothing to audit in plain decoding: turn speculation on, or leave out the audit")


def compare(
    plain: SpeculativeDecoder, prompt: Sequence[int], sampler: Sampler, token_ids: Sequence[int]
) -> AuditReport:
    """Decode `prompt` with `plain`, up to the first token that differs from `token_ids`."""
    probs: list[NDArray[np.float64]] = []

    def observe(round: Round) -> None:
        probs[:] = [round.target_probs[0]]

    position = 0
    # A stop string ends a text outside of the decoder, so plain decoding would continue after it.
    stopped_by_text = bool(sampler.params.stop)
    for chunk in plain.generate(prompt, sampler, seeded_streams(0), SpecDecodeStats(), observe):
        (token,) = chunk.token_ids
        if position == len(token_ids):
            return AuditReport(False, position, position, None, token)
        if token_ids[position] != token:
            gap = float(np.log(probs[0][token]) - log(probs[0][token_ids[position]]))
            return AuditReport(False, position, position, token_ids[position], token, gap)
        position += 1
        if position == len(token_ids) and stopped_by_text:
            break
    if position < len(token_ids):
        return AuditReport(False, position, position, token_ids[position], None)
    return AuditReport(True, position)
