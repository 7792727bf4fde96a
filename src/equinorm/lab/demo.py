"""`equinorm demo`: deep fully connected ReLU nets on scikit-learn's digits, with and without ENorm, in a minute.

A method is one line of `METHODS`: how to build the net, and what to attach to its optimizer. Everything else (data,
initialization, batches, schedule, weight decay) is the same for all.

Protocol: 450 of the 1,797 images are the test set, fixed once and for all. Learning rates were chosen by `tune`, on 270
images held out of the remaining 1,347; the reported nets are then trained on all 1,347. Only those meet the test set.
"""

from __future__ import annotations

import io
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import equinorm

from . import UserError
from .files import replacing, write_text

WIDTH, BATCH, STEPS, WEIGHT_DECAY = 100, 64, 200, 1e-3
DEPTHS = (1, 9, 15, 19)  # intermediary layers: width × width, between the first layer and the classifier
SEEDS = 3
RATES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # what `tune` chooses from

# -- methods -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A net and what keeps it in balance. `rates` holds the learning rate for each of `DEPTHS`, as chosen by `tune`."""

    name: str
    build: Callable[[int], nn.Sequential]
    attach: Callable[[nn.Module, Optimizer], object]
    rates: tuple[float, ...]
    colour: str  # from the Okabe-Ito palette, which colour-blind readers can tell apart
    marker: str


def fully_connected(depth: int, bias: bool = True, norm: bool = False) -> nn.Sequential:
    """Linear and ReLU, `depth` intermediary layers deep; He initialization, zero biases."""
    widths = [64] + [WIDTH] * (depth + 1)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers.append(nn.Linear(inputs, outputs, bias=bias and not norm))
        if norm:
            layers.append(nn.BatchNorm1d(outputs))
        layers.append(nn.ReLU())
    layers.append(nn.Linear(WIDTH, 10, bias=bias))
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def without_bias(depth: int) -> nn.Sequential:
    return fully_connected(depth, bias=False)


def batch_norm(depth: int) -> nn.Sequential:
    return fully_connected(depth, norm=True)


def nothing(model: nn.Module, optimizer: Optimizer) -> None:
    """The baseline."""


def enorm(c: float, bias: str = "safe") -> Callable[[nn.Module, Optimizer], object]:
    def attach(model: nn.Module, optimizer: Optimizer) -> object:
        return equinorm.ENorm(model, optimizer, torch.zeros(2, 64), c=c, bias=bias).attach()

    return attach


METHODS = (
    Method("baseline", fully_connected, nothing, (0.5, 0.1, 0.1, 0.05), "#000000", "o"),
    Method("BatchNorm", batch_norm, nothing, (1.0, 0.5, 1.0, 1.0), "#0072B2", "s"),
    Method("ENorm, c = 1", fully_connected, enorm(1.0), (0.2, 0.05, 0.05, 0.05), "#56B4E9", "v"),
    Method("ENorm-1.2, no biases", without_bias, enorm(1.2), (0.5, 0.05, 0.01, 0.02), "#009E73", "D"),
    Method("ENorm-1.2, safe biases", fully_connected, enorm(1.2), (0.2, 0.05, 0.05, 0.02), "#D55E00", "^"),
    # at the rates of safe biases: `tune` finds none at which plain ones train at 15 or 19 layers
    Method("ENorm-1.2, plain biases", fully_connected, enorm(1.2, "plain"), (0.2, 0.05, 0.05, 0.02), "#CC79A7", "x"),
)

# -- one run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    method: int  # in METHODS
    depth: int
    lr: float
    seed: int
    steps: int
    validation: bool = False  # train on a part of the training set and test on the rest of it


@dataclass(frozen=True)
class Run:
    """A line of `runs.jsonl`."""

    method: str
    depth: int
    lr: float
    seed: int
    steps: int
    split: str
    accuracy: float | None  # None: diverged
    diverged_at: int | None
    seconds: float


