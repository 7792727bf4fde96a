"""`equinorm report`: every number next to the paper's, from the records of a store.

    write(Store("results"), Path("results"))   # README.md, a page for each paper, index.html, figures
    section(Store("results"), find("repro2019/figure2"))   # blocks for markdown.render or terminal.show

Writing a report again from the same records changes no file.

In reading order:

results        what the records say about an artifact, and which claims hold
wording        numbers and facts as text
headline       which method helps, where, by how much, at what cost
document       headings, paragraphs, tables: what a report is made of before it has a mark-up
content        what the report says, as a document
markdown       the document as README.md, methods.md and a page for each paper
page           the document as index.html
terminal       the document on a terminal
style          a colour per method everywhere
figures        an artifact as a picture
chart          all numbers of the papers in one picture
tensorboard    all curves as event files
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure as MatplotlibFigure

from ...errors import UserError
from ...files import replacing
from ..experiments.artifacts import Artifact, all_artifacts
from ..training.store import Record, Store
from . import chart, content, figures, headline, markdown, page, style
from .document import Figure, Section
from .links import Links
from .results import Result, evaluate
from .wording import slug

__all__ = ["WrittenReport", "section", "write"]

_TOY_HEAD, _HEAD = "# TOY results", "# Results"


@dataclass(frozen=True)
class WrittenReport:
    """What a report was made of, and where it is."""

    readme: Path
    page: Path
    results: tuple[Result, ...]
    damaged: dict[Path, str]  # files of the store that could not be used, and why


def write(
    store: Store,
    out: Path,
    artifacts: Iterable[Artifact] | None = None,
    toy: bool = False,
    tensorboard: bool = False,
) -> WrittenReport:
    """Write the report on `artifacts` (all of them by default) into the folder `out`.

    With `toy` it is about their toy versions: everything is labelled TOY, nothing gets a verdict, and a folder that
    holds a report of measurements is refused (and the other way round).
    """
    chosen = tuple(all_artifacts().values() if artifacts is None else artifacts)
    _refuse_to_mix(out, toy)
    if tensorboard:
        from .tensorboard import export, require

        require()
    scan = store.scan()
    results = tuple(_result(store, artifact, scan.records, toy) for artifact in chosen)
    if not any(result.was_run for result in results):
        _refuse_the_other_kind(store, chosen, scan.records, toy)
    folder = out / "figures"
    places: dict[str, Path] = {}
    with _named_errors(out):
        folder.mkdir(parents=True, exist_ok=True)
        for result in results:
            drawn, paths = _draw(result, folder)
            if drawn:
                places[result.artifact.name] = paths[0]
        links = Links(out, places, scan.paths)
        damaged = {path: why.replace(f"{store.folder}/", "") for path, why in scan.damaged.items()}
        costs = [] if toy else headline.costs(store.folder)
        overview = _draw_chart(results, folder)
        _write_markdown(out, results, links, costs, overview, damaged, toy)
        _write_page(out, results, links, costs, overview, damaged, toy)
        if tensorboard:
            export(results, out / "tensorboard")
    return WrittenReport(out / "README.md", out / "index.html", results, scan.damaged)


def _write_markdown(
    out: Path,
    results: Sequence[Result],
    links: Links,
    costs: Sequence[headline.Cost],
    overview: Figure | None,
    damaged: Mapping[Path, str],
    toy: bool,
) -> None:
    """The first screen, which method helps, and a page for each paper; pages of an earlier time are removed."""
    place = {result.artifact.name: f"{result.paper}.md#{slug(result.artifact.name)}" for result in results}
    pages = {
        paper: [
            content.heading(paper, toy),
            *content.paper(mine, toy),
            *(content.artifact(result, links) for result in mine),
        ]
        for paper, mine in _by_paper(results).items()
    }
    if helps := content.methods(results, costs, place, level=1):
        pages["methods"] = helps
    first = content.first(results, overview, toy, ".md")
    more = content.more(sorted(set(pages) & {"methods"}))
    _update(out / "README.md", markdown.render([*first, *more, *content.unused(damaged)]).encode())
    for name, blocks in pages.items():
        _update(out / f"{name}.md", markdown.render(blocks).encode())


def _write_page(
    out: Path,
    results: Sequence[Result],
    links: Links,
    costs: Sequence[headline.Cost],
    overview: Figure | None,
    damaged: Mapping[Path, str],
    toy: bool,
) -> None:
    place = {result.artifact.name: f"#{slug(result.artifact.name)}" for result in results}
    by_paper = {
        paper: (*content.paper(mine, toy), *(content.artifact(result, links, heading=3) for result in mine))
        for paper, mine in _by_paper(results).items()
    }
    text = page.page(
        content.first(results, overview, toy, ""),
        content.pictures(results, links),
        content.methods(results, costs, place),
        by_paper,
        content.unused(damaged),
        results,
    )
    _update(out / "index.html", text.encode())


def _by_paper(results: Sequence[Result]) -> dict[str, list[Result]]:
    return {paper: [result for result in results if result.paper == paper] for paper in content.papers(results)}


def section(store: Store, artifact: Artifact, out: Path | None = None, toy: bool = False) -> Section:
    """What the report says about one artifact; with `out`, its figure is drawn into `out`/figures too."""
    scan = store.scan()
    result = _result(store, artifact, scan.records, toy)
    places = {}
    if out is not None:
        _refuse_to_mix(out, toy)
        with _named_errors(out):
            (out / "figures").mkdir(parents=True, exist_ok=True)
            drawn, paths = _draw(result, out / "figures")
        places = {result.artifact.name: paths[0]} if drawn else {}
    return content.artifact(result, Links(out or store.folder, places, scan.paths))


@contextmanager
def _named_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write the report to {out}: {error.strerror or error}") from error


def _result(store: Store, artifact: Artifact, records: Mapping[str, Record], toy: bool) -> Result:
    computed = None if artifact.compute is None else store.computed(artifact.name, toy)
    return evaluate(artifact.toy() if toy else artifact, records, computed, toy)


def _refuse_the_other_kind(store: Store, chosen: Iterable[Artifact], records: Mapping[str, Record], toy: bool) -> None:
    """An empty report would stand in the way of the one that was meant."""
    if any(_result(store, artifact, records, not toy).was_run for artifact in chosen):
        held, remedy = ("runs, but no toy runs", "leave out --toy") if toy else ("toy runs only", "say --toy")
        raise UserError(f"{store.folder} holds {held}: {remedy}, or give another folder")


def _draw(result: Result, folder: Path) -> tuple[bool, tuple[Path, Path]]:
    """Draw a result into its two files, or remove those of an earlier time if there is nothing to draw."""
    return _drawn(figures.draw(result), folder / slug(result.artifact.name))


def _draw_chart(results: Sequence[Result], folder: Path) -> Figure | None:
    drawn, (svg, png) = _drawn(chart.draw(results), folder / "all-numbers")
    where = folder.parent
    title = "Our accuracies minus the papers'"
    return Figure(title, f"{svg.relative_to(where)}", f"{png.relative_to(where)}") if drawn else None


def _drawn(made: MatplotlibFigure | None, path: Path) -> tuple[bool, tuple[Path, Path]]:
    paths = path.parent / f"{path.name}.svg", path.parent / f"{path.name}.png"
    if made is None:
        for one in paths:
            one.unlink(missing_ok=True)
        return False, paths
    for one, written in zip(paths, style.svg_and_png(made), strict=True):
        _update(one, written)
    return True, paths


def _update(path: Path, content: bytes) -> None:
    """Write a file, unless it is like that already."""
    if path.is_file() and path.read_bytes() == content:
        return
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def _refuse_to_mix(out: Path, toy: bool) -> None:
    readme = out / "README.md"
    if not readme.is_file():
        return
    first = readme.read_text(encoding="utf-8").partition("\n")[0]
    if first.startswith(_HEAD if toy else _TOY_HEAD):
        held, wanted = ("measurements", "toy results") if toy else ("toy results", "measurements")
        raise UserError(f"{out} holds a report of {held}: give another folder for {wanted}")
