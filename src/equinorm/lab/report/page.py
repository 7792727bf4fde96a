"""The report as one page: `results/index.html`. Nothing comes from elsewhere; without scripts there is no filter.

It opens on pictures and a filter; tables come below, contents stand at the side.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from .content import title_of
from .document import (
    Block,
    Figure,
    Folded,
    Heading,
    Line,
    Paragraph,
    Picture,
    Row,
    Section,
    Table,
    Words,
    pieces,
    plain,
)
from .results import VERDICTS, Result, Verdict
from .wording import MARKS, slug

__all__ = ["page"]


def page(
    first: Sequence[Block],
    pictures: Sequence[Picture],
    middle: Sequence[Block],
    by_paper: dict[str, tuple[Block, ...]],
    last: Sequence[Block],
    results: Sequence[Result],
) -> str:
    """The whole page from its parts, in this order; `by_paper` holds what there is on each paper."""
    title = next((block.text for block in first if isinstance(block, Heading)), "Results")
    body = [*map(_block, first), _form(results), _gallery(pictures), *map(_block, middle)]
    for name, blocks in by_paper.items():
        body.append(f'<h2 id="{escape(name)}" data-paper="{escape(name)}">{escape(title_of(name))}</h2>')
        body += map(_block, blocks)
    body += map(_block, last)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}: equinorm</title>\n<style>\n{_file('page.css')}</style>\n</head>\n<body>\n"
        f"{_contents(by_paper)}\n<main>\n" + "\n".join(body) + "\n</main>\n"
        f"<script>\n{_file('page.js')}</script>\n</body>\n</html>\n"
    )


def _file(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _contents(by_paper: dict[str, tuple[Block, ...]]) -> str:
    """What stands at the side."""
    parts = ['<nav aria-label="Contents"><a href="#top">equinorm</a>']
    for name, blocks in by_paper.items():
        sections = [block for block in blocks if isinstance(block, Section)]
        links = "".join(f"<li>{_entry(section, name)}</li>" for section in sections)
        parts.append(
            f'<details><summary><a href="#{escape(name)}">{escape(name)}</a></summary><ul>{links}</ul></details>'
        )
    return "".join(parts) + "</nav>"


def _entry(section: Section, paper: str) -> str:
    short = section.anchor.removeprefix(f"{paper}-")
    return f'<a class="{_class(section.state)}" href="#{section.anchor}">{escape(short)}</a>'


def _form(results: Sequence[Result]) -> str:
    papers = dict.fromkeys(result.paper for result in results)
    methods = sorted({row for result in results for row in result.rows}, key=str.lower)
    found = {n.verdict for r in results for n in r.numbers} | {c.verdict for r in results for c in r.claims}
    found |= {result.verdict for result in results}
    selects = "".join(
        f'<select name="{name}" aria-label="{name}"><option value="">{every}</option>'
        + "".join(f'<option value="{escape(one)}">{escape(one)}</option>' for one in choices)
        + "</select>"
        for name, every, choices in (
            ("paper", "every paper", papers),
            ("method", "every method", methods),
            ("verdict", "every verdict", [verdict for verdict in VERDICTS if verdict in found]),
        )
    )
    return (
        f'<form aria-label="Filter">{selects}<input type="search" name="text" placeholder="search" aria-label="search">'
        '<button type="reset">Clear</button><output class="soft"></output></form>'
    )


def _gallery(pictures: Sequence[Picture]) -> str:
    cards = [
        f'<a class="card {_class(picture.state)}" href="#{slug(picture.artifact)}" data-for="{slug(picture.artifact)}">'
        f'<img loading="lazy" src="{escape(picture.figure.svg)}" alt="">'
        f"<span>{escape(f'{MARKS[picture.state]} {picture.artifact}'.strip())}</span>"
        f"<small>{escape(picture.figure.title)}</small></a>"
        for picture in pictures
    ]
    return f'<div class="gallery">{"".join(cards)}</div>'


# -- mark-up -----------------------------------------------------------------------------------------------------------


def _block(block: Block) -> str:
    match block:
        case Heading(text, level):
            top = ' id="top"' if level == 1 else ""
            return f"<h{level}{top}>{escape(text)}</h{level}>"
        case Paragraph(line, soft):
            return f'<p class="soft">{_line(line)}</p>' if soft else f"<p>{_line(line)}</p>"
        case Table():
            return _table(block)
        case Figure(title, svg, png):
            return (
                f'<figure><a href="{escape(svg)}"><img loading="lazy" src="{escape(svg)}" alt="{escape(title)}"></a>'
                f'<figcaption class="soft"><a href="{escape(svg)}">SVG</a> <a href="{escape(png)}">PNG</a>'
                "</figcaption></figure>"
            )
        case Folded(title, blocks):
            return f"<details><summary>{escape(title)}</summary>{''.join(map(_block, blocks))}</details>"
        case Section(anchor, paper, state, blocks):
            waiting = " class=waiting" if state == "not run" else ""
            opening = f'<section id="{anchor}" data-paper="{escape(paper)}" data-state="{state}"{waiting}>'
            return "\n".join([opening, *map(_block, blocks), "</section>"])


def _table(table: Table) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in table.head)
    body = "\n".join(map(_row, table.rows))
    kind = f' class="{table.kind}"' if table.kind else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{cells}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _row(row: Row) -> str:
    method = f' data-method="{escape(row.method)}"' if row.method is not None else ""
    verdicts = f' data-verdict="{"|".join(row.verdicts)}"' if row.verdicts else ""
    return f"<tr{method}{verdicts}>{''.join(map(_cell, row.cells))}</tr>"


_NUMBER = re.compile(r"[\N{MINUS SIGN}+]?[\d.,]+( ±.*| \[.*)?.{0,2}")


def _cell(line: Line) -> str:
    number = ' class="n"' if _NUMBER.fullmatch(plain(line)) else ""
    return f"<td{number}>{_line(line)}</td>"


def _line(line: Line) -> str:
    text = ""
    for words in pieces(line):
        text += " " * bool(text) + _words(words)
    return text


def _words(words: Words) -> str:
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(words.text)).replace("\n", "<br>")
    if words.to:
        text = f'<a href="{escape(words.to)}">{text}</a>'
    if words.strong:
        text = f"<b>{text}</b>"
    if words.verdict is not None:
        text = f'<span class="{_class(words.verdict)}">{text}</span>'
    return f"<small>{text}</small>" if words.below else text


def _class(verdict: Verdict) -> str:
    """The verdict as a CSS class."""
    return verdict.replace(" ", "-")
