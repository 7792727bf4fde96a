"""The report as one self-contained page: `results/index.html`. No network; without scripts only the filter is missing.

The texts are those of the Markdown report (`wording`); a filter and figures that can be enlarged come on top.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from . import headline, wording
from .markdown import GAINS, Links
from .results import VERDICTS, Number, Result, Verdict, choices, gains
from .wording import MARKS, capital, slug

__all__ = ["page"]

# of the figures, and what they are on a page that may be dark
_COLOURS = (
    ("#000000", "currentColor"),
    ("#ffffff", "var(--paper)"),
    ("#e6e6e6", "var(--grid)"),
    ("#767676", "var(--soft)"),
    ("#404040", "var(--soft)"),
)


def page(
    results: Sequence[Result],
    links: Links,
    drawings: Mapping[str, str],
    damaged: Mapping[Path, str],
    costs: Sequence[headline.Cost] = (),
    toy: bool = False,
) -> str:
    """The whole page; `drawings` holds the SVG of each artifact that has one."""
    title = "TOY results: not measurements" if toy else "equinorm: results"
    body = [f"<h1>{title}</h1>"]
    if toy:
        body.append(f'<p class="banner">TOY. {wording.TOY}</p>')
    body.append(f"<p>{escape(wording.summary(results))}</p>")
    body += [_headline(results, costs), _glances(results, toy), _form(results)]
    for paper in dict.fromkeys(result.paper for result in results):
        body.append(f'<h2 data-paper="{escape(paper)}">{escape(paper)}</h2>')
        body += [_section(r, links, drawings.get(r.artifact.name)) for r in results if r.paper == paper]
    if damaged:
        items = "".join(f"<li>{escape(why)}</li>" for why in damaged.values())
        body.append(f"<h2>Files that could not be used</h2><p>These runs count as not run.</p><ul>{items}</ul>")
    buttons = "".join(
        f'<button type="button" data-act="{act}" aria-label="{name}">{sign}</button>'
        for act, name, sign in (("in", "zoom in", "+"), ("out", "zoom out", "&minus;"), ("close", "close", "&times;"))
    )
    body.append(f'<dialog aria-label="Figure, enlarged"><div>{buttons}</div></dialog>')
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{_file('page.css')}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + f"\n<script>\n{_file('page.js')}</script>\n</body>\n</html>\n"
    )


def _file(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _form(results: Sequence[Result]) -> str:
    papers = dict.fromkeys(result.paper for result in results)
    methods = sorted({row for result in results for row in result.rows}, key=str.lower)
    found = {n.verdict for r in results for n in r.numbers} | {c.verdict for r in results for c in r.claims}
    found |= {result.verdict for result in results}
    verdicts = [verdict for verdict in VERDICTS if verdict in found]
    selects = "".join(
        f'<select name="{name}" aria-label="{name}"><option value="">{every}</option>'
        + "".join(f'<option value="{escape(one)}">{escape(one)}</option>' for one in choices)
        + "</select>"
        for name, every, choices in (
            ("paper", "every paper", papers),
            ("method", "every method", methods),
            ("verdict", "every verdict", verdicts),
        )
    )
    return (
        f'<form aria-label="Filter">{selects}<input type="search" name="text" placeholder="search" aria-label="search">'
        '<button type="reset">Clear</button><output class="soft"></output></form>'
    )


def _headline(results: Sequence[Result], costs: Sequence[headline.Cost]) -> str:
    """Settings × methods."""
    lines = headline.lines(results)
    if not lines:
        return ""
    rows = []
    for line in lines:
        name = line.setting.artifact
        cells = "".join(_headline_cell(line, method) for method in headline.METHODS)
        note = f"<small>{escape(line.setting.note)}</small>" if line.setting.note else ""
        where = f'{escape(line.setting.name)}{note} <a href="#{slug(name)}">{escape(name)}</a>'
        rows.append(f"<tr><td>{where}</td><td>{escape(line.verdict)}</td>{cells}</tr>")
    for cost in costs:
        cells = "".join(f"<td>{time}</td>" for time in cost.cells())
        name = escape(wording.cost_name(cost))
        rows.append(f'<tr><td class="soft">{name}</td><td class="soft">{escape(cost.unit)} = 1</td>{cells}</tr>')
    short = [
        f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in wording.in_short(found))}</tr>"
        for found in headline.summaries(lines, costs)
    ]
    parts = ["<h2>Which method helps</h2>", f'<p class="soft">{_text(wording.SHORTLY)}</p>']
    parts += [_table(wording.IN_SHORT, short, "short"), f'<p class="soft">{_text(wording.HEADLINE)}</p>']
    parts.append(_table(("where", "best", *headline.METHODS), rows, "headline"))
    return "\n".join(parts if costs else [*parts, f'<p class="soft">{_text(headline.COSTS_MISSING)}</p>'])


def _headline_cell(line: headline.Line, method: str) -> str:
    number = line.numbers.get(method)
    if number is None:
        return "<td></td>"
    ours, paper = wording.headline(number)
    text = f"<b>{escape(ours)}</b>" if method == line.best else escape(ours)
    below = f"<small>{escape(paper)}</small>" if paper else ""
    return f'<td class="{slug_of(number.verdict)}">{text}{below}</td>'


def _glances(results: Sequence[Result], toy: bool) -> str:
    rows = []
    for g in wording.glances(results):
        artifact, verdict = g.result.artifact, g.result.verdict
        rows.append(
            f'<tr><td><a href="#{slug(artifact.name)}">{escape(artifact.name)}</a><br>{escape(artifact.title)}</td>'
            f"<td><b>{escape(g.best)}</b>{escape(g.also)}</td><td>{escape(wording.gain(g.gains.baseline))}</td>"
            f"<td>{escape(wording.gain(g.gains.batch_norm))}</td>"
            f"<td>{escape(g.cost)}</td>"
            f'<td class="{slug_of(verdict)}">{escape(f"{MARKS[verdict]} {wording.counts(g.result)}".strip())}</td></tr>'
        )
    parts = ["<h2>Every table and figure</h2>"]
    if not toy:
        parts.append(f'<p class="soft">{escape(wording.LEGEND)}</p>')
    if rows:
        parts.append(_table(("where", "best method", *GAINS, "cost", "outcome"), rows))
    every = [(row, result, both) for result in results for row, both in gains(result).items()]
    lines = []
    for row, result, both in sorted(every, key=lambda item: item[0].lower()):
        name = result.artifact.name
        texts = (wording.gain(both.baseline), wording.gain(both.batch_norm), wording.slowdown(both.first))
        lines.append(
            f'<tr><td>{escape(row)}</td><td><a href="#{slug(name)}">{escape(name)}</a></td>'
            + "".join(f"<td>{escape(text)}</td>" for text in texts)
            + "</tr>"
        )
    if lines:
        table = _table(("method", "where", *GAINS, "cost"), lines)
        parts.append(f"<details><summary>Every method</summary>{table}</details>")
    return "\n".join(parts)


def _section(result: Result, links: Links, drawing: str | None) -> str:
    artifact = result.artifact
    toy = "TOY " if result.toy else ""
    verdict = result.verdict
    head = f"{MARKS[verdict]} {wording.counts(result)}".strip()
    parts = [
        f'<section id="{slug(artifact.name)}" data-paper="{escape(result.paper)}" data-state="{verdict}"'
        f"{'' if result.was_run else ' class=waiting'}>",
        f"<h3>{toy}{escape(artifact.name)}: {escape(artifact.title)}</h3>",
        f'<p class="{slug_of(verdict)}"><b>{escape(head)}</b></p>',
        f"<p>The paper: {_text(artifact.says)}</p>" if artifact.says else "",
        f'<details><summary>Protocol</summary><div class="protocol">{_text(artifact.protocol)}</div></details>',
    ]
    if drawing is not None:
        figure = links.figure(result) or ""
        png = figure.removesuffix(".svg") + ".png"
        parts.append(
            f'<figure><button type="button" aria-label="Enlarge">{_inline(drawing)}</button>'
            f'<figcaption class="soft">Click to enlarge. <a href="{figure}">SVG</a> <a href="{png}">PNG</a>'
            "</figcaption></figure>"
        )
    if result.claims and result.was_run:
        rows = [
            f'<tr data-verdict="{c.verdict}"><td class="{slug_of(c.verdict)}">{_verdict(c.verdict)}</td>'
            f'<td>{_text(c.text)}</td><td class="soft">{_text(c.note)}</td></tr>'
            for c in result.claims
        ]
        parts.append(_table(("claim of the paper", "", ""), rows))
    if found := choices(result):
        cells = ("".join(f"<td>{escape(text)}</td>" for text in wording.choice(one)) for one in found)
        parts.append(_table(wording.CHOICE, (f"<tr>{row}</tr>" for row in cells)))
    if result.was_run and result.numbers:
        parts.append(_numbers(result, links))
    return "\n".join([*parts, _rerun(result, links), "</section>"])


def _numbers(result: Result, links: Links) -> str:
    every = _list(result, links)
    if result.form != "list":
        every = f"<details><summary>Every number, with n and logs</summary>{every}</details>"
    if result.form == "matrix":
        every = _matrix(result) + every
    return f'<p class="soft">{escape(wording.caption(result))}.</p>{every}'


def _matrix(result: Result) -> str:
    rows = []
    for row in result.rows:
        numbers = [result.by_cell.get((row, column)) for column in result.columns]
        found = "|".join(sorted({number.verdict for number in numbers if number is not None}))
        cells = "".join(_short(number) for number in numbers)
        rows.append(f'<tr data-method="{escape(row)}" data-verdict="{found}"><td>{escape(row)}</td>{cells}</tr>')
    return _table((result.artifact.x_label or "method", *result.columns), rows, "matrix")


def _short(number: Number | None) -> str:
    if number is None or not number.was_run:
        return "<td></td>"
    hover = f"n {wording.n(number)}; paper {wording.paper(number)}; difference {wording.difference(number)}"
    text = f"{wording.measured(number)} {MARKS[number.verdict]}".strip()
    if number.n + number.diverged < number.wanted or (number.diverged and number.values):
        text += f" (n {wording.n(number)})"
    return f'<td class="n {slug_of(number.verdict)}" title="{escape(hover)}">{escape(text)}</td>'


def _list(result: Result, links: Links) -> str:
    rows = []
    for number in result.numbers:
        cells = (wording.measured(number), wording.n(number), wording.paper(number), wording.difference(number))
        found = ((record.run.seed, links.log(record.run.key)) for record in number.records)
        logs = " ".join(f'<a href="{escape(path)}">{seed}</a>' for seed, path in found if path is not None)
        rows.append(
            f'<tr data-method="{escape(number.cell.row)}" data-verdict="{number.verdict}">'
            f"<td>{escape(number.cell.row)}</td><td>{escape(number.cell.column)}</td>"
            + "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells)
            + f'<td class="{slug_of(number.verdict)}">{_verdict(number.verdict)}</td><td>{logs}</td></tr>'
        )
    column = result.artifact.x_label or "column"
    return _table(("method", column, "ours", "n", "paper", "difference", "verdict", "logs"), rows, "list")


def _rerun(result: Result, links: Links) -> str:
    name = result.artifact.name.removesuffix("-toy") if result.toy else result.artifact.name
    text = f"Rerun: <code>equinorm reproduce {escape(name)}{' --toy' if result.toy else ''}</code>."
    if result.was_run:
        text += f" {escape(capital(wording.provenance(result).sentence))}."
        folders = links.folders(result)
        if folders:
            text += " Logs: " + ", ".join(f'<a href="{escape(f)}">{escape(f)}</a>' for f in folders) + "."
    return f'<p class="soft">{text}</p>'


# -- mark-up -----------------------------------------------------------------------------------------------------------


def _table(head: Iterable[str], rows: Iterable[str], kind: str = "") -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "\n".join(rows)
    table = f'<table class="{kind}"><thead><tr>{cells}</tr></thead><tbody>\n{body}\n</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _verdict(verdict: Verdict) -> str:
    return f"{MARKS[verdict]} {verdict}".strip()


def slug_of(verdict: Verdict) -> str:
    """The verdict as a CSS class."""
    return verdict.replace(" ", "-")


def _text(text: str) -> str:
    """Plain text, where `code` is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _inline(svg: str) -> str:
    """An SVG file as part of the page: without its size, and with the page's colours, so that it can be dark."""
    svg = svg[svg.index("<svg") :]
    opening, rest = svg.split(">", 1)
    opening = re.sub(r'\s(width|height)="[^"]*"', "", opening)
    box = re.search(r'viewBox="0 0 ([\d.]+)', opening)
    assert box is not None
    for colour, name in _COLOURS:
        rest = rest.replace(colour, name)
    return f'{opening} style="max-width: {float(box[1]) * 1.33:.0f}px">{rest}'
