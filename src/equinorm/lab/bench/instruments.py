"""What the instruments show on CIFAR-10: the loss along the gradient of VGG nets, the filters of ResNet-110.

    equinorm bench instruments                        # all three parts, into results/diagnostics
    equinorm bench instruments --only cost            # needs no data
    equinorm bench instruments --quick --out FOLDER   # seconds on a CPU

    python -m equinorm.lab.bench.instruments --help   # the same with lengths, seeds and another data folder
    python -m equinorm.lab.bench.instruments --draw --out results/diagnostics   # figures from the logs

Each part has a file of JSON lines in --out, written anew (atomically) whenever a run ends. A run that is there with
these very settings and all its epochs is not made again. After --minutes, Ctrl-C or SIGTERM, runs in progress are
written with the epochs they have: learning rates are constant, so they are the beginning of the longer run.

vgg: VGG-13 without dropout and with one classifier layer, He initialization by fan-out; plain SGD without weight decay
at the constant learning rate 0.1 of Santurkar et al. (2018), batch 128. The same for every method; half the rate too
for ENorm, which diverged at 0.1 in our first runs (by fan-in). Every 100 steps loss and gradient are measured in
float32 at θ - η∇L(θ), η from ½ to 4 times the learning rate, on a batch of training images that is the same for all.

resnet110: the first epochs of ruff2020's schedule, by its recipe: BatchNorm with weight decay 5e-4 at lr 0.1 (one epoch
of warm-up), the same without decay, and mean shift rejection with LUMA 5e-4 at lr 0.4. The length of every filter of
the residual blocks is measured after every epoch.

cost: what a `Recorder` adds to a training step of ResNet-18. Blocks of a few steps with one recording take turns with
blocks without (A B B A ...); the difference, spread over the default interval, is the cost.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import diagnostics
from ...diagnostics import Context, Recorder
from ...diagnostics.recorder import EVERY, Instrument
from ...files import write_text
from .. import nets as models
from ..experiments import ruff2020
from ..experiments.common import changed, toy_run
from ..training.inputs import Inputs, Streamed, inputs_of
from ..training.precision import precision
from ..training.runs import Data, Method, Model, Optim, Run
from ..training.schedules import Constant
from ..training.trainer import about, interruptible
from ..training.training import Training

Measurement = dict[str, Any]
FACTORS = [0.5 + 0.5 * i for i in range(8)]  # ½ ... 4 times the learning rate
QUANTILES = 201  # of the lengths of filters: every half per cent
LOST = 0.1  # of the longest filter of its layer, as in ruff2020/deflation
CHUNK, AHEAD = 16, 2  # steps of a run before it is the next one's turn; epochs it may be ahead of the host

# -- runs --------------------------------------------------------------------------------------------------------------

VGG = Run(
    data=Data("cifar10", padding=4, flip=True),
    # by fan-in, pools and classifier make the logits so large that without a norm the third step ends in NaN
    model=Model("vgg", {"depth": 13, "norm": "none", "bias": True, "init": "he_fan_out"}),
    optim=Optim(lr=0.1, schedule=Constant()),
    batch=128,
    precision="bfloat16",
)


def vgg_runs() -> list[Run]:
    """One run for every method, by its label."""
    enorm = changed(VGG, method=Method("enorm", {"c": 1.0}))
    runs = {
        "none": VGG,
        "BatchNorm": changed(VGG, norm="batchnorm", bias=False),
        "ENorm": enorm,
        "ENorm, lr 0.05": changed(enorm, lr=0.05),
        "EquiNorm": replace(changed(VGG, norm="equinorm"), data=replace(VGG.data, inputs="unit")),
        "MSR": changed(VGG, norm="msr", method=Method("msr", {"z": 0.85, "luma": 5e-4})),
    }
    return [replace(run, label=label) for label, run in runs.items()]


def resnet110_runs() -> list[Run]:
    decayed, rejection = ruff2020.batchnorm(), ruff2020.rejection(lr=0.4, z=0.85, noise=0.1)
    runs = {
        "BatchNorm, weight decay 5e-4": decayed,
        "BatchNorm, no decay": replace(decayed, optim=replace(decayed.optim, weight_decay=0.0)),
        "MSR, LUMA 5e-4": rejection,
    }
    return [replace(_first_phase(run), label=label) for label, run in runs.items()]


def _first_phase(run: Run) -> Run:
    """The same before its learning rate first falls."""
    return replace(run, optim=replace(run.optim, schedule=Constant(warm_up=run.optim.schedule.warm_up)), record=())


# -- what is measured --------------------------------------------------------------------------------------------------


def landscape_at(lr: float) -> Instrument:
    """The instrument for loss and gradient along the gradient, up to four times the learning rate."""

    def landscape(context: Context) -> Measurement:
        scan = diagnostics.gradient_scan(*context.probe(), steps=[lr * factor for factor in FACTORS])
        return {**vars(scan), "beta": scan.smoothness.beta}

    return landscape


def filters(context: Context) -> Measurement:
    """Lengths of the filters of residual branches: quantiles, and shares in per cent of those that are short.

    Short of their own first length, or of the longest filter of their layer now.
    """
    layers = [norms for name, norms in diagnostics.filter_norms(context.model).norms.items() if ".branch." in name]
    lengths = torch.cat(layers)
    first = context.memory.setdefault("first", lengths)
    longest = torch.cat([norms.amax().expand_as(norms) for norms in layers])

    def share(short: Tensor) -> Tensor:
        return 100 * short.float().mean()

    return {
        "quantiles": torch.quantile(lengths, torch.linspace(0, 1, QUANTILES).to(lengths)),
        "below_half": share(lengths < first / 2),
        "below_tenth": share(lengths < first / 10),
        "lost": share(lengths < LOST * longest),
    }


@dataclass(frozen=True)
class Part:
    """Runs that are shown together, and how each is looked at: an instrument, every so many steps."""

    runs: Callable[[], list[Run]]
    epochs: int
    instrument: Callable[[Run], Instrument]
    every: int | None  # steps; None: an epoch


PARTS = {
    "vgg": Part(vgg_runs, 15, lambda run: landscape_at(run.optim.lr), 100),
    "resnet110": Part(resnet110_runs, 20, lambda run: filters, None),
}


class Watched:
    """A run in progress, and the recorder that looks at it between its steps."""

    def __init__(self, run: Run, inputs: Inputs | Streamed, instrument: Instrument, every: int | None):
        self.run, self.training = run, Training(run, inputs)
        self.every = every or self.training.steps_per_epoch
        parts = self.training.parts
        self.recorder = Recorder(
            parts.model,
            parts.optimizer,
            instruments=[instrument],
            loss_fn=F.cross_entropy,
            batch=self.batch,
            keep=10_000,
            max_share=None,
            context=lambda: precision("float32", self.training.device),
            attach=False,
        )
        self.looked_at, self.began, self.about = -1, time.monotonic(), about(self.training.device)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Training images as the run sees them; the same for all runs at the same step."""
        inputs, device = self.training.inputs, self.training.device
        assert isinstance(inputs, Inputs)
        with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
            torch.manual_seed(1_000_003 * (self.run.seed + 1) + self.training.done)
            return inputs.batch(torch.randperm(len(inputs), device=device)[: self.run.batch])

    def advance(self) -> bool:
        """A few steps, with a look wherever one is due; whether there was anything to do."""
        training = self.training
        for i in range(CHUNK):
            self._look_if_due()
            if training.finished or training.ahead >= AHEAD:
                return i > 0
            training.step(self.every - training.done % self.every)
        return True

    @property
    def over(self) -> bool:
        training = self.training
        training.collect()
        return training.diverged is not None or (training.finished and not training.ahead)

    def _look_if_due(self) -> None:
        done = self.training.done
        if done % self.every or done == self.looked_at:
            return
        before = self.training.state_dict()["tensors"] if done == 0 else None
        with self._stream():  # behind the steps that are under way; nobody waits
            self.recorder.step = self.looked_at = done
            self.recorder.record()
        if before is not None:
            check_equal(before, self.training.state_dict()["tensors"])

    def _stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.training.stream) if self.training.captured else nullcontext()

    def close(self) -> list[Measurement]:
        """What was measured, and a last row that says of what run; nothing before the end of the first epoch."""
        training, run = self.training, self.run
        training.close()
        while training.ahead:
            training.collect(wait=True)
        self.recorder.close()
        log = until_divergence(training.log)
        if not log:
            return []
        key = {"run": run.label, "seed": run.seed}
        summary = {
            "finished": True,
            "key": run.key,
            "epochs": len(log),
            "asked_epochs": run.epochs,
            "diverged": not math.isfinite(log[-1]["train_loss"]),
            "test_accuracy": log[-1]["test_accuracy"],
            "history": [row["test_accuracy"] for row in log],
            "train_loss": [row["train_loss"] if math.isfinite(row["train_loss"]) else None for row in log],
            "lr": run.optim.lr,
            "momentum": run.optim.momentum,
            "weight_decay": run.optim.weight_decay,
            "batch": run.batch,
            "data": run.data.name,
            "steps_per_epoch": training.steps_per_epoch,
            "measured_every": self.every,
            "seconds": round(time.monotonic() - self.began, 1),
            **self.about,
        }
        return [{**key, **record} for record in self.recorder.records] + [{**key, **summary}]


