"""Every tensor that crosses the border of an exported graph: name, shape and dtype, once.

Axes: B = 1, T rows of this pass (a compiled width), N sequences they may be of, S speculative rows up to and including
them, R rows whose logits are wanted, C cache capacity, K = top-k columns, V vocabulary, H_kv key/value heads, D head
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

TARGET, DRAFT = "target", "draft"
ROLES = (TARGET, DRAFT)


class Binding(NamedTuple):
    name: str
    dtype: str  # numpy name
    shape: tuple[str, ...]  # axis names


INPUT_IDS = Binding("input_ids", "int64", ("B", "T"))
POSITION_IDS = Binding("position_ids", "int64", ("B", "T"))
ATTENTION_MASK = Binding("attention_mask", "float32", ("B", "1", "T", "C"))  # additive: 0 sees, MASKED does not
SEQUENCES = Binding("sequences", "int32", ("N", "4"))  # whose rows these are, see plugins/tree_attention/op.py
TREE_MASK = Binding("tree_mask", "bool", ("B", "T", "S"))  # column j is a slot of the speculative rows
WRITE_INDICES = Binding("write_indices", "int64", ("B",))  # first cache slot of this pass's rows
OUTPUT_ROWS = Binding("output_rows", "int64", ("R",))  # rows that go through the vocabulary projection

# The two forms of one graph. ADDITIVE: the host makes the mask over the whole cache, which grows; the fastest on a CPU.
# COMPACT: sequences and tree mask only, over a cache of fixed size, which is what a TensorRT kernel reads.
ADDITIVE, COMPACT = "additive", "compact"

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
# Type of weights, activations and cache by precision; logits and what is made of them are fp32 in any case.
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
HALF = ("fp16", "bf16")  # types matrices may be rounded to
BITS = {"int8": 8, "int4": 4}  # of a number of a low-bit matrix
LOW_BIT = tuple(BITS)  # how matrices are stored; see `activations` for what is computed with them


def activations(precision: str, form: str) -> str:
    """Precision of activations and cache: low-bit matrices meet fp32 rows on a CPU and fp16 rows on a GPU."""
    if precision not in LOW_BIT:
        return precision
    return "fp16" if form == COMPACT else "fp32"


def inputs(form: str) -> tuple[Binding, ...]:
    """Inputs of a graph of one form besides the cache, in order."""
    masks = {ADDITIVE: (ATTENTION_MASK,), COMPACT: (SEQUENCES, TREE_MASK)}[form]
    return (INPUT_IDS, POSITION_IDS, *masks, WRITE_INDICES, OUTPUT_ROWS)


def output_names(role: str, acceptance_head: bool = False, form: str = ADDITIVE) -> tuple[str, ...]:
    """Outputs of a role's graph besides the cache. The draft ranks its columns in the graph, and so does a target on a
    device: at temperature 0 its logits then need not leave it. Only the draft has a head."""
    if role == TARGET and form == ADDITIVE:
        return (LOGITS.name,)
    ranked = (LOGITS.name, TOP_IDS.name, TOP_LOGPROBS.name)
    return (*ranked, ACCEPTANCE.name) if acceptance_head else ranked


def outputs(names: Sequence[str]) -> tuple[Binding, ...]:
    """The named outputs besides the cache; the logits, by far the largest, come last."""
    return tuple(item for item in (ACCEPTANCE, TOP_IDS, TOP_LOGPROBS, LOGITS) if item.name in names)


def top_columns(vocab_size: int) -> int:
    """K: how many of the draft's columns are ranked in the graph."""
    return min(TOP_COLUMNS, vocab_size)
