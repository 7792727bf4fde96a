"""Train many runs: several side by side on a GPU, one after the other on a CPU, none of them twice.

A run that is in the store is skipped; one that another process holds is left to it; one that was interrupted goes on
from its checkpoint and makes the very steps it would have made. A run that diverges is recorded as such and the others
go on. Ctrl-C, SIGTERM and the end of the time given save what is in progress and stop.
"""

from __future__ import annotations

import gc
import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch

from ... import __version__
from ...errors import UserError, counted
from ...files import replacing, set_aside
from .inputs import Inputs, Streamed, inputs_of
from .runs import Run
from .store import Lock, Record, Store
from .training import Training

__all__ = ["Outcome", "about", "chosen_device", "in_words", "train", "train_all"]

AHEAD = 2  # epochs a run may be ahead of what the host has seen of it
AGREE = 10  # steps after which processes that train together look whether to stop
TURN = 16  # graphs of one run before it is the next one's turn (CUDA)
GLANCE = 2e-4  # seconds between two looks at a device that has enough to do
FULL = 0.5  # part of a device's memory that torch may hold when a run is started


def in_words(trained: list[Record]) -> str:
    """How many runs were trained, and how many of them diverged."""
    diverged = sum(record.status == "diverged" for record in trained)
    return f"{counted(len(trained), 'run')} trained" + (f", {diverged} of them diverged" if diverged else "")


@dataclass
class Outcome:
    """What became of the runs asked for."""

    trained: list[Record] = field(default_factory=list)
    known: int = 0  # were in the store already
    elsewhere: list[Run] = field(default_factory=list)  # another process is at them
    unfinished: list[Run] = field(default_factory=list)  # interrupted, or not started for want of time
    interrupted: bool = False


def train(run: Run, store: Store, **options: Any) -> Record:
    """Train one run, or find it in the store.

    record = train(run, Store(Path("results")))
    """
    outcome = train_all([run], store, **options)
    record = store.get(run)
    if record is None:
        where = "another process is training it" if outcome.elsewhere else "it was interrupted"
        raise RuntimeError(f"{run.key} has no result yet: {where}")
    return record


def train_all(
    runs: Iterable[Run],
    store: Store,
    *,
    data_dir: Path | None = None,
    device: torch.device | str | None = None,
    side_by_side: int | None = None,
    minutes: float = float("inf"),
    checkpoint_seconds: float = 60.0,
    watch: Callable[[list[Job]], None] | None = None,
    on_record: Callable[[Record], None] | None = None,
) -> Outcome:
    """Train every run that the store does not have.

    Args:
        data_dir: where data sets lie; see `lab.data.load`.
        side_by_side: runs in progress at once; 8 on a GPU and 1 on a CPU.
        minutes: after these, runs in progress are checkpointed and none is started.
        checkpoint_seconds: how often a run in progress is saved.
        watch: called with the jobs in progress whenever one of them has finished an epoch.
        on_record: called with each finished run.
    """
    device = chosen_device(device)
    width = side_by_side or (8 if device.type == "cuda" else 1)
    progress = JobsInProgress(
        store, device, width, data_dir, checkpoint_seconds, time.monotonic() + 60 * minutes, watch, on_record
    )
    wanted = list({run.key: run for run in runs}.values())
    waiting = deque(run for run in wanted if store.get(run) is None)
    progress.outcome.known = len(wanted) - len(waiting)
    with interruptible() as interrupted:
        try:
            while (waiting or progress.jobs) and not interrupted() and progress.time_left() > 0:
                while waiting and len(progress.jobs) < width:
                    progress.start(waiting.popleft())
                progress.advance(interrupted)
        finally:
            progress.suspend()
        progress.outcome.interrupted = interrupted()
    progress.outcome.unfinished += waiting
    return progress.outcome


