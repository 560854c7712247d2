"""Caches of ONNX Runtime on a device. The CPU's provider stands for CUDA's, and like that one it copies an array of the
host when the array is bound as an input, never again."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from engine_parts import BUSHY, CAPACITY, contents, engine_spec, filled, random_text
from onnx_device import stand_in_device
from trees import Tree

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.export import export
from draftwood.models import bindings
from draftwood.models.errors import EngineError
from draftwood.runtime import LLM, SamplingParams, SpeculativeConfig
from draftwood.runtime.engines.onnx import onnxruntime as opening
from draftwood.runtime.engines.onnx.device import DeviceKVCache
from draftwood.runtime.engines.onnx.moves import gather_graph, move_graph
from draftwood.runtime.engines.onnx.onnxruntime import OnnxRuntimeEngine, Provider, preload_cuda
from draftwood.runtime.engines.passes import causal_batch, prefill

Opened = Callable[..., OnnxRuntimeEngine]
PROMPTS = ["once upon a time", "the cat sat on the mat and the dog", "a"]
SETTINGS = [SamplingParams(max_tokens=40, temperature=0), SamplingParams(max_tokens=40, temperature=0.8, seed=3)]
CONFIGS = [SpeculativeConfig(grow="chain"), SpeculativeConfig(grow="topk"), SpeculativeConfig(grow="dyspec"), None]


class Bus:
    """Counts the bytes that cross between arrays of the host and values of ONNX Runtime. on_host: bytes of the outputs
    that were bound to the host, by name."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.up = self.down = 0
        self.on_host: dict[str, int] = {}
        values, binding = onnxruntime.OrtValue, onnxruntime.IOBinding
        update, read = values.update_inplace, values.numpy
        self._bind, result = binding.bind_ortvalue_input, binding.bind_ortvalue_output

        def uploaded(value: Any, array: Any) -> None:
            self.up += array.nbytes
            update(value, array)

        def downloaded(value: Any) -> Any:
            self.down += value.tensor_size_in_bytes()
            return read(value)

        def bound(self_: Any, name: str, value: Any) -> None:
            if value._numpy_obj is not None:  # of the host: copied now
                self.up += value.tensor_size_in_bytes()
                value = values.ortvalue_from_numpy(value._numpy_obj.copy())
            self._bind(self_, name, value)

        def received(self_: Any, name: str, value: Any) -> None:
            if value._numpy_obj is not None:
                self.on_host[name] = value.tensor_size_in_bytes()
            result(self_, name, value)

        for owner, name, counted in (
            (values, "update_inplace", uploaded),
            (values, "numpy", downloaded),
            (binding, "bind_ortvalue_input", bound),
            (binding, "bind_ortvalue_output", received),
        ):
            patch.setattr(owner, name, counted)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Arrays of the host are read when a pass runs, as by the CPU's provider."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(onnxruntime.IOBinding, "bind_ortvalue_input", self._bind)
            yield


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bus]:
    with stand_in_device():
        yield Bus(monkeypatch)


@pytest.fixture(scope="module")
def opened(gqa: Path, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    checkpoint, file = Checkpoint(gqa), tmp_path_factory.mktemp("draft") / "draft.onnx"
    export(checkpoint, bindings.DRAFT, CAPACITY, file, lambda name: None)
    spec = engine_spec(checkpoint, "onnxruntime", bindings.DRAFT)
    return lambda provider="cuda": OnnxRuntimeEngine(file, spec, provider=provider)


def texts(bundle: Path, provider: str, config: SpeculativeConfig | None) -> list[list[int]]:
    """Of one prompt at a time, and of all together."""
    with LLM(bundle, config, threads=1, provider=provider) as llm:
        found = [llm.generate(prompt, params) for prompt in PROMPTS for params in SETTINGS]
        found += [llm.generate(PROMPTS, params) for params in SETTINGS]
        return [list(result.token_ids) for results in found for result in results]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "plain" if config is None else config.grow)
def test_texts_are_those_of_caches_on_the_host(tiny_bundle: Path, config: SpeculativeConfig | None, bus: Bus) -> None:
    on_device = texts(tiny_bundle, "cuda", config)
    with bus.aside():
        assert on_device == texts(tiny_bundle, "cpu", config)


def test_the_stand_in_notices_an_array_of_the_host_that_is_written_after_it_was_bound(opened: Opened, bus: Bus) -> None:
    """As an engine with caches on the host does, which ran on GPUs until 23 November 2026: every pass would read the
    inputs of the first one."""
    engine, text = opened("cpu"), random_text(20)
    found = contents(filled(engine, text))
    with bus.aside():
        assert not np.allclose(found, contents(filled(engine, text)))


def test_only_inputs_and_results_that_are_read_cross_the_bus(opened: Opened, bus: Bus) -> None:
    engine = opened()
    cache = filled(engine, random_text(100))
    batch = causal_batch(engine.spec, random_text(8), cache.length)
    sizes = {"width": 8, "outputs": 1, "slots": cache.capacity}
    inputs = 8 * (2 * sizes["width"] + 1 + sizes["outputs"]) + 4 * sizes["width"] * sizes["slots"]
    wide = 4 * engine.spec.model.num_logits
    whole = np.zeros(0, np.float32)
    for changed, expected in (
        (batch, {"logits": wide, "top_ids": 128, "top_logprobs": 64}),
        (replace(batch, ranking_only=True), {"top_ids": 128, "top_logprobs": 64}),
        (replace(batch, cache_only=True), {}),
    ):
        cache.truncate(100)
        bus.up = bus.down = 0
        bus.on_host.clear()
        output = engine.score(changed, cache)
        assert inputs <= bus.up < inputs + 6 * 256 and bus.down == 0  # each input is aligned to 256 bytes
        assert bus.on_host == expected and output.top_ids is not None
        if not len(whole):
            whole = output.logits[0].copy()
        if expected:
            np.testing.assert_array_equal(output.top_ids[0], np.argsort(-whole, kind="stable")[:16])
        else:
            assert not output.logits.any() and not output.top_ids.any()


