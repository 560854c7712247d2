"""llama.cpp and ik_llama.cpp: llama-server on the files themselves, or on their weights in another format.

A server's kind of proposals is fixed when it starts. Caches of prompts are off, since prompts recur. Keys and values
stay fp16, the default. The default lengths of n-gram kinds are made for long texts, so that there are short ones, too.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.program import FILE, PLAIN, Conditions, Program, Setting, SetupError, flags, installed
from draftwood.models.errors import RequestError

LENGTHS = (2, 3, 4, 6, 8)
CONFIDENT = 0.75  # a draft token less probable than this ends a proposal
SHORT = {"n": 3, "m": 8}  # tokens that must recur, and that are proposed


def make(precision: str, conditions: Conditions) -> Program:
    return make_any("llama.cpp", "libggml-cpu.so", precision, conditions)


def make_ik(precision: str, conditions: Conditions) -> Program:
    return make_any("ik_llama.cpp", "libggml.so", precision, conditions)


def make_any(name: str, kernels: str, precision: str, conditions: Conditions) -> Program:
    """precision: "file", or "bf16" or "q8_0" for the file's weights in that format."""
    server, environment = find_server(name, kernels, conditions)
    if precision != FILE:
        target, draft = conditions.target, conditions.draft
        conditions = conditions._replace(
            target=converted(target, precision, conditions), draft=draft and converted(draft, precision, conditions)
        )
    return make_program(name, server, precision, conditions, environment)


def find_server(name: str, kernels: str, conditions: Conditions) -> tuple[Path, tuple[tuple[str, str], ...]]:
    """The server, and the environment that gives it the kernels for AVX2 alone where these are wanted."""
    home = conditions.work / name
    server = installed(home / "build" / "bin" / "llama-server", name, conditions)
    if not conditions.avx2:
        return server, ()
    found = next((home / "build-avx2").rglob(kernels), home / "build-avx2" / kernels)
    return server, (("LD_LIBRARY_PATH", str(installed(found, name, conditions, "avx2").parent)),)


def make_program(
    name: str, server: Path, precision: str, conditions: Conditions, environment: tuple[tuple[str, str], ...] = ()
) -> Program:
    """Of any llama-server: what it can do is in its --help. Raises SetupError when it cannot be run."""
    shown = run(server, "--help")
    modern = "--spec-draft-n-max" in shown
    slots, threads = conditions.at_a_time, conditions.threads
    command = [server, "-m", conditions.target, "-a", "model", "-np", slots, "-c", slots * conditions.context]
    command += ["-t", threads, "-tb", threads, "--no-warmup", "-cram", 0]
    stateless = "--no-cache-prompt" in shown
    command += ["--no-cache-prompt"] if stateless else []
    if "--run-time-repack" in shown:  # ik_llama.cpp: its kernels want other orders of weights; of attention one fails
        command += ["-rtr", *(["-no-fa"] if slots > 1 else [])]  # with several texts at a time
    command += ["--jinja"] if "--jinja" in shown else []
    return Program(
        name,
        precision,
        f"{name} {read_version(server)}",
        flags(*command),
        tuple(
            setting if stateless else replace(setting, body=(("cache_prompt", False),))
            for setting in settings(conditions.draft, shown, modern)
        ),
        environment,
        mixed=mix_modern if modern else mix,
    )


def settings(draft: Path | None, shown: str, modern: bool) -> tuple[Setting, ...]:
    found = [Setting(PLAIN)]
    if draft is not None:
        kind = ("--spec-type", "draft-simple") if modern else ()
        limit, least = ("--spec-draft-n-max", "--spec-draft-p-min") if modern else ("--draft-max", "--draft-p-min")
        autotunes = "--spec-autotune" in shown  # ik_llama.cpp, whose attention kernel ends the program beside a draft
        start = flags("-md", draft, *kind, *(("-no-fa",) if autotunes else ()))
        found += [Setting(f"draft:{n}", (*start, *flags(limit, n, least, 0))) for n in LENGTHS]
        found.append(Setting("draft:8 confident", (*start, *flags(limit, 8, least, CONFIDENT))))
        if autotunes:
            found.append(Setting("draft:8 autotune", (*start, *flags(limit, 8, "--spec-autotune"))))
    if "ngram" in shown:
        for kind_of_lookup in ("ngram-simple", "ngram-map-k", "ngram-map-k4v"):
            size = f"--spec-{kind_of_lookup}-size" if modern else "--spec-ngram-size"
            short = flags(f"{size}-n", SHORT["n"], f"{size}-m", SHORT["m"])
            found.append(lookup(f"{kind_of_lookup} short", kind_of_lookup, *short))
        found += [lookup(kind_of_lookup, kind_of_lookup) for kind_of_lookup in ("ngram-mod", "ngram-cache")]
    if modern:
        short = flags("--spec-ngram-mod-n-match", 6, "--spec-ngram-mod-n-min", 2, "--spec-ngram-mod-n-max", SHORT["m"])
        found.append(lookup("ngram-mod short", "ngram-mod", *short))
    return tuple(found)


def lookup(name: str, kind: str, *more: str) -> Setting:
    return Setting(name, ("--spec-type", kind, *more), lookups=True)


def mix_modern(draft: Setting, lookup: Setting) -> Setting:
    """One list of both kinds of proposals."""
    kinds = [setting.start[setting.start.index("--spec-type") + 1] for setting in (lookup, draft)]
    rest = [part for setting in (draft, lookup) for part in without_kind(setting.start)]
    return Setting(f"{draft.name} + {lookup.name}", ("--spec-type", ",".join(kinds), *rest), lookups=True)


def mix(draft: Setting, lookup: Setting) -> Setting:
    return Setting(f"{draft.name} + {lookup.name}", draft.start + lookup.start, draft.body, lookups=True)


def without_kind(start: tuple[str, ...]) -> tuple[str, ...]:
    at = start.index("--spec-type")
    return start[:at] + start[at + 2 :]


def converted(model: Path, precision: str, conditions: Conditions) -> Path:
    """A file's weights in another format, made once. Raises RequestError for an unknown one."""
    if precision not in ("bf16", "q8_0"):
        raise RequestError(f"llama-server runs here at {FILE}, bf16 or q8_0, not {precision!r}")
    made = conditions.work / "models" / f"{model.stem}-{precision}.gguf"
    if not made.is_file():
        made.parent.mkdir(parents=True, exist_ok=True)
        unfinished = made.with_suffix(".unfinished")
        quantize = installed(
            conditions.work / "llama.cpp" / "build" / "bin" / "llama-quantize", "llama.cpp", conditions
        )
        run(quantize, "--allow-requantize", model, unfinished, precision.upper())
        unfinished.rename(made)
    return made


def read_version(server: Path) -> str:
    lines = [line for line in run(server, "--version").splitlines() if line.startswith("version")]
    return lines[0].partition(":")[2].strip() if lines else "of unknown version"


def run(program: Path, *arguments: object) -> str:
    """What a program writes. Raises SetupError when it cannot be run or fails; ik_llama.cpp's --help only seems to."""
    command = [str(program), *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=1200)
    except (OSError, subprocess.SubprocessError) as error:
        raise SetupError(f"{program} cannot be run: {error}") from error
    shown = done.stdout + done.stderr
    if done.returncode and (arguments != ("--help",) or not shown):
        raise SetupError(f"{program} cannot be run: it ends with status {done.returncode}")
    return shown
