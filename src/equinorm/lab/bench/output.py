"""How a measurement is summed up, and shown in the columns there are."""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table

__all__ = ["Timing", "in_parts", "show"]


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the median of n measurements and the range of their middle half."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Timing:
        if len(milliseconds) == 1:
            return cls(milliseconds[0], milliseconds[0], milliseconds[0], 1)
        low, middle, high = statistics.quantiles(milliseconds, n=4, method="inclusive")
        return cls(middle, low, high, len(milliseconds))

    def __str__(self) -> str:
        digits = 3 if self.median < 1 else 2 if self.median < 100 else 1
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def show(items: Iterable[RenderableType], console: Console | None = None, width: int = 150) -> str:
    """Print to the terminal, and return the same as plain text."""
    text = io.StringIO()
    plain, terminal = Console(file=text, width=width), console or Console()
    for item in items:
        for target in (terminal, plain):
            parts = in_parts(item, target.width) if isinstance(item, Table) else [item]
            for part in parts:
                target.print(part, markup=False, highlight=False)
    return text.getvalue()


def in_parts(table: Table, width: int) -> list[Table]:
    """The table, or if it is too wide, tables of some of its columns each, with the first column in front of each."""
    needs = [max(cell_len(str(cell)) for cell in (column.header, *column.cells)) + 3 for column in table.columns]
    groups: list[list[int]] = [[]]
    for i, need in enumerate(needs[1:], 1):
        if groups[-1] and 1 + needs[0] + sum(needs[j] for j in groups[-1]) + need > width:
            groups.append([])
        groups[-1].append(i)
    if len(groups) == 1:
        return [table]
    parts = []
    for number, group in enumerate(groups):
        part = Table(title=None if number else table.title, title_justify="left", show_header=table.show_header)
        chosen = [table.columns[i] for i in (0, *group)]
        for column in chosen:
            part.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap)
        for cells in zip(*(column.cells for column in chosen), strict=True):
            part.add_row(*cells)
        parts.append(part)
    return parts
