"""What the report says, as a document without mark-up: the first screen, which method helps, an artifact, a paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ...errors import counted
from . import headline, wording
from .document import Block, Figure, Folded, Heading, Line, Paragraph, Picture, Row, Section, Table, Words
from .links import Links
from .results import Gains, Number, Result, Verdict, choices, gains, tally
from .wording import MARKS, capital, slug

__all__ = [
    "artifact",
    "first",
    "heading",
    "methods",
    "more",
    "paper",
    "papers",
    "pictures",
    "title_of",
    "unused",
]

_GAINS = ("over the baseline", "over BatchNorm")
_ABOUT = {
    "stock2019": "Equi-normalization of neural networks",
    "repro2019": "Reproducibility of equi-normalization",
    "defazio2018": "Controlling covariate shift using equilibrium normalization of weights",
    "ruff2020": "Mean shift rejection",
    "arpit2019": "Normalization techniques (lecture)",
    "rivals": "What is used today, beside the papers' methods (ours)",
    "imagenette": "In ImageNet's place (ours)",
    "private": "Training with differential privacy (ours)",
    "federated": "Federated training (ours)",
    "deep": "Deep nets without norms, with AdamW and Muon (ours)",
}


def papers(results: Iterable[Result]) -> list[str]:
    """Papers by their short names, in the order of the results."""
    return list(dict.fromkeys(result.paper for result in results))


def title_of(paper: str) -> str:
    """ "stock2019: Equi-normalization of neural networks"."""
    return f"{paper}: {_ABOUT[paper]}" if paper in _ABOUT else paper


def heading(paper: str, toy: bool) -> Heading:
    """The first line of a paper's page."""
    return Heading(f"{'TOY ' if toy else ''}{title_of(paper)}", 1)


def more(others: Sequence[str]) -> list[Block]:
    """Where to go from the first screen."""
    texts = {"methods": "which method helps, and what it costs"}
    links = [Words(texts[name], to=f"{name}.md") for name in others]
    links.append(Words("all of it as one page, with pictures and a filter", to="index.html"))
    return [Paragraph(("More:", *(part for link in links for part in (link, "·")[: 1 if link is links[-1] else 2])))]


# -- the first screen --------------------------------------------------------------------------------------------------


def first(results: Sequence[Result], chart: Figure | None, toy: bool, suffix: str) -> list[Block]:
    """The whole in one screen: what was run, a chart, a line for each paper."""
    blocks: list[Block] = [Heading("TOY results: not measurements" if toy else "Results", 1)]
    if toy:
        blocks.append(Paragraph(Words(f"TOY. {wording.TOY}", strong=True)))
    blocks.append(Paragraph(wording.summary(results)))
    if chart is not None:
        blocks.append(chart)
    blocks.append(_by_paper(results, suffix, toy))
    return blocks


def _by_paper(results: Sequence[Result], suffix: str, toy: bool) -> Table:
    rows = []
    for name in papers(results):
        mine = [result for result in results if result.paper == name]
        run = [result for result in mine if result.was_run]
        found = tally(run)
        about = [Words(_ABOUT[name], below=True)] if name in _ABOUT else []
        where = Words(name, to=f"{name}{suffix}" if suffix else f"#{name}")
        counts = [str(count) if found.numbers else "" for count in (found.reproduced, found.higher, found.missed)]
        claims = f"{found.holds} of {found.claims}" if found.claims else ""
        cells: tuple[Line, ...] = ((where, *about), f"{len(run)} of {len(mine)}", *counts, claims)
        rows.append(Row(cells[:2] if toy else cells))
    head = (
        "paper",
        "tables and figures with results",
        "numbers reproduced ✓",
        "higher ▲",
        "lower or other ✗",
        "claims that hold",
    )
    return Table(head[:2] if toy else head, tuple(rows), "short")


def pictures(results: Sequence[Result], links: Links) -> list[Picture]:
    """A small picture for each artifact that has one."""
    found = ((result, links.figure(result)) for result in results)
    return [Picture(f, r.artifact.name, r.paper, r.verdict) for r, f in found if f is not None]


def unused(damaged: Mapping[Path, str]) -> list[Block]:
    """Files of the store that could not be read."""
    if not damaged:
        return []
    rows = tuple(Row((why,)) for why in damaged.values())
    return [
        Heading("Files that could not be used"),
        Paragraph("These runs count as not run and will be run again."),
        Table(("file",), rows),
    ]


