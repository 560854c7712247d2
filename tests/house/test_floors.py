"""The floors of the building: a file imports from lower ones only; heavy packages only where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bundling import ROOT

from draftwood.runtime.engines.backends import BACKENDS

FLOORS = ("plugins", "models", "runtime", "builder", "cli", "src")
FACE = ROOT / "src" / "draftwood"  # the package itself, which links the others
# Module -> where it may be imported: files, or folders ending with a slash.
RESERVED = {
    "onnxruntime": ("runtime/engines/onnx/onnxruntime.py",),
    "tensorrt": ("plugins/tensorrt.py",),
    "torch": (
        "models/llama.py",
        "builder/head/",
        "builder/distillation/",
        "builder/torch_settings.py",
        "builder/quantization/calibration.py",
    ),
    "llguidance": ("runtime/structured/",),
    "huggingface_hub": ("builder/checkpoints/hub.py",),
    "draftwood.models.llama": ("builder/",),
}
# Rooms of the runtime, the lowest first; a room imports from its own and lower ones only.
RUNTIME_ROOMS = (
    "sampling",
    "engines",
    "engines/native",
    "engines/onnx",
    "engines/static",
    "engines/backends.py",  # the table, which opens each of them
    "engines/shared",
    "speculation/graph",
    "speculation/planning",
    "speculation/growers",
    "speculation",
    "decoding",
    "text",
    "structured",
    "bundle",
    ".",  # llm.py and what it is made of
    "inspection",
    "requests",
    "serving",
    "serving/http",
    "serving/openai",
    "serving/anthropic",
    "serving/ollama",
    "serving/several.py",
    "serving/app.py",
    "serving/triton",
)
MAX_FILES_AT_THE_TOP = 8
MAX_LINES = 350  # of a file of code
KNOW_BACKENDS = (  # files, and folders, that may compare the name of a backend
    "runtime/engines/backends.py",
    "runtime/engines/compatibility.py",
    "runtime/engines/static/",
    "builder/engines/plan.py",
    "builder/engines/tensorrt.py",
    "plugins/tensorrt.py",
)
TRAINING = "models/demo"  # scripts that made the demo pair; nothing imports them


def product_files() -> list[Path]:
    files = [*FACE.glob("*.py"), *(file for floor in FLOORS[:-1] for file in (ROOT / floor).rglob("*.py"))]
    return [file for file in files if TRAINING not in file.as_posix()]


def imports(file: Path) -> Iterator[str]:
    """Absolute names of everything a file imports, "draftwood.…" for its own package."""
    package = ["draftwood", *(() if file.parent == FACE else file.relative_to(ROOT).parent.parts)]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *([node.module] if node.module else [])]
            yield from (".".join([*module, alias.name]) for alias in node.names)


@pytest.mark.parametrize("file", product_files(), ids=lambda file: file.relative_to(ROOT).as_posix())
def test_a_file_imports_from_lower_floors_only(file: Path) -> None:
    name = file.relative_to(ROOT).as_posix()
    floor = FLOORS.index(name.split("/")[0])
    for imported in imports(file):
        top, _, rest = imported.partition(".")
        if top == "draftwood":
            assert FLOORS.index(rest.split(".")[0]) <= floor, f"{name} imports {imported} from a higher floor"
        for module, places in RESERVED.items():
            if f"{imported}.".startswith(f"{module}."):
                assert name.startswith(places), f"{name} imports {imported}"


def room_of(file: Path) -> str:
    """Its folder, unless a file has a place of its own."""
    name = file.relative_to(ROOT / "runtime").as_posix()
    return name if name in RUNTIME_ROOMS else file.parent.relative_to(ROOT / "runtime").as_posix()


def imported_files(file: Path) -> Iterator[Path]:
    """Files of the runtime that a file of it imports from."""
    for name in imports(file):
        path = ROOT.joinpath(*name.split(".")[1:])
        found = [each for each in (path.with_suffix(".py"), path.parent.with_suffix(".py")) if each.is_file()]
        if found and found[0].is_relative_to(ROOT / "runtime"):
            yield found[0]


@pytest.mark.parametrize(
    "file", sorted((ROOT / "runtime").rglob("*.py")), ids=lambda file: file.relative_to(ROOT).as_posix()
)
def test_a_room_of_the_runtime_imports_from_lower_rooms_only(file: Path) -> None:
    room = RUNTIME_ROOMS.index(room_of(file))
    if file == ROOT / "runtime" / "__init__.py":  # the public names, of every room
        return
    for imported in imported_files(file):
        assert RUNTIME_ROOMS.index(room_of(imported)) <= room, f"{file} imports {imported} from a higher room"


def compared(tree: ast.AST) -> Iterator[ast.AST]:
    """What a file compares anything with, or chooses by: operands of comparisons, keys of dictionaries, cases."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield from (part for operand in (node.left, *node.comparators) for part in ast.walk(operand))
        elif isinstance(node, ast.Dict):
            yield from (key for key in node.keys if key is not None)
        elif isinstance(node, ast.MatchValue):
            yield node.value


def compared_backends(code: str) -> list[str]:
    """Names of backends, and of tuples of them, that a file compares something with."""
    found = []
    for node in compared(ast.parse(code)):
        if isinstance(node, ast.Constant) and node.value in BACKENDS:
            found.append(str(node.value))
        elif isinstance(node, ast.Name) and node.id == "PACKAGES":
            found.append(node.id)
    return found


@pytest.mark.parametrize("file", product_files(), ids=lambda file: file.relative_to(ROOT).as_posix())
def test_only_the_table_and_tensorrt_compare_the_name_of_a_backend(file: Path) -> None:
    if not file.relative_to(ROOT).as_posix().startswith(KNOW_BACKENDS):
        assert not compared_backends(file.read_text(encoding="utf-8"))


def test_the_runtime_shows_its_rooms_at_the_top() -> None:
    files = [file for file in (ROOT / "runtime").iterdir() if file.is_file()]
    assert len(files) <= MAX_FILES_AT_THE_TOP


def test_every_file_stays_readable_in_one_go() -> None:
    """The limit holds for product code and for tests, the helpers of tests included."""
    kernels = (ROOT / "plugins" / "native" / "kernels").iterdir()
    files = [*product_files(), *kernels, *(ROOT / "tests").rglob("*.py")]
    lengths = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert not {str(file): length for file, length in lengths.items() if length > MAX_LINES}


def test_the_runtime_needs_neither_torch_nor_onnx_nor_a_server() -> None:
    code = (
        "import sys; import draftwood.runtime, draftwood.cli.main\n"
        "heavy = {'torch', 'onnx', 'onnx_ir', 'onnxruntime', 'safetensors', 'transformers', 'ml_dtypes'}\n"
        "server = {'fastapi', 'pydantic', 'starlette', 'uvicorn'}\n"
        "sys.exit(', '.join((heavy | server) & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, f"imported: {done.stderr}"
