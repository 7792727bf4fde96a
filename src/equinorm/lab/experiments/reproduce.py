"""Everything behind a table or figure: train its runs, compute what needs no training, and say what is there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import torch

from ...errors import UserError, counted, meant
from ..training.launchers import Launcher, Options, launch
from ..training.runs import Run
from ..training.store import Record, Store
from ..training.trainer import Outcome, about, in_words
from .artifacts import PAPERS, Artifact, all_artifacts

__all__ = ["Reproduced", "chosen", "reproduce", "single"]


@dataclass
class Reproduced:
    """What `reproduce` did."""

    artifacts: list[Artifact]
    outcome: Outcome
    computed: list[str] = field(default_factory=list)

    def sentence(self) -> str:
        outcome = self.outcome
        parts = [in_words(outcome.trained)]
        parts += [f"{outcome.known} were in the store"] if outcome.known else []
        parts += [f"{counted(len(self.computed), 'artifact')} computed"] if self.computed else []
        parts += [f"{len(outcome.elsewhere)} left to another process"] if outcome.elsewhere else []
        parts += [f"{len(outcome.unfinished)} unfinished: the same command goes on"] if outcome.unfinished else []
        return "; ".join(parts) + "."


def chosen(
    names: Iterable[str], toy: bool = False, rows: Collection[str] = (), columns: Collection[str] = ()
) -> list[Artifact]:
    """Artifacts by name; a paper's name stands for all of its, "all" for every one; of them some rows and columns."""
    found = all_artifacts()
    picked: dict[str, Artifact] = {}
    for name in names:
        matching = [a for key, a in found.items() if name in ("all", key, key.split("/")[0])]
        if not matching:
            raise UserError(
                f"there is no artifact {name!r}{meant(name, [*PAPERS, *found]) or '.'} There are those of the papers "
                f"{', '.join(PAPERS)}; `equinorm reproduce` lists them"
            )
        picked |= {a.name: a for a in matching}
    for what, wanted in (("row", rows), ("column", columns)):
        there = dict.fromkeys(getattr(cell, what) for artifact in picked.values() for cell in artifact.cells)
        if missing := [name for name in wanted if name not in there]:
            raise UserError(
                f"there is no {what} {', '.join(missing)} in {', '.join(picked)}; there are {', '.join(there)}"
            )
    parts = [a.part(rows, columns) for a in picked.values()]
    return [a.toy() if toy else a for a in parts]


def reproduce(
    artifacts: Iterable[Artifact],
    store: Store,
    *,
    toy: bool = False,
    launcher: Launcher = "local",
    options: Options | None = None,
    on_record: Callable[[Record], None] | None = None,
) -> Reproduced:
    """Run what the store does not have of the artifacts.

    reproduce(chosen(["repro2019"]), Store("results"))
    """
    done = Reproduced(list(artifacts), Outcome())
    for artifact in done.artifacts:
        name = artifact.name.removesuffix("-toy")
        if artifact.compute is not None and store.computed(name, toy) is None:
            facts = about(torch.device("cpu"))
            store.write_computed(name, artifact.compute.function(toy), toy, facts)
            done.computed.append(name)
    runs = [run for artifact in done.artifacts for run in artifact.runs()]
    done.outcome = launch(runs, store, launcher, options, on_record)
    return done


def single(artifact: Artifact, row: str | None, column: str | None, seed: int) -> Run:
    """One run of an artifact: the cell in that row and column, with that seed."""
    cells = [cell for cell in artifact.cells if cell.runs and row in (None, cell.row) and column in (None, cell.column)]
    if not cells:
        rows = ", ".join(dict.fromkeys(cell.row for cell in artifact.cells)) or "none: it needs no training"
        columns = ", ".join(dict.fromkeys(cell.column for cell in artifact.cells))
        raise UserError(f"{artifact.name} has no such run. Rows: {rows}. Columns: {columns}")
    of_seed = [run for run in cells[0].runs if run.seed == seed]
    if not of_seed:
        seeds = ", ".join(str(run.seed) for run in cells[0].runs)
        raise UserError(f"{artifact.name}, {cells[0].row}, {cells[0].column} has the seeds {seeds}")
    return of_seed[0]
