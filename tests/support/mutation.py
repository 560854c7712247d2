"""Mutation tests of the core: one small change at a time, each of which a test must detect.

Each mutant (`mutants.py`) is tested in a copy of the source by the tests in TESTS. A mutant that makes tests hang
counts as detected, and is named. `mutants_equivalent.json` lists mutants that no test can detect, each with the reason.

    python tests/support/mutation.py --mutants 300 --output build/mutation.json
    python tests/support/mutation.py --names build/mutation.json  # the survivors of that pass again
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import date
from fnmatch import fnmatch
from pathlib import Path

from mutants import Mutant, c_mutants, python_mutants

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.json")
KERNELS = (
    "test_native_kernels",
    "test_native",
    "test_softmax",
    "test_native_edges",
)
CONTROLLER = ("test_controller", "test_controller_learning", "test_budget", "test_lookups", "test_planning_lossless")
EXPLAIN = ("test_explain", "test_explain_html")
SPECULATION = ("test_verifier", *CONTROLLER, "test_cost", "test_decoder", "test_room")
TESTS = {
    "runtime/text/writer.py": ("test_llm", "test_detokenizer"),
    "runtime/text/detokenizer.py": ("test_detokenizer", "test_llm"),
    "runtime/sampling/params.py": ("test_sampling_params", "test_sampling", "test_llm"),
    "runtime/sampling/sampler.py": (
        "test_sampling",
        "test_sampling_params",
        "test_softmax",
        "test_verifier",
        "test_llm",
    ),
    "runtime/decoding/queue.py": ("test_queue", "test_async_llm"),
    "runtime/decoding/scheduler.py": (
        "test_async_together",
        "test_async_llm",
        "test_prompt_chunks",
        "test_pool",
        "test_memory",
    ),
    "runtime/decoding/decoder.py": (
        "test_decoder",
        "test_room",
        "test_llm",
        "test_verifier",
        "test_audit",
        "test_lossless",
    ),
    "runtime/decoding/state.py": ("test_decoder", "test_room", "test_llm", *CONTROLLER, "test_lossless"),
    "runtime/decoding/round.py": ("test_lookup_alone", "test_decoder", "test_room", *EXPLAIN, *CONTROLLER, "test_llm"),
    "runtime/speculation/planning/budget.py": CONTROLLER,
    "runtime/speculation/planning/prices.py": ("test_shared_arrays", *CONTROLLER),
    "runtime/speculation/planning/cost.py": ("test_cost", *CONTROLLER, "test_profile", "test_planning"),
    "runtime/engines/shared/prefix.py": ("test_prefix", "test_async_together", "test_pool"),
    "runtime/speculation/planning/estimate.py": (
        "test_acceptance_head",
        "test_calibration",
        *SPECULATION,
        "test_planning",
    ),
    "runtime/speculation/growers/baseline.py": ("test_baseline", *SPECULATION, "test_lossless"),
    "runtime/speculation/planning/calibration.py": ("test_calibration", "test_dyspec", *SPECULATION, "test_lossless"),
    "runtime/speculation/config.py": ("test_speculative_config", "test_llm", *SPECULATION, "test_lossless"),
    "runtime/speculation/planning/controller.py": (
        *CONTROLLER,
        "test_cost",
        "test_llm",
        "test_planning",
        "test_audit",
    ),
    "runtime/speculation/growers/drawing.py": ("test_baseline", "test_dyspec", *SPECULATION, "test_lossless"),
    "runtime/speculation/growers/dyspec.py": ("test_dyspec", "test_gsd", *SPECULATION, "test_lossless"),
    "runtime/speculation/growers/gsd.py": ("test_gsd", *SPECULATION, "test_lossless"),
    "runtime/speculation/growers/kinds.py": ("test_speculative_config", "test_lossless", *SPECULATION, "test_llm"),
    "runtime/speculation/growers/lookup.py": ("test_baseline", "test_llm", *SPECULATION, "test_lossless"),
    "runtime/speculation/proposer.py": (
        "test_baseline",
        "test_dyspec",
        "test_specdecpp",
        *SPECULATION,
        "test_lossless",
    ),
    "runtime/speculation/growers/specdecpp.py": (
        "test_specdecpp",
        "test_acceptance_head",
        *SPECULATION,
        "test_lossless",
    ),
    "runtime/speculation/graph/token_graph.py": (
        "test_gsd",
        "test_dyspec",
        "test_baseline",
        *SPECULATION,
        "test_lossless",
    ),
    "runtime/speculation/graph/token_tree.py": (
        "test_gsd",
        "test_dyspec",
        "test_baseline",
        *SPECULATION,
        "test_lossless",
    ),
    "runtime/speculation/stopwatch.py": ("test_decoder", *EXPLAIN),
    "runtime/speculation/verifier.py": ("test_verifier", "test_decoder", "test_lossless"),
    **{f"plugins/native/kernels/{name}.h": KERNELS for name in ("acceptance", "attention", "inputs", "keys")},
    **{f"plugins/native/kernels/{name}.h": KERNELS for name in ("linear", "matrix", "norms", "ranking")},
    **{f"plugins/native/kernels/{name}.h": KERNELS for name in ("rounding", "sampling", "threads", "vector")},
    **{
        f"plugins/native/kernels/{name}.h": (*KERNELS, "test_native_instructions")
        for name in ("isa_avx2", "isa_avx512", "plain")
    },
    **{f"plugins/native/kernels/{name}.h": ("test_weights", "test_native_edges") for name in ("commit", "residual")},
    "plugins/native/kernels/llama.c": KERNELS,
}


def mutants(pattern: str) -> list[Mutant]:
    found: list[Mutant] = []
    for file in TESTS:
        if fnmatch(file, pattern):
            source = (ROOT / file).read_text(encoding="utf-8")
            found += python_mutants(file, source) if file.endswith(".py") else c_mutants(file, source)
    return found


def named(file: Path, every: list[Mutant]) -> list[Mutant]:
    """The mutants whose names `file` lists: one on each line, or as the survivors of a result. A name whose code was
    changed meanwhile is printed as gone."""
    text = file.read_text(encoding="utf-8")
    names: list[str] = json.loads(text)["survivors"] if text.startswith("{") else text.splitlines()
    known = {mutant.name for mutant in every}
    for name in names:
        if name not in known:
            print(f"gone: {name}", flush=True)
    return [mutant for mutant in every if mutant.name in names]


class Tree:
    """A copy of the tracked files, in which mutants are tried."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.hung = 0  # runs of tests that were ended because they took too long
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, files.split("\0")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
        self.environment = (
            {"DRAFTWOOD_TEST_DATA": str(ROOT.parent / "shared" / "data")}
            | os.environ
            | {
                "PYTHONPATH": str(folder / "src"),
                "PYTHONDONTWRITEBYTECODE": "1",
                "XDG_CACHE_HOME": str(folder / "cache"),  # kernels of mutants are nobody else's
            }
        )

    def passes(self, mutant: Mutant | None, tests: str, seconds: float) -> bool:
        """Whether a file of tests sees nothing of a mutant, or of none."""
        if mutant is None:
            return self._run(tests, seconds)
        file = self._folder / mutant.file
        original = file.read_bytes()
        begin, end = mutant.span
        file.write_bytes(original[:begin] + mutant.new.encode() + original[end:])
        try:
            return self._run(tests, seconds)
        finally:
            file.write_bytes(original)

    def _run(self, tests: str, seconds: float) -> bool:
        files = map(str, self._folder.glob(f"tests/**/{tests}.py"))
        options = ["-x", "-q", "-m", "not full and not gpu", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        unseen = subprocess.DEVNULL
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *files],
            cwd=self._folder,
            env=self.environment,
            stdin=unseen,
            stdout=unseen,
            stderr=unseen,
            start_new_session=True,
        ) as process:
            try:
                return process.wait(seconds) == 0
            except subprocess.TimeoutExpired:
                self.hung += 1
                return False
            finally:
                with suppress(ProcessLookupError):  # the tests, or what they left behind
                    os.killpg(process.pid, signal.SIGKILL)


