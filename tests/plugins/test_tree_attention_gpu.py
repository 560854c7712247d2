"""The kernel on a GPU, by both launchers, against the oracle. Invisible slots hold NaN."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention import SCALE, TOLERANCES, Case, Tensors, operands, workspace

from draftwood.plugins.tree_attention.driver import DriverLauncher, device_attribute
from draftwood.plugins.tree_attention.library import CAPABILITIES, compile_library
from draftwood.plugins.tree_attention.plan import plan_launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and a CUDA build of torch"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton"),
]
TREE = Case(2, 4, 7, 5, 6000, (2500, 3), 128, "fp16")
CASES = (
    TREE,
    replace(TREE, dtype="bf16"),
    replace(TREE, dtype="fp32"),
    replace(TREE, head_dim=64, group=1, rows=64),
    replace(TREE, head_dim=80, rows=1, earlier=0),
    replace(TREE, head_dim=96, rows=200, earlier=0, lengths=(0, 1000)),
)


def on_gpu(case: Case) -> Tensors:
    return Tensors(*(tensor.cuda() for tensor in case.tensors()))


def check(found: torch.Tensor, case: Case) -> None:
    expected = case.tensors().expected()
    np.testing.assert_allclose(found.float().cpu().numpy(), expected, rtol=0, atol=TOLERANCES[case.dtype])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_torch_tensors(case: Case) -> None:
    from draftwood.plugins.tree_attention.launch import tree_attention

    tensors = on_gpu(case)
    check(tree_attention(*tensors, SCALE), case)
    by_row = tensors.query.transpose(1, 2).contiguous().transpose(1, 2)
    check(tree_attention(*tensors._replace(query=by_row), SCALE), case)


def test_a_captured_graph_follows_the_lengths() -> None:
    from draftwood.plugins.tree_attention.launch import tree_attention

    tensors = on_gpu(TREE)
    tree_attention(*tensors, SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = tree_attention(*tensors, SCALE)
    other = replace(TREE, lengths=(40, 2900), seed=1)
    for static, changed in zip(tensors, other.tensors(), strict=True):
        static.copy_(changed)
    graph.replay()
    check(output, other)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("portable", [True, False])
def test_by_the_driver(case: Case, portable: bool) -> None:
    """From PTX and from a cubin for this device."""
    tensors = on_gpu(case)
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor not in CAPABILITIES:
        pytest.skip(f"no kernel is compiled for compute capability {major}.{minor}")
    capabilities = () if portable else (10 * major + minor,)
    library = compile_library(case.head_dim, case.group, case.dtype, case.rows, capabilities)
    layout = plan_launch(tensors.shape(), device_attribute("MULTIPROCESSOR_COUNT"))
    output, memory = torch.full_like(tensors.query, float("nan")), workspace(layout, "cuda")
    stream = torch.cuda.current_stream().cuda_stream
    DriverLauncher(library).launch(layout, operands(tensors, output, memory), SCALE, stream)
    torch.cuda.synchronize()
    check(output, case)
