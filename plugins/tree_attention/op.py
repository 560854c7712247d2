"""The TreeAttention operator: its name in ONNX and its body in standard operators.

    draftwood::TreeAttention(query, keys, values, mask) -> output        attribute: scale (float)

query [B, H, T, D]; keys, values [B, H_kv, C, D], this pass's rows already written; mask [B, 1, T, C], additive;
output [B, H, T, D]. Written as an ONNX *local function*: a runtime without a kernel for it inlines the body below, a
TensorRT parser with our creator registered and ENABLE_PLUGIN_OVERRIDE takes the plugin instead.
"""

from __future__ import annotations

import onnx_ir as ir

DOMAIN, NAME, VERSION = "draftwood", "TreeAttention", 1
OPSET = 24  # TensorScatter and Attention with an explicit mask over a cache


def function() -> ir.Function:
    """The body: one standard Attention node; grouped heads follow from H and H_kv."""
    inputs = [ir.Value(name=name) for name in ("query", "keys", "values", "mask")]
    scale = ir.RefAttr("scale", "scale", ir.AttributeType.FLOAT)
    attention = ir.Node("", "Attention", inputs, [scale, ir.AttrInt64("is_causal", 0)], name="attention")
    attention.outputs[0].name = "output"
    graph = ir.Graph(inputs, attention.outputs, nodes=[attention], opset_imports={"": OPSET}, name=NAME)
    declared = [ir.Attr("scale", ir.AttributeType.FLOAT, None)]
    return ir.Function(DOMAIN, NAME, graph=graph, attributes=declared)
