"""Bundles of TensorRT plans: what the manifest says, what a machine without a GPU answers, what never gets built."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bundling import ROOT, resigned

from draftwood.builder.engines.export import export
from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build
from draftwood.builder.progress import Step
from draftwood.cli.main import main
from draftwood.models.bindings import COMPACT, output_names
from draftwood.models.errors import BundleError, ConfigError
from draftwood.runtime.bundle.bundle import MANIFEST, EngineBundle
from draftwood.runtime.engines.compatibility import Kernel, LayerReport, Machine, TensorRTPlan, WidthFamily, obstacle

needs_rtx = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("tensorrt_rtx", "polygraphy"))), reason="needs the extra tensorrt-rtx"
)
SMALL: dict[str, Any] = {"backend": "tensorrt-rtx", "widths": (1, 4, 8), "max_length": 64}
PLAN = TensorRTPlan(
    package="tensorrt-rtx",
    version="1.7.1.116",
    compute_capabilities=("8.6", "8.9"),
    kernel=Kernel("0123456789abcdef", "DWKERNEL1"),
    families=(WidthFamily(1, 1, 1),),
    columns=64,
    layers=LayerReport(100, 2, 0, 4),
    executed=False,
)
ADA = Machine("NVIDIA L4", "8.9", {"tensorrt-rtx": "1.7.1.116"}, "DWKERNEL1")


@pytest.fixture(scope="module")
def bundle(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the command, in a process of its own: no environment variable is set, and no GPU is needed."""
    output = tmp_path_factory.mktemp("tensorrt") / "bundle"
    pair = ["--target", str(tiny_pair / "target"), "--draft", str(tiny_pair / "draft"), "--output", str(output)]
    chosen = ["--backend", "tensorrt-rtx", "--compute-capability", "8.0", "8.9", "--no-plugin", "--widths", "1,4,8"]
    more = ["--max-length", "64", "--graphs", str(output.parent / "graphs")]
    command = [sys.executable, str(ROOT / "build_engines.py"), *pair, *chosen, *more]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Compiling the target: Building engine" in done.stdout
    assert "Costs were not measured: built for SM 8.0, 8.9" in done.stdout
    assert "The plans were not executed" in done.stdout and "draftwood generate" not in done.stdout
    assert {file.name for file in (output.parent / "graphs").glob("*.onnx")} == {"target.onnx", "draft.onnx"}
    return output


@needs_rtx
def test_the_manifest_says_what_was_built_and_that_it_was_not_run(bundle: Path) -> None:
    manifest = EngineBundle.open(bundle).manifest
    for role, spec in manifest.engines.items():
        plan = spec.plan
        assert plan is not None and (spec.backend, spec.precision) == ("tensorrt-rtx", "fp16")
        assert (plan.package, plan.compute_capabilities) == ("tensorrt-rtx", ("8.0", "8.9"))
        assert plan.kernel is None and not plan.executed and plan.version
        assert (plan.layers.attention, plan.layers.kv_cache_update, plan.layers.plugin) == (2, 4, 0)
        assert plan.families[-1].maximum == spec.max_width and plan.columns == 32
        assert spec.capacity == 64 + plan.columns
        assert 0 < manifest.parity[role] < 2e-2  # of the graph, in fp16
    assert set(manifest.files) == {"target.plan", "draft.plan", "tokenizer.json", "tokenizer_config.json"}
    assert manifest.to_json() == json.loads((bundle / MANIFEST).read_text())


