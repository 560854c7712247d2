"""The kernels at the edges of what they are given: tied logits, long contexts, every shape under sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from bundling import ROOT
from checkpoints import VOCAB_SIZE, edit_weights, write_checkpoint
from native_parts import held, kernels, open_native, spec_of
from numpy.typing import NDArray

from draftwood.models.bindings import DRAFT, TARGET
from draftwood.plugins.native.compile import FLAGS, SOURCE, compiler
from draftwood.plugins.native.library import NativeLibrary
from draftwood.runtime.engines.native import engine as native
from draftwood.runtime.engines.native.engine import NativeEngine
from draftwood.runtime.engines.passes import causal_batch

LANES, WHOLE = 16, 256  # panels of a long context
DRIVER = ROOT / "tests" / "support" / "native_edges.c"
PROCESSORS = ("-march=native", "-march=x86-64-v3", "-march=x86-64")


def opened(folder: Path, role: str, march: str, capacity: int = 256) -> NativeEngine:
    weights = held(folder, "fp32")
    with patch.object(native, "open_kernels", lambda: NativeLibrary(kernels(march))):
        return open_native(weights, spec_of(weights, role, "fp32", (1, 4, 16), capacity), folder, 2)


@pytest.mark.parametrize(("march", "rows"), [*((march, 3) for march in PROCESSORS), (PROCESSORS[0], 1)])
def test_of_equal_logits_the_first_is_ranked_first(march: str, rows: int, tmp_path: Path) -> None:
    """As argmax does: greedy decoding must not depend on who looks for the best token. Copies of a few rows of the
    projection have logits that are equal bit for bit."""
    folder = write_checkpoint(tmp_path, "mha")
    copied = np.random.default_rng(0).integers(0, rows, VOCAB_SIZE)
    edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"][copied].clone()}))
    engine = opened(folder, DRAFT, march)
    output = engine.score(causal_batch(engine.spec, [5, 9, 200, 7], 0), engine.new_cache())
    assert output.top_ids is not None and output.top_logprobs is not None
    for logits, ids, logprobs in zip(output.logits, output.top_ids, output.top_logprobs, strict=True):
        expected = np.argsort(-logits, kind="stable")[: len(ids)]
        assert len(np.unique(logits)) <= rows, "logits are tied"
        assert ids.tolist() == expected.tolist()
        wide = logits.astype(np.float64)
        normalizer = wide.max() + np.log(np.exp(wide - wide.max()).sum())
        assert logprobs == pytest.approx(wide[ids] - normalizer, abs=1e-5)


def test_columns_without_a_number_are_ranked_last(tmp_path: Path) -> None:
    """An overflow leaves infinities and NaN: every id is one of the vocabulary, and each is there once."""
    folder = write_checkpoint(tmp_path, "mha")

    def overflow(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][2:] = 3e38
        tensors["lm_head.weight"][2:, ::2] = -3e38  # infinities of either sign are added: NaN

    edit_weights(folder, overflow)
    engine = opened(folder, DRAFT, PROCESSORS[0])
    cache = engine.new_cache()
    output = engine.score(causal_batch(engine.spec, [5, 9, 200, 7], 0), cache)
    assert output.top_ids is not None
    assert not np.isfinite(output.logits[:, 2:]).all()
    for ids in output.top_ids:
        assert len(set(ids.tolist())) == len(ids) and ids.min() >= 0 and ids.max() < VOCAB_SIZE


@pytest.fixture(scope="module")
def unattentive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Queries are zero, so that all slots weigh the same; so are the values of new rows."""
    folder = write_checkpoint(tmp_path_factory.mktemp("unattentive"), "mqa")

    def clear(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if "q_proj" in name or "v_proj" in name:
                tensor.zero_()

    edit_weights(folder, clear)
    return folder


@pytest.mark.parametrize("march", PROCESSORS)
def test_attention_over_a_long_context_is_exact(march: str, unattentive: Path) -> None:
    """The mean of many equal values is that value: sums of their weights that are not cut in time overflow."""
    most = 5 * WHOLE * LANES
    engine = opened(unattentive, TARGET, march, most + 64)
    expected = logits_after(engine, LANES, (LANES + 1) / LANES)
    for slots in (WHOLE * LANES - 1, WHOLE * LANES, WHOLE * LANES + LANES, most - 3):
        found = logits_after(engine, slots, (slots + 1) / slots)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def logits_after(engine: NativeEngine, length: int, value: float) -> NDArray[np.float32]:
    """Of one row after so many slots of one value; its own value is zero."""
    cache = engine.new_cache()
    cache._resize(length + 64, 0)
    cache.length = length
    cache.rows.values[:] = value
    logits: NDArray[np.float32] = engine.score(causal_batch(engine.spec, [5], length), cache).logits[0]
    return logits.copy()


@pytest.mark.parametrize(
    "march",
    [*(pytest.param(each, marks=pytest.mark.full) for each in ("-march=native", "-march=x86-64")), "-march=x86-64-v3"],
)
def test_no_access_out_of_bounds_and_no_undefined_behaviour(march: str, tmp_path: Path) -> None:
    """native_edges.c drives every function the library exports, over the edges of every shape."""
    program = tmp_path / "edges"
    flags = [flag for flag in FLAGS if flag not in ("-O3", "-march=native", "-fPIC", "-shared")]
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1", march]
    command = [*compiler(), *flags, *checks, f"-I{SOURCE.parent}", str(DRIVER), "-o", str(program)]
    compiled = subprocess.run([*command, "-lm", "-lpthread"], capture_output=True, text=True)
    if compiled.returncode and "cannot find" in compiled.stderr:
        pytest.skip("this compiler lacks its sanitizers")
    assert compiled.returncode == 0, compiled.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert done.stdout.startswith("checked ")