def tried(sample: list[Mutant], equivalent: dict[str, str]) -> dict[str, list[Mutant]]:
    """The sample by what became of it."""
    ends: dict[str, list[Mutant]] = {"killed": [], "hung": [], "survived": [], "equivalent": []}
    patience: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        tree = Tree(Path(folder))
        for number, mutant in enumerate(sample, 1):
            end = "equivalent" if mutant.name in equivalent else "survived"
            # One file after the other: the first ones notice most mutants, and the last ones take longest.
            for tests in TESTS[mutant.file] if end == "survived" else ():
                if tests not in patience:
                    begin = time.monotonic()
                    assert tree.passes(None, tests, 3600), f"{tests} fails without any mutant"
                    patience[tests] = 30 + 4 * (time.monotonic() - begin)
                before = tree.hung
                if not tree.passes(mutant, tests, patience[tests]):
                    end = "killed" if tree.hung == before else "hung"
                    break
            ends[end].append(mutant)
            print(f"{number}/{len(sample)} {end}: {mutant.file}:{mutant.line} {mutant.old} -> {mutant.new}", flush=True)
    return ends


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", default="*", help="pattern of the files to change")
    parser.add_argument("--mutants", type=int, default=300, help="how many are tried, drawn at random; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--names", type=Path, help="file of the names to try, or an earlier result: its survivors")
    parser.add_argument("--list", action="store_true", help="names the sample and tries nothing")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    every = mutants(options.files)
    if options.names:
        sample = named(options.names, every)
    else:
        sample = random.Random(options.seed).sample(every, min(options.mutants or len(every), len(every)))
    if options.list:
        print(*(mutant.name for mutant in sample), sep="\n")
        return 0
    reasons: dict[str, str] = json.loads(EQUIVALENT.read_text(encoding="utf-8"))
    ends = tried(sample, reasons)
    possible = len(sample) - len(ends["equivalent"])
    result = {
        "date": date.today().isoformat(),
        "seed": options.seed,
        "mutants_possible": len(every),
        **{end: len(found) for end, found in ends.items()},
        "score": round(1 - len(ends["survived"]) / possible, 4) if possible else None,
        "names_hung": sorted(mutant.name for mutant in ends["hung"]),
        "survivors": sorted(mutant.name for mutant in ends["survived"]),
    }
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
