"""Mutants: small changes of one place in a source file, made from the syntax tree of Python or by pattern in C."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
C_PATTERNS = {" < ": " <= ", " > ": " >= ", " <= ": " < ", " >= ": " > ", " + ": " - ", " - ": " + ", " && ": " || ",
              " || ": " && ", " == ": " != ", " * ": " / ", " += ": " -= "}  # fmt: skip
C_CODE = re.compile("|".join(map(re.escape, C_PATTERNS)))


class Mutant(NamedTuple):
    """A change of one place. span: where in the file's bytes. code: the line as it stands, which names the place for as
    long as it is not edited."""

    file: str
    line: int
    span: tuple[int, int]
    new: str
    code: str
    old: str

    @property
    def name(self) -> str:
        return f"{self.file}: {self.code} :: {self.old} -> {self.new}"


def python_mutants(file: str, source: str) -> Iterator[Mutant]:
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))

    def mutant(node: ast.expr | ast.stmt, new: str) -> Mutant:
        assert node.end_lineno is not None and node.end_col_offset is not None
        span = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        old = source.encode()[slice(*span)].decode()
        place = f"{lines[node.lineno - 1].strip()} @{node.col_offset}"
        return Mutant(file, node.lineno, span, new, place, " ".join(old.split()))

    for node in calculating(ast.parse(source)):
        for changed in changes(node):
            yield mutant(node, changed)


def calculating(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Nodes that do something when the program runs: no annotation, no docstring, no text of a message, and neither the
    condition of an `assert` nor `strict=True` of a zip, which only asserts."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)):
            if isinstance(node, (ast.Raise, ast.Assert)):
                yield node
            continue
        if isinstance(node, ast.keyword) and (node.arg, ast.unparse(node.value)) == ("strict", "True"):
            continue
        if isinstance(node, (ast.expr, ast.stmt)):
            yield node
        if isinstance(node, ast.AnnAssign):
            yield from calculating(ast.Expression(node.value)) if node.value else ()
        elif isinstance(node, ast.arguments):
            yield from calculating(ast.Tuple([each for each in [*node.defaults, *node.kw_defaults] if each]))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from calculating(ast.Module([ast.Expr(ast.Lambda(node.args, ast.Constant(0)))], []))
            yield from calculating(ast.Module(node.body, []))
        elif isinstance(node, ast.ClassDef):
            yield from calculating(ast.Module(node.body, []))
        else:
            yield from calculating(node)


def changes(node: ast.expr | ast.stmt) -> Iterator[str]:
    """The possible replacements of a node; none for most nodes."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
        yield ast.unparse(ast.Compare(node.left, [COMPARED[type(node.ops[0])]()], node.comparators))
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
        yield f"({ast.unparse(ast.BinOp(node.left, COMPUTED[type(node.op)](), node.right))})"
    elif isinstance(node, ast.AugAssign) and type(node.op) in COMPUTED:
        yield ast.unparse(ast.AugAssign(node.target, COMPUTED[type(node.op)](), node.value))
    elif isinstance(node, ast.BoolOp):
        yield f"({ast.unparse(ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.IfExp):
        yield f"({ast.unparse(ast.IfExp(node.test, node.orelse, node.body))})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield repr(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and hasattr(node, "lineno"):
        yield repr(node.value + 1)
    elif isinstance(node, ast.Name) and node.id in NAMES:
        yield NAMES[node.id]
    elif isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Yield))):
        yield "pass"


def c_mutants(file: str, source: str) -> Iterator[Mutant]:
    start = 0
    for number, line in enumerate(source.splitlines(keepends=True), 1):
        code = line.split("//")[0]
        if not code.lstrip().startswith(("#", "/*", "*")):
            for found in C_CODE.finditer(code):
                at = start + len(line[: found.start()].encode())
                new = C_PATTERNS[found[0]]
                place = f"{line.strip()} @{found.start()}"
                yield Mutant(file, number, (at, at + len(found[0])), new, place, found[0])
        start += len(line.encode())