def until_divergence(log: Sequence[Measurement]) -> Sequence[Measurement]:
    """The epochs up to the first whose loss is not a number; the device may have been ahead of the host."""
    first = next((i for i, row in enumerate(log) if not math.isfinite(row["train_loss"])), len(log))
    return log[: first + 1]


def check_equal(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """An instrument must leave no trace, to the last bit."""
    touched = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    if touched:
        raise RuntimeError(f"an instrument has changed {', '.join(touched[:5])}: its numbers cannot be used")


# -- training ----------------------------------------------------------------------------------------------------------


def run_part(name: str, options: argparse.Namespace, must_stop: Callable[[], bool]) -> None:
    """Every run of the part that its file does not have, side by side on a GPU."""
    part, device, path = PARTS[name], options.device, options.out / f"{name}.jsonl"
    wanted = [prepared(run, part, options) for run in part.runs()]
    waiting = deque(run for run in wanted if not is_done(run, read(path)))
    for run in wanted:
        if run not in waiting:
            print(f"{name}, {run.label}: done before", flush=True)
    inputs: dict[str, Inputs | Streamed] = {}

    def start(run: Run) -> Watched:
        data = repr(run.data)
        if data not in inputs:
            inputs[data] = inputs_of(run, options.data_dir, device)
        return Watched(run, inputs[data], part.instrument(run), 2 if options.toy and part.every else part.every)

    def end(one: Watched) -> None:
        if rows := one.close():
            rows[-1]["side_by_side"] = width
            put(path, rows, [run.label for run in wanted])
            print(f"{name}, {sentence(rows[-1])}", flush=True)

    width = min(len(waiting), 8) if device.type == "cuda" else 1
    side_by_side: list[Watched] = []
    while (waiting or side_by_side) and not must_stop():
        while waiting and len(side_by_side) < width:
            side_by_side.append(start(waiting.popleft()))
        moved = [one.advance() for one in side_by_side]
        for one in [one for one in side_by_side if one.over]:
            side_by_side.remove(one)
            end(one)
        if side_by_side and not any(moved):  # the device is behind
            side_by_side[0].training.collect(wait=True)
    for one in side_by_side:
        end(one)


def prepared(run: Run, part: Part, options: argparse.Namespace) -> Run:
    """The run as it was asked for: how long, with which seed, at which size."""
    asked = {"vgg": options.epochs_vgg, "resnet110": options.epochs_resnet}[run.model.name]
    run = toy_run(run) if options.toy else run
    return replace(run, seed=options.seed, epochs=asked or (run.epochs if options.toy else part.epochs))


def is_done(run: Run, rows: Iterable[Measurement]) -> bool:
    """Whether the rows hold this very run, to its end."""
    return any(row["key"] == run.key and (row["diverged"] or row["epochs"] == run.epochs) for row in summaries(rows))


def sentence(summary: Measurement) -> str:
    return f"{summary['run']}: {summary['epochs']} epochs in {summary['seconds']} s, {outcome(summary)}"


def outcome(summary: Measurement) -> str:
    return f"diverged in epoch {summary['epochs']}" if summary["diverged"] else f"{summary['test_accuracy']:.1f} %"


# -- files -------------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[Measurement]:
    return diagnostics.read_records(path) if path.exists() else []


def summaries(rows: Iterable[Measurement]) -> list[Measurement]:
    """The last row of every run; those of an earlier format have no key."""
    return [row for row in rows if row.get("finished") and "key" in row]


def put(path: Path, rows: Sequence[Measurement], labels: Sequence[str]) -> None:
    """Give a file the rows of a run in the place of those it has of it; rows of none of the labels are left out."""

    def name(row: Measurement) -> tuple[str, int]:
        return row["run"], row["seed"]

    known = read(path)
    readable = {name(row) for row in summaries(known)} - {name(rows[-1])}
    kept = [row for row in known if name(row) in readable and row["run"] in labels]
    ordered = sorted([*kept, *rows], key=lambda row: (labels.index(row["run"]), row["seed"]))  # is stable
    write_lines(path, ordered)


def write_lines(path: Path, rows: Iterable[Measurement]) -> None:
    write_text(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))


