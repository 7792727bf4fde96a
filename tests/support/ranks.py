"""Processes that compute together: started once for all tests, they run the functions that tests send them.

A function is sent by its name, so it stands in a module that can be imported.

def total(number):
    tensor = torch.tensor(number)
    dist.all_reduce(tensor)
    return tensor

def test_total(ranks):
    assert ranks(2).run(total, 3) == [6, 6]
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Imported once, by the process that the others are copies of.
PRELOADED = ["pytest", "torch._dynamo", "torch.export", "torch.nn.parallel.distributed", "equinorm.conversion"]
START = 600.0
"""Seconds that processes have to start: on a loaded machine their imports may take minutes."""
GRACE = 10.0
"""Seconds that the others have when one has failed: they may be waiting for it in vain."""


class RankError(Exception):
    """A function failed, or did not end; the message says in which processes, and where."""


@dataclass(frozen=True)
class Failure:
    """In place of what a function returns."""

    how: str


class Ranks:
    """So many processes in one group (gloo); they are started with the first function, and again after a failure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._connections: list[Any] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *arguments: Any, seconds: float = 300.0) -> list[Any]:
        """What the function returns in each process. There `torch.distributed` knows the process's rank."""
        work = pickle.dumps((function, arguments))
        if not self._processes:
            self._start()
            self._checked("start", self._collect(START))
        self._send(work)
        return self._checked(function.__qualname__, self._collect(seconds))

    def _checked(self, what: str, answers: list[Any]) -> list[Any]:
        if any(isinstance(answer, Failure) for answer in answers):
            self._stop(0.0)
            failures = [f"rank {i} {answer.how}" for i, answer in enumerate(answers) if isinstance(answer, Failure)]
            raise RankError("\n\n".join([f"{what} in {self.size} processes", *failures]))
        return answers

    def close(self) -> None:
        self._send(pickle.dumps(None))
        self._stop(GRACE)

    def _send(self, request: bytes) -> None:
        for each in self._connections:
            with suppress(OSError):  # a process that is gone is found when it should answer
                each.send_bytes(request)

    def _start(self) -> None:
        # A copy of a process that knows about GPUs cannot use autograd.
        context = get_context("spawn" if torch.cuda.is_available() else "forkserver")
        if context.get_start_method() == "forkserver":
            context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, self._folder.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self, seconds: float) -> list[Any]:
        deadline = time.monotonic() + seconds
        answers: dict[int, Any] = {}
        while waiting := [i for i in range(self.size) if i not in answers]:
            left = max(0.0, deadline - time.monotonic())
            ready = connection.wait([self._connections[i] for i in waiting], left)
            for i in waiting:
                if self._connections[i] in ready:
                    answers[i] = self._answer(i)
                elif not ready:
                    answers[i] = Failure(f"has not ended, and was at\n{self._stack(i)}")
            if any(isinstance(answer, Failure) for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE)
        return [answers[i] for i in range(self.size)]

    def _answer(self, rank: int) -> Any:
        try:
            return pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(GRACE)
            return Failure(f"is gone, with exit code {self._processes[rank].exitcode}")

    def _stack(self, rank: int) -> str:
        """Where a process is, as it says itself when it gets the signal."""
        assert self._folder is not None
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        file = _stack_file(self._folder.name, rank)
        return file.read_text() if file.exists() else "its start"

    def _stop(self, seconds: float) -> None:
        for process in self._processes:
            process.join(seconds)
            if process.is_alive():
                process.kill()
                process.join()
        for each in self._connections:
            each.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._connections, self._folder = [], [], None


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack{rank}"


def _serve(rank: int, size: int, folder: str, requests: Any) -> None:
    """One process: it answers requests until there is none."""
    torch.set_num_threads(1)
    with _stack_file(folder, rank).open("w") as stack:
        faulthandler.register(signal.SIGUSR1, stack)
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", store, timedelta(seconds=600), world_size=size, rank=rank)
        requests.send_bytes(pickle.dumps(None))
        while (request := pickle.loads(requests.recv_bytes())) is not None:
            requests.send_bytes(_answer(*request))
        dist.destroy_process_group()


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    try:
        torch.manual_seed(0)
        return pickle.dumps(function(*arguments))
    except BaseException:
        return pickle.dumps(Failure(f"failed:\n{traceback.format_exc()}"))
