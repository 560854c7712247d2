"""Engines that take and return states agree with each other: targets with taps, and drafts that read them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_driver.machine import Machine
from engine_parts import SHARED_CAPACITY, STATIC, engine_spec
from native_parts import open_native
from onnx_device import stand_in_device
from onnx_program import open_static
from states import DRAFT, TAPPED, RandomModel

from draftwood.builder.engines.export import export
from draftwood.builder.parity import largest_difference, rows_of
from draftwood.builder.quantization.formats import RoundedCheckpoint, stored_as
from draftwood.builder.quantization.kept import others_of
from draftwood.builder.reference import score_rows
from draftwood.models.bindings import ADDITIVE, COMPACT, MASKED
from draftwood.models.errors import EngineError
from draftwood.models.llama import Llama
from draftwood.runtime.engines.backends import BACKENDS
from draftwood.runtime.engines.base import Engine, EngineSpec, TokenBatch
from draftwood.runtime.engines.onnx.onnxruntime import OnnxRuntimeEngine

pytestmark = pytest.mark.usefixtures("no_faults")
MODELS = {
    "taps": TAPPED,
    "one tap": replace(TAPPED, taps=(2,)),
    "draft": DRAFT,
    "two layers": replace(DRAFT, num_layers=2),
    "norm first": replace(DRAFT, reads=replace(DRAFT.reads, norm_first=True)) if DRAFT.reads else DRAFT,
    "whole vocabulary": replace(DRAFT, draft_vocab_size=None),
}


def spec_of(model: RandomModel, backend: str, precision: str = "fp32") -> EngineSpec:
    role = "draft" if model.config.reads else "target"
    return replace(engine_spec(model, backend, role, SHARED_CAPACITY), precision=precision)


def opened(model: RandomModel, name: str, folder: Path, gpu: Machine, precision: str = "fp32") -> Engine:
    """name: of a backend, or of a form of the graph, or of STATIC, or "device": caches of their own memory."""
    if name in STATIC:
        return open_static(model, folder, gpu, spec_of(model, name).role, SHARED_CAPACITY, STATIC[name])
    backend, form = name if name in BACKENDS else "onnxruntime", COMPACT if name == COMPACT else ADDITIVE
    spec = spec_of(model, backend, precision)
    weights = stored_as(model, BACKENDS[backend], precision, {}, None)
    if backend == "native":
        return open_native(weights, replace(spec, matrices=others_of(weights)), folder)
    assert not isinstance(weights, RoundedCheckpoint)
    file = folder / f"{form}.onnx"
    export(weights, spec.role, spec.capacity, file, lambda name: None, form=form, precision=precision)
    if form == ADDITIVE:
        BACKENDS[backend].check_file(file, spec)
    with stand_in_device():
        return OnnxRuntimeEngine(file, spec, provider="cuda" if name == "device" else "cpu")


@pytest.mark.parametrize("engine", ["native", "onnxruntime", COMPACT, "device", *STATIC])
@pytest.mark.parametrize("name", MODELS)
def test_an_engine_computes_what_the_reference_does(name: str, engine: str, tmp_path: Path, gpu: Machine) -> None:
    """Logits and states, of a prompt and of a tree, with own states and the target's in one pass, after a warm-up."""
    model = RandomModel(MODELS[name])
    running = opened(model, engine, tmp_path, gpu)
    for step in running.warm_up():
        step()
    reference = score_rows(model.tensor, model.config, rows_of(running.spec))
    assert reference.states is not None and reference.states.shape[1] == model.config.state_size
    assert largest_difference(running, reference) < 1e-4
    running.close()


@pytest.mark.parametrize("precision", ["int8", "int4", "bf16"])
def test_native_precisions(precision: str, tmp_path: Path, gpu: Machine) -> None:
    model = RandomModel(DRAFT)
    engine = opened(model, "native", tmp_path, gpu, precision)
    held = stored_as(model, BACKENDS["native"], precision, {}, None)
    assert largest_difference(engine, score_rows(held.tensor, model.config, rows_of(engine.spec))) < 0.05
    engine.close()


@pytest.mark.parametrize("name", MODELS)
def test_torch_computes_what_the_reference_does(name: str) -> None:
    model = RandomModel(MODELS[name])
    rows = rows_of(spec_of(model, "native"))
    module = Llama(model.config, 64)
    module.load_state_dict({key: torch.from_numpy(value) for key, value in model.weights.items()})
    config, count = model.config, len(rows.tokens)
    mask = torch.where(torch.from_numpy(rows.mask), 0.0, MASKED)[None, None]
    cache = torch.zeros(2 * config.num_layers, 1, config.num_kv_heads, count, config.head_dim)
    states = None if rows.states is None else torch.from_numpy(rows.states)[None]
    tokens, positions = (torch.from_numpy(each)[None] for each in (rows.tokens, rows.positions))
    with torch.inference_mode():
        output = module(tokens, positions, mask, cache, 0, torch.arange(count), states)
    expected = score_rows(model.tensor, config, rows)
    assert expected.states is not None and output.states is not None
    assert np.abs(output.logits[0].numpy() - expected.logits).max() < 1e-3
    assert np.abs(output.states[0].numpy() - expected.states).max() < 1e-3


def test_nothing_else_changes_where_no_state_is_read(tmp_path: Path, gpu: Machine) -> None:
    """The bits of the logits are those of a target without taps, whether or not its states are read."""
    tapped, plain = RandomModel(TAPPED), RandomModel(replace(TAPPED, taps=()))
    found = []
    for model, read in ((plain, False), (tapped, False), (tapped, True)):
        engine = opened(model, "native", tmp_path, gpu, "int8")
        spec = engine.spec
        batch = TokenBatch.pad(list(range(8)), list(range(8)), np.tri(8, dtype=np.bool_), 8, states_read=read)
        output = engine.score(batch, engine.new_cache())
        found.append(output.logits.copy())
        assert (output.states is not None) == read and spec.model.state_size == len(model.config.taps) * 32
        engine.close()
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


@pytest.mark.parametrize("backend", ["native", "onnxruntime", *STATIC])
def test_a_pass_without_the_states_that_it_needs_is_refused(backend: str, tmp_path: Path, gpu: Machine) -> None:
    model = RandomModel(DRAFT)
    engine = opened(model, backend, tmp_path, gpu)
    cache = engine.new_cache()
    whole = np.zeros((2, DRAFT.state_inputs), np.float32)
    wrong: list[Any] = [None, whole[:1], whole[:, 1:], whole.astype(np.float64)]
    for states in wrong:
        batch = TokenBatch.pad([1, 2], [0, 1], np.tri(2, dtype=np.bool_), 2, states=states)
        with pytest.raises(EngineError, match=r"2 rows .* takes 128 numbers"):
            engine.score(batch, cache)
    engine.close()
    plain = opened(RandomModel(replace(TAPPED, taps=())), backend, tmp_path, gpu)
    cache = plain.new_cache()
    pairs: list[Any] = [(whole, False), (None, True)]
    for states, read in pairs:
        batch = TokenBatch.pad([1, 2], [0, 1], np.tri(2, dtype=np.bool_), 2, states=states, states_read=read)
        with pytest.raises(EngineError, match="states"):
            plain.score(batch, cache)
    plain.close()