@cache
def digits(validation: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train on, images and labels to test on. The test set is the same 450 images always."""
    images, labels = load_digits(return_X_y=True)
    train, test, train_y, test_y = train_test_split(images, labels, test_size=450, random_state=0, stratify=labels)
    if validation:
        train, test, train_y, test_y = train_test_split(train, train_y, test_size=270, random_state=0, stratify=train_y)
    mean, deviation = train.mean(), train.std()
    scaled = [torch.from_numpy((x - mean) / deviation).float() for x in (train, test)]
    return scaled[0], torch.from_numpy(train_y), scaled[1], torch.from_numpy(test_y)


def train(job: Job) -> tuple[nn.Sequential, int | None]:
    """The trained net, and the step at which its loss stopped being a number, if it did."""
    images, labels, _, _ = digits(job.validation)
    torch.manual_seed(job.seed)
    model = METHODS[job.method].build(job.depth)
    optimizer = SGD(model.parameters(), lr=job.lr, weight_decay=WEIGHT_DECAY)
    METHODS[job.method].attach(model, optimizer)
    schedule = LambdaLR(optimizer, lambda step: 1 - step / job.steps)
    for step, batch in enumerate(batches(len(images), job.steps)):
        loss = cross_entropy(model(images[batch]), labels[batch])
        if not math.isfinite(loss.item()):
            return model, step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model, None


def batches(size: int, steps: int) -> Iterator[Tensor]:
    """Indices of one batch per step; a new shuffle for every epoch, whose last, smaller batch is left out."""
    per_epoch = size // BATCH
    for step in range(steps):
        if step % per_epoch == 0:
            order = torch.randperm(size)
        yield order[step % per_epoch * BATCH :][:BATCH]


def run_job(job: Job) -> Run:
    """Train and test one net. (A process of its own may do this, so arguments and result are plain.)"""
    start = time.monotonic()
    model, diverged = train(job)
    _, _, images, labels = digits(job.validation)
    model.eval()
    with torch.no_grad():
        correct = model(images).argmax(1) == labels
    accuracy = None if diverged is not None else round(100 * float(correct.float().mean()), 2)
    split = "validation" if job.validation else "test"
    seconds = round(time.monotonic() - start, 2)
    name = METHODS[job.method].name
    return Run(name, job.depth, job.lr, job.seed, job.steps, split, accuracy, diverged, seconds)


# -- many runs ---------------------------------------------------------------------------------------------------------


def run_all(jobs: Sequence[Job], console: Console, what: str) -> list[Run]:
    """All runs, one process per core, the long ones first; a bar on a terminal."""
    workers = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 4)
    order = sorted(range(len(jobs)), key=lambda i: -jobs[i].depth * jobs[i].steps)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found: dict[int, Run] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=len(jobs))
        for i, run in _results(jobs, order, workers):
            found[i] = run
            progress.advance(task)
    return [found[i] for i in range(len(jobs))]


def _results(jobs: Sequence[Job], order: Sequence[int], workers: int) -> Iterator[tuple[int, Run]]:
    if workers < 2 or len(jobs) < 8:  # starting a process costs more than a few runs
        with _one_thread():
            for i in order:
                yield i, run_job(jobs[i])
        return
    pool = ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    )
    try:
        futures = {pool.submit(run_job, jobs[i]): i for i in order}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _one_thread() -> Iterator[None]:
    """These nets are so small that a second thread only costs time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run(out: Path, seed: int = 0, quick: bool = False, command: Sequence[str] = ("equinorm", "demo")) -> None:
    """Train every method at every depth; print a table, draw a picture, and keep every run."""
    console = Console()
    start = time.monotonic()
    depths, seeds, steps = ((1, 15), 1, 150) if quick else (DEPTHS, SEEDS, STEPS)
    _make_folder(out)
    jobs = [
        Job(number, depth, method.rates[DEPTHS.index(depth)], seed + i, steps)
        for number, method in enumerate(METHODS)
        for depth in depths
        for i in range(seeds)
    ]
    runs = run_all(jobs, console, "training")
    energies = balanced_energies(replace(jobs[0], depth=15, lr=METHODS[0].rates[DEPTHS.index(15)]))
    table = summary(runs)
    protocol = protocol_of(seeds, steps, seed)
    lines = [header(command, protocol), *(asdict(r) for r in runs), {"energies": asdict(energies)}]
    write_text(out / "runs.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    text = io.StringIO()
    plain = Console(file=text, width=110)
    for target in (console, plain):
        target.print(table)
        target.print(protocol, markup=False, highlight=False)
        target.print(energies.sentence(), markup=False, highlight=False)
    write_text(out / "table.txt", text.getvalue())
    draw(runs, energies, out / "demo.png")
    console.print(
        f"{len(runs)} runs in {time.monotonic() - start:.0f} s. Written to {out}: demo.png, table.txt, runs.jsonl",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip


def tune(out: Path, command: Sequence[str]) -> None:
    """Choose a learning rate for each method and depth on images held out of the training set."""
    console = Console()
    _make_folder(out)
    jobs = [
        Job(number, depth, lr, seed, STEPS, validation=True)
        for number in range(len(METHODS))
        for depth in DEPTHS
        for lr in RATES
        for seed in (1000, 1001)
    ]
    runs = run_all(jobs, console, "tuning")
    lines = [
        header(command, "learning rates, each on 270 images held out of the training set"),
        *(asdict(r) for r in runs),
    ]
    write_text(out / "tuning.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    for method in METHODS:
        chosen = tuple(best_rate([r for r in runs if r.method == method.name and r.depth == d]) for d in DEPTHS)
        note = "" if chosen == method.rates else f" (METHODS has {method.rates})"
        console.print(f"{method.name}: {chosen}{note}", markup=False, highlight=False)
    console.print(f"Written to {out / 'tuning.jsonl'}", markup=False, highlight=False)


def best_rate(runs: Iterable[Run]) -> float:
    """The rate of the best mean accuracy; a diverged run counts as 0, the smaller rate wins a tie."""
    scores: dict[float, list[float]] = {}
    for r in runs:
        scores.setdefault(r.lr, []).append(r.accuracy or 0.0)
    return max(sorted(scores), key=lambda lr: statistics.mean(scores[lr]))


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {out}: {error.strerror}") from error


# -- what is reported --------------------------------------------------------------------------------------------------


def header(command: Sequence[str], protocol: str) -> dict[str, Any]:
    packages = ("equinorm", "torch", "numpy", "scikit-learn")
    return {
        "command": shlex.join([Path(command[0]).name, *command[1:]]),
        "protocol": protocol,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def protocol_of(seeds: int, steps: int, seed: int) -> str:
    _, labels, _, test_labels = digits(validation=False)
    several = (
        f"median (lowest to highest) of {seeds} seeds, {seed} to {seed + seeds - 1}"
        if seeds > 1
        else f"one seed, {seed}"
    )
    short = f" Rates were chosen for {STEPS} steps." if steps != STEPS else ""
    return (
        f"Test accuracy in %, {several}. scikit-learn's digits: {len(labels):,} images to train on, {len(test_labels)} "
        f"to test on, one fixed split. Width {WIDTH}, He initialization, SGD without momentum, batch {BATCH}, {steps} "
        f"steps, learning rate falling linearly to 0, weight decay {WEIGHT_DECAY:g}. Learning rates chosen for each "
        f"method and depth from {', '.join(map(str, RATES))} on 270 images held out of the training set (equinorm demo "
        f"--tune), never on the test set; plain biases run at the rates of safe ones.{short}"
    )


def summary(runs: Sequence[Run]) -> Table:
    depths = sorted({r.depth for r in runs})
    title = "Test accuracy by number of intermediary layers"
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("method", no_wrap=True)
    for depth in depths:
        table.add_column(str(depth), justify="right", no_wrap=True)
    for name in dict.fromkeys(r.method for r in runs):
        table.add_row(name, *(cell([r for r in runs if r.method == name and r.depth == d]) for d in depths))
    return table


def cell(runs: Sequence[Run]) -> str:
    """The median above the spread, or the step at which the first seed diverged. (Lines fit narrow terminals.)"""
    good = sorted(r.accuracy for r in runs if r.accuracy is not None)
    steps = [r.diverged_at for r in runs if r.diverged_at is not None]
    if steps:
        some = f"\n{len(steps)} of {len(runs)}" if good else ""
        return f"diverged\nat step {min(steps)}{some}"
    spread = f"\n{good[0]:.1f}-{good[-1]:.1f}" if len(good) > 1 else ""
    return f"{statistics.median(good):.1f}{spread}"


@dataclass(frozen=True)
class Energies:
    """‖W_k‖² of each layer of a trained baseline net, before and after balancing it."""

    depth: int
    before: list[float]
    after: dict[str, list[float]]  # by c
    relative_change: float  # of the outputs, in float64

    def sentence(self) -> str:
        before, after = sum(self.before), sum(self.after["1"])
        return (
            f"Balancing the trained baseline with {self.depth} intermediary layers (c = 1): squared norm {before:.0f} "
            f"to {after:.0f}; its outputs change by {self.relative_change:.0e} (relative, float64)."
        )


def balanced_energies(job: Job) -> Energies:
    _, _, images, _ = digits(validation=False)
    with _one_thread():
        model = train(job)[0].double()
    symmetry = equinorm.trace(model, images.double())
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def energy() -> list[float]:
        return [float(layer.weight.square().sum()) for layer in model if isinstance(layer, nn.Linear)]

    with torch.no_grad():
        before, after, change = energy(), {}, 0.0
        outputs = model(images.double())
        for c in (1.0, 1.2):
            model.load_state_dict(original)
            equinorm.balance_(model, symmetry=symmetry, c=c)
            after[f"{c:g}"] = energy()
            change = max(change, float((model(images.double()) - outputs).abs().max() / outputs.abs().max()))
    return Energies(job.depth, before, after, change)


def draw(runs: Sequence[Run], energies: Energies, path: Path) -> None:
    """Accuracy against depth, and energy per layer before and after balancing."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)  # no display, no global state
    left, right = figure.subplots(1, 2, width_ratios=[1.25, 1])
    _draw_accuracy(left, runs)
    _draw_energies(right, energies)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def _draw_accuracy(axes: Any, runs: Sequence[Run]) -> None:
    from matplotlib.ticker import MultipleLocator

    depths = sorted({r.depth for r in runs})
    lost_at = {(r.method, r.depth) for r in runs if r.accuracy is None}
    shown = [r for r in runs if (r.method, r.depth) not in lost_at]
    floor = max(0.0, 5 * math.floor((min(r.accuracy or 0.0 for r in shown) - 1) / 5)) if shown else 0.0
    for number, method in enumerate(METHODS):
        shift = 0.16 * (number - (len(METHODS) - 1) / 2)  # so that the bars of two methods do not hide each other
        points: dict[int, list[float]] = {}
        for r in shown:
            if r.method == method.name:
                points.setdefault(r.depth, []).append(r.accuracy or 0.0)
        kept, lost = sorted(points), [d for d in depths if (method.name, d) in lost_at]
        middle = [statistics.median(points[d]) for d in kept]
        below = [m - min(points[d]) for m, d in zip(middle, kept, strict=True)]
        above = [max(points[d]) - m for m, d in zip(middle, kept, strict=True)]
        style = {"color": method.colour, "marker": method.marker, "markersize": 6, "linewidth": 1.6}
        where = [d + shift for d in kept]
        axes.errorbar(where, middle, [below, above], label=method.name, elinewidth=1, capsize=0, **style)
        if lost:
            gone = [d + shift for d in lost]
            axes.plot(
                gone, [floor] * len(gone), "x", color=method.colour, markersize=9, markeredgewidth=2.2, clip_on=False
            )
            axes.plot([*where[-1:], gone[0]], [*middle[-1:], floor][-2:], ":", color=method.colour, linewidth=1.4)
            for x in gone:
                axes.annotate("diverged", (x, floor), (-9, 7), textcoords="offset points", ha="right", va="center",
                              color=method.colour, fontsize=8.5)  # fmt: skip
    axes.set_ylim(floor, 100)
    axes.yaxis.set_major_locator(MultipleLocator(5))
    axes.set_xticks(depths)
    axes.set_xlabel("intermediary layers")
    axes.set_ylabel("test accuracy (%)")
    seeds = len({r.seed for r in runs})
    note = f": median, lowest and highest of {seeds} seeds" if seeds > 1 else ""
    axes.set_title(f"Deep ReLU nets on digits{note}", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8.5, loc="lower left")


def _draw_energies(axes: Any, energies: Energies) -> None:
    layers = range(1, len(energies.before) + 1)
    axes.plot(layers, energies.before, "o-", color="#000000", label="as trained", linewidth=1.6)
    for c, colour, marker in (("1", "#56B4E9", "v"), ("1.2", "#D55E00", "^")):
        axes.plot(layers, energies.after[c], color=colour, marker=marker, label=f"balanced, c = {c}", linewidth=1.6)
    axes.set_yscale("log")
    axes.set_xlabel("layer, from input to output")
    axes.set_ylabel("energy ‖W‖²")
    axes.set_title(f"One net, {energies.depth} intermediary layers, same function", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8.5)


if __name__ == "__main__":
    run(Path("equinorm-demo"), command=sys.argv)
