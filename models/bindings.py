"""The inputs and outputs of an exported graph: name, shape and dtype of each tensor.

Axes: B = 1. T: rows of the pass, a compiled width. N: sequences that the rows may belong to. S: speculative rows,
those of the pass included. R: rows whose logits are computed. C: slots of the cache. C_near: those of layers with a
window, if they have fewer. K: ranked tokens of a row. V: columns of logits, one for each token of the vocabulary or
each kept token of a trimmed draft. H_kv: key/value heads. D: numbers of a head. I, O: numbers of a row of states that
go in and come out.
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
ATTENTION_MASK = Binding("attention_mask", "float32", ("B", "1", "T", "C"))  # added to scores: 0 if visible, or MASKED
SEQUENCES = Binding("sequences", "int32", ("N", "4"))  # the sequences of the rows, see plugins/tree_attention/op.py
TREE_MASK = Binding("tree_mask", "bool", ("B", "T", "S"))  # column j is a slot of the speculative rows
WRITE_INDICES = Binding("write_indices", "int64", ("B",))  # first cache slot of this pass's rows
OUTPUT_ROWS = Binding("output_rows", "int64", ("R",))  # rows that go through the vocabulary projection
DROPPED = Binding("dropped", "int64", ("1",))  # slots that caches of layers with a window no longer hold
STATES_IN = Binding("states_in", "float32", ("B", "T", "I"))  # draft that reads states: see LlamaConfig.state_inputs

# The two forms of a graph. ADDITIVE: the host computes a mask over the whole cache, and the cache can grow. It is the
# fastest form on a CPU. COMPACT: the inputs are the sequences and the tree mask only, and the cache has a fixed size.
# TensorRT reads this form.
ADDITIVE, COMPACT = "additive", "compact"

LOGITS = Binding("logits", "float32", ("B", "R", "V"))
TOP_IDS = Binding("top_ids", "int64", ("B", "R", "K"))  # draft only, most probable first
TOP_LOGPROBS = Binding("top_logprobs", "float32", ("B", "R", "K"))  # draft only, natural logarithm
ACCEPTANCE = Binding("acceptance", "float32", ("B", "R"))  # draft with a head: chance that the row's token is accepted
STATES = Binding("states", "float32", ("B", "T", "O"))  # of every row: see LlamaConfig.state_size

TOP_COLUMNS = 16  # enough for every tree grower: no published tree has more children per node
MASKED = -1e9  # additive mask of an invisible slot; finite, so that a fully masked padding row stays free of NaN


def past(kind: str, layer: int) -> str:
    """Cache input of one layer, [B, H_kv, C, D]; kind is "key" or "value"."""
    return f"past_{kind}.{layer}"


def present(kind: str, layer: int) -> str:
    """Cache output of one layer: the same buffer as `past`, with this pass's rows written in."""
    return f"present_{kind}.{layer}"


CACHE_SHAPE, NEAR_SHAPE = ("B", "H_kv", "C", "D"), ("B", "H_kv", "C_near", "D")
KINDS = ("key", "value")
# Dtype of weights, activations and cache, by precision. Logits and all that is computed from them are fp32.
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
HALF = ("fp16", "bf16")  # precisions of 16 bits
FP8 = "fp8"  # codes are floating-point numbers (E4M3), which GPUs alone multiply
INTEGERS = ("int8", "int6", "int5", "int4")
LOW_BIT = (*INTEGERS, FP8)  # precisions of matrices only: `activations` says what rows are computed in
# The same with superblocks: a scale is an integer of 8 bits times a number in fp16 for 256 inputs. Only single matrices
# are stored so, those of a file of llama.cpp's K types.
SUPERBLOCKS = {"int6k": "int6", "int5k": "int5", "int4k": "int4"}
BITS = {"int8": 8, "int6": 6, "int5": 5, "int4": 4, "fp8": 8, "int6k": 6, "int5k": 5, "int4k": 4}  # of a code
EXPORTED = ("int8", "int4")  # those that a graph can have


def activations(precision: str, form: str) -> str:
    """Precision of activations and cache. With low-bit matrices it is fp32 on a CPU and fp16 on a GPU."""
    if precision not in LOW_BIT:
        return precision
    return "fp16" if form == COMPACT else "fp32"


def inputs(form: str, reads: bool = False, drops: bool = False) -> tuple[Binding, ...]:
    """Inputs of a graph of this form, without the cache, in order. reads: whether it takes states. drops: whether
    layers with a window have fewer slots than others."""
    masks = {ADDITIVE: (ATTENTION_MASK,), COMPACT: (SEQUENCES, TREE_MASK)}[form]
    more = (*((STATES_IN,) if reads else ()), *((DROPPED,) if drops else ()))
    return (INPUT_IDS, POSITION_IDS, *masks, WRITE_INDICES, OUTPUT_ROWS, *more)


def output_names(
    role: str, acceptance_head: bool = False, form: str = ADDITIVE, states: bool = False
) -> tuple[str, ...]:
    """Names of the outputs of a role's graph, without the cache. The graph of a draft ranks the tokens of each row. So
    does the graph of a target on a device: at temperature 0 its logits then need not leave the device. Only a draft can
    have an acceptance head. states: whether it returns states."""
    ranked = () if role == TARGET and form == ADDITIVE else (TOP_IDS.name, TOP_LOGPROBS.name)
    headed = (ACCEPTANCE.name,) if acceptance_head else ()
    return (LOGITS.name, *ranked, *headed, *((STATES.name,) if states else ()))


def outputs(names: Sequence[str]) -> tuple[Binding, ...]:
    """The outputs of these names. The logits, by far the largest, come last."""
    return tuple(item for item in (STATES, ACCEPTANCE, TOP_IDS, TOP_LOGPROBS, LOGITS) if item.name in names)


def top_columns(num_logits: int) -> int:
    """K: how many tokens of a row the graph ranks."""
    return min(TOP_COLUMNS, num_logits)
