"""Lines of code, result files and words of documents by room: `make size` prints them, tests/house/test_budget.py
compares them with tests/house/budget.toml.

    python tests/support/size.py [REVISION]     # and what they were in a revision (default: origin/main)
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUDGET = ROOT / "tests" / "house" / "budget.toml"
PRODUCT = ("runtime", "builder", "plugins", "cli", "models", "src", "build_engines.py")
ROOMS = (*PRODUCT, "tests", "benchmarks")
CODE = (".py", ".c", ".h")
RESULTS = "benchmarks/results/"
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs")
INTERNALS = ("structure", "architecture", "papers", "benchmarks", "performance", "internals/")
Sizes = dict[str, dict[str, int]]  # kind -> room -> number


def sizes(revision: str | None = None) -> Sizes:
    """Of the tracked files in the working tree, or of a revision."""
    lines, words = Counter[str](), Counter[str]()
    for name in tracked(revision):
        room = name.split("/")[0]
        if room in ROOMS and name.endswith(CODE):
            lines[room] += content(name, revision).count("\n")
        elif name.endswith(".md"):
            words[kind_of_document(name)] += len(content(name, revision).split())
    lines["product"] = sum(lines[room] for room in PRODUCT)
    words["all"] = words.total()
    results = sum(name.startswith(RESULTS) for name in tracked(revision))
    return {"lines": dict(lines), "words": dict(words), "files": {"results": results}}


def kind_of_document(name: str) -> str:
    """internals: of docs/, structure and evidence. users: the rest of DOCUMENTS. other: cards and indexes elsewhere."""
    if name.split("/")[0] not in DOCUMENTS:
        return "other"
    return "internals" if name.removeprefix("docs/").startswith(INTERNALS) else "users"


def tracked(revision: str | None) -> list[str]:
    """Names of files, links left out."""
    command = ["ls-files", "-s"] if revision is None else ["ls-tree", "-r", revision]
    entries = (line.partition("\t") for line in git(*command).splitlines())
    names = [name for state, _, name in entries if not state.startswith("120000")]
    return [name for name in names if revision is not None or (ROOT / name).is_file()]


def content(name: str, revision: str | None) -> str:
    return (ROOT / name).read_text(encoding="utf-8") if revision is None else git("show", f"{revision}:{name}")


def git(*arguments: str) -> str:
    """Raises CalledProcessError outside of a repository and for an unknown revision."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main() -> None:
    revision = sys.argv[1] if len(sys.argv) > 1 else "origin/main"
    now = sizes()
    try:
        then: Sizes = sizes(revision)
    except subprocess.CalledProcessError:
        print(f"{revision} is unknown here: no differences are shown")
        then = now
    for kind, rooms in now.items():
        for room, number in rooms.items():
            print(f"{kind:6} {room:18} {number:7,} {number - then[kind].get(room, 0):+8,}")


if __name__ == "__main__":
    main()
