"""What a terminal shows while runs are trained; nothing where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

if TYPE_CHECKING:
    from .store import Record
    from .trainer import Job

__all__ = ["Display", "display"]


class Display:
    """A bar for all runs and a line for each one in progress: epoch, loss, accuracy, time left."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._all = progress.add_task("all runs", total=total, note=f"0/{total}")
        self._lines: dict[str, tuple[TaskID, float, float]] = {}  # task, and when and where we first saw the run
        self._began = time.monotonic()

    def watch(self, jobs: list[Job]) -> None:
        for job in jobs:
            if job.run.key not in self._lines:
                task = self._progress.add_task(name_of(job), total=1.0, note="")
                self._lines[job.run.key] = (task, time.monotonic(), job.progress)
            task, seen, part = self._lines[job.run.key]
            self._progress.update(task, completed=job.progress, note=self._note(job, seen, part))
        present = {job.run.key for job in jobs}
        for key in self._lines.keys() - present:
            self._progress.remove_task(self._lines.pop(key)[0])

    def done(self, record: Record) -> None:
        self._done += 1
        left = (time.monotonic() - self._began) * (self._total - self._done) / self._done
        note = f"{self._done}/{self._total}, about {duration(left)} left"
        self._progress.update(self._all, completed=self._done, note=note)

    @staticmethod
    def _note(job: Job, seen: float, part: float) -> str:
        if not job.training.log:
            return "first epoch"
        last = job.training.log[-1]
        gone = job.progress - part
        left = f", {duration((time.monotonic() - seen) * (1 - job.progress) / gone)} left" if gone > 0 else ""
        numbers = f"loss {last['train_loss']:.3f}, test {last['test_accuracy']:.2f} %"
        return f"epoch {last['epoch']}/{job.run.epochs:g}, {numbers}{left}"


@contextmanager
def display(total: int, console: Console | None = None) -> Iterator[Display | None]:
    """A display on a terminal; None elsewhere."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(24), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        yield Display(progress, total)


def name_of(job: Job) -> str:
    run = job.run
    return f"{run.label or run.key} (seed {run.seed})"


def duration(seconds: float) -> str:
    """90 -> "1:30", 4000 -> "1:06:40"."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
