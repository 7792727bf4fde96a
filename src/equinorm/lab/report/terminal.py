"""A document as lines on a terminal, by rich."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Lines
from rich.text import Text

from .document import Block, Figure, Folded, Heading, Line, Paragraph, Section, Table, Words, pieces
from .results import Verdict

__all__ = ["show"]

_STYLES: dict[Verdict, str] = {"reproduced": "green", "higher": "cyan", "in part": "yellow", "not reproduced": "red"}


def show(blocks: Iterable[Block], console: Console) -> None:
    """Print blocks, one below the other."""
    for block in blocks:
        console.print(_block(block, console.width), end="\n\n")


def _block(block: Block, width: int) -> RenderableType:
    match block:
        case Heading(text):
            return Text(text, style="bold")
        case Paragraph(line, soft):
            return _text(line, "dim" if soft else "")
        case Table():
            return _table(block, width)
        case Figure(_, _, png):
            return Text(f"Figure: {png}")
        case Folded(title, blocks):
            inside = [Padding(_block(one, width - 2), (0, 0, 0, 2)) for one in blocks]
            return Group(Text(title, style="dim"), *inside)
        case Section(_, _, _, blocks):
            return Group(*(part for one in blocks for part in (_block(one, width), Text(""))))


def _table(table: Table, width: int) -> RenderableType:
    # paths are of no use on a terminal, nor is what is the same in all lines
    texts = {i: [_plain(row.cells[i]) for row in table.rows] for i, name in enumerate(table.head) if name != "logs"}
    chosen = [i for i, column in texts.items() if any(column) and (i == 0 or len(column) < 3 or len(set(column)) > 1)]
    parts: list[RenderableType] = []
    for columns in _that_fit(table, chosen, width):
        lines = Lines(box=None, header_style="bold", pad_edge=False)
        for i in columns:
            lines.add_column(table.head[i], overflow="fold", no_wrap=False)
        for row in table.rows:
            lines.add_row(*(_text(_shorter(table.head[i], row.cells[i])) for i in columns))
        parts.append(lines)
    return Group(*parts)


def _shorter(head: str, cell: Line) -> Line:
    """Of a verdict its mark, where it has one."""
    if head == "verdict" and isinstance(cell, Words) and not cell.text[:1].isalpha():
        return replace(cell, text=cell.text[:1])
    return cell


def _that_fit(table: Table, columns: list[int], width: int) -> list[list[int]]:
    """The columns in groups that fit side by side; the first stands in front of each group."""
    if not columns:
        return []
    needs = {
        i: min(28, max(len(word) for row in table.rows for word in _words(_shorter(table.head[i], row.cells[i]))))
        for i in columns
    }
    needs = {i: max(need, max(map(len, table.head[i].split()), default=0)) + 2 for i, need in needs.items()}
    first, *others = columns
    groups: list[list[int]] = [[first]]
    for i in others:
        if sum(needs[j] for j in groups[-1]) + needs[i] > width and len(groups[-1]) > 1:
            groups.append([first])
        groups[-1].append(i)
    return groups


def _words(line: Line) -> list[str]:
    plain = _plain(line)
    return [plain] if len(plain) <= 16 else plain.split() or [""]


def _plain(line: Line) -> str:
    return " ".join(piece.text for piece in pieces(line))


def _text(line: Line, style: str = "") -> Text:
    text = Text(style=style)
    for words in pieces(line):
        if text:
            text.append("\n" if words.below else " ")
        look = " ".join(filter(None, ("bold" if words.strong else "", _STYLES.get(words.verdict or "measured", ""))))
        said = re.sub(r"`([^`]+)`", r"\1", " ".join(words.text.split("\n")))
        text.append(said, style=look or None)
    return text