# -- what recording costs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedStep:
    """A training step of ResNet-18 that is measured without a recorder and with one."""

    batch: int
    size: int
    classes: int
    width: int = 64
    pairs: int = 50  # of blocks
    block: int = 10  # steps; one recording in every block that has any

    @property
    def name(self) -> str:
        return f"ResNet-18, {self.batch} images of {self.size} x {self.size}"


SETTINGS = (RecordedStep(128, 32, 10), RecordedStep(64, 224, 1000))
TOY_SETTINGS = (RecordedStep(4, 8, 10, width=4, pairs=6, block=2),)


def run_cost(options: argparse.Namespace, must_stop: Callable[[], bool]) -> None:
    path = options.out / "cost.jsonl"
    for setting in TOY_SETTINGS if options.toy else SETTINGS:
        if must_stop():
            return
        row = {**measure_cost(setting, options.device, EVERY if not options.toy else 4), **about(options.device)}
        kept = [other for other in read(path) if other["setting"] != row["setting"] and "pairs" in other]
        write_lines(path, [*kept, row])
        print(cost_sentence(row), flush=True)


def measure_cost(setting: RecordedStep, device: torch.device, every: int) -> Measurement:
    """What a default recorder adds to a step, in per cent, and what memory it holds after 1, 2 and 4 intervals."""
    model, optimizer, step = training_step(setting, device)
    recorder = Recorder(model, optimizer, every=setting.block, max_share=None, attach=False)

    def block(recording: bool) -> tuple[float, float]:
        with Clock(device) as clock:
            for _ in range(setting.block):
                step()
                if recording:
                    recorder.advance()
        return clock.device_ms, clock.wall_ms

    for recording in (True, False, True, False):  # warm up
        block(recording)
    for _ in range(setting.block // 2):  # from here on in the middle of a block, where the device has work queued
        recorder.advance()
    pairs = [take_turns(block, recorded_first=bool(i % 2)) for i in range(setting.pairs)]
    recorder.close()
    row: Measurement = {"setting": setting.name, "every": every, "pairs": setting.pairs, "block": setting.block}
    for number, clock in enumerate(("device", "wall")):
        without, with_one = ([block[number] for block in column] for column in zip(*pairs, strict=True))
        row[clock] = added(without, with_one, setting.block, every)
    return row | {"allocated_mib": memory(model, optimizer, step, device, every)}


def take_turns(block: Callable[[bool], Any], recorded_first: bool) -> tuple[Any, Any]:
    """A block without recording and one with, in either order."""
    first = block(recorded_first)
    second = block(not recorded_first)
    return (second, first) if recorded_first else (first, second)


def added(without: Sequence[float], with_one: Sequence[float], block: int, every: int) -> Measurement:
    """The cost of one recording in `every` steps, from milliseconds of pairs of blocks, one with a recording."""
    step = statistics.median(without) / block
    each = [b - a for a, b in zip(without, with_one, strict=True)]
    per_cent = [100 * extra / (every * step) for extra in each]
    return {
        "ms_step": step,
        "ms_recording": statistics.median(each),
        "added_percent": statistics.median(per_cent),
        "added_percent_95": bootstrap(per_cent),
        "added_percent_mean": statistics.fmean(per_cent),
    }


def bootstrap(values: Sequence[float], repeats: int = 5000) -> list[float]:
    """The interval that holds 95 % of the medians of samples drawn from the values with replacement."""
    draw = torch.Generator().manual_seed(0)
    index = torch.randint(len(values), (repeats, len(values)), generator=draw)
    medians = torch.tensor(values, dtype=torch.float64)[index].quantile(0.5, dim=1)
    return medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()


def training_step(setting: RecordedStep, device: torch.device) -> tuple[Any, torch.optim.Optimizer, Callable[[], None]]:
    """A model with its optimizer and an ordinary step: bfloat16 by autocast and channels_last on a GPU."""
    on_gpu = device.type == "cuda"
    layout = torch.channels_last if on_gpu else torch.contiguous_format
    torch.manual_seed(0)
    shape = (3, setting.size, setting.size)
    model = models.build("resnet18", classes=setting.classes, in_shape=shape, width=setting.width)
    model = model.to(device, memory_format=layout)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(setting.batch, *shape, device=device).contiguous(memory_format=layout)
    y = torch.randint(setting.classes, (setting.batch,), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return model, optimizer, step


class Clock:
    """Milliseconds between two events on the device, and on the wall; without a device they are the same."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.device_ms = self.wall_ms = 0.0

    def __enter__(self) -> Clock:
        if self.on_gpu:
            torch.cuda.synchronize()
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self.events[0].record()
        self.began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self.on_gpu:
            self.events[1].record()
            torch.cuda.synchronize()
        self.wall_ms = self.device_ms = 1e3 * (time.perf_counter() - self.began)
        if self.on_gpu:
            self.device_ms = self.events[0].elapsed_time(self.events[1])


def memory(
    model: Any, optimizer: Any, step: Callable[[], None], device: torch.device, every: int
) -> Measurement | None:
    """MiB on the device before a recorder is attached and after 1, 2 and 4 of its intervals; None on a CPU."""
    if device.type != "cuda":
        return None

    def allocated() -> float:
        torch.cuda.synchronize()
        return round(torch.cuda.memory_allocated() / 2**20, 3)

    step()
    found: Measurement = {"without": allocated()}
    with Recorder(model, optimizer, every, max_share=None):
        for interval in range(1, 5):
            for _ in range(every):
                step()
            if interval != 3:
                found[str(interval)] = allocated()
    return found


def cost_sentence(row: Measurement) -> str:
    def one(clock: str) -> str:
        found = row[clock]
        low, high = found["added_percent_95"]
        return (
            f"{found['added_percent']:+.2f} % [{low:+.2f}, {high:+.2f}] by the {clock} clock (mean "
            f"{found['added_percent_mean']:+.2f} %, {found['ms_recording']:.2f} ms a recording, {found['ms_step']:.2f} "
            "ms a step)"
        )

    held = row["allocated_mib"]
    grows = "" if held is None else f"; MiB allocated without it and after 1, 2, 4 intervals: {list(held.values())}"
    return (
        f"{row['setting']}, a recording every {row['every']} steps, median of {row['pairs']} pairs and its 95 % "
        f"interval: {one('device')}, {one('wall')}{grows}"
    )


# -- figures -----------------------------------------------------------------------------------------------------------


def draw(out: Path) -> None:
    """Every figure that the logs have data for, and what recording costs in a sentence."""
    from equinorm.diagnostics import style

    for name, make in (("vgg", draw_vgg), ("resnet110", draw_resnet110)):
        rows = read(out / f"{name}.jsonl")
        if not summaries(rows):
            print(f"{out / name}.jsonl has no runs of this format: nothing drawn")
            continue
        figure_name, figure = make(rows)
        for suffix in ("svg", "png"):
            style.save(figure, out / f"{figure_name}.{suffix}")
            print(out / f"{figure_name}.{suffix}")
    for row in read(out / "cost.jsonl"):
        if "pairs" in row:
            print(cost_sentence(row))


def draw_vgg(rows: Sequence[Measurement]) -> tuple[str, Any]:
    runs = {}
    shown = list(first_seeds(rows))
    for summary, own in shown:
        name = summary["run"].partition(", lr")[0]
        runs[f"{name}\nlr {summary['lr']:g}: {outcome(summary)}"] = [(row["step"], row["landscape"]) for row in own]
    every = each(summary["measured_every"] for summary, _ in shown)
    caption = (
        f"{setting_sentence('VGG-13', rows)} Plain SGD; above each column its constant learning rate and its test "
        f"accuracy at the end. Every {every} steps loss and gradient are measured at θ - η∇L(θ), η from ½ to 4 times "
        "the learning rate, on a batch of training images. Top: the range of the loss there; the line is the loss at "
        "θ. Middle: the range of the distance between the gradients there and at θ. Bottom: the largest ratio of that "
        "distance to the distance moved. Low and narrow is good: a step does what the gradient promises. Methods whose "
        "parameters are not the weights themselves measure lengths in their own units: compare shapes rather than "
        "heights. After Santurkar et al. (2018), figure 4."
    )
    title = "How far the gradient of a VGG net can be trusted, without and with normalization"
    figure = diagnostics.plot_gradient_scans(runs, title=title, caption=caption, highest=20.0)
    return "vgg_landscape", figure


def draw_resnet110(rows: Sequence[Measurement]) -> tuple[str, Any]:
    runs, sentences, change = {}, [], {}
    for summary, own in first_seeds(rows):
        moments = [(row["step"] / summary["steps_per_epoch"], row["filters"]) for row in own]
        moments = [(epoch, found) for epoch, found in moments if None not in found["quantiles"]]
        name, last = summary["run"], moments[-1][1]
        runs[name] = [(epoch, found["quantiles"]) for epoch, found in moments]
        before, after = (median(found["quantiles"]) for found in (moments[0][1], last))
        change[name] = after / before
        sentences.append(
            f"{name} (lr {summary['lr']:g}, test accuracy {outcome(summary)}): {before:.2f} and {after:.2f}; "
            f"{last['below_half']:.0f}, {last['below_tenth']:.0f} and {last['lost']:.0f} %."
        )
    caption = (
        f"{setting_sentence('ResNet-110', rows)} All filters of the residual blocks. Median length at the start and at "
        "the end; share of filters that end below a half and below a tenth of their own first length, and below a "
        f"tenth of the longest filter of their layer: {' '.join(sentences)} ruff2020 reports about 25 % of filters "
        "lost to BatchNorm with weight decay in 200 epochs, and lengths near 1 with LUMA."
    )
    figure = diagnostics.plot_filter_magnitudes(runs, title=filters_title(change), caption=caption, x_label="epoch")
    return "resnet110_filters", figure


def filters_title(change: dict[str, float]) -> str:
    """The message, where the numbers bear it out. `change`: of the median length of each run, as a factor."""
    decayed, plain, luma = (
        next((factor for name, factor in change.items() if part in name), math.nan)
        for part in ("weight decay", "no decay", "LUMA")
    )
    if decayed < 0.7 and not plain < 0.9 and 0.8 < luma < 1.25:  # LUMA starts at 1
        return "Weight decay shrinks the filters of a BatchNorm net; LUMA keeps them near length 1"
    return "Lengths of filters under BatchNorm with weight decay, without, and under LUMA"


def first_seeds(rows: Sequence[Measurement]) -> Iterator[tuple[Measurement, list[Measurement]]]:
    """Of every method the run with the lowest seed: its summary, and its measurements."""
    seen = set()
    for summary in sorted(summaries(rows), key=lambda row: row["seed"]):
        if summary["run"] not in seen:
            seen.add(summary["run"])
            own = (row for row in rows if (row["run"], row["seed"]) == (summary["run"], summary["seed"]))
            yield summary, [row for row in own if "step" in row]


def setting_sentence(network: str, rows: Sequence[Measurement]) -> str:
    """What was trained, on what, for how long and how often, from the rows themselves."""
    found = summaries(rows)
    trained = [row for row in found if not row["diverged"]] or found
    data = found[0]["data"]
    what = f"{network} on CIFAR-10" if data == "cifar10" else f"A toy of {network} on the {data}"
    counts = Counter(row["run"] for row in found).values()
    number = "one run each" if set(counts) == {1} else f"{each(counts)} runs each, of which the first is shown"
    batch, epochs = each(row["batch"] for row in found), each(row["epochs"] for row in trained)
    return f"{what}, batch {batch}, {epochs} epochs, {number}."


def each(values: Iterable[int]) -> str:
    """One number, or those that there are."""
    different = sorted(set(values))
    return " or ".join(map(str, different))


def median(quantiles: Sequence[float]) -> float:
    return quantiles[(len(quantiles) - 1) // 2]


# -- command line ------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and figures")
    parser.add_argument("--only", nargs="+", choices=["cost", *PARTS], default=["cost", *PARTS], help="these parts")
    parser.add_argument("--data-dir", type=Path, help="folder with CIFAR-10 ($EQUINORM_DATA, else ./data)")
    parser.add_argument("--epochs-vgg", type=int, help=f"{PARTS['vgg'].epochs} unless told")
    parser.add_argument("--epochs-resnet", type=int, help=f"{PARTS['resnet110'].epochs} unless told")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop then, and write what there is")
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--toy", action="store_true", help="tiny nets on the embedded digits")
    parser.add_argument("--draw", action="store_true", help="draw the figures from the logs, and do nothing else")
    options = parser.parse_args(arguments)
    options.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.draw:
        draw(options.out)
        return
    end = time.monotonic() + 60 * options.minutes
    with interruptible() as interrupted:

        def must_stop() -> bool:
            return interrupted() or time.monotonic() > end

        for name in options.only:
            began = time.monotonic()
            if name == "cost":
                run_cost(options, must_stop)
            else:
                run_part(name, options, must_stop)
            print(f"{name}: {time.monotonic() - began:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