def chosen_device(name: torch.device | str | None) -> torch.device:
    """The device of this name; of none, a GPU if there is one."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise UserError(f"there is no device {name!r}: say cpu, or cuda, or cuda:1 for the second GPU") from error
    gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= gpus:
        seen = f"torch {torch.__version__} sees {gpus or 'no'} GPU{'s' * (gpus != 1)} here"
        raise UserError(f"there is no device {str(device)!r}: {seen}. Without a device named it takes what there is")
    return device


# -- runs in progress --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Job:
    """A run in progress: its training, the lock on it, and when it was last saved."""

    run: Run
    training: Training
    lock: Lock | None
    about: dict[str, Any]
    seconds_before: float = 0.0  # spent before it was last interrupted
    lent: float = 0.0  # of its seconds, what the runs beside it had of the device
    pace: float = 0.0  # seconds of a step that has the device to itself; 0: not measured, as none runs beside it
    charged: int = 0  # steps whose time has been divided
    began: float = field(default_factory=time.monotonic)
    saved: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.began

    @property
    def progress(self) -> float:
        """The part that is done, 0 to 1."""
        return self.training.done / max(self.training.total_steps, 1)

    def let_go(self) -> None:
        self.training.close()
        if self.lock is not None:
            self.lock.release()

    def record(self) -> Record:
        log, reason = self.training.log, self.training.diverged
        seconds = self.seconds
        final = log[-1] | {"seconds": seconds, "device_seconds": seconds - self.lent}
        if self.pace:
            final["pace"] = self.pace
        status: Literal["finished", "diverged"] = "finished" if reason is None else "diverged"
        return Record(self.run, status, tuple(log), final | ({"reason": reason} if reason else {}), self.about)


class JobsInProgress:
    """The jobs in progress on one device."""

    def __init__(
        self,
        store: Store,
        device: torch.device,
        width: int,
        data_dir: Path | None,
        checkpoint_seconds: float,
        deadline: float,
        watch: Callable[[list[Job]], None] | None,
        on_record: Callable[[Record], None] | None,
    ) -> None:
        self.store, self.device, self.width, self.data_dir = store, device, width, data_dir
        self.checkpoint_seconds, self.deadline = checkpoint_seconds, deadline
        self.watch, self.on_record = watch, on_record
        self.jobs: list[Job] = []
        self.outcome = Outcome()
        self._inputs: dict[Any, Inputs | Streamed] = {}
        self._charged = time.monotonic()

    def time_left(self) -> float:
        return self.deadline - time.monotonic()

    def start(self, run: Run) -> None:
        """Take a run in hand, from its checkpoint if there is one; or leave it to the process that has it."""
        lock = self.store.lock(run)
        if lock is None:
            self.outcome.elsewhere.append(run)
            return
        try:
            if self.store.get(run) is not None:  # another process finished it meanwhile
                lock.release()
                self.outcome.known += 1
                return
            make_room(self.device)
            inputs = self.inputs(run)
            training, state = resumed(lambda state: Training(run, inputs, state), self.store.checkpoint(run))
            pace = training.pace() if self.width > 1 else 0.0
        except BaseException:
            lock.release()
            raise
        facts = about(self.device) | {"side_by_side": self.width}
        self._charge()
        self.jobs.append(Job(run, training, lock, facts, *spent(state), pace, training.done))

    def inputs(self, run: Run) -> Inputs | Streamed:
        """The data a run wants, on the device; shared by all runs that want the same."""
        key = (repr(run.data), run.precision == "bfloat16")
        if key not in self._inputs:
            self._inputs[key] = inputs_of(run, self.data_dir, self.device)
        return self._inputs[key]

    def advance(self, interrupted: Callable[[], bool]) -> None:
        """A few steps of every job; finish those that have come to their end."""
        moved = news = False
        for job in list(self.jobs):
            training = job.training
            if not training.finished and training.ahead < AHEAD and not training.busy:
                moved = True
                training.turn(TURN if training.captured else 1, interrupted)
            news |= self._look_at(job)
        if not moved and not news:  # each has enough to do: those with short steps must not wait for the others' long
            time.sleep(GLANCE)
        if news and self.watch is not None:
            self.watch(self.jobs)

    def _look_at(self, job: Job) -> bool:
        news = job.training.collect()
        if job.training.diverged or (job.training.finished and not job.training.ahead):
            self._finish(job)
            return True
        if time.monotonic() - job.saved > self.checkpoint_seconds:
            self._save(job)
        return news

    def _charge(self) -> None:
        """Divide the time since the last call among the jobs in progress; to be called before these change.

        Each has a part as large as what its steps would have taken by themselves.
        """
        now = time.monotonic()
        alone = [job.pace * (job.training.done - job.charged) for job in self.jobs]
        for job, own in zip(self.jobs, alone, strict=True):
            part = own / sum(alone) if sum(alone) else 1 / len(self.jobs)
            job.lent += (now - self._charged) * (1 - part)
            job.charged = job.training.done
        self._charged = now

    def _finish(self, job: Job) -> None:
        self._charge()
        record = job.record()
        self.store.write(record)
        self.store.checkpoint(job.run).unlink(missing_ok=True)
        self.jobs.remove(job)
        job.let_go()
        self.outcome.trained.append(record)
        if self.on_record is not None:
            self.on_record(record)

    def _save(self, job: Job) -> None:
        self._charge()
        save_checkpoint(self.store.checkpoint(job.run), checkpoint_of(job, job.training.state_dict()))
        job.saved = time.monotonic()

    def suspend(self) -> None:
        """Save and let go of everything in progress."""
        self._charge()
        while self.jobs:
            job = self.jobs.pop()
            try:
                self._save(job)
            finally:
                job.let_go()
            self.outcome.unfinished.append(job.run)


def make_room(device: torch.device) -> None:
    """Give back what finished runs have left, if that may be much: while a graph is captured, torch cannot do it."""
    if device.type != "cuda":
        return
    if torch.cuda.memory_reserved(device) > FULL * torch.cuda.get_device_properties(device).total_memory:
        gc.collect()  # a run refers to itself
        torch.cuda.empty_cache()


def checkpoint_of(job: Job, training: dict[str, Any]) -> dict[str, Any]:
    return {"training": training, "seconds": job.seconds, "lent": job.lent}


def spent(state: dict[str, Any] | None) -> tuple[float, float]:
    """The seconds that a run has taken up to a checkpoint, and what of these it lent."""
    return (state["seconds"], state.get("lent", 0.0)) if state else (0.0, 0.0)


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        torch.save(state, temporary)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """What `save_checkpoint` wrote. A damaged one is set aside with a word, and the run begins anew."""
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not {"training", "seconds"} <= state.keys():
            raise ValueError("it is no checkpoint of a run")
    except Exception as error:
        _set_aside(path, error)
        return None
    return state


def _set_aside(path: Path, error: Exception) -> None:
    try:
        aside = set_aside(path)
    except FileNotFoundError:  # another process of this run was quicker
        return
    why = str(error).strip().splitlines() or [type(error).__name__]
    warnings.warn(f"{path} is damaged ({why[0]}): set aside as {aside.name}, the run begins anew", stacklevel=3)


def resumed(make: Callable[[Any], Training], path: Path) -> tuple[Training, dict[str, Any] | None]:
    """A run from its checkpoint, and what is in it; from the start if there is none, or none that fits."""
    state = load_checkpoint(path)
    if state is not None:
        try:
            return make(state["training"]), state
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            _set_aside(path, error)
    return make(None), None


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM are noted and acted upon between two steps; a second Ctrl-C is an ordinary one."""
    seen: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    with ExitStack() as undo:
        if threading.current_thread() is threading.main_thread():  # else whoever runs this handles signals
            for number in (signal.SIGINT, signal.SIGTERM):
                undo.callback(signal.signal, number, signal.signal(number, note))
        yield lambda: bool(seen)


# -- where a number comes from -----------------------------------------------------------------------------------------


def about(device: torch.device) -> dict[str, Any]:
    """Command, versions, hardware and commit: what goes with every number."""
    file = Path(sys.argv[0]).name
    program = {"cli.py": "equinorm", "__main__.py": "equinorm", "run.py": "equinorm record"}.get(file, file)
    packages = {
        "equinorm": version_of("equinorm") or __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    hardware = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    )
    return {
        "command": f"{program} {shlex.join(sys.argv[1:])}".strip(),
        "versions": packages,
        "hardware": hardware,
        "commit": commit(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that is not installed
        return None


@cache
def commit() -> str | None:
    """The commit of the checkout this code runs from, with "+" if it has changes; None if nothing says.

    A copy without its history can be told by the variable EQUINORM_COMMIT, which is believed.
    """
    if told := os.environ.get("EQUINORM_COMMIT"):
        return told
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ("git", *arguments), cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
