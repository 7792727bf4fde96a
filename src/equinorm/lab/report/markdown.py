"""A document as Markdown: `results/README.md` and a page for each paper."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .document import Block, Figure, Folded, Heading, Line, Paragraph, Row, Section, Table, Words, pieces

__all__ = ["render"]


def render(blocks: Iterable[Block]) -> str:
    """Blocks, one below the other.

    >>> render([Heading("Results", 1), Paragraph("All is well.")])
    '# Results\\n\\nAll is well.\\n'
    """
    return "\n\n".join(filter(None, map(_block, blocks))) + "\n"


def _block(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {_escape(text)}"
        case Paragraph(line):
            return _line(line)
        case Table(head, rows):
            return _table(head, rows)
        case Figure(title, svg, png):
            return f"![{_escape(title)}]({svg})\n\n[SVG]({svg}) · [PNG]({png})"
        case Folded(title, blocks):
            inside = "\n\n".join(map(_block, blocks))
            return f"<details><summary>{_escape(title)}</summary>\n\n{inside}\n\n</details>"
        case Section(anchor, _, _, blocks):
            return "\n\n".join([f'<a id="{anchor}"></a>', *map(_block, blocks)])


def _table(head: Sequence[str], rows: Sequence[Row]) -> str:
    lines = [map(_escape, head), ["---"] * len(head), *([_line(cell) for cell in row.cells] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _line(line: Line) -> str:
    text = ""
    for words in pieces(line):
        text += ("<br>" if words.below else " ") * bool(text) + _words(words)
    return text


def _words(words: Words) -> str:
    text = _escape(words.text)
    if words.to:
        text = f"[{text}]({words.to})"
    return f"**{text}**" if words.strong and text else text


def _escape(text: str) -> str:
    """Plain text in Markdown, also inside a table; `code` stays code."""
    return re.sub(r"([|*\\])", r"\\\1", text).replace("<", "&lt;")
