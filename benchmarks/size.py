"""Counts code lines (no blank lines, comments or docstrings) against the budgets of the architecture; `make size`."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = ROOT / "runtime" / "agl_runtime"
BUDGETS = {
    "method (samples, algorithms, schedule)": (
        [RUNTIME / "samples", RUNTIME / "algorithms", RUNTIME / "trainer" / "schedule.py"],
        1200,
    ),
    "agl_runtime": ([RUNTIME], 14_440),
    "agl_cli": ([ROOT / "agl_cli"], None),
    "tests": ([ROOT / "tests"], None),
}
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(file: Path) -> int:
    source = file.read_text(encoding="utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(source)))


def docstring_lines(tree: ast.AST) -> set[int]:
    """Lines of strings that stand alone: docstrings of modules, classes, functions and fields."""
    alone = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return {line for node in alone for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def main() -> int:
    over = False
    for name, (places, budget) in BUDGETS.items():
        files = [file for place in places for file in (place.rglob("*.py") if place.is_dir() else [place])]
        total = sum(code_lines(file) for file in files)
        over |= budget is not None and total > budget
        print(f"{name:40} {total:6}" + (f" of {budget}" if budget else ""))
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
