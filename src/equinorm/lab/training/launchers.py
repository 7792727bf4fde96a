"""Where runs are trained: in this process, on a Ray cluster, or as Slurm jobs.

Every launcher takes the runs that the store does not have and puts their records there, each once. Ray's workers need
no shared disk: records travel back to the driver, which alone writes. Slurm's jobs write to the store themselves, which
must lie on a disk they all see; locks keep two jobs from training the same run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch

from ...errors import UserError
from . import together
from .progress import display
from .runs import Run
from .store import Record, Store, dumps, parse
from .trainer import Outcome, train_all

__all__ = ["LAUNCHERS", "Launcher", "Options", "check_limits", "launch"]

Launcher = Literal["local", "ray", "slurm"]


@dataclass(frozen=True)
class Options:
    """How runs are trained, wherever that is."""

    data_dir: Path | None = None
    device: str | None = None  # None: a GPU if there is one
    side_by_side: int | None = None  # runs in progress at once on one device; None: 8 on a GPU, 1 on a CPU
    minutes: float = float("inf")  # after these, what is in progress is saved and nothing is started
    checkpoint_seconds: float = 60.0
    processes: int = 1  # of this machine, where it has no GPU: so many runs at once, a thread for each
    address: str | None = None  # of a Ray cluster; None: $RAY_ADDRESS, else a cluster of this machine
    partition: str | None = None  # of Slurm
    cluster: str | None = None  # submitit's executor; None: Slurm

    def __post_init__(self) -> None:
        check_limits(self.side_by_side, self.minutes)

    def training(self) -> dict[str, Any]:
        names = ("data_dir", "device", "side_by_side", "minutes", "checkpoint_seconds")
        return {name: getattr(self, name) for name in names}


def check_limits(side_by_side: int | None, minutes: float | None, sitting: float | None = None) -> None:
    """Refuse numbers that no run could be done with.

    >>> check_limits(side_by_side=8, minutes=30.0)
    """
    if side_by_side is not None and side_by_side < 1:
        raise UserError(f"--side-by-side must be at least 1, got {side_by_side}")
    for name, value in (("--minutes", minutes), ("--sitting", sitting)):
        if value is not None and not value >= 0:
            raise UserError(f"{name} must be a number of minutes, 0 or more, got {value}")


def launch(
    runs: Sequence[Run],
    store: Store,
    launcher: Launcher = "local",
    options: Options | None = None,
    on_record: Callable[[Record], None] | None = None,
) -> Outcome:
    """Train every run that the store does not have, and say what became of them.

    launch(find("repro2019/figure2").runs(), Store("results"), "ray")
    """
    options = options or Options()
    wanted = list({run.key: run for run in runs}.values())
    missing = [run for run in wanted if store.get(run) is None]
    outcome = LAUNCHERS[launcher](missing, store, options, on_record or (lambda record: None)) if missing else Outcome()
    outcome.known += len(wanted) - len(missing)
    return outcome


def _local(runs: list[Run], store: Store, options: Options, on_record: Callable[[Record], None]) -> Outcome:
    if together.are_several():
        return _together(runs, store, options, on_record)
    if options.processes > 1 and len(runs) > 1:
        return _in_processes(runs, store, options, on_record)
    with display(len(runs)) as shown:

        def done(record: Record) -> None:
            if shown is not None:
                shown.done(record)
            on_record(record)

        watch = None if shown is None else shown.watch
        return train_all(runs, store, watch=watch, on_record=done, **options.training())


def _together(runs: list[Run], store: Store, options: Options, on_record: Callable[[Record], None]) -> Outcome:
    """Under torchrun: all processes train one run after the other."""
    total = Outcome()
    for i, run in enumerate(runs):
        one = together.train_together(run, store, **options.training())
        for record in one.trained:
            on_record(record)
        total.trained += one.trained
        total.known += one.known
        total.elsewhere += one.elsewhere
        if one.unfinished:
            total.unfinished, total.interrupted = runs[i:], one.interrupted
            break
    return total


def _in_processes(runs: list[Run], store: Store, options: Options, on_record: Callable[[Record], None]) -> Outcome:
    """Processes of this machine that share the store: each takes the next run when it has ended one."""
    outcome = Outcome()
    pool = ProcessPoolExecutor(
        options.processes, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    )
    try:
        futures = {pool.submit(_train_one, run, store.folder, options): run for run in runs}
        with display(len(runs)) as shown:
            for future in as_completed(futures):
                one, run = future.result(), futures[future]
                outcome.known += one.known
                outcome.elsewhere += one.elsewhere
                outcome.unfinished += one.unfinished
                outcome.interrupted |= one.interrupted
                for record in one.trained:
                    outcome.trained.append(replace(record, run=run))  # with its label
                    on_record(record)
                    if shown is not None:
                        shown.done(record)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return outcome


def _train_one(run: Run, folder: Path, options: Options) -> Outcome:
    return train_all([run], Store(folder), **options.training())


# -- Ray ---------------------------------------------------------------------------------------------------------------


def _ray(runs: list[Run], store: Store, options: Options, on_record: Callable[[Record], None]) -> Outcome:
    """One task per handful of runs. A task whose node dies is started again on another."""
    try:
        import ray
    except ImportError as error:
        raise UserError("the launcher ray needs Ray: pip install 'equinorm[ray]'") from error
    own = not ray.is_initialized()
    if own:
        address = options.address or os.environ.get("RAY_ADDRESS")
        ray.init(address=address, log_to_driver=False, include_dashboard=False)
    try:
        gpus = ray.cluster_resources().get("GPU", 0) > 0 and options.device != "cpu"
        task = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0, max_retries=-1)(_train_far_away)
        size = (options.side_by_side or 8) if gpus else 1
        training = asdict(options) | {"data_dir": options.data_dir and str(options.data_dir.resolve())}
        waiting = {task.remote([run.to_dict() for run in part], training): part for part in _parts(runs, size)}
        outcome = Outcome()
        with display(len(runs)) as shown:
            while waiting:
                (ready, *_), _rest = ray.wait(list(waiting), num_returns=1)
                part = waiting.pop(ready)
                records = [parse(text, Path("a worker's answer")) for text in ray.get(ready)]
                for record in records:
                    store.write(record)
                    outcome.trained.append(record)
                    on_record(record)
                    if shown is not None:
                        shown.done(record)
                finished = {record.run.key for record in records}
                outcome.unfinished += [run for run in part if run.key not in finished]
        return outcome
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"runs that came back are in {store.folder}; the others start again") from None
    finally:
        if own:
            ray.shutdown()


def _train_far_away(runs: list[dict[str, Any]], options: dict[str, Any]) -> list[str]:
    """In a worker: train with a store of its own, and send back the text of the records."""
    chosen = Options(**options | {"data_dir": options["data_dir"] and Path(options["data_dir"])})
    with tempfile.TemporaryDirectory(prefix="equinorm-") as folder:
        outcome = train_all([Run.from_dict(run) for run in runs], Store(folder), **chosen.training())
        return [dumps(record) for record in outcome.trained]


# -- Slurm -------------------------------------------------------------------------------------------------------------


@dataclass
class Work:
    """What a Slurm job does. Preempted or out of time, it asks to be queued again and goes on from its checkpoints."""

    runs: list[Run]
    folder: Path
    options: Options

    def __call__(self) -> list[str]:
        outcome = train_all(self.runs, Store(self.folder), **self.options.training())
        return [record.run.key for record in outcome.trained]

    def checkpoint(self) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(Work(self.runs, self.folder, self.options))


def _slurm(runs: list[Run], store: Store, options: Options, on_record: Callable[[Record], None]) -> Outcome:
    """One array of jobs, each with a handful of runs, writing to the shared store; waits for them."""
    try:
        import submitit
    except ImportError as error:
        raise UserError("the launcher slurm needs submitit: pip install 'equinorm[slurm]'") from error
    logs = store.folder.resolve() / "unfinished" / "jobs"
    logs.mkdir(parents=True, exist_ok=True)
    try:
        executor = submitit.AutoExecutor(
            folder=logs, cluster=options.cluster or "slurm"
        )  # else it would settle for less
    except RuntimeError as error:
        raise UserError(f"Slurm is not here ({error}): run this where sbatch is, or use --launcher local") from error
    gpus = options.device != "cpu"
    minutes = 24 * 60 if options.minutes == float("inf") else max(1, round(options.minutes))
    executor.update_parameters(name="equinorm", timeout_min=minutes, cpus_per_task=4, gpus_per_node=1 if gpus else 0)
    if options.partition is not None:
        executor.update_parameters(slurm_partition=options.partition)
    size = (options.side_by_side or 8) if gpus else 1
    parts = list(_parts(runs, size))
    with executor.batch():
        jobs = [executor.submit(Work(part, store.folder.resolve(), options)) for part in parts]
    outcome = Outcome()
    with display(len(runs)) as shown:
        for job, part in zip(jobs, parts, strict=True):
            job.wait()
            failure = job.exception()
            for run in part:
                record = store.get(run)
                if record is None:
                    outcome.unfinished.append(run)
                    continue
                outcome.trained.append(record)
                on_record(record)
                if shown is not None:
                    shown.done(record)
            if failure is not None:
                raise UserError(f"job {job.job_id} failed, its log is {job.paths.stderr}: {failure}")
    return outcome


def _parts(runs: Sequence[Run], size: int) -> Iterator[list[Run]]:
    return (list(runs[i : i + size]) for i in range(0, len(runs), size))


LAUNCHERS: dict[str, Callable[[list[Run], Store, Options, Callable[[Record], None]], Outcome]] = {
    "local": _local,
    "ray": _ray,
    "slurm": _slurm,
}
