"""What is done of every table and figure, as a list for a terminal of 80 columns.

Console().print(table(Store("results"), all_artifacts().values()))
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich.table import Table

from ..experiments.artifacts import Artifact
from ..training.store import Store
from . import wording
from .content import title_of
from .results import time_of

__all__ = ["table"]


def table(store: Store, artifacts: Iterable[Artifact], toy: bool = False) -> Table:
    """A line for each artifact: runs done of all, the time they took, the data set they need, what it is."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    shown.add_column("artifact", no_wrap=True)
    shown.add_column("done", justify="right", no_wrap=True)
    shown.add_column("time", justify="right", no_wrap=True)
    shown.add_column("data set", no_wrap=True)
    shown.add_column("what it is")
    records = store.scan().records
    for paper, mine in groupby(artifacts, key=lambda artifact: artifact.name.partition("/")[0]):
        heading = title_of(paper).removeprefix(f"{paper}: ")
        shown.add_row(f"[bold]{paper}/[/bold]", "", "", "", f"[bold]{heading}[/bold]")
        for artifact in mine:
            runs = (artifact.toy() if toy else artifact).runs()
            times = [time_of(records[run.key]) for run in runs if run.key in records]
            seconds = sum(time for time in times if time is not None)
            done = f"{len(times)}/{len(runs)}" if runs else _computed(store, artifact, toy)
            data = ", ".join(dict.fromkeys(run.data.name for run in runs)) or "none"
            name = artifact.name.partition("/")[2]
            shown.add_row(f"  {name}", done, wording.duration(seconds) if seconds else "-", data, artifact.title)
    return shown


def _computed(store: Store, artifact: Artifact, toy: bool) -> str:
    """An artifact that needs no training is there or not."""
    return "-" if store.computed(artifact.name, toy) is None else "yes"
