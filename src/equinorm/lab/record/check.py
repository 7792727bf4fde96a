"""Before time is spent on runs: does every method capture, is a captured step the eager one, how long is it."""

from __future__ import annotations

import time
import traceback

import torch

from .config import Config, method
from .runner import Runner
from .sizes import ORDER, SIZES
from .training import Training, together

__all__ = ["check"]

STEPS = 60


def check(run: Runner, sizes: tuple[int, ...] = (2, 32, 1000)) -> None:
    """Two captured steps of every method beside two eager ones, and milliseconds per step alone and side by side."""
    smallest: list[Training] = []
    for norm in ORDER:
        line = f"{norm:10}"
        for size in sizes:
            said, training = _one(run, norm, size)
            line += f" | batch {size}: {said}"
            if size == min(sizes) and training is not None:
                smallest.append(training)
        run.say(line)
    run.say("above: the relative difference of a captured and an eager update, and milliseconds per step")
    if smallest:
        for training in smallest:
            training.reset(0)
            training.prepare()
        each = 1000 * together(smallest) / max(training.steps for training in smallest)
        steps = sum(3 * 50000 / size for size in SIZES)
        run.say(
            f"{len(smallest)} methods side by side at batch {min(sizes)}: {each:.3f} ms a step of all; at that pace "
            f"three epochs at every size take {each * steps / 1000:.0f} s a seed"
        )
    run.forget()


def _one(run: Runner, norm: str, size: int) -> tuple[str, Training | None]:
    """What is said about a method at a size, and its net if all went well."""
    try:
        training = _made(run, method(norm, batch=size))
        said = f"{_difference(training):.1e}, {_milliseconds(training):.3f} ms"
    except Exception as error:  # the other methods are to be checked
        run.say(traceback.format_exc()[-1500:])
        return f"failed: {type(error).__name__}: {str(error)[:200]}", None
    return said + ("" if training.graphs else " (eager)"), training


def _made(run: Runner, config: Config) -> Training:
    """A captured net with tables for a few steps."""
    images = run.images["held-out"]
    small = config.but(epochs=1.0) if run.toy else config.but(epochs=2 * STEPS * config.batch / len(images.train))
    training = run.training(run.adapted(small), "held-out")
    training.reset(0)
    training.prepare()
    return training


def _difference(training: Training) -> float:
    """How far two captured steps and two eager ones end up from each other, in lengths of the way they went."""
    ends = []
    for captured in (True, False):
        training.reset(0)
        training.prepare()
        start = training.optimizer.filters.clone()
        if training.device.type == "cuda":
            torch.cuda.synchronize()
        for _ in range(2):
            if captured:
                training.advance(1)
            else:
                training.step(training.phase(0))
        if training.device.type == "cuda":
            torch.cuda.synchronize()
        ends.append(training.optimizer.filters - start)
    return float((ends[0] - ends[1]).norm() / ends[1].norm())


def _milliseconds(training: Training) -> float:
    training.reset(0)
    training.prepare()
    training.advance(5)
    if training.device.type == "cuda":
        torch.cuda.synchronize()
    started, steps = time.perf_counter(), min(STEPS, training.steps - 5)
    training.advance(steps)
    if training.device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started) / max(steps, 1)
