"""Every tensor that crosses the border of an exported graph: name, shape and dtype, once.

Axes: B sequences, T rows of this pass (a compiled width), R rows whose logits are wanted, C cache capacity,
K = top-k columns, V vocabulary, H_kv key/value heads, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

TARGET, DRAFT = "target", "draft"
ROLES = (TARGET, DRAFT)


class Binding(NamedTuple):
    name: str
    dtype: str  # numpy name
    shape: tuple[str, ...]  # axis names


INPUT_IDS = Binding("input_ids", "int64", ("B", "T"))
POSITION_IDS = Binding("position_ids", "int64", ("B", "T"))
ATTENTION_MASK = Binding("attention_mask", "float32", ("B", "1", "T", "C"))  # additive: 0 sees, -inf does not
WRITE_INDICES = Binding("write_indices", "int64", ("B",))  # first cache slot of this pass's rows
OUTPUT_ROWS = Binding("output_rows", "int64", ("R",))  # rows that go through the vocabulary projection
INPUTS = (INPUT_IDS, POSITION_IDS, ATTENTION_MASK, WRITE_INDICES, OUTPUT_ROWS)

LOGITS = Binding("logits", "float32", ("B", "R", "V"))
TOP_IDS = Binding("top_ids", "int64", ("B", "R", "K"))  # draft only, most probable first
TOP_LOGPROBS = Binding("top_logprobs", "float32", ("B", "R", "K"))  # draft only, natural logarithm
ACCEPTANCE = Binding("acceptance", "float32", ("B", "R"))  # draft with a head: the target accepts the row's own token

TOP_COLUMNS = 16  # enough for every tree grower: no published tree has more children per node
MASKED = -1e9  # additive mask of an invisible slot; finite, so that a fully masked padding row stays free of NaN


def past(kind: str, layer: int) -> str:
    """Cache input of one layer, [B, H_kv, C, D]; kind is "key" or "value"."""
    return f"past_{kind}.{layer}"


def present(kind: str, layer: int) -> str:
    """Cache output of one layer: the same buffer as `past`, with this pass's rows written in."""
    return f"present_{kind}.{layer}"


CACHE_SHAPE = ("B", "H_kv", "C", "D")
KINDS = ("key", "value")


def output_names(role: str, acceptance_head: bool = False) -> tuple[str, ...]:
    """Outputs of a role's graph besides the cache. Only the draft ranks its columns in the graph and has a head."""
    if role == TARGET:
        return (LOGITS.name,)
    ranked = (LOGITS.name, TOP_IDS.name, TOP_LOGPROBS.name)
    return (*ranked, ACCEPTANCE.name) if acceptance_head else ranked


def top_columns(vocab_size: int) -> int:
    """K: how many of the draft's columns are ranked in the graph."""
    return min(TOP_COLUMNS, vocab_size)
