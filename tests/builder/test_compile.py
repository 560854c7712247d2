"""Plans compiled by TensorRT-RTX itself, on a machine that need not have a GPU: what is in them, what is refused."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from checkpoints import write_checkpoint
from compiling import COLUMNS, options
from heads import write_small_pair
from steps import counted, failing, noted, quiet

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines import graph
from draftwood.builder.engines import plan as compile_module
from draftwood.builder.engines import tensorrt as tensorrt_builder
from draftwood.builder.engines.export import export
from draftwood.builder.engines.plan import check_compiler, compile_plan, profiles
from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build
from draftwood.builder.progress import Step
from draftwood.builder.quantization.formats import FORMATS, QuantizedCheckpoint
from draftwood.models import bindings
from draftwood.models.errors import ConfigError
from draftwood.models.typed import typed
from draftwood.plugins.tensorrt import tensorrt_logger
from draftwood.plugins.tree_attention import library
from draftwood.runtime.engines.compatibility import RTX_COMPUTE_CAPABILITIES, LayerReport, TensorRTPlan, WidthFamily

# Not importorskip: the package must be imported by load_tensorrt alone, see plugins/tensorrt.py.
if not all(map(importlib.util.find_spec, ("tensorrt_rtx", "polygraphy"))):
    pytest.skip("needs the extra tensorrt-rtx", allow_module_level=True)

CAPACITY = 256
MAGIC = b"vtrt"  # every plan begins with it
MATRIX_BYTES = 2 * (2 * (512 * 512 + 256 * 512 + 3 * 512 * 1024) + 512 * 288)  # of the checkpoint "wide" in fp16
Compile = Callable[..., TensorRTPlan]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    folder = tmp_path_factory.mktemp("checkpoints")
    wide: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64}

    def written(shape: str) -> Checkpoint:
        more = wide if shape == "wide" else {}
        return Checkpoint(write_checkpoint(folder / shape, "gqa" if more else shape, **more))

    return written


@pytest.fixture
def compiled(checkpoints: Callable[[str], Checkpoint], tmp_path: Path) -> Compile:
    """Exports and compiles a draft; the plan lies at tmp_path / "draft.plan"."""

    def run(begin: Callable[[Step], Callable[[], None]] = quiet, shape: str = "gqa", **changes: Any) -> TensorRTPlan:
        checkpoint, chosen = checkpoints(shape), options(**changes)
        file = tmp_path / "draft.onnx"
        wanted = FORMATS.get(("tensorrt-rtx", chosen.precision))
        weights = checkpoint if wanted is None else QuantizedCheckpoint(checkpoint, wanted)
        form, precision = bindings.COMPACT, chosen.precision
        more: dict[str, Any] = {"form": form, "precision": precision, "max_batch": chosen.max_batch}
        export(weights, bindings.DRAFT, CAPACITY, file, lambda name: None, **more)
        return compile_plan(file, tmp_path / "draft.plan", checkpoint.config, chosen, begin)

    return run


@pytest.mark.parametrize(
    ("precision", "capabilities", "attention"),
    [("fp16", RTX_COMPUTE_CAPABILITIES, 2), ("bf16", (), 2), ("fp32", RTX_COMPUTE_CAPABILITIES[1:], 0)],
)
def test_tensorrt_s_own_attention(
    precision: str, capabilities: tuple[str, ...], attention: int, compiled: Compile, tmp_path: Path
) -> None:
    """One build for several GPUs; the cache is written in place by layers of their own. The two layers and the head
    size of 8, which no fused kernel computes, are what TensorRT-RTX 1.7 fails on when masks are made with Range or
    attention may not be taken apart."""
    plan = compiled(precision=precision, compute_capabilities=capabilities)
    assert (tmp_path / "draft.plan").read_bytes().startswith(MAGIC)
    assert plan.compute_capabilities == (capabilities or ("8.0", "8.6", "8.9", "12.0"))
    assert plan.layers == LayerReport(plan.layers.total, plugin=0, attention=attention, kv_cache_update=4)
    assert (plan.package, plan.kernel, plan.executed) == ("tensorrt-rtx", None, False)
    assert plan.version.startswith("1.")
    assert plan.families == (WidthFamily(1, 4, 16), WidthFamily(17, 32, 32))
    assert typed(TensorRTPlan, json.loads(json.dumps(plan.to_json())), "plan") == plan


def test_low_bit_matrices_stay_low_bit_in_the_plan(compiled: Compile, tmp_path: Path) -> None:
    """With fp16 activations: a plan that had unpacked its weights would be as large as the fp16 one."""
    sizes = {}
    for precision in ("fp16", *bindings.EXPORTED, bindings.FP8):
        plan = compiled(precision=precision, shape="wide", compute_capabilities=("8.9",))
        assert plan.layers.attention == 2 and plan.layers.kv_cache_update == 4
        sizes[precision] = (tmp_path / "draft.plan").stat().st_size
    assert sizes["fp16"] - sizes["int8"] > 0.5 * MATRIX_BYTES / 2
    assert sizes["fp16"] - sizes["fp8"] > 0.5 * MATRIX_BYTES / 2
    assert sizes["fp16"] - sizes["int4"] > 0.5 * MATRIX_BYTES * 3 / 4


def test_our_kernel_is_inside_the_plan(compiled: Compile, checkpoints: Any, tmp_path: Path) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs the extra kernel")
    plan = compiled(plugin=True)
    assert plan.layers == LayerReport(plan.layers.total, plugin=2, attention=0, kv_cache_update=4)
    content = (tmp_path / "draft.plan").read_bytes()
    held = library.KernelLibrary.from_bytes(library_inside(content))
    assert plan.kernel is not None and held.fingerprint == plan.kernel.fingerprint
    assert content.count(library.MAGIC) >= 2 and plan.kernel.format == library.MAGIC.decode()
    portable = [image for image in held.images if image.format == library.PTX]
    assert portable and all(b".target sm_80" in image.code for image in portable)
    config = checkpoints("gqa").config
    assert {(image.variant.head_dim, image.variant.dtype) for image in held.images} == {(config.head_dim, "fp16")}


def library_inside(plan: bytes) -> bytes:
    """The kernel library that a plan carries: its compressed stream says where it ends."""
    start = plan.index(library.MAGIC)
    stream = zlib.decompressobj()
    stream.decompress(plan[start + len(library.MAGIC) :])
    return plan[start : len(plan) - len(stream.unused_data)]


def test_the_default_takes_our_kernel_where_it_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    ada = ("8.9",)
    assert options(plugin=True).takes_plugin(64, ada) and not options(plugin=False).takes_plugin(64, ada)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    default = options(plugin=None)
    assert default.takes_plugin(64, ada) and not default.takes_plugin(512, ada)
    assert not default.takes_plugin(64, ("7.5", "8.9"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not default.takes_plugin(64, ada)


def test_a_head_and_its_target_become_plans(tmp_path: Path) -> None:
    """A target that returns its taps, and a draft that takes states. The build says who runs their rounds."""
    told = list[str]()
    chosen: dict[str, Any] = {"precision": "fp16", "compute_capability": ("8.9",), "plugin": False, "max_length": 64}
    asked = BuildOptions(*write_small_pair(tmp_path), tmp_path / "bundle", "tensorrt-rtx", **chosen)
    specs = build(asked, noted(told)).manifest.engines
    for role, layers in (("target", 3), ("draft", 1)):
        plan = specs[role].plan
        assert plan is not None and plan.layers.kv_cache_update == 2 * layers == 2 * plan.layers.attention
        assert bindings.STATES.name in specs[role].outputs
    assert any("run on the host" in each for each in told)


def test_without_triton_the_kernel_is_refused_with_the_fix(compiled: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install .*--no-plugin"):
        compiled(plugin=True)


def test_every_phase_reports_all_its_steps(compiled: Compile) -> None:
    left: dict[str, int] = {}
    compiled(counted(left))
    assert "Compiling the draft: Building engine" in left and len(left) >= 4
    assert set(left.values()) == {0}


@pytest.mark.parametrize("phase", ["Preparing", "Computing"])
@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_ends_the_build(
    interruption: type[BaseException], phase: str, compiled: Compile, tmp_path: Path
) -> None:
    """TensorRT calls back from its own threads and swallows exceptions; this one arrives all the same."""
    with pytest.raises(interruption, match="enough"):
        compiled(failing(phase, interruption("enough")))
    assert not (tmp_path / "draft.plan").exists()


def test_a_full_disk_ends_the_build(compiled: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is written while it is made; an error of the file is the build's."""

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    writer = tensorrt_builder.stream_writer
    monkeypatch.setattr(tensorrt_builder, "stream_writer", lambda trt, file: writer(trt, Full()))
    with pytest.raises(OSError, match="No space left"):
        compiled()
    assert not (tmp_path / "draft.plan").exists()


