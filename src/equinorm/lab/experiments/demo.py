"""`equinorm demo`: ENorm in deep nets, and every family of methods on one net, on scikit-learn's digits, in minutes.

A recipe like those of the papers: a `Study` is a base `Run` and rows that differ from it in their method, a row is one
line. In the first study the nets are fully connected and up to 21 layers deep; in the second a small residual net of
convolutions has each method of `equinorm.convert`. The runs are trained and kept as all others of the laboratory:
what a folder has is not trained again, and what was interrupted goes on.

Protocol: 450 of the 1,797 images are the test set, fixed once and for all. Learning rates are chosen by `tune`, on 270
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
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from ... import balance_, trace
from ...errors import UserError
from ...files import write_text
from ..training.inputs import Inputs, inputs_of
from ..training.launchers import Options, launch
from ..training.runs import Data, Method, Model, Optim, Run
from ..training.schedules import Linear
from ..training.store import Record, Store
from ..training.training import Training
from .common import Candidate, Places, choose, held_out

WIDTH, BATCH, WEIGHT_DECAY = 100, 64, 1e-3
DEPTHS = (1, 9, 15, 19)  # intermediary layers: width × width, between the first layer and the classifier
CHANNELS, LAYERS = 16, 8
SEEDS, FIRST_TUNING_SEED = 3, 1000
RATES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # what `tune` chooses from
HELD_OUT = 270

# -- methods -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DemoRow:
    """A net and what keeps it in balance. `rates`: the learning rate for each depth of its study, chosen by `tune`."""

    name: str
    norm: str  # of the laboratory's nets, which have the names of `equinorm.methods()`
    rates: tuple[float, ...]
    colour: str  # from the Okabe-Ito palette, which colour-blind readers can tell apart
    marker: str
    method: Method = field(default_factory=Method)
    options: Mapping[str, Any] = field(default_factory=dict)  # of the model
    how: str = ""  # what to give to `convert`, and what comes then


def enorm(c: float, bias: str = "safe") -> Method:
    return Method("enorm", {"c": c, "bias": bias})


BIASES = {"bias": True}
DEEP_ROWS = (
    DemoRow("baseline", "none", (0.5, 0.1, 0.1, 0.05), "#000000", "o", options=BIASES),
    DemoRow("BatchNorm", "batchnorm", (1.0, 0.5, 1.0, 1.0), "#0072B2", "s"),
    DemoRow("ENorm, c = 1", "none", (0.2, 0.05, 0.05, 0.05), "#56B4E9", "v", enorm(1.0), BIASES),
    DemoRow("ENorm-1.2, no biases", "none", (0.5, 0.05, 0.01, 0.02), "#009E73", "D", enorm(1.2)),
    DemoRow("ENorm-1.2, safe biases", "none", (0.2, 0.05, 0.05, 0.02), "#D55E00", "^", enorm(1.2), BIASES),
    # at the rates of safe biases: `tune` finds none at which plain ones train at 15 or 19 layers
    DemoRow("ENorm-1.2, plain biases", "none", (0.2, 0.05, 0.05, 0.02), "#CC79A7", "x", enorm(1.2, "plain"), BIASES),
)
FAMILY_ROWS = (
    DemoRow("no normalization", "none", (0.02,), "#000000", "o", how='"none"'),
    DemoRow("BatchNorm", "batchnorm", (0.02,), "#0072B2", "s", how='"batchnorm"'),
    DemoRow("ENorm", "none", (0.01,), "#56B4E9", "v", enorm(1.0), how='"none", then ENorm'),
    DemoRow("EquiNorm", "equinorm", (0.1,), "#009E73", "D", how='"equinorm"'),
    DemoRow(
        "mean shift rejection",
        "msr",
        (0.5,),
        "#D55E00",
        "^",
        Method("msr", {"centre_luma": True}),
        how='"msr", then MeanShiftRejection',
    ),
    DemoRow("weight norm", "weightnorm", (0.02,), "#CC79A7", "P", how='"weightnorm", init_batch=images'),
    DemoRow("scaled weight norm", "scaled_weightnorm", (0.2,), "#E69F00", "X", how='"scaled_weightnorm"'),
)

# -- studies -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Study:
    """Rows that are trained in the same way, at some depths. `base`: the run that they all are but for their method."""

    net: str
    rows: tuple[DemoRow, ...]
    depths: tuple[int, ...]
    depth_option: str  # what the laboratory's net calls its depth
    base: Run

    def row(self, name: str) -> DemoRow:
        return next(row for row in self.rows if row.name == name)

    def run(self, row: DemoRow, depth: int, seed: int, lr: float | None = None) -> Run:
        """One run of a row; at the rate that was chosen for it, unless told."""
        rate = row.rates[self.depths.index(depth)] if lr is None else lr
        options = {**self.base.model.options, self.depth_option: depth, "norm": row.norm, **row.options}
        return replace(
            self.base,
            model=replace(self.base.model, options=options),
            method=row.method,
            optim=replace(self.base.optim, lr=rate),
            seed=seed,
            label=row.name,
        )

    def depth_of(self, run: Run) -> int:
        return int(run.model.options[self.depth_option])


def _base(inputs: str, model: Model, momentum: float, epochs: int) -> Run:
    optim = Optim(momentum=momentum, weight_decay=WEIGHT_DECAY, schedule=Linear())
    return Run(Data("digits", inputs=inputs), model, optim=optim, epochs=epochs, batch=BATCH, precision="float32")


DEEP = Study(
    "fully connected",
    DEEP_ROWS,
    DEPTHS,
    "hidden",
    _base("standard", Model("fc", {"width": WIDTH, "init": "he"}), momentum=0.0, epochs=9),
)
RESIDUAL = Study(
    "residual",
    FAMILY_ROWS,
    (LAYERS,),
    "depth",
    _base("unit", Model("resnet_cifar", {"width": CHANNELS, "init": "he"}), momentum=0.9, epochs=7),
)
STUDIES = (DEEP, RESIDUAL)


@dataclass(frozen=True)
class Score:
    """What became of a run: a line of `runs.jsonl`."""

    net: str  # of a study
    method: str
    depth: int
    lr: float
    seed: int
    steps: int
    split: str
    accuracy: float | None  # None: diverged
    diverged_at: int | None  # the last step of the epoch in which the loss stopped being a number
    seconds: float
    key: str  # of the run in `runs/`

    @classmethod
    def of(cls, study: Study, record: Record) -> Score:
        run = record.run
        images = len(inputs_of(run, None, torch.device("cpu")))
        per_epoch = math.ceil(images / run.batch)
        lost = record.status == "diverged"
        return cls(
            study.net,
            run.label,
            study.depth_of(run),
            run.optim.lr,
            run.seed,
            round(per_epoch * run.epochs),
            run.data.evaluate,
            None if lost else round(record.final["test_accuracy"], 2),
            per_epoch * len(record.epochs) if lost else None,
            round(record.final["seconds"], 2),
            run.key,
        )


# -- training ----------------------------------------------------------------------------------------------------------


def run(out: Path, seed: int = 0, quick: bool = False, command: Sequence[str] = ("equinorm", "demo")) -> None:
    """Train every method at every depth; print tables, draw a picture, and keep every run."""
    from .demo_picture import draw

    console = Console()
    start = time.monotonic()
    seeds, every = (1, 2) if quick else (SEEDS, 1)
    _make_folder(out)
    asked = [
        (study, study.run(row, depth, seed + i))
        for study in STUDIES
        for row in study.rows
        for depth in study.depths[::every]
        for i in range(seeds)
    ]
    scores, trained = train(out, asked)
    energies = balanced_energies(DEEP.run(DEEP.rows[0], 15, seed))
    lines = [header(command, protocol_of(seeds, seed)), *map(asdict, scores), {"energies": asdict(energies)}]
    write_text(out / "runs.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    text = io.StringIO()
    for target in (console, Console(file=text, width=110)):
        target.print(by_depth([score for score in scores if score.net == DEEP.net]))
        target.print(by_family([score for score in scores if score.net == RESIDUAL.net]))
        target.print(protocol_of(seeds, seed), markup=False, highlight=False)
        target.print(energies.sentence(), markup=False, highlight=False)
    write_text(out / "table.txt", text.getvalue())
    draw(scores, energies, out / "demo.png")
    known = "" if trained == len(scores) else f", {len(scores) - trained} of them trained before"
    said = f"{len(scores)} runs{known}, in {time.monotonic() - start:.0f} s."
    console.print(
        f"{said} Written to {out}: demo.png, table.txt, runs.jsonl", markup=False, highlight=False, soft_wrap=True
    )


def tune(out: Path, command: Sequence[str]) -> None:
    """Choose a learning rate for each method and depth on images held out of the training set."""
    console = Console()
    _make_folder(out)
    tried = [
        (study, candidate)
        for study in STUDIES
        for row in study.rows
        for depth in study.depths
        for candidate in candidates(study, row, depth)
    ]
    scores, _ = train(out, [(study, run) for study, candidate in tried for run in candidate.runs])
    lines = [header(command, f"learning rates, each on {HELD_OUT} images held out of the training set")]
    lines += map(asdict, scores)
    write_text(out / "tuning.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    accuracy = {score.key: math.nan if score.accuracy is None else score.accuracy for score in scores}
    for study in STUDIES:
        mine = [candidate for of, candidate in tried if of is study]
        for name, places in choose(mine, lambda run: accuracy[run.key]).items():
            rates, used = rates_of(places, study.depths), study.row(name).rates
            note = "" if rates == used else f" (the demo has {used})"
            console.print(f"{study.net}, {name}: {rates}{note}", markup=False, highlight=False)
    console.print(f"Written to {out / 'tuning.jsonl'}", markup=False, highlight=False)


def candidates(study: Study, row: DemoRow, depth: int) -> Iterator[Candidate]:
    for lr in RATES:
        runs = (held_out(study.run(row, depth, FIRST_TUNING_SEED + i, lr), HELD_OUT) for i in range(2))
        yield Candidate(row.name, depth, {"lr": lr}, tuple(runs))


def rates_of(places: Places, depths: Sequence[int]) -> tuple[float, ...]:
    return tuple(places[depth]["lr"] for depth in depths)


def train(out: Path, asked: Sequence[tuple[Study, Run]]) -> tuple[list[Score], int]:
    """What became of runs, and how many of them the folder did not have."""
    store = Store(out)
    processes = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 4)
    few = len(asked) < 8  # starting a process costs more than a few runs
    longest_first = [run for _, run in sorted(asked, key=lambda one: -one[0].depth_of(one[1]))]
    with _one_thread():
        outcome = launch(longest_first, store, options=Options(device="cpu", processes=1 if few else processes))
    if outcome.interrupted or outcome.unfinished:
        raise KeyboardInterrupt
    scores = []
    for study, run in asked:
        record = store.get(run)
        if record is None:
            raise UserError(
                f"another process trains {run.key} in {out}: wait for it, or give another folder with --out"
            )
        scores.append(Score.of(study, replace(record, run=run)))  # with this label
    return scores, len(outcome.trained)


@contextmanager
def _one_thread() -> Iterator[None]:
    """These nets are so small that a second thread only costs time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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
    several = (
        f"median (lowest to highest) of {seeds} seeds, {seed} to {seed + seeds - 1}"
        if seeds > 1
        else f"one seed, {seed}"
    )
    return (
        f"Test accuracy in %, {several}. scikit-learn's digits: 1,347 images to train on, 450 to test on, one fixed "
        f"split. He initialization, SGD, batch {BATCH}, learning rate falling linearly to 0, weight decay "
        f"{WEIGHT_DECAY:g}. Fully connected nets: width {WIDTH}, standardized inputs, no momentum, "
        f"{DEEP.base.epochs:g} epochs. Residual net: {LAYERS - 1} convolutions, 3 by 3, of {CHANNELS} to "
        f"{4 * CHANNELS} channels, pixels in [0, 1], momentum {RESIDUAL.base.optim.momentum:g}, "
        f"{RESIDUAL.base.epochs:g} epochs. "
        f"Learning rates chosen for each method and depth from {', '.join(map(str, RATES))} on {HELD_OUT} images held "
        "out of the training set (equinorm demo --tune), never on the test set; plain biases run at the rates of safe "
        "ones."
    )


