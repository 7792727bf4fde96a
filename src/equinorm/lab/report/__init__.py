"""`equinorm report`: every number next to the paper's, from the records of a store.

    write(Store("results"), Path("results"))        # README.md, index.html, figures/*.svg and *.png
    print(section(Store("results"), find("repro2019/figure2")))

Writing a report again from the same records changes no file.

In reading order:

results        what the records say about an artifact, and which claims hold
wording        numbers and facts as text
headline       the first tables: which method helps, where, by how much, at what cost
markdown       README.md
page           index.html
style          a colour per method everywhere
figures        an artifact as a picture
tensorboard    all curves as event files
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...errors import UserError
from ...files import replacing
from ..experiments.artifacts import Artifact, all_artifacts
from ..training.store import Record, Store
from . import figures, headline, markdown, page, style
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
    drawings: dict[str, str] = {}
    places: dict[str, Path] = {}
    with _named_errors(out):
        folder.mkdir(parents=True, exist_ok=True)
        for result in results:
            svg, paths = _draw(result, folder)
            if svg is not None:
                drawings[result.artifact.name], places[result.artifact.name] = svg, paths[0]
        links = markdown.Links(out, places, scan.paths)
        damaged = {path: why.replace(f"{store.folder}/", "") for path, why in scan.damaged.items()}
        costs = [] if toy else headline.costs(store.folder)
        _update(out / "README.md", markdown.report(results, links, damaged, costs, toy).encode())
        _update(out / "index.html", page.page(results, links, drawings, damaged, costs, toy).encode())
        if tensorboard:
            export(results, out / "tensorboard")
    return WrittenReport(out / "README.md", out / "index.html", results, scan.damaged)


def section(store: Store, artifact: Artifact, out: Path | None = None, toy: bool = False) -> str:
    """What the report says about one artifact, as Markdown; with `out`, its figure is drawn into `out`/figures too."""
    scan = store.scan()
    result = _result(store, artifact, scan.records, toy)
    places = {}
    if out is not None:
        _refuse_to_mix(out, toy)
        with _named_errors(out):
            (out / "figures").mkdir(parents=True, exist_ok=True)
            svg, paths = _draw(result, out / "figures")
        places = {} if svg is None else {result.artifact.name: paths[0]}
    return markdown.section(result, markdown.Links(out or store.folder, places, scan.paths))


@contextmanager
def _named_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write the report to {out}: {error.strerror or error}") from error


def _result(store: Store, artifact: Artifact, records: Mapping[str, Record], toy: bool) -> Result:
    computed = None if artifact.compute is None else store.computed(artifact.name, toy)
    return evaluate(artifact.toy() if toy else artifact, records, computed, toy)


def _refuse_the_other_kind(
    store: Store, chosen: Iterable[Artifact], records: Mapping[str, Record], toy: bool
) -> None:  # fmt: skip
    """An empty report would stand in the way of the one that was meant."""
    if any(_result(store, artifact, records, not toy).was_run for artifact in chosen):
        held, remedy = ("runs, but no toy runs", "leave out --toy") if toy else ("toy runs only", "say --toy")
        raise UserError(f"{store.folder} holds {held}: {remedy}, or give another folder")


def _draw(result: Result, folder: Path) -> tuple[str | None, tuple[Path, Path]]:
    """Draw a result into its two files, or remove those of an earlier time if there is nothing to draw."""
    name = slug(result.artifact.name)
    paths = folder / f"{name}.svg", folder / f"{name}.png"
    made = figures.draw(result)
    if made is None:
        for path in paths:
            path.unlink(missing_ok=True)
        return None, paths
    contents = style.svg_and_png(made)
    for path, content in zip(paths, contents, strict=True):
        _update(path, content)
    return contents[0].decode(), paths


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