# -- which method helps ------------------------------------------------------------------------------------------------


def methods(
    results: Sequence[Result], costs: Sequence[headline.Cost], place: Mapping[str, str], level: int = 2
) -> list[Block]:
    """Methods in short, settings × methods, and what a step costs; `place` says where artifacts stand."""
    lines = headline.lines(results)
    if not lines:
        return []
    short = tuple(Row(wording.in_short(found)) for found in headline.summaries(lines, costs))
    blocks: list[Block] = [Heading("Which method helps", level), Paragraph(wording.SHORTLY, soft=True)]
    blocks += [Table(wording.IN_SHORT, short, "short"), Heading("Accuracy, setting by setting", level + 1)]
    blocks.append(Paragraph(wording.HEADLINE, soft=True))
    blocks.append(
        Table(("where", "best", *headline.METHODS), tuple(_setting(line, place) for line in lines), "headline")
    )
    blocks.append(Heading("What a step costs", level + 1))
    if not costs:
        return [*blocks, Paragraph(headline.COSTS_MISSING, soft=True)]
    rows = tuple(Row((f"{cost.network}, {cost.hardware}", f"{cost.unit} = 1", *cost.cells())) for cost in costs)
    blocks.append(Paragraph(wording.COSTS, soft=True))
    return [*blocks, Table(("network", "unit", *headline.METHODS), rows, "headline")]


def _setting(line: headline.Line, place: Mapping[str, str]) -> Row:
    name = line.setting.artifact
    where: list[str | Words] = [line.setting.name]
    if line.setting.note:
        where.append(Words(line.setting.note, below=True))
    where.append(Words(name, to=place[name], below=True))
    numbers = [line.numbers.get(method) for method in headline.METHODS]
    cells = (
        _setting_cell(number, method == line.best) for number, method in zip(numbers, headline.METHODS, strict=True)
    )
    return Row((where, line.verdict, *cells))


def _setting_cell(number: Number | None, is_best: bool) -> Line:
    if number is None:
        return ""
    ours, theirs = wording.headline(number)
    return (Words(ours, strong=is_best, verdict=number.verdict), *[Words(theirs, below=True)] * bool(theirs))


# -- a paper -----------------------------------------------------------------------------------------------------------


def paper(results: Sequence[Result], toy: bool) -> list[Block]:
    """All artifacts of a paper at a glance; their sections come behind it."""
    blocks: list[Block] = [] if toy else [Paragraph(wording.LEGEND, soft=True)]
    rows = [_glance(glance) for glance in wording.glances(results)]
    if rows:
        blocks.append(Table(("where", "best method", *_GAINS, "outcome"), tuple(rows)))
    if toy:
        return blocks
    every = [(row, result, both) for result in results for row, both in gains(result).items()]
    if every:
        lines = tuple(_method(*one) for one in sorted(every, key=lambda one: one[0].lower()))
        table = Table(("method", "where", *_GAINS, "cost"), lines)
        blocks.append(Folded("Every method, and what its runs cost", (Paragraph(wording.RUN_COSTS, soft=True), table)))
    waiting = [result.artifact.name for result in results if not result.was_run]
    if waiting:
        names = [Words(name, to=f"#{slug(name)}") for name in waiting]
        blocks.append(Paragraph(("Not run yet:", *names)))
    return blocks


def _glance(glance: wording.Glance) -> Row:
    about = glance.result.artifact
    best = Words(glance.best, strong=glance.best != wording.NONE)
    outcome = f"{MARKS[glance.result.verdict]} {wording.counts(glance.result)}".strip()
    return Row(
        (
            (Words(about.name, to=f"#{slug(about.name)}"), Words(about.title, below=True)),
            (best, *[glance.also.removeprefix(", ")] * bool(glance.also)),
            wording.gain(glance.gains.baseline),
            wording.gain(glance.gains.batch_norm),
            Words(outcome, verdict=glance.result.verdict),
        )
    )


def _method(name: str, result: Result, both: Gains) -> Row:
    where = Words(result.artifact.name, to=f"#{slug(result.artifact.name)}")
    return Row((name, where, wording.gain(both.baseline), wording.gain(both.batch_norm), wording.slowdown(both.first)))


