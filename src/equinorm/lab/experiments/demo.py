"""`equinorm demo`: ENorm in deep nets, and every family of methods on one net, on scikit-learn's digits, in a minute.

A `Study` trains several methods in the same way. In the first the nets are fully connected and up to 21 layers deep;
in the second a small residual net of convolutions gets each method from `equinorm.convert`. A method is one line: how
to build the net, and what to attach to its optimizer. Everything else is the same for all of a study.

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
from torch.nn.functional import cross_entropy, relu
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import equinorm
from equinorm.msr import parameter_groups

from ...errors import UserError
from ...files import replacing, write_text

WIDTH, BATCH, WEIGHT_DECAY = 100, 64, 1e-3
DEPTHS = (1, 9, 15, 19)  # intermediary layers: width × width, between the first layer and the classifier
CHANNELS, CONVOLUTIONS = 16, 9
SEEDS = 3
RATES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # what `tune` chooses from

# -- nets --------------------------------------------------------------------------------------------------------------


def he_initialized(model: nn.Sequential) -> nn.Sequential:
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model


def fully_connected(depth: int, images: Tensor, bias: bool = True, norm: bool = False) -> nn.Sequential:
    """Linear and ReLU, `depth` intermediary layers deep."""
    widths = [images[0].numel()] + [WIDTH] * (depth + 1)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers.append(nn.Linear(inputs, outputs, bias=bias and not norm))
        if norm:
            layers.append(nn.BatchNorm1d(outputs))
        layers.append(nn.ReLU())
    return he_initialized(nn.Sequential(*layers, nn.Linear(WIDTH, 10, bias=bias)))


class Block(nn.Module):
    """x + norm(conv(relu(norm(conv(x))))), rectified."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return relu(x + self.norm2(self.conv2(relu(self.norm1(self.conv1(x))))))


