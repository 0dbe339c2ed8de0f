"""Tables for a terminal that is narrower than they are.

rich shrinks the columns of a wide table until every figure is an ellipsis. Here figures stay whole:
first headings break between words, then the table becomes several, one under the other. Each
repeats the columns that name a line and has as many of the others as fit.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

_FRAME = 3  # columns of the terminal that one column's frame takes, and one for the last line
_GAP = 2  # between columns without a frame


def fit(laid_out: Table | Group, console: Console) -> Group:
    """The same tables, unchanged if the console is wide enough, otherwise in parts.

    Columns that may not wrap name the lines and stand first.
    """
    tables = laid_out.renderables if isinstance(laid_out, Group) else [laid_out]
    return Group(*(part for table in tables for part in _fitted(table, console.width)))


def _fitted(table: Table, width: int) -> Iterator[RenderableType]:
    room = width - _FRAME * len(table.columns) - 1
    if sum(max(_width(c), cell_len(str(c.header))) for c in table.columns) <= room:
        yield table
        return
    if sum(map(_width, table.columns)) <= room:
        yield _part(table, table.columns, Table(title=table.title, caption=table.caption))
        return
    names = [column for column in table.columns if column.no_wrap]
    figures = _together([column for column in table.columns if not column.no_wrap])
    yield Text(str(table.title), style="table.title", justify="center")
    # The last column has no gap after it.
    for part in _shared_out(figures, width + _GAP - _taken(names)):
        plain = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        yield _part(table, [*names, *part], plain)
        yield Text()
    yield Text(str(table.caption), style="table.caption", justify="center")


def _together(columns: list[Column]) -> list[list[Column]]:
    """Groups of columns: a heading that occurs several times refers to the column before it."""
    headings = [column.header for column in columns]
    groups: list[list[Column]] = []
    for column in columns:
        if groups and headings.count(column.header) > 1:
            groups[-1].append(column)
        else:
            groups.append([column])
    return groups


def _shared_out(groups: list[list[Column]], room: int) -> list[list[Column]]:
    """As many groups per part as there is room for, at least one."""
    parts: list[list[Column]] = []
    for group in groups:
        if parts and _taken(parts[-1]) + _taken(group) <= room:
            parts[-1] += group
        else:
            parts.append(list(group))
    return parts


def _taken(columns: list[Column]) -> int:
    return sum(_width(column) + _GAP for column in columns)


def _width(column: Column) -> int:
    """Width of the longest cell, or of the heading's longest word."""
    return max(cell_len(str(text)) for text in (*str(column.header).split(), *column.cells))


def _part(table: Table, columns: list[Column], empty: Table) -> Table:
    """Some columns of a table, as wide as they need to be."""
    for column in columns:
        # A cell that is wider than the whole terminal continues in the next line.
        empty.add_column(
            column.header, justify=column.justify, width=_width(column), overflow="fold"
        )
    cells = zip(*(column.cells for column in columns), strict=True)
    for row, line in zip(table.rows, cells, strict=True):
        empty.add_row(*line, style=row.style, end_section=row.end_section)
    return empty
