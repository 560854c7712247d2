"""Every kind of proposal with every verifier that is lossless for it, and settings of requests, all small enough to
enumerate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.speculation.config import LOSSLESS, SpeculativeConfig


def dead_end(tokens: Sequence[int], logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """A logits processor that fails after token 1, or lets nothing follow, or does neither: in draft and target
    independently, since their logits differ."""
    case = int(1000 * abs(logits[0])) % 3
    if tokens[-1:] != [1] or case == 0:
        return logits
    if case == 1:
        raise LookupError("an automaton of texts, which end at 1")
    return np.full_like(logits, -np.inf)


SETTINGS = {
    "plain": SamplingParams(max_tokens=3),
    "greedy": SamplingParams(max_tokens=3, temperature=0),
    "cold": SamplingParams(max_tokens=3, temperature=0.6),
    "top-k": SamplingParams(max_tokens=3, top_k=2),
    "top-p": SamplingParams(max_tokens=3, top_p=0.8),
    "min-p": SamplingParams(max_tokens=3, min_p=0.3),
    "penalties": SamplingParams(max_tokens=3, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7),
    "processor": SamplingParams(
        max_tokens=3, logits_processors=(lambda tokens, logits: logits + 0.8 * (np.arange(len(logits)) == len(tokens)),)
    ),
    "dead ends": SamplingParams(max_tokens=3, stop_token_ids=(1,), logits_processors=(dead_end,)),
    "greedy dead ends": SamplingParams(max_tokens=3, temperature=0, stop_token_ids=(1,), logits_processors=(dead_end,)),
}
SMALL = {"max_draft_len": 2, "max_total_draft_tokens": 4, "frontier_width": 2}
GROWN: dict[str, dict[str, Any]] = {
    "auto": {},
    "chain": {"grow": "chain"},
    "k-ary": {"grow": "k-ary", "branching": (2, 1)},
    "static": {"grow": "static", "topology": (0, 0, 2)},
    "topk": {"grow": "topk"},
    "topk merged": {"grow": "topk", "merge": "gsd", "merge_ngram": 1, "sibling_share": 0.2, "leaf_share": 0.1},
    "dyspec": {"grow": "dyspec", "key": "draft"},
    "dyspec pruned": {"grow": "dyspec", "key": "draft", "max_total_draft_tokens": 3},
    "dyspec-heap": {"grow": "dyspec-heap", "key": "draft", "max_total_draft_tokens": 3},
    "dyspec-threshold": {"grow": "dyspec-threshold", "draft_threshold": 0.2},
    "dyspec merged": {"grow": "dyspec-threshold", "merge": "gsd", "merge_ngram": 1, "draft_threshold": 0.1},
    "layers merged": {"grow": "dyspec", "merge": "gsd", "merge_ngram": 1, "key": "draft"},
    "heap merged": {"grow": "dyspec-heap", "merge": "gsd", "merge_ngram": 1, "max_total_draft_tokens": 3},
    "k-ary merged": {"grow": "k-ary", "branching": (2, 1), "merge": "gsd", "merge_ngram": 1},
    "dyspec calibrated": {"grow": "dyspec", "key": "calibrated", "max_total_draft_tokens": 3},
    "merged calibrated": {
        "grow": "dyspec-threshold",
        "merge": "gsd",
        "merge_ngram": 1,
        "draft_threshold": 0.1,
        "key": "calibrated",
    },
    "dyspec by head": {"grow": "dyspec", "key": "head"},
    "heap by head": {"grow": "dyspec-heap", "key": "head", "max_total_draft_tokens": 3},
    "merged by head": {
        "grow": "dyspec-threshold",
        "merge": "gsd",
        "merge_ngram": 1,
        "draft_threshold": 0.1,
        "key": "head",
    },
    "chain, specdec++": {"grow": "chain", "stop_rule": "specdec++", "rejection_threshold": 0.4},
    "chain, confidence": {"grow": "chain", "stop_rule": "confidence", "confidence_threshold": 0.4},
    "chain, entropy": {"grow": "chain", "stop_rule": "entropy", "entropy_threshold": 0.3},
    "dyspec, specdec++": {"grow": "dyspec", "stop_rule": "specdec++", "rejection_threshold": 0.5},
    "merged, specdec++": {
        "grow": "dyspec-threshold",
        "merge": "gsd",
        "merge_ngram": 1,
        "draft_threshold": 0.1,
        "stop_rule": "specdec++",
    },
    "lookup": {"grow": "lookup", "lookup_ngram": 1, "lookup_len": 2},
}


def speculative(name: str, verify: str) -> SpeculativeConfig:
    return SpeculativeConfig(**{**SMALL, **GROWN[name], "verify": verify})


LEGAL = [(name, verify) for name in GROWN for verify in LOSSLESS[speculative(name, "auto").proposal]]