def test_weights_beside_a_graph_are_mapped(compiled: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the plan is as large as that of a graph which holds them."""
    compiled(shape="wide")
    inside = (tmp_path / "draft.plan").stat().st_size
    monkeypatch.setattr(graph, "EXTERNAL_DATA_BYTES", 0)
    held = []
    parse = tensorrt_builder.parse

    def parsed(*arguments: Any) -> tensorrt_builder.Parsed:
        held.append(parse(*arguments))
        return held[-1]

    monkeypatch.setattr(compile_module, "parse", parsed)
    compiled(shape="wide")
    (file,) = held[0].weights
    assert file == tmp_path / "draft.onnx.data" and held[0].weights[file].nbytes > MATRIX_BYTES
    assert abs((tmp_path / "draft.plan").stat().st_size - inside) < 100_000


def test_what_tensorrt_cannot_compile_is_refused_in_its_words(checkpoints: Any, tmp_path: Path) -> None:
    node = onnx.helper.make_node("Mystery", ["input_ids"], ["logits"], name="layers.0/mystery", domain="elsewhere")
    value = onnx.helper.make_tensor_value_info
    ends = [value("input_ids", onnx.TensorProto.INT64, [1, "T"])], [value("logits", onnx.TensorProto.INT64, [1, "T"])]
    opsets = [onnx.helper.make_opsetid("", 24), onnx.helper.make_opsetid("elsewhere", 1)]
    onnx.save(
        onnx.helper.make_model(onnx.helper.make_graph([node], "g", *ends), opset_imports=opsets),
        tmp_path / "draft.onnx",
    )
    with pytest.raises(ConfigError, match=r"cannot compile the draft: .*Mystery"):
        compile_plan(tmp_path / "draft.onnx", tmp_path / "plan", checkpoints("gqa").config, options(), quiet)


def test_profiles_span_rows_columns_and_scored_rows() -> None:
    (tree, wide) = profiles(options())
    assert tuple(tree["input_ids"]) == ((1, 1), (1, 4), (1, 16))
    assert tuple(tree["tree_mask"]) == ((1, 1, 1), (1, 4, 4), (1, 16, COLUMNS))
    assert tuple(wide["output_rows"]) == ((1,), (32,), (32,))
    assert tuple(wide["sequences"]) == ((1, 4), (1, 4), (1, 4))
    assert tuple(profiles(options(max_batch=8, plugin=True))[0]["sequences"]) == ((8, 4), (8, 4), (8, 4))


def test_the_builder_has_the_workspace_limit_and_a_plan_allocates_nothing_while_it_runs() -> None:
    trt = tensorrt_builder.tensorrt_module("tensorrt-rtx")
    with tensorrt_builder.polygraphy("tensorrt-rtx"):
        builder = trt.Builder(tensorrt_logger("tensorrt-rtx"))
        chosen = compile_module.config(trt, options(workspace=3), None)(builder, None)
        assert chosen.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) == 3 << 20
        assert chosen.get_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)


def test_the_capabilities_are_those_of_the_package() -> None:
    """Its enumeration, in our words; besides, it has members for no GPU in particular."""
    members = tensorrt_builder.tensorrt_module("tensorrt-rtx").ComputeCapability.__members__
    known = {name for name in members if name.startswith("SM")}
    assert known == {f"SM{capability.replace('.', '')}" for capability in RTX_COMPUTE_CAPABILITIES}


def test_a_missing_package_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(backend: str) -> Any:
        raise ModuleNotFoundError(f"no such package: pip install 'draftwood[{backend}]'")

    monkeypatch.setattr(tensorrt_builder, "load_tensorrt", absent)
    with pytest.raises(ConfigError, match=r"pip install .*\[tensorrt\]'"):
        check_compiler(options(backend="tensorrt", compute_capabilities=()))


def test_a_package_that_was_imported_too_early_is_refused() -> None:
    """Its parser would end the process with the first plugin: it cannot open a library that has another name."""
    code = (
        "import tensorrt_rtx\n"
        "from draftwood.builder.engines.tensorrt import tensorrt_module\n"
        "tensorrt_module('tensorrt-rtx')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "ConfigError: the package tensorrt_rtx was imported before" in done.stderr


def test_one_process_compiles_for_one_package() -> None:
    with tensorrt_builder.polygraphy("tensorrt-rtx"):
        assert "polygraphy.backend.trt" in sys.modules
    with pytest.raises(ConfigError, match="one by one"), tensorrt_builder.polygraphy("tensorrt"):
        pass