@needs_rtx
@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="for machines without a GPU")
def test_a_machine_without_a_gpu_says_so(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """inspect answers, generate refuses, and both in the same words."""
    assert main(["inspect", str(bundle), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    words = shown["obstacles"]["target"]
    assert words.startswith("built for SM 8.0, 8.9 with tensorrt-rtx 1.")
    assert "cannot run here because this machine has no NVIDIA driver" in words and "rebuild with" in words
    assert shown["memory"] == {"target": None, "draft": None}
    assert main(["inspect", str(bundle)]) == 0
    text = capsys.readouterr().out
    assert f"The target engine: {words}." in text
    assert "its graph: not executed" in text and "SM 8.0, 8.9" in text and "MB when full" in text
    assert main(["generate", str(bundle), "--prompt", "hello"]) == 2
    assert capsys.readouterr().err == f"draftwood: error: {words}\n"


@needs_rtx
def test_a_manifest_that_lacks_something_is_refused(bundle: Path, tmp_path: Path) -> None:
    for missing in ("version", "layers", "compute_capabilities"):
        copy = Path(shutil.copytree(bundle, tmp_path / missing))
        resigned(copy, lambda content: content["engines"]["draft"]["plan"].pop(missing))  # noqa: B023
        with pytest.raises(BundleError, match="rebuild the bundle"):
            EngineBundle.open(copy)


@needs_rtx
def test_a_graph_that_computes_something_else_is_not_compiled(
    tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the half of parity that needs no GPU."""
    right = export

    def wrong(*given: Any, **options: Any) -> None:
        import onnx

        right(*given, **options)
        model = onnx.load(given[3])
        for node in model.graph.node:
            if node.op_type == "TreeAttention":
                node.attribute[0].f *= 1.3
        onnx.save(model, given[3])

    monkeypatch.setattr("draftwood.builder.engines.export.export", wrong)
    options = BuildOptions(tiny_pair / "target", tiny_pair / "draft", tmp_path / "bundle", plugin=False, **SMALL)
    with pytest.raises(BundleError, match="differs from the reference"):
        build(options, lambda step: lambda: None)
    assert not options.output.exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--backend tensorrt-rtx --draft-precision bf16 --compute-capability 7.5", "no bf16 for SM 7.5"),
        ("--compute-capability 8.9", "--backend"),
        ("--plugin", "--backend"),
        ("--no-plugin", "--backend"),
        ("--workspace 100", "--backend"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(
    arguments: str, named: str, tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = ["--target", str(tiny_pair / "target"), "--draft", str(tiny_pair / "draft")]
    assert main(["build", *pair, "--output", str(tmp_path / "out"), *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("draftwood: error: ") and named in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="for machines without TensorRT")
def test_without_tensorrt_nothing_slow_is_begun(tiny_pair: Path, tmp_path: Path) -> None:
    begun = []

    def begin(step: Step) -> Callable[[], None]:
        begun.append(step.title)
        return lambda: None

    with pytest.raises(ConfigError, match=r"pip install .*\[tensorrt\]'"):
        build(BuildOptions(tiny_pair / "target", tiny_pair / "draft", tmp_path / "out", backend="tensorrt"), begin)
    assert begun == ["Reading checkpoints"]


NO_GPU = Machine(None, None, {"tensorrt-rtx": "1.7.1.116"}, "DWKERNEL1")
INSTALL = "pip install 'tensorrt-rtx==1.7.1.116'"


@pytest.mark.parametrize(
    ("device", "reason", "fix"),
    [
        (NO_GPU, "no NVIDIA driver", "--backend onnxruntime"),
        (ADA._replace(packages={}), "is not installed", INSTALL),
        (ADA._replace(packages={"tensorrt": "11.4.0.106"}), "is not installed", INSTALL),
        (ADA._replace(name="NVIDIA A2", compute_capability="8.0"), "NVIDIA A2 is SM 8.0", "--compute-capability 8.0"),
        (ADA._replace(name="NVIDIA H200", compute_capability="9.0"), "H200 is SM 9.0", "--backend tensorrt"),
        (ADA._replace(packages={"tensorrt-rtx": "1.8.0"}), "tensorrt-rtx 1.8.0 is installed", f"{INSTALL}, or rebuild"),
        (ADA._replace(kernel="DWKERNEL2"), "is of format DWKERNEL1", "rebuild"),
    ],
)
def test_every_obstacle_names_what_was_built_why_it_fails_and_the_fix(device: Machine, reason: str, fix: str) -> None:
    words = obstacle(PLAN, device)
    assert words is not None and words.startswith("built for SM 8.6, 8.9 with tensorrt-rtx 1.7.1.116, cannot run here")
    assert reason in words and fix in words


@pytest.mark.parametrize("kernel", [None, PLAN.kernel])
def test_no_obstacle_where_everything_fits(kernel: Kernel | None) -> None:
    assert obstacle(PLAN._replace(kernel=kernel), ADA) is None
    assert obstacle(PLAN._replace(kernel=None), ADA._replace(kernel=None)) is None


def test_bundles_without_plans_are_read_as_before(tiny_bundle: Path, tmp_path: Path) -> None:
    """What a release before TensorRT wrote had no such field."""
    copy = Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))
    resigned(copy, lambda content: [each.pop("plan") for each in content["engines"].values()])
    assert all(spec.plan is None for spec in EngineBundle.open(copy).manifest.engines.values())


@pytest.mark.gpu
def test_a_plan_that_runs_here_is_compared_itself(tiny_pair: Path, tmp_path: Path) -> None:
    import torch

    packages = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
    installed = [backend for backend, module in packages.items() if importlib.util.find_spec(module) is not None]
    if not torch.cuda.is_available() or not installed:
        pytest.skip("needs a CUDA device and a TensorRT package")
    capability = ("{}.{}".format(*torch.cuda.get_device_capability()),) if installed[0] == "tensorrt-rtx" else ()
    chosen = SMALL | {"backend": installed[0], "compute_capability": capability}
    try:
        options = BuildOptions(tiny_pair / "target", tiny_pair / "draft", tmp_path / "bundle", **chosen)
    except ConfigError as error:
        pytest.skip(str(error))
    plans = [spec.plan for spec in build(options, lambda step: lambda: None).manifest.engines.values()]
    assert all(plan is not None and plan.executed for plan in plans)


def test_a_spec_with_a_plan_goes_through_json(tiny_bundle: Path) -> None:
    manifest = EngineBundle.open(tiny_bundle).manifest
    engines = {
        role: replace(
            spec, backend=PLAN.package, file=f"{role}.plan", plan=PLAN, outputs=output_names(role, form=COMPACT)
        )
        for role, spec in manifest.engines.items()
    }
    files = {spec.file: manifest.files[f"{role}.onnx"] for role, spec in engines.items()}
    changed = replace(manifest, engines=engines, files={**manifest.files, **files})
    assert type(changed).from_json(json.loads(json.dumps(changed.to_json()))) == changed
