"""The documents: every link leads somewhere, pictures and the reference of options are those of the code, and the site
can be built without a warning."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest
from bundling import ROOT

from draftwood import runtime
from draftwood.runtime import SamplingParams, SpeculativeConfig

DRAFT = "models/demo/smollm2"
FOLDERS = ("", "docs", "docs/internals", "benchmarks", "models/demo", DRAFT, "deploy/dynamo", "examples")
PAGES = sorted(
    page
    for folder in (
        "",
        "docs",
        "docs/internals",
        "benchmarks",
        "models/demo",
        DRAFT,
        "deploy/dynamo",
        "examples",
    )
    for page in (ROOT / folder).glob("*.md")
)
GENERATED = ROOT / "docs" / "options.md"
MAX_LINES_OF_THE_README = 120


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """A page without its code, which may contain what looks like a link or a heading."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^    .*$", "", text, flags=re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title).replace("`", "") for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", [page for page in PAGES if page != GENERATED], ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(<?([^)\s>]+)", re.sub(r"`[^`\n]*`", "", prose(page))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = page if not path else (page.parent / path).resolve()
        assert target == GENERATED or target.exists(), f"{name_of(page)} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{name_of(page)} links to {link}: no such heading"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < MAX_LINES_OF_THE_README


def test_every_page_is_in_the_navigation() -> None:
    index = ROOT / "docs" / "index.md"
    listed = re.findall(r"^```\{toctree\}\n(.*?)^```", index.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line for block in listed for line in block.splitlines() if line and not line.startswith(":")]
    names = [re.sub(r".*<(.*)>", r"\1", line) for line in lines]
    paths = [(index.parent / f"{name}.md").resolve() for name in names]
    assert len(set(paths)) == len(paths) and {*paths, index, GENERATED} == {*PAGES, GENERATED}


def module(file: Path) -> ModuleType:
    """A script of the documents."""
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    loaded = module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_the_pictures_are_those_that_their_script_draws() -> None:
    folder = ROOT / "docs" / "pictures"
    drawn = module(folder / "draw.py").PICTURES
    assert {path.name for path in folder.glob("*.svg")} == set(drawn)
    for name, draw in drawn.items():
        assert (folder / name).read_text(encoding="utf-8") == draw(), f"python docs/pictures/draw.py draws {name} anew"


def test_the_reference_has_every_option_and_field() -> None:
    reference = module(ROOT / "docs" / "options_page.py")
    page = reference.page()
    for name, parser in reference.parsers().items():
        assert f"### draftwood {name}\n" in page
        flags = {flag for action in parser._actions for flag in action.option_strings} - {"-h", "--help"}
        assert flags and all(flag in page for flag in flags)
        assert argparse.SUPPRESS not in page
    for settings in (SamplingParams, SpeculativeConfig):
        assert all(f"| `{field.name}` |" in page for field in fields(settings))
    for name in runtime.__all__:
        assert f"### {name}\n" in page
    for name in ("LLM.generate", "LLM.chat", "AsyncLLM.generate", "ChatSession.send"):
        cls, method = name.split(".")
        assert f"| `{method}(" in page.partition(f"### {cls}\n")[2].partition("\n##")[0], name
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) in (3, 4, 5) for row in rows)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    if find_spec("furo") is None or find_spec("myst_parser") is None:
        pytest.skip("needs sphinx, furo and myst-parser: make docs installs them")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-c", "docs", ".", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "docs" / "concepts.html").read_text(encoding="utf-8")
    loaded = re.findall(r'<(?:script|link rel="stylesheet"|img)[^>]*(?:src|href)="(https?:[^"]*)"', page)
    assert "A round" in page and not loaded
