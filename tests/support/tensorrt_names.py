"""The public names of a TensorRT Python package, and those that this project uses.

`python tests/support/tensorrt_names.py tensorrt_bindings > tests/support/tensorrt_11_names.json` wrote the list
beside this file: names and numbers of parameters of release 11.4.0.106, nothing else. The bindings import where the
libraries they are linked to can be opened, without a GPU.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

Names = Mapping[str, Mapping[str, str]]  # class, "" for the module -> attribute -> accepted parameters, "2" or "0-1|3"
MODULES = ("trt", "self._trt")  # what the package is called where it is used


class Use(NamedTuple):
    """One name that a file takes from the package. parameters: of a call, None where it is not called."""

    owner: str
    name: str
    parameters: int | None
    place: str


def public_names(module: ModuleType) -> Names:
    """Every public class and function of a package, by introspection."""
    names: dict[str, dict[str, str]] = {}

    def visit(owner: str, holder: Any) -> None:
        values = {name: getattr(holder, name) for name in sorted(dir(holder)) if not name.startswith("_")}
        names[owner] = {name: accepted(value) for name, value in values.items() if not isinstance(value, ModuleType)}
        for name, value in values.items():
            if isinstance(value, type) and owner.count(".") < 2:
                visit(f"{owner}.{name}".strip("."), value)

    visit("", module)
    return {owner: found for owner, found in names.items() if found}


def accepted(value: Any) -> str:
    """The number of parameters of a callable besides self, from the signatures that begin its documentation."""
    found = set()
    text = vars(value)["__init__"].__doc__ if isinstance(value, type) and "__init__" in vars(value) else value.__doc__
    for parameters in re.findall(r"^(?:\d+\. )?\w+\((.*)\) ->", text or "", re.MULTILINE) if callable(value) else ():
        kept = [part for part in split(parameters) if not re.match(r"self\b", part)]
        if any(part.startswith("*") for part in kept):
            continue  # the line that announces overloads
        required = sum("=" not in part for part in kept)
        found.add(str(required) if required == len(kept) else f"{required}-{len(kept)}")
    return "|".join(sorted(found))


def split(parameters: str) -> list[str]:
    """At the commas that are in no bracket."""
    parts, depth = [""], 0
    for letter in parameters:
        depth += (letter in "[(<{") - (letter in "])>}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def takes(signature: str, parameters: int) -> bool:
    """Whether a call with so many parameters fits; a callable without documented signature takes anything."""
    ranges = [list(map(int, part.split("-"))) for part in signature.split("|") if part]
    return not ranges or any(limits[0] <= parameters <= limits[-1] for limits in ranges)


def uses(file: Path, receivers: Mapping[str, str]) -> Iterator[Use]:
    """What a file takes from the package: `trt.A.B` chains, and attributes of the variables in `receivers`, which maps
    an expression to its class."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    calls = {
        id(node.func): len(node.args) + len(node.keywords) for node in ast.walk(tree) if isinstance(node, ast.Call)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr.startswith("__"):
            continue
        base, place = ast.unparse(node.value), f"{file.name}:{node.lineno}"
        module = next((name for name in MODULES if base == name or base.startswith(name + ".")), None)
        if module is not None:
            yield Use(base[len(module) + 1 :], node.attr, calls.get(id(node)), place)
        elif base in receivers:
            yield Use(receivers[base], node.attr, calls.get(id(node)), place)


def overridden(file: Path, names: Names) -> Iterator[Use]:
    """Methods of a file's classes that override one of the package's."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ClassDef):
            continue
        bases = {part for base in node.bases for part in class_names(base, file)}
        methods = [part for part in node.body if isinstance(part, ast.FunctionDef) and not part.name.startswith("_")]
        for base in sorted(bases):
            for method in methods:
                if method.name in names.get(base, {}):
                    yield Use(base, method.name, None, f"{file.name}:{method.lineno}")


def class_names(base: ast.expr, file: Path) -> set[str]:
    """`trt.A` -> A; `*bases` -> the classes of the tuple that `bases` is assigned in the file."""
    if isinstance(base, ast.Attribute):
        return {base.attr}
    assigned = re.search(rf"\b{ast.unparse(base).lstrip('*')} = \((.*)\)", file.read_text(encoding="utf-8"))
    return set(re.findall(r"trt\.(\w+)", assigned.group(1))) if assigned else set()


def missing(found: Sequence[Use], names: Names) -> list[Use]:
    """Uses that a package does not offer."""
    return [
        use
        for use in found
        if use.name not in names.get(use.owner, {})
        or (use.parameters is not None and not takes(names[use.owner][use.name], use.parameters))
    ]


if __name__ == "__main__":
    json.dump(public_names(importlib.import_module(sys.argv[1])), sys.stdout, indent=1)
