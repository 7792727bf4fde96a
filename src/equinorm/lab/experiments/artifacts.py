"""What a table or figure of a paper is: the runs behind it, the paper's numbers, and what the paper says follows.

A recipe (`lab/experiments/PAPER.py`) makes one `Artifact` per table or figure. Nothing here trains or draws: launchers
run `artifact.runs()`, the report puts their results where the artifact says.

    artifact = find("repro2019/figure2")
    artifact.runs()                # every run, each once
    artifact.toy()                 # the same artifact in seconds, on the embedded digits
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from itertools import zip_longest
from typing import Any, Literal

from ..training.runs import Run

__all__ = ["PAPERS", "Artifact", "Cell", "Claim", "Compute", "Means", "all_artifacts", "find"]

PAPERS = (
    "stock2019",
    "defazio2018",
    "ruff2020",
    "repro2019",
    "arpit2019",
    "rivals",
    "imagenette",
    "private",
    "federated",
    "deep",
)


@dataclass(frozen=True)
class Cell:
    """One number of a table, one point of a curve or one whole training curve: a setting, run with several seeds."""

    row: str  # the method: "ENorm-1.2"
    column: str  # where: "19" intermediary layers, batch size "128"
    runs: tuple[Run, ...]
    paper: float | None = None  # what the paper prints, in the artifact's unit; None: only drawn there, or not given
    paper_spread: float | None = None
    tolerance: float | None = None  # how far from the paper still counts as reproduced; None: the artifact's


Means = Mapping[tuple[str, ...], float]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper that the numbers decide.

    `holds` gets the means by (row, column), or by (row, column, metric) where the sentence is about another metric
    than the artifact's, as "test_accuracy@10", and returns whether it is so; it may raise KeyError where a cell was
    not run, which the report shows as "not run".
    """

    text: str
    holds: Callable[[Means], bool]
    same_as: str = ""  # the text of the claim that says the same elsewhere, of the same paper; equal texts need none

    @property
    def ours(self) -> bool:
        """Whether the sentence is not the paper's."""
        return self.text.endswith("(ours)")

    @property
    def sentence(self) -> str:
        """What a paper's distinct claims are counted by."""
        return self.same_as or self.text


@dataclass(frozen=True)
class Compute:
    """A result that needs no training: `function(toy)` returns plain data (JSON); `draw(data, axes)` shows it."""

    function: Callable[[bool], dict[str, Any]]
    cells: Callable[[dict[str, Any]], Means] = lambda data: {}  # numbers for cells and claims
    draw: Callable[[dict[str, Any], Any], None] | None = None  # on a matplotlib Figure


@dataclass(frozen=True)
class Artifact:
    """A table or figure of a paper."""

    name: str  # "stock2019/figure4"
    title: str
    says: str  # what the paper reports, in our words; of our own tries, nothing
    protocol: str  # what the paper did, what it leaves open, and what we chose there
    cells: tuple[Cell, ...] = ()
    claims: tuple[Claim, ...] = ()
    compute: Compute | None = None
    kind: Literal["table", "lines", "curves", "bars"] = "table"  # lines: final value over columns; curves: over epochs
    metric: str = "test_accuracy"  # key of the final metrics (table, lines, bars) or of every epoch's (curves)
    unit: str = "%"
    x_label: str = ""  # what the columns are
    band: Literal["std", "quartiles"] = "std"  # mean ± std, or median and quartiles, as the paper draws it
    tolerance: float = 0.5
    compares: bool = True  # whether the rows are methods; of a tuning they are methods and places
    variant_of: str = ""  # the artifact whose numbers and claims these are again, with a choice of ours in it
    shrink: Callable[[Run], Run] | None = field(default=None, compare=False)  # one run at toy size

    def runs(self) -> tuple[Run, ...]:
        """Every run behind the artifact, each once: the first seed of every cell, then the second, and so on."""
        by_seed = zip_longest(*(cell.runs for cell in self.cells))
        return tuple({run.key: run for turn in by_seed for run in turn if run is not None}.values())

    def part(self, rows: Iterable[str] = (), columns: Iterable[str] = ()) -> Artifact:
        """The artifact with some of its rows and columns only; none named: all."""
        rows, columns = set(rows), set(columns)
        kept = (c for c in self.cells if (not rows or c.row in rows) and (not columns or c.column in columns))
        return replace(self, cells=tuple(kept))

    def toy(self) -> Artifact:
        """The artifact with every run at toy size, on one seed."""
        if self.shrink is None:
            return self
        shrink = self.shrink
        cells = tuple(replace(cell, runs=tuple(shrink(run) for run in cell.runs[:1])) for cell in self.cells)
        return replace(self, name=f"{self.name}-toy", cells=cells, shrink=None)


def seeds(run: Run, n: int) -> tuple[Run, ...]:
    """The same run with seeds 0 to n - 1."""
    return tuple(replace(run, seed=seed) for seed in range(n))


@cache
def all_artifacts() -> Mapping[str, Artifact]:
    """Every artifact of every recipe, by name."""
    made: Iterable[Sequence[Artifact]] = (
        import_module(f"equinorm.lab.experiments.{paper}").artifacts() for paper in PAPERS
    )
    return {artifact.name: artifact for group in made for artifact in group}


def find(name: str) -> Artifact:
    """The artifact of that name; an error lists those there are."""
    found = all_artifacts()
    if name not in found:
        raise ValueError(f"there is no artifact {name!r}; there are {', '.join(found)}")
    return found[name]