def by_depth(scores: Sequence[Score]) -> Table:
    depths = sorted({score.depth for score in scores})
    title = "Fully connected nets, by number of intermediary layers"
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("method", no_wrap=True)
    for depth in depths:
        table.add_column(str(depth), justify="right", no_wrap=True)
    for name in dict.fromkeys(score.method for score in scores):
        mine = [score for score in scores if score.method == name]
        table.add_row(name, *(cell([score for score in mine if score.depth == depth]) for depth in depths))
    return table


def by_family(scores: Sequence[Score]) -> Table:
    title = f"Every family on a residual net of {LAYERS - 1} convolutions"
    table = Table(title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    table.add_column("accuracy", justify="right", no_wrap=True)
    table.add_column("equinorm.convert(net, ..., x)", no_wrap=True)
    for name in dict.fromkeys(score.method for score in scores):
        mine = [score for score in scores if score.method == name]
        table.add_row(name, cell(mine).replace("\n", "  "), RESIDUAL.row(name).how)
    return table


def cell(scores: Sequence[Score]) -> str:
    """The median above the spread, or by which step the first seed had diverged. (Lines fit narrow terminals.)"""
    good = sorted(score.accuracy for score in scores if score.accuracy is not None)
    steps = [score.diverged_at for score in scores if score.diverged_at is not None]
    if steps:
        some = f"\n{len(steps)} of {len(scores)}" if good else ""
        return f"diverged\nby step {min(steps)}{some}"
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


def balanced_energies(run: Run) -> Energies:
    inputs = inputs_of(run, None, torch.device("cpu"))
    assert isinstance(inputs, Inputs)
    images = inputs.test.double()
    with _one_thread():
        training = Training(run, inputs)
        while not training.finished:
            training.step()
    model = training.parts.model.double()
    symmetry = trace(model, images)
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def energy() -> list[float]:
        return [float(layer.weight.square().sum()) for layer in model.modules() if isinstance(layer, nn.Linear)]

    with torch.no_grad():
        before, after, change = energy(), {}, 0.0
        outputs = model(images)
        for c in (1.0, 1.2):
            model.load_state_dict(original)
            balance_(model, symmetry=symmetry, c=c)
            after[f"{c:g}"] = energy()
            change = max(change, float((model(images) - outputs).abs().max() / outputs.abs().max()))
    return Energies(DEEP.depth_of(run), before, after, change)
