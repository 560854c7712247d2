"""What a machine can run: its facts are stand-ins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftwood.cli import inspect
from draftwood.cli.main import main
from draftwood.plugins.installation import install
from draftwood.runtime.engines.gpus import Driver, Gpu
from draftwood.runtime.inspection import machine
from draftwood.runtime.inspection.machine import Surroundings, abilities, cuda_of_torch, is_library, look_around

H100, ADA, KEPLER = (
    Driver((13, 0), (Gpu(name, capability, nbytes << 30),))
    for name, capability, nbytes in (("H100", "9.0", 80), ("L4", "8.9", 24), ("K80", "3.7", 12))
)
EVERYTHING = Surroundings(
    versions={
        "onnxruntime-gpu": "1.31.1",
        "tensorrt": "11.4",
        "tensorrt-rtx": "1.7.1",
        "cuda-bindings": "13.5.0",
        "torch": "2.13.0",
        "triton": "3.9.0",
    },
    obstacles={"native": None, "onnxruntime": None},
    driver=ADA,
    torch_cuda="13.0",
    missing=(),
)
CPU, CUDA = "onnxruntime", "onnxruntime on CUDA"


def obstacles(engine: str, **changed: Any) -> tuple[str, ...]:
    """Of an engine on a machine that has everything but what is changed."""
    here = EVERYTHING._replace(**changed)
    (found,) = (each for each in abilities(here) if each.engine == engine)
    assert found.runs == (not found.obstacles)
    return found.obstacles


def without(*packages: str, **other: str) -> dict[str, str]:
    return {name: found for name, found in EVERYTHING.versions.items() if name not in packages} | other


def test_a_machine_with_everything_runs_everything() -> None:
    assert all(each.runs for each in abilities(EVERYTHING))
    shown = {each.engine: each.found for each in abilities(EVERYTHING)}
    assert shown[CUDA] == "L4 (SM 8.9, 26 GB), 1.31.1, with --provider cuda"
    assert shown["tensorrt-rtx"] == "L4 (SM 8.9, 26 GB), 1.7.1" and shown[CPU] == "CPU, 1.31.1"


def test_what_is_not_installed_has_no_version() -> None:
    shown = {each.engine: each.found for each in abilities(EVERYTHING._replace(versions={}, driver="no driver"))}
    assert shown[CPU] == "CPU" and shown[CUDA] == "no GPU, with --provider cuda" and shown["tensorrt"] == "no GPU"
    assert shown["tensorrt-rtx"] == "no GPU"
    assert shown["torch"] == "CPU, to train" and shown["torch on CUDA"] == "no GPU, to measure"


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        (without("onnxruntime-gpu"), f"onnxruntime-gpu is not installed: {install('gpu')}"),
        (
            without("onnxruntime-gpu", onnxruntime="1.32.0"),
            f"onnxruntime 1.32.0 is installed, no CUDA provider: pip uninstall onnxruntime; {install('gpu')}",
        ),
        (
            without(onnxruntime="1.32.0"),
            "onnxruntime 1.32.0 is installed, onnxruntime overwrites onnxruntime-gpu, in the same folder: "
            f"pip uninstall onnxruntime onnxruntime-gpu; {install('gpu')}",
        ),
        (
            without(**{"onnxruntime-gpu": "1.24.4"}),
            f"the CUDA provider of 1.24.4 lacks operators: {install('gpu')}",
        ),
    ],
)
def test_the_wrong_onnxruntime_is_named(versions: dict[str, str], said: str) -> None:
    assert obstacles(CUDA, versions=versions) == (said,)
    assert obstacles(CPU, versions=versions) == ()


def test_missing_libraries_of_cuda_are_named() -> None:
    (said,) = obstacles(CUDA, missing=["libcudnn.so.9"])
    assert said.startswith("no libcudnn.so.9: pip install 'onnxruntime-gpu[cuda,cudnn]'")


@pytest.mark.parametrize("engine", [CUDA, "tensorrt", "tensorrt-rtx", "torch on CUDA"])
def test_a_missing_driver_and_an_old_gpu_are_named(engine: str) -> None:
    assert obstacles(engine, driver="there is no driver: install one") == ("there is no driver: install one",)
    said = obstacles(engine, driver=KEPLER)
    assert said[0] == "K80 is SM 3.7, older than 7.5: use a backend for CPUs" and len(said) == 1
    (newer,) = obstacles(engine, driver=Driver((12, 4), ADA.gpus))
    assert newer.endswith(": install a newer driver") and "12.4" in newer


def test_tensorrt_rtx_has_no_hopper() -> None:
    assert obstacles("tensorrt", driver=H100) == ()
    said = "it does not support SM 9.0 (H100): use --backend tensorrt"
    assert obstacles("tensorrt-rtx", driver=H100) == (said,)


@pytest.mark.parametrize("engine", ["tensorrt", "tensorrt-rtx"])
def test_packages_of_plans_are_named(engine: str) -> None:
    said = tuple(f"{package} is not installed: {install(engine)}" for package in (engine, "cuda-bindings"))
    assert obstacles(engine, versions=without(*(engine, "cuda-bindings"))) == said


def test_torch_without_cuda_is_named() -> None:
    (said,) = obstacles("torch on CUDA", torch_cuda=None)
    assert said.startswith("torch 2.13.0 is a build without CUDA: pip install")
    assert obstacles("torch", versions=without("torch")) == (f"torch is not installed: {install('train')}",)
    assert obstacles("torch on CUDA", versions=without("triton"))[0].endswith(f"{install('kernel')}")


def test_a_cpu_backend_says_what_it_lacks() -> None:
    assert obstacles("native", obstacles={"native": "no compiler: x", "onnxruntime": None}) == ("no compiler: x",)


def test_looking_around_imports_no_backend() -> None:
    """It would take seconds."""
    code = "from draftwood.runtime.inspection.machine import look_around; found = look_around()\n"
    code += "import sys; assert not {'torch', 'onnxruntime', 'triton', 'tensorrt_rtx', 'cuda'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_torch_was_built_for_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.setattr(machine, "find_spec", lambda name: Place(str(tmp_path / name / "__init__.py")))
    assert cuda_of_torch() is None
    for line, found in (("cuda: Optional[str] = '13.0'", "13.0"), ("cuda = None", None)):
        (tmp_path / "torch" / "version.py").write_text(f"hip = '7.0'\n{line}\ncuda_extra = '1'\n")
        assert cuda_of_torch() == found


class Place:
    """Of a package."""

    def __init__(self, origin: str) -> None:
        self.origin, self.submodule_search_locations = origin, [str(Path(origin).parent)]


def test_libraries_are_found_in_packages_and_by_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia" / "cudnn" / "lib").mkdir(parents=True)
    (tmp_path / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9").touch()
    monkeypatch.setattr(machine, "find_spec", lambda name: Place(str(tmp_path / name / "__init__.py")))
    assert is_library("libcudnn.so.9") and not is_library("libcublas.so.99")
    assert is_library("libcublas.so.99", load=lambda name: name)


def test_the_command_shows_engines_and_fixes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inspect, "look_around", lambda: EVERYTHING._replace(driver=H100))
    assert main(["inspect"]) == 0
    shown = capsys.readouterr().out
    assert "H100" in shown and "--backend tensorrt" in " ".join(shown.split())
    assert main(["inspect", "--json"]) == 0
    found = {each["engine"]: each for each in json.loads(capsys.readouterr().out)}
    assert found["native"] == {"engine": "native", "runs": True, "found": "CPU", "obstacles": []}
    assert not found["tensorrt-rtx"]["runs"] and found["tensorrt"]["runs"]
    for option in (["--open"], ["--chat-template"], ["--requests", "8"]):
        assert main(["inspect", *option]) == 2
        assert f"{option[0]} needs a bundle: draftwood inspect BUNDLE" in capsys.readouterr().err


def test_this_machine_is_described() -> None:
    here = look_around()
    assert here.versions["torch"] and here.obstacles.keys() == {"native", "onnxruntime"}
    assert len(abilities(here)) == 7