def residual(convolutions: int) -> nn.Sequential:
    """A convolution, residual blocks of two each, and a classifier; batch norms, which `convert` replaces."""
    stem = [nn.Conv2d(1, CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(CHANNELS), nn.ReLU()]
    blocks = [Block(CHANNELS) for _ in range(convolutions // 2)]
    return he_initialized(nn.Sequential(*stem, *blocks, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * CHANNELS, 10)))


# -- methods -----------------------------------------------------------------------------------------------------------

Build = Callable[[int, Tensor], nn.Sequential]
"""(depth, images to train on) -> net."""
Attach = Callable[[nn.Module, Optimizer, Tensor], object]
"""(net, its optimizer, images): make something act in every step."""


@dataclass(frozen=True)
class Method:
    """A net and what keeps it in balance. `rates`: the learning rate for each depth of its study, chosen by `tune`."""

    name: str
    build: Build
    attach: Attach
    rates: tuple[float, ...]
    colour: str  # from the Okabe-Ito palette, which colour-blind readers can tell apart
    marker: str
    how: str = ""  # what to give to `convert`, and what comes then


def without_bias(depth: int, images: Tensor) -> nn.Sequential:
    return fully_connected(depth, images, bias=False)


def batch_norm(depth: int, images: Tensor) -> nn.Sequential:
    return fully_connected(depth, images, norm=True)


def converted(method: str, data_dependent: bool = False) -> Build:
    """The residual net with one of `equinorm.methods()`; `data_dependent`: initialized from 256 images."""

    def build(depth: int, images: Tensor) -> nn.Sequential:
        batch = images[:256] if data_dependent else None
        model, _ = equinorm.convert(residual(depth), method, images[:2], init_batch=batch)
        assert isinstance(model, nn.Sequential)
        return model

    return build


def nothing(model: nn.Module, optimizer: Optimizer, images: Tensor) -> None:
    """The baseline."""


def enorm(c: float, bias: str = "safe") -> Attach:
    def attach(model: nn.Module, optimizer: Optimizer, images: Tensor) -> object:
        return equinorm.ENorm(model, optimizer, images[:2], c=c, bias=bias).attach()

    return attach


def mean_shift_rejection(model: nn.Module, optimizer: Optimizer, images: Tensor) -> object:
    return equinorm.MeanShiftRejection(model, optimizer).attach()


METHODS = (
    Method("baseline", fully_connected, nothing, (0.5, 0.1, 0.1, 0.05), "#000000", "o"),
    Method("BatchNorm", batch_norm, nothing, (1.0, 0.5, 1.0, 1.0), "#0072B2", "s"),
    Method("ENorm, c = 1", fully_connected, enorm(1.0), (0.2, 0.05, 0.05, 0.05), "#56B4E9", "v"),
    Method("ENorm-1.2, no biases", without_bias, enorm(1.2), (0.5, 0.05, 0.01, 0.02), "#009E73", "D"),
    Method("ENorm-1.2, safe biases", fully_connected, enorm(1.2), (0.2, 0.05, 0.05, 0.02), "#D55E00", "^"),
    # at the rates of safe biases: `tune` finds none at which plain ones train at 15 or 19 layers
    Method("ENorm-1.2, plain biases", fully_connected, enorm(1.2, "plain"), (0.2, 0.05, 0.05, 0.02), "#CC79A7", "x"),
)

FAMILIES = (
    Method("no normalization", converted("none"), nothing, (0.02,), "#000000", "o", '"none"'),
    Method("BatchNorm", converted("batchnorm"), nothing, (0.02,), "#0072B2", "s", '"batchnorm"'),
    Method("ENorm", converted("none"), enorm(1.0), (0.01,), "#56B4E9", "v", '"none", then ENorm'),
    Method("EquiNorm", converted("equinorm"), nothing, (0.1,), "#009E73", "D", '"equinorm"'),
    Method(
        "mean shift rejection", converted("msr"), mean_shift_rejection, (0.5,), "#D55E00", "^",
        '"msr", then MeanShiftRejection',
    ),
    Method(
        "weight norm", converted("weightnorm", data_dependent=True), nothing, (0.02,), "#CC79A7", "P",
        '"weightnorm", init_batch=images',
    ),
    Method(
        "scaled weight norm", converted("scaled_weightnorm"), nothing, (0.1,), "#E69F00", "X",
        '"scaled_weightnorm"',
    ),
)  # fmt: skip

# -- studies -----------------------------------------------------------------------------------------------------------


def standardized(images: Tensor, like: Tensor) -> Tensor:
    """Vectors of mean 0 and variance 1 over all pixels of the images to train on."""
    return ((images - like.mean()) / like.std(correction=0)).flatten(1).float()


def pixels(images: Tensor, like: Tensor) -> Tensor:
    """Pixels in [0, 1] as they are, which EquiNorm asks for."""
    return images.unsqueeze(1).float()


@dataclass(frozen=True)
class Study:
    """Methods that are trained in the same way."""

    net: str
    methods: tuple[Method, ...]
    depths: tuple[int, ...]
    inputs: Callable[[Tensor, Tensor], Tensor]
    steps: int
    momentum: float

    def method(self, name: str) -> Method:
        return next(method for method in self.methods if method.name == name)

    def rate(self, method: Method, depth: int) -> float:
        return method.rates[self.depths.index(depth)]


DEEP = Study("fully connected", METHODS, DEPTHS, standardized, steps=200, momentum=0.0)
RESIDUAL = Study("residual", FAMILIES, (CONVOLUTIONS,), pixels, steps=150, momentum=0.9)
STUDIES = (DEEP, RESIDUAL)


def study_of(net: str) -> Study:
    return next(study for study in STUDIES if study.net == net)


# -- one run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    net: str  # of a study
    method: str
    depth: int
    lr: float
    seed: int
    steps: int


@dataclass(frozen=True)
class Job(Setting):
    validation: bool = False  # train on a part of the training set and test on the rest of it


@dataclass(frozen=True)
class Run(Setting):
    """A line of `runs.jsonl`."""

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
    scaled = [torch.from_numpy(x / 16).view(-1, 8, 8) for x in (train, test)]
    return scaled[0], torch.from_numpy(train_y), scaled[1], torch.from_numpy(test_y)


def train(job: Job) -> tuple[nn.Sequential, int | None]:
    """The trained net, and the step at which its loss stopped being a number, if it did."""
    study = study_of(job.net)
    method = study.method(job.method)
    raw, labels, _, _ = digits(job.validation)
    images = study.inputs(raw, raw)
    torch.manual_seed(job.seed)
    model = method.build(job.depth, images)
    optimizer = SGD(parameter_groups(model, WEIGHT_DECAY), lr=job.lr, momentum=study.momentum)
    method.attach(model, optimizer, images)
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
    seen, _, images, labels = digits(job.validation)
    model.eval()
    with torch.no_grad():
        correct = model(study_of(job.net).inputs(images, seen)).argmax(1) == labels
    accuracy = None if diverged is not None else round(100 * float(correct.float().mean()), 2)
    split = "validation" if job.validation else "test"
    seconds = round(time.monotonic() - start, 2)
    return Run(job.net, job.method, job.depth, job.lr, job.seed, job.steps, split, accuracy, diverged, seconds)


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
    """Train every method at every depth; print tables, draw a picture, and keep every run."""
    console = Console()
    start = time.monotonic()
    seeds, every = (1, 2) if quick else (SEEDS, 1)
    _make_folder(out)
    jobs = [
        Job(study.net, method.name, depth, study.rate(method, depth), seed + i, study.steps)
        for study in STUDIES
        for method in study.methods
        for depth in study.depths[::every]
        for i in range(seeds)
    ]
    runs = run_all(jobs, console, "training")
    energies = balanced_energies(replace(jobs[0], depth=15, lr=DEEP.rate(METHODS[0], 15)))
    lines = [header(command, protocol_of(seeds, seed)), *(asdict(r) for r in runs), {"energies": asdict(energies)}]
    write_text(out / "runs.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    text = io.StringIO()
    for target in (console, Console(file=text, width=110)):
        target.print(by_depth([r for r in runs if r.net == DEEP.net]))
        target.print(by_family([r for r in runs if r.net == RESIDUAL.net]))
        target.print(protocol_of(seeds, seed), markup=False, highlight=False)
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
        Job(study.net, method.name, depth, lr, seed, study.steps, validation=True)
        for study in STUDIES
        for method in study.methods
        for depth in study.depths
        for lr in RATES
        for seed in (1000, 1001)
    ]
    runs = run_all(jobs, console, "tuning")
    lines = [
        header(command, "learning rates, each on 270 images held out of the training set"),
        *(asdict(r) for r in runs),
    ]
    write_text(out / "tuning.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    for study in STUDIES:
        for method in study.methods:
            mine = [r for r in runs if (r.net, r.method) == (study.net, method.name)]
            chosen = tuple(best_rate([r for r in mine if r.depth == d]) for d in study.depths)
            note = "" if chosen == method.rates else f" (the demo has {method.rates})"
            console.print(f"{study.net}, {method.name}: {chosen}{note}", markup=False, highlight=False)
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


def protocol_of(seeds: int, seed: int) -> str:
    _, labels, _, test_labels = digits(validation=False)
    several = (
        f"median (lowest to highest) of {seeds} seeds, {seed} to {seed + seeds - 1}"
        if seeds > 1
        else f"one seed, {seed}"
    )
    return (
        f"Test accuracy in %, {several}. scikit-learn's digits: {len(labels):,} images to train on, {len(test_labels)} "
        f"to test on, one fixed split. He initialization, SGD, batch {BATCH}, learning rate falling linearly to 0, "
        f"weight decay {WEIGHT_DECAY:g}. Fully connected nets: width {WIDTH}, standardized inputs, no momentum, "
        f"{DEEP.steps} steps. Residual net: {CONVOLUTIONS} convolutions, 3 by 3, of {CHANNELS} channels, pixels in "
        f"[0, 1], momentum {RESIDUAL.momentum}, {RESIDUAL.steps} steps. Learning rates chosen for each method and "
        f"depth from {', '.join(map(str, RATES))} on 270 images held out of the training set (equinorm demo --tune), "
        "never on the test set; plain biases run at the rates of safe ones."
    )


def by_depth(runs: Sequence[Run]) -> Table:
    depths = sorted({r.depth for r in runs})
    title = "Fully connected nets, by number of intermediary layers"
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("method", no_wrap=True)
    for depth in depths:
        table.add_column(str(depth), justify="right", no_wrap=True)
    for name in dict.fromkeys(r.method for r in runs):
        table.add_row(name, *(cell([r for r in runs if r.method == name and r.depth == d]) for d in depths))
    return table


def by_family(runs: Sequence[Run]) -> Table:
    title = f"Every family on a residual net of {CONVOLUTIONS} convolutions"
    table = Table(title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    table.add_column("accuracy", justify="right", no_wrap=True)
    table.add_column("equinorm.convert(net, ..., x)", no_wrap=True)
    for name in dict.fromkeys(r.method for r in runs):
        mine = [r for r in runs if r.method == name]
        table.add_row(name, cell(mine).replace("\n", "  "), RESIDUAL.method(name).how)
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
    seen, _, unseen, _ = digits(validation=False)
    images = study_of(job.net).inputs(unseen, seen).double()
    with _one_thread():
        model = train(job)[0].double()
    symmetry = equinorm.trace(model, images)
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def energy() -> list[float]:
        return [float(layer.weight.square().sum()) for layer in model if isinstance(layer, nn.Linear)]

    with torch.no_grad():
        before, after, change = energy(), {}, 0.0
        outputs = model(images)
        for c in (1.0, 1.2):
            model.load_state_dict(original)
            equinorm.balance_(model, symmetry=symmetry, c=c)
            after[f"{c:g}"] = energy()
            change = max(change, float((model(images) - outputs).abs().max() / outputs.abs().max()))
    return Energies(job.depth, before, after, change)


def draw(runs: Sequence[Run], energies: Energies, path: Path) -> None:
    """Accuracy against depth, energy per layer before and after balancing, and accuracy of every family."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.8), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)  # no display, no global state
    panels = figure.subplot_mosaic(
        [["depth", "energy"], ["family", "family"]], width_ratios=[1.25, 1], height_ratios=[1.6, 1]
    )
    _draw_accuracy(panels["depth"], [r for r in runs if r.net == DEEP.net])
    _draw_energies(panels["energy"], energies)
    _draw_families(panels["family"], [r for r in runs if r.net == RESIDUAL.net])
    for name, axes in panels.items():
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x" if name == "family" else "y", color="0.9", linewidth=0.8)
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
    axes.set_title(f"Deep fully connected nets{note}", loc="left", fontsize=11)
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


def _draw_families(axes: Any, runs: Sequence[Run]) -> None:
    """A line for each method: the median, and from the lowest to the highest seed."""
    names = list(dict.fromkeys(r.method for r in runs))
    found = {name: [r.accuracy or 0.0 for r in runs if r.method == name] for name in names}  # 0: diverged
    middles = {name: statistics.median(values) for name, values in found.items()}
    floor = max(0.0, 5 * math.floor((min(middles.values()) - 1) / 5))
    for row, name in enumerate(names):
        method, middle, low, high = RESIDUAL.method(name), middles[name], min(found[name]), max(found[name])
        axes.plot([max(low, floor), high], [row, row], color=method.colour, linewidth=1.6)
        axes.plot(middle, row, color=method.colour, marker=method.marker, markersize=8)
        axes.annotate(f"{middle:.1f}", (high, row), (10, 0), textcoords="offset points", va="center", fontsize=8.5)
        if low < floor:  # a seed that failed does not set the scale
            axes.annotate(f"lowest seed {low:.0f}", (floor, row), (6, 7), textcoords="offset points", va="center",
                          color=method.colour, fontsize=8.5)  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(floor, 100)
    axes.set_xlabel("test accuracy (%)")
    axes.set_title(f"Every family on a residual net of {CONVOLUTIONS} convolutions", loc="left", fontsize=11)


if __name__ == "__main__":
    run(Path("equinorm-demo"), command=sys.argv)
