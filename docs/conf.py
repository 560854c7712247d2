"""Sphinx's configuration of the site: `make docs` builds it into build/site. Pages are the Markdown files where they
are, in docs/ and elsewhere in the repository, so their links work on the site and in the repository alike."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

project, author = "Draftwood", "the authors of Draftwood"
copyright = f"{author}, Apache-2.0"
release = metadata.version("draftwood")
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/internals/*.md",
    "benchmarks/*.md",
    "models/demo/*.md",
    "models/demo/smollm2/*.md",
    "deploy/dynamo/*.md",
    "examples/*.md",
]
exclude_patterns = [".*", "build", "bundles"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
html_theme = "furo"
html_title = "Draftwood"
html_extra_path = ["entrance"]
html_copy_source = html_show_sourcelink = False


def setup(app: Sphinx) -> None:
    from options_page import page

    (HERE / "options.md").write_text(page(), encoding="utf-8")
