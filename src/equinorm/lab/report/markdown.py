"""The report as Markdown: `results/README.md`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from . import headline, wording
from .results import Number, Result, choices, gains
from .wording import MARKS, capital, slug

__all__ = ["GAINS", "Links", "report", "section"]

GAINS = ("over the baseline", "over BatchNorm")


class Links:
    """Where figures and logs lie, as seen from the folder of the report."""

    def __init__(self, out: Path, figures: Mapping[str, Path], logs: Mapping[str, Path]) -> None:
        self._out, self._figures, self._logs = out, figures, logs

    def figure(self, result: Result) -> str | None:
        """The SVG file; the PNG file is beside it."""
        path = self._figures.get(result.artifact.name)
        return None if path is None else self._from_here(path)

    def log(self, key: str) -> str | None:
        path = self._logs.get(key)
        return None if path is None else self._from_here(path)

    def folders(self, result: Result) -> list[str]:
        """The folders that hold the runs of an artifact."""
        logs = (self._logs.get(record.run.key) for record in result.records)
        return sorted({self._from_here(path.parent) for path in logs if path is not None})

    def _from_here(self, path: Path) -> str:
        return Path(os.path.relpath(path, self._out)).as_posix()


def report(
    results: Sequence[Result],
    links: Links,
    damaged: Mapping[Path, str],
    costs: Sequence[headline.Cost] = (),
    toy: bool = False,
) -> str:
    """The whole file."""
    parts = [_head(results, toy), _headline(results, costs), _glances(results, toy)]
    for paper in dict.fromkeys(result.paper for result in results):
        parts.append(f"## {paper}")
        parts += [section(result, links) for result in results if result.paper == paper]
    if damaged:
        lines = "\n".join(f"- {_escape(why)}" for why in damaged.values())
        parts.append(f"## Files that could not be used\nThese runs count as not run and will be run again.\n\n{lines}")
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _head(results: Sequence[Result], toy: bool) -> str:
    if toy:
        return f"# TOY results: not measurements\n\n> **TOY.** {wording.TOY}\n\n{wording.summary(results)}"
    return (
        f"# Results\n\n{wording.summary(results)} Written by `equinorm report` from the logs in this folder; "
        "[index.html](index.html) is the same as one page with a filter."
    )


def _headline(results: Sequence[Result], costs: Sequence[headline.Cost]) -> str:
    """Settings × methods."""
    lines = headline.lines(results)
    if not lines:
        return ""
    rows = []
    for line in lines:
        name = line.setting.artifact
        cells = [_headline_cell(line, method) for method in headline.METHODS]
        where = f"{_escape(line.setting.name)}{f' ({_escape(line.setting.note)})' * bool(line.setting.note)}"
        rows.append((f"{where} [{name}](#{slug(name)})", _escape(line.verdict), *cells))
    rows += [(f"*{_escape(wording.cost_name(cost))}*", f"*{cost.unit} = 1*", *cost.cells()) for cost in costs]
    short = [tuple(map(_escape, wording.in_short(found))) for found in headline.summaries(lines, costs)]
    parts = ["## Which method helps", wording.SHORTLY, _table(wording.IN_SHORT, short)]
    parts += [wording.HEADLINE, _table(("where", "best", *headline.METHODS), rows)]
    return "\n\n".join(parts if costs else [*parts, headline.COSTS_MISSING])


def _headline_cell(line: headline.Line, method: str) -> str:
    number = line.numbers.get(method)
    if number is None:
        return ""
    ours, paper = wording.headline(number)
    return (f"**{ours}**" if method == line.best else ours) + (f"<br>{paper}" if paper else "")


def _glances(results: Sequence[Result], toy: bool) -> str:
    run = wording.glances(results)
    lines = ["## Every table and figure", *[wording.LEGEND] * (not toy)]
    if run:
        rows = [
            (
                f"[{g.result.artifact.name}](#{slug(g.result.artifact.name)}) {_escape(g.result.artifact.title)}",
                f"**{_escape(g.best)}**{_escape(g.also)}" if g.best != wording.NONE else g.best,
                wording.gain(g.gains.baseline),
                wording.gain(g.gains.batch_norm),
                g.cost,
                f"{MARKS[g.result.verdict]} {wording.counts(g.result)}".strip(),
            )
            for g in run
        ]
        lines.append(_table(("where", "best method", *GAINS, "cost", "outcome"), rows))
    every = [(row, result, both) for result in results for row, both in gains(result).items()]
    if every:
        rows_of_all = [
            (
                _escape(row),
                f"[{result.artifact.name}](#{slug(result.artifact.name)})",
                wording.gain(both.baseline),
                wording.gain(both.batch_norm),
                wording.slowdown(both.first),
            )
            for row, result, both in sorted(every, key=lambda item: item[0].lower())
        ]
        lines.append(_folded("Every method", _table(("method", "where", *GAINS, "cost"), rows_of_all)))
    waiting = [result.artifact.name for result in results if not result.was_run]
    if waiting:
        names = ", ".join(f"[{name}](#{slug(name)})" for name in waiting)
        lines.append(f"Not run yet: {names}.")
    return "\n\n".join(lines)


def section(result: Result, links: Links) -> str:
    """One artifact."""
    artifact = result.artifact
    name = slug(artifact.name)
    toy = "TOY " if result.toy else ""
    parts = [f'<a id="{name}"></a>\n\n### {toy}{artifact.name}: {_escape(artifact.title)}']
    parts.append(f"{MARKS[result.verdict]} **{capital(wording.counts(result))}.**".strip())
    if artifact.says:
        parts.append(f"The paper: {_escape(artifact.says)}")
    parts.append(_folded("Protocol", _escape(artifact.protocol)))
    figure = links.figure(result)
    if figure is not None:
        png = figure.removesuffix(".svg") + ".png"
        parts.append(f"![{toy}{_escape(artifact.title)}]({figure})\n\n[SVG]({figure}) · [PNG]({png})")
    if result.claims and result.was_run:
        rows = [(f"{MARKS[c.verdict]} {c.verdict}".strip(), _escape(c.text), _escape(c.note)) for c in result.claims]
        parts.append(_table(("claim of the paper", "", ""), rows))
    if found := choices(result):
        parts.append(_table(wording.CHOICE, [tuple(map(_escape, wording.choice(one))) for one in found]))
    if result.was_run and result.numbers:
        parts.append(_numbers(result, links))
    parts.append(_rerun(result, links))
    return "\n\n".join(part for part in parts if part)


def _numbers(result: Result, links: Links) -> str:
    caption = f"{wording.caption(result)}."
    every = _list(result, links)
    if result.form == "list":
        return f"{caption}\n\n{every}"
    folded = _folded("Every number, with n and logs", every)
    return "\n\n".join([caption, *[_matrix(result)] * (result.form == "matrix"), folded])


def _matrix(result: Result) -> str:
    """Methods × columns."""
    rows = []
    for row in result.rows:
        cells = [result.by_cell.get((row, column)) for column in result.columns]
        rows.append((_escape(row), *(_short(number) for number in cells)))
    return _table((_escape(result.artifact.x_label or "method"), *map(_escape, result.columns)), rows)


def _short(number: Number | None) -> str:
    if number is None or not number.was_run:
        return ""
    text = f"{wording.measured(number)} {MARKS[number.verdict]}".strip()
    missing = number.n + number.diverged < number.wanted
    return f"{text} (n {wording.n(number)})" if missing or (number.diverged and number.values) else text


def _list(result: Result, links: Links) -> str:
    rows = [
        (
            _escape(number.cell.row),
            _escape(number.cell.column),
            wording.measured(number),
            wording.n(number),
            wording.paper(number),
            wording.difference(number),
            f"{MARKS[number.verdict]} {number.verdict}".strip(),
            _logs(number, links),
        )
        for number in result.numbers
    ]
    head = (
        "method",
        _escape(result.artifact.x_label or "column"),
        "ours",
        "n",
        "paper",
        "difference",
        "verdict",
        "logs",
    )
    return _table(head, rows)


def _logs(number: Number, links: Links) -> str:
    """A link per run, named by its seed."""
    found = ((record.run.seed, links.log(record.run.key)) for record in number.records)
    return " ".join(f"[{seed}]({path})" for seed, path in found if path is not None)


def _rerun(result: Result, links: Links) -> str:
    name = result.artifact.name.removesuffix("-toy") if result.toy else result.artifact.name
    lines = [f"Rerun: `equinorm reproduce {name}{' --toy' if result.toy else ''}`."]
    if result.was_run:
        lines.append(f"{capital(_escape(wording.provenance(result).sentence))}.")
        folders = links.folders(result)
        if folders:
            lines.append("Logs: " + ", ".join(f"[{folder}]({folder})" for folder in folders) + ".")
    return " ".join(lines)


# -- mark-up -----------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{content}\n\n</details>"


def _escape(text: str) -> str:
    """Plain text in Markdown, also inside a table; `code` stays code."""
    return re.sub(r"([|*\\])", r"\\\1", text).replace("<", "&lt;")
