"""Everything that goes to stdout, which is data: JSON, tables, text.

Tables are drawn for people on a terminal (rich, which honours NO_COLOR) and are plain aligned columns elsewhere.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO


def emit(text: str = "") -> None:
    print(text, flush=True)


def emit_json(value: Any) -> None:
    """One JSON document; keys keep their documented order."""
    emit(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def emit_json_line(value: Any, file: TextIO | None = None) -> None:
    """One line of JSON Lines, on stdout or into a file."""
    print(json.dumps(value, ensure_ascii=False, default=str), file=file or sys.stdout)


def compact(value: Any) -> str:
    """A value as agl.yaml would hold it, on one line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def emit_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """None is shown as nothing."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _draw(columns, cells)
    else:
        emit(align([list(columns), *cells]))


def align(rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell, two spaces between."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _draw(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
