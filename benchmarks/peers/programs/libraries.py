"""Libraries without a server of their own, behind the one of `inside`: OpenVINO GenAI and transformers."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.peers import inside
from benchmarks.peers.program import FILE, PLAIN, Conditions, Program, Setting, SetupError, flags
from benchmarks.peers.programs.folder import ROOT, as_folder, interpreter
from benchmarks.peers.programs.vllm import version_in
from draftwood.models.errors import RequestError

LENGTHS = (2, 3, 5)


def make_openvino(precision: str, conditions: Conditions) -> Program:
    """The target is the file itself. A draft must be in OpenVINO's own form: int8, from the folder in bf16."""
    if precision != FILE:
        raise RequestError(f"OpenVINO GenAI runs here on the file itself, not at {precision!r}: openvino-genai/{FILE}")
    python = interpreter("openvino-genai", conditions)
    command = [python, "-m", f"{inside.__name__}.openvino_server", "--model", conditions.target]
    command += ["--threads", conditions.threads]
    settings = [Setting(PLAIN, ("--kind", PLAIN))]
    if conditions.draft is not None:
        start = flags("--kind", "draft", "--draft", as_openvino(conditions.draft, python, conditions))
        settings += [Setting(f"draft:{n}", start, (("tokens", n),)) for n in LENGTHS]
    settings += [Setting(f"lookup:{n}", ("--kind", "lookup"), (("tokens", n),), lookups=True) for n in LENGTHS]
    version = f"openvino-genai {version_in(python.parents[1], 'openvino_genai')}"
    return Program("openvino-genai", precision, version, flags(*command), tuple(settings), environment(conditions))


def make_transformers(precision: str, conditions: Conditions) -> Program:
    if precision != "bf16":
        raise RequestError(f"transformers runs here at bf16, not {precision!r}: transformers/bf16")
    python = interpreter("transformers", conditions)
    command = [python, "-m", f"{inside.__name__}.transformers_server"]
    command += ["--model", as_folder(conditions.target, conditions)]
    command += ["--threads", conditions.threads]
    settings = [Setting(PLAIN)]
    if conditions.draft is not None:
        command += ["--draft", as_folder(conditions.draft, conditions)]
        settings += [Setting(f"draft:{n}", body=(("draft", n),)) for n in LENGTHS]
    settings += [Setting(f"lookup:{n}", body=(("lookup", n),), lookups=True) for n in LENGTHS]
    version = f"transformers {version_in(python.parents[1], 'transformers')}"
    return Program(
        "transformers", precision, version, flags(*command), tuple(settings), environment(conditions), at_a_time=1
    )


def environment(conditions: Conditions) -> tuple[tuple[str, str], ...]:
    """Where this package is, and what makes torch and oneDNN, which OpenVINO has inside, leave AVX-512 alone."""
    here = (("PYTHONPATH", str(ROOT)),)
    return (*here, ("ATEN_CPU_CAPABILITY", "avx2"), ("ONEDNN_MAX_CPU_ISA", "AVX2")) if conditions.avx2 else here


def as_openvino(model: Path, python: Path, conditions: Conditions) -> Path:
    """Made once, by optimum. Raises SetupError when it cannot be."""
    made = conditions.work / "models" / f"{model.stem}-openvino-int8"
    if not made.is_dir():
        unfinished = made.with_suffix(".unfinished")
        export = flags(python.with_name("optimum-cli"), "export", "openvino", "-m", as_folder(model, conditions))
        kind = flags("--task", "text-generation-with-past", "--weight-format", "int8", unfinished)
        done = subprocess.run([*export, *kind], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SetupError(f"{model.name} does not become OpenVINO's: {done.stderr.strip()[-300:]}")
        unfinished.rename(made)
    return made
