"""Draftwood: `draftwood serve` on the files themselves, as a user starts it. All settings share a server."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.program import DEFAULT, FILE, PLAIN, Conditions, Program, Setting, flags
from draftwood.builder.pipeline import LONGEST

NAME = "draftwood"
AVX2 = Path(__file__).parents[1] / "setup" / "avx2.sh"


def make(precision: str, conditions: Conditions) -> Program:
    """precision: "file" for the blocks of the file, a value of --precision, or the folder of a bundle."""
    command: list[object] = [sys.executable, "-m", "draftwood", "serve"]
    if (Path(precision) / "manifest.json").is_file():
        command.append(Path(precision).resolve())
    else:
        command += [conditions.target, "--draft", conditions.draft or "none"]
        command += [] if precision == FILE else ["--precision", precision]
        command += ["-c", conditions.context] if conditions.context > LONGEST else []
    # Costs belong to a number of threads, and those that a build measures to the default.
    command += [] if conditions.threads == os.cpu_count() else ["--threads", conditions.threads]
    command += ["--max-running", conditions.at_a_time, "--prefix-cache-slots", 0, "--served-model-name", "model"]
    drafts = (
        Setting("no lookups", body=speculative(lookups="off")),
        *(
            Setting(f"{grow}:{size}", body=speculative(grow=grow, **{limit: size}))
            for grow, limit, sizes in (
                ("chain", "max_draft_len", (2, 3, 4)),
                ("topk", "max_total_draft_tokens", (8, 16)),
            )
            for size in sizes
        ),
    )
    return Program(
        NAME,
        Path(precision).name,
        f"draftwood {version('draftwood')}",
        flags(*command),
        (
            Setting(PLAIN, body=(("speculative", False),)),
            Setting(DEFAULT, lookups=True),
            *(drafts if conditions.draft else ()),
            Setting("lookup:8", body=speculative(grow="lookup", lookup_len=8, max_draft_len=8), lookups=True),
        ),
        environment(conditions),
    )


def speculative(**fields: object) -> tuple[tuple[str, object], ...]:
    return (("speculative", fields),)


def environment(conditions: Conditions) -> tuple[tuple[str, str], ...]:
    """Kernels for AVX2 alone come from another compiler command. They, and bundles with their costs, have a cache."""
    if not conditions.avx2:
        return ()
    return (("CC", f"sh {AVX2}"), ("DRAFTWOOD_CACHE", str(conditions.work.resolve() / "draftwood-avx2")))