def test_commits_and_growth_copy_rows_on_the_device(opened: Opened, bus: Bus) -> None:
    device, host = opened(), opened("cpu")
    text = random_text(250)
    bus.up = 0
    first = device.new_cache()
    blank = 2 * device.spec.model.num_layers * device.spec.model.num_kv_heads * 4 * device.spec.model.head_dim
    assert isinstance(first, DeviceKVCache) and bus.up == blank + 8 * first.capacity  # a row, and numbers of rows
    paths = ([0, 2, 4, 6, 7], [3, 1, 0], [5])  # a path, an order in which rows overwrite others, one row
    cache = committed(device, text, paths)
    with bus.aside():
        expected = contents(committed(host, text, paths))
    np.testing.assert_allclose(contents(cache), expected, atol=1e-5)
    bus.up = 0
    cache._replace(512, cache.length)
    assert bus.up == 8 * 512 and cache.capacity == 512  # the numbers of the rows
    np.testing.assert_allclose(contents(cache), expected, atol=1e-5)
    device.score(BUSHY.batch(device.spec, cache.length), cache)
    bus.up = 0
    cache.commit([0, 4])
    planes = 2 * device.spec.model.num_layers
    assert bus.up == 8 + 8 * planes  # which row moves, and its new slot for each layer's keys and values


def committed(engine: OnnxRuntimeEngine, text: list[int], paths: Sequence[Sequence[int]]) -> Any:
    """A cache with a text and these paths of trees after it."""
    cache = filled(engine, text)
    for path in paths:
        engine.score(BUSHY.batch(engine.spec, cache.length), cache)
        cache.commit(path)
    return cache


@pytest.mark.parametrize("rows", [[2, 0, 1], [0, 1], [5, 5, 4, 3], []])
def test_the_graphs_of_moves_are_those_of_numpy(rows: Sequence[int]) -> None:
    cache = np.random.default_rng(0).normal(size=(4, 2, 6, 3)).astype(np.float32)
    index = np.array(rows, np.int64)
    for content in (gather_graph("float32"), move_graph("float32")):
        onnx.checker.check_model(content, full_check=True)
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        first = np.full(4, 1, np.int64)
        feeds = {"source": cache, "cache": cache, "rows": index, "first": first}
        (found,) = session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})
        expected = cache.copy()
        expected[:, :, 1 : 1 + len(rows)] = cache[:, :, rows]
        np.testing.assert_array_equal(found, expected if len(session.get_inputs()) == 3 else cache[:, :, rows])


def test_a_pass_over_many_output_rows_stays_within_its_memory(opened: Opened, bus: Bus) -> None:
    """More rows with outputs than the widest pass of a tree has, none of which is read."""
    engine = opened()
    engine.spec = engine._memory.spec = replace(engine.spec, prompt_widths=(64,))  # type: ignore[union-attr]
    cache = engine.new_cache()
    batch = replace(Tree((1,) * 64, tuple(range(-1, 63))).batch(engine.spec, 0), cache_only=True)
    engine.score(batch, cache)
    layout, value = engine._memory.unread(64)  # type: ignore[union-attr]
    assert layout.nbytes == value.tensor_size_in_bytes() >= 64 * 4 * engine.spec.model.num_logits


def test_no_memory_on_the_device_leaves_the_cache_as_it_was(
    opened: Opened, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened()
    cache = filled(engine, random_text(200))
    before = contents(cache)

    def refused(*_: Any) -> Any:
        raise RuntimeError("Failed to allocate memory for requested buffer of size 1")

    with monkeypatch.context() as patch:
        patch.setattr(onnxruntime.OrtValue, "ortvalue_from_shape_and_type", refused)
        with pytest.raises(MemoryError, match="no memory for a pass of the draft"):
            prefill(engine, cache, random_text(100))
    np.testing.assert_array_equal(contents(cache)[:, :, :, :200], before)


def test_a_release_without_an_operator_on_the_device_is_refused(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime would read the caches on the host: here the CPU's provider does."""
    monkeypatch.setitem(opening.PROVIDERS, "cuda", Provider("CPUExecutionProvider", "cuda"))
    with pytest.raises(
        EngineError, match=r"reads input_ids .* instead of on cuda.*pip install 'onnxruntime-gpu>=1.27'"
    ):
        opened()


def test_cudas_libraries_are_found_where_the_packages_of_this_python_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime may lie in another folder than the packages of NVIDIA, beside which it looks alone."""
    files = [tmp_path / "nvidia" / name for name in ("cu13/lib/libcudart.so.13", "cudnn/lib/libcudnn.so.9")]
    for file in files:
        file.parent.mkdir(parents=True)
        file.touch()
    loaded: list[str] = []
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: loaded.append(name))
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: loaded.append("its own"))
    preload_cuda()
    found = [name for name in loaded if name.startswith(str(tmp_path)) or name == "its own"]
    assert found == [*map(str, files), "its own"]
