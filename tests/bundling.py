"""Where things are, and bundles built for a test."""

from __future__ import annotations

from pathlib import Path

from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"  # optional; tests that read it skip without it
DEMO = ROOT / "models" / "demo"


def built(target: Path, draft: Path, output: Path, head: Path | None = None) -> Path:
    """A bundle of the pair, built without a word."""
    build(BuildOptions(target, draft, output, acceptance_head=head), lambda step: lambda: None)
    return output