# -- an artifact -------------------------------------------------------------------------------------------------------


def artifact(result: Result, links: Links, heading: int = 2) -> Section:
    """One table or figure: the verdict, what the paper says, a picture, claims, numbers, and how to run it again."""
    about = result.artifact
    toy = "TOY " if result.toy else ""
    verdict = f"{MARKS[result.verdict]} {capital(wording.counts(result))}.".strip()
    blocks: list[Block] = [Heading(f"{toy}{about.name}: {about.title}", heading)]
    blocks.append(Paragraph(Words(verdict, strong=True, verdict=result.verdict)))
    if about.says:
        blocks.append(Paragraph(f"The paper: {about.says}"))
    blocks.append(Folded("Protocol", (Paragraph(about.protocol),)))
    if (figure := links.figure(result)) is not None:
        blocks.append(figure)
    if result.claims and result.was_run:
        rows = tuple(
            Row((_verdict(claim.verdict), claim.text, claim.note), verdicts=(claim.verdict,)) for claim in result.claims
        )
        whose = "claim of the paper, or ours" if any(claim.ours for claim in result.claims) else "claim of the paper"
        blocks.append(Table(("", whose, ""), rows))
    if found := choices(result):
        blocks.append(Table(wording.CHOICE, tuple(Row(wording.choice(one)) for one in found)))
    if result.was_run and result.numbers:
        blocks += _numbers(result, links)
    blocks.append(_again(result, links))
    return Section(slug(about.name), result.paper, result.verdict, tuple(blocks))


def _verdict(verdict: Verdict) -> Words:
    return Words(f"{MARKS[verdict]} {verdict}".strip(), verdict=verdict)


def _numbers(result: Result, links: Links) -> list[Block]:
    caption = Paragraph(f"{wording.caption(result)}.", soft=True)
    every = _list(result, links)
    if result.form == "list":
        return [caption, every]
    folded = Folded("Every number, with n and logs", (every,))
    return [caption, *[_matrix(result)] * (result.form == "matrix"), folded]


def _matrix(result: Result) -> Table:
    """Methods × columns."""
    rows = []
    for row in result.rows:
        numbers = [result.by_cell.get((row, column)) for column in result.columns]
        found = tuple(sorted({number.verdict for number in numbers if number is not None}))
        rows.append(Row((row, *(_short(number) for number in numbers)), row, found))
    return Table((result.artifact.x_label or "method", *result.columns), tuple(rows), "matrix")


def _short(number: Number | None) -> Line:
    if number is None or not number.was_run:
        return ""
    text = f"{wording.measured(number)} {MARKS[number.verdict]}".strip()
    missing = number.n + number.diverged < number.wanted
    if missing or (number.diverged and number.values):
        text += f" (n {wording.n(number)})"
    return Words(text, verdict=number.verdict)


def _list(result: Result, links: Links) -> Table:
    rows = [
        Row(
            (
                number.cell.row,
                number.cell.column,
                wording.measured(number),
                wording.n(number),
                wording.paper(number),
                wording.difference(number),
                _verdict(number.verdict),
                _logs(number, links),
            ),
            number.cell.row,
            (number.verdict,),
        )
        for number in result.numbers
    ]
    column = result.artifact.x_label or "column"
    return Table(("method", column, "ours", "n", "paper", "difference", "verdict", "logs"), tuple(rows), "list")


def _logs(number: Number, links: Links) -> Line:
    """A link for each run, named by its seed."""
    found = ((record.run.seed, links.log(record.run.key)) for record in number.records)
    return tuple(Words(str(seed), to=path) for seed, path in found if path is not None)


def _again(result: Result, links: Links) -> Paragraph:
    name = result.artifact.name.removesuffix("-toy") if result.toy else result.artifact.name
    parts: list[str | Words] = [f"Rerun: `equinorm reproduce {name}{' --toy' if result.toy else ''}`."]
    if result.was_run:
        parts.append(f"{capital(wording.provenance(result).sentence)}.")
        folders = [Words(folder, to=folder) for folder in links.folders(result)]
        if folders:
            parts += [f"{capital(counted(len(folders), 'folder'))} of logs:", *folders]
    return Paragraph(parts, soft=True)
