"""What a report is made of before it is Markdown, a page or lines on a terminal: headings, paragraphs, tables.

Table(("method", "ours"), (Row(("BN", Words("93.1", verdict="reproduced"))),))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from .results import Verdict

__all__ = [
    "Block",
    "Document",
    "Figure",
    "Folded",
    "Heading",
    "Line",
    "Paragraph",
    "Picture",
    "Row",
    "Section",
    "Table",
    "Words",
    "pieces",
    "plain",
]


@dataclass(frozen=True)
class Words:
    """A piece of text; what stands in backticks is code."""

    text: str
    to: str = ""  # where it leads: a file, or "#artifact"
    strong: bool = False
    below: bool = False  # on a line of its own, smaller
    verdict: Verdict | None = None  # which colour it has, where there are colours


Line = str | Words | Sequence[str | Words]


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    line: Line
    soft: bool = False  # what explains, rather than says


@dataclass(frozen=True)
class Row:
    cells: tuple[Line, ...]
    method: str | None = None  # what a filter looks for
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[Row, ...]
    kind: Literal["", "matrix", "list", "headline", "short"] = ""


@dataclass(frozen=True)
class Figure:
    """A picture in two files."""

    title: str
    svg: str
    png: str


@dataclass(frozen=True)
class Picture:
    """A small picture that leads to its artifact."""

    figure: Figure
    artifact: str
    paper: str
    state: Verdict


@dataclass(frozen=True)
class Folded:
    """What is shown when it is asked for."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Section:
    """One table or figure of a paper."""

    anchor: str
    paper: str
    state: Verdict
    blocks: tuple[Block, ...]


Block = Heading | Paragraph | Table | Figure | Folded | Section


@dataclass(frozen=True)
class Document:
    """A file of the report."""

    name: str  # without its suffix
    blocks: tuple[Block, ...]


def pieces(line: Line) -> Iterator[Words]:
    """The pieces of a line.

    >>> list(pieces("text"))
    [Words(text='text', to='', strong=False, below=False, verdict=None)]
    """
    for piece in (line,) if isinstance(line, str | Words) else line:
        yield Words(piece) if isinstance(piece, str) else piece


def plain(line: Line) -> str:
    """A line without anything but its text."""
    return " ".join(piece.text for piece in pieces(line))
