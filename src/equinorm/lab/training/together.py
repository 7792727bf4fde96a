"""One run on several GPUs: `torchrun --nproc-per-node 8 -m equinorm.cli train stock2019/table4`.

Every process has a copy of the network and its part of each batch (DistributedDataParallel); batch statistics are each
process's own, as in stock2019 section 6.3. The first process evaluates, keeps the checkpoints and writes the record.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from .inputs import inputs_of
from .runs import Run
from .store import Store
from .trainer import (
    AGREE,
    Job,
    Outcome,
    about,
    checkpoint_of,
    chosen_device,
    interruptible,
    load_checkpoint,
    save_checkpoint,
    spent,
)
from .training import Training

__all__ = ["are_several", "train_together"]


def are_several() -> bool:
    """Whether torchrun started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def train_together(
    run: Run,
    store: Store,
    *,
    data_dir: Path | None = None,
    device: torch.device | str | None = None,
    minutes: float = float("inf"),
    checkpoint_seconds: float = 60.0,
    **_: Any,
) -> Outcome:
    """Train one run in all processes of the group; to be called in each of them."""
    outcome = Outcome()
    deadline = time.monotonic() + 60 * minutes
    with _group(device) as (rank, world, own), interruptible() as interrupted:
        lock = store.lock(run) if rank == 0 else None
        known = rank == 0 and store.get(run) is not None
        go_on, known = _from_first([lock is not None and not known, known])
        if not go_on:
            outcome.known, outcome.elsewhere = int(known), [] if known else [run]
            if lock is not None:
                lock.release()
            return outcome
        try:
            state = load_checkpoint(store.checkpoint(run))
            training = Training(run, inputs_of(run, data_dir, own), state and state["training"], rank, world)
            job = Job(run, training, lock, about(own) | {"processes": world}, *spent(state))
            stopped = _train(job, lambda: interrupted() or time.monotonic() > deadline, store, checkpoint_seconds, rank)
            if stopped:
                outcome.unfinished, outcome.interrupted = [run], interrupted()
            elif rank == 0:
                record = job.record()
                store.write(record)
                outcome.trained.append(record)
            distributed.barrier()
        finally:
            if lock is not None:
                lock.release()
    return outcome


def _train(job: Job, must_stop: Callable[[], bool], store: Store, checkpoint_seconds: float, rank: int) -> bool:
    """Train to the end; whether it was stopped before. All processes agree on when to save and when to stop."""
    training, saved = job.training, time.monotonic()
    while not training.finished and training.diverged is None:
        training.step()
        training.collect()
        if training.done % AGREE and not training.at_epoch_end:
            continue
        stop, due = _any([must_stop(), rank == 0 and time.monotonic() - saved > checkpoint_seconds])
        if (stop or due) and not training.finished:
            state = training.state_dict()
            if rank == 0:
                save_checkpoint(store.checkpoint(job.run), checkpoint_of(job, state))
            saved = time.monotonic()
        if stop and not training.finished:
            return True
    return False


@contextmanager
def _group(device: torch.device | str | None) -> Iterator[tuple[int, int, torch.device]]:
    """The processes torchrun started, each with a device of its own."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    own = chosen_device(device)
    if gpu := own.type == "cuda":
        own = chosen_device(f"cuda:{local}")
        torch.cuda.set_device(own)
    made = not distributed.is_initialized()
    if made:
        distributed.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(minutes=10))
    try:
        yield distributed.get_rank(), distributed.get_world_size(), own
    finally:
        if made:
            distributed.destroy_process_group()


def _from_first(flags: list[bool]) -> list[bool]:
    sent: list[Any] = [flags]
    distributed.broadcast_object_list(sent)
    return list(sent[0])


def _any(flags: list[bool]) -> list[bool]:
    """Each flag, if any process has set it."""
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    counts = torch.tensor([int(flag) for flag in flags], device=device)
    distributed.all_reduce(counts, distributed.ReduceOp.MAX)
    return [bool(count) for count in counts.tolist()]
