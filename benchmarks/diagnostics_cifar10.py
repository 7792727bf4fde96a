"""What the instruments show on CIFAR-10: the loss along the gradient for VGG, filter lengths for ResNet-110.

    python benchmarks/diagnostics_cifar10.py --data DIR --out results/diagnostics --runs vgg resnet110
    python benchmarks/diagnostics_cifar10.py --out results/diagnostics --cost     what recording costs a ResNet-18 step
    python benchmarks/diagnostics_cifar10.py --out results/diagnostics --draw     figures from the logs; needs no data

DIR holds the official `cifar-10-batches-bin`. Every family has its own file of JSON lines in the folder --out; a run is
written whole when it ends, and a run that is in the file is skipped. `--toy` runs everything in a minute on a CPU, on
random images, to see that it runs.

vgg: VGG-13 without dropout and with one classifier layer, plain SGD, the constant learning rate 0.1 of Santurkar et al.
(2018), batch 128, no weight decay, 8 epochs; the same for every method, and half of it too for ENorm, which diverges at
0.1. Every 100 steps loss and gradient are measured, in float32, at θ - η∇L(θ) for η from ½ to 4 times the learning
rate, on the batch that is trained on next.
resnet110: ruff2020's set-up, 20 epochs of its first phase: BatchNorm with weight decay 5e-4 at lr 0.1 (one epoch of
warm-up), mean shift rejection with LUMA 5e-4 at lr 0.4. The length of every filter is measured after every epoch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cifar10 import (
    Residual,
    Run,
    Step,
    accuracy,
    batchnorm_conv,
    constant,
    enorm,
    equinorm_conv,
    load,
    mean_shift_rejection,
    msr_net,
    prepare,
    residual_net,
    toy,
)
from torch import Tensor, nn
from torch.nn import functional as F

from equinorm import diagnostics
from equinorm.meanshift import apply_mean_shift_rejection_, parameter_groups

Data = tuple[Tensor, Tensor, Tensor, Tensor]
RATE, BATCH, EVERY = 0.1, 128, 100
FACTORS = [0.5 + 0.5 * i for i in range(8)]  # ½ ... 4 times the learning rate

# -- models ------------------------------------------------------------------------------------------------------------

VGG_13 = (64, 64, "pool", 128, 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


def vgg(conv: Callable[..., nn.Module], narrow: int = 1) -> nn.Sequential:
    """Convolutions of 3 × 3 with a ReLU after each, five poolings, one classifier layer."""
    layers: list[nn.Module] = []
    channels = 3
    for item in VGG_13:
        if isinstance(item, int):
            layers += [conv(channels, item // narrow, 3, 1), nn.ReLU()]
            channels = item // narrow
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10))


def plain_conv(a: int, b: int, kernel: int, stride: int) -> nn.Module:
    conv = nn.Conv2d(a, b, kernel, stride, kernel // 2)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    nn.init.zeros_(conv.bias)
    return conv


def msr_vgg(narrow: int) -> nn.Module:
    """e^g = 1.71 keeps the variance in a chain (docs/mean-shift-rejection.md)."""
    net = vgg(plain_conv, narrow)
    apply_mean_shift_rejection_(net, log_gain=math.log(1.71))
    return net


def resnet18(classes: int = 1000, large: bool = True, width: int = 64) -> nn.Sequential:
    stem: list[nn.Module] = [batchnorm_conv(3, width, 7 if large else 3, 2 if large else 1), nn.ReLU()]
    layers = [*stem, *([nn.MaxPool2d(3, 2, 1)] if large else [])]
    a = width
    for stage in range(4):
        for block in range(2):
            b, stride = width * 2**stage, 2 if stage and not block else 1
            layers.append(Residual(a, b, stride, batchnorm_conv))
            a = b
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(a, classes))


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """Runs that are shown together, and what is measured during each."""

    runs: Callable[[bool], Iterator[Run]]
    observe: Callable[[Run, nn.Module, torch.optim.Optimizer, Data], Observer]


def vgg_runs(small: bool) -> Iterator[Run]:
    narrow = 16 if small else 1
    common: dict[str, Any] = {"epochs": 8, "batch": BATCH, "schedule": constant(RATE, momentum=0.0)}
    yield Run("none", lambda: vgg(plain_conv, narrow), **common)
    yield Run("BatchNorm", lambda: vgg(batchnorm_conv, narrow), **common)
    yield Run("ENorm", lambda: vgg(plain_conv, narrow), attach=enorm(c=1.0), **common)
    slower = {**common, "schedule": constant(RATE / 2, momentum=0.0)}
    yield Run("ENorm, lr 0.05", lambda: vgg(plain_conv, narrow), attach=enorm(c=1.0), **slower)
    yield Run("EquiNorm", lambda: vgg(equinorm_conv(1.0), narrow), normalize=False, **common)
    yield Run(
        "MSR", lambda: msr_vgg(narrow), attach=mean_shift_rejection(), groups=lambda m: parameter_groups(m), **common
    )  # fmt: skip


def resnet110_runs(small: bool) -> Iterator[Run]:
    blocks = 2 if small else 18
    common: dict[str, Any] = {"epochs": 20, "batch": BATCH}
    yield Run(
        "BatchNorm, weight decay 5e-4", lambda: residual_net(blocks, 16, batchnorm_conv, option_a=True), decay=5e-4,
        schedule=constant(0.1, warm_up=1.0), note={"lr": 0.1}, **common,
    )  # fmt: skip
    yield Run(
        "MSR, LUMA 5e-4", lambda: msr_net(0.1, 0.5, False, blocks), schedule=constant(0.4),
        attach=mean_shift_rejection(), groups=lambda m: parameter_groups(m, 5e-4), note={"lr": 0.4}, **common,
    )  # fmt: skip


class Observer:
    """What is measured: `before` every step, given the rows it will be trained on, and after every epoch."""

    def before(self, step: int, index: Tensor, lr: float) -> None: ...

    def after_epoch(self, epoch: int, lr: float) -> None: ...

    def lines(self) -> list[dict[str, Any]]:
        raise NotImplementedError


class Scans(Observer):
    """The loss along the gradient, every EVERY steps."""

    def __init__(self, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, data: Data) -> None:
        self.run, self.x, self.y, self.lr = run, data[0], data[1], 0.0
        self.index = torch.arange(run.batch, device=self.x.device)
        self.recorder = diagnostics.Recorder(
            model, optimizer, instruments=[self.landscape], loss_fn=F.cross_entropy, batch=self.batch, attach=False
        )

    def batch(self) -> tuple[Tensor, Tensor]:
        return prepare(self.x[self.index], self.run), self.y[self.index]

    def landscape(self, context: diagnostics.Context) -> dict[str, Any]:
        scan = diagnostics.gradient_scan(*context.probe(), steps=[self.lr * factor for factor in FACTORS])
        return {**vars(scan), "beta": scan.smoothness.beta}

    def before(self, step: int, index: Tensor, lr: float) -> None:
        if step % (EVERY if len(self.x) > 1000 else 2) == 0:
            self.index, self.lr, self.recorder.step = index, lr, step
            self.recorder.record()

    def lines(self) -> list[dict[str, Any]]:
        self.recorder.close()
        return list(self.recorder.records)


class Lengths(Observer):
    """The length of every filter of the residual blocks, at the start and after every epoch."""

    def __init__(self, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, data: Data) -> None:
        self.model, self.rows = model, [self._row(model, 0, float("nan"))]

    @staticmethod
    def _row(model: nn.Module, epoch: int, lr: float) -> dict[str, Any]:
        found = diagnostics.filter_norms(model).norms
        inner = [norms for name, norms in found.items() if not name.startswith(("0.", f"{len(list(model)) - 1}."))]
        lengths = [float(f"{v:.4g}") if math.isfinite(v) else None for v in torch.cat(inner).tolist()]
        return {"epoch": epoch, "lr": None if math.isnan(lr) else lr, "lengths": lengths}

    def after_epoch(self, epoch: int, lr: float) -> None:
        self.rows.append(self._row(self.model, epoch, lr))

    def lines(self) -> list[dict[str, Any]]:
        return self.rows


FAMILIES = {"vgg": Family(vgg_runs, Scans), "resnet110": Family(resnet110_runs, Lengths)}


class OutOfTimeError(Exception):
    """The minutes are over; the run that was under way is not written."""


def train(
    run: Run, family: Family, data: Data, seed: int, epochs: int, deadline: float
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    x, y, test_x, test_y = data
    torch.manual_seed(seed)
    model = run.build().to(x.device)
    model = model.to(memory_format=torch.channels_last) if run.half else model
    on_gpu = x.device.type == "cuda"
    optimizer = torch.optim.SGD(
        run.groups(model), lr=torch.tensor(0.0, device=x.device), momentum=run.schedule(0.0)[1],
        weight_decay=run.decay, fused=on_gpu, foreach=None if on_gpu else False,
    )  # fmt: skip
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.0, device=x.device)
    run.attach(model, optimizer, prepare(x[:2], run))
    step = Step(run, model, optimizer, x, y)
    observer = family.observe(run, model, optimizer, data)
    steps, begin = len(x) // run.batch, time.monotonic()
    history: list[float] = []
    losses: list[float] = []
    lr = 0.0
    for epoch in range(epochs):
        order = torch.randperm(len(x), device=x.device)
        step.loss.zero_()
        for i in range(steps):
            if time.monotonic() > deadline:
                raise OutOfTimeError
            lr, momentum = run.schedule(epoch + i / steps)
            index = order[i * run.batch : (i + 1) * run.batch]
            observer.before(epoch * steps + i, index, lr)
            step(index, lr, momentum)
        losses.append(float(step.loss) / steps)
        history.append(accuracy(model, test_x, test_y, run))
        observer.after_epoch(epoch + 1, lr)
        print(f"  {run.name}: epoch {epoch + 1}, loss {losses[-1]:.3f}, test {history[-1]:.2f} %", flush=True)
        if not math.isfinite(losses[-1]):
            break
    summary = {
        "epochs": epochs, "steps_per_epoch": steps, "test_accuracy": history[-1], "history": history,
        "train_loss": [loss if math.isfinite(loss) else None for loss in losses],
        "diverged": not all(map(math.isfinite, losses)), "seconds": time.monotonic() - begin, **run.note,
    }  # fmt: skip
    return observer.lines(), summary


def run_family(name: str, arguments: argparse.Namespace, data: Data, deadline: float) -> None:
    """Every run that the family's file does not have yet; a run's lines are appended in one write at its end."""
    path, family = arguments.out / f"{name}.jsonl", FAMILIES[name]
    done = {(row["run"], row["seed"]) for row in read(path) if row.get("finished")}
    device = data[0].device
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    facts = {"hardware": machine, "torch": torch.__version__, "toy": arguments.toy, "command": command_line()}
    for run in family.runs(arguments.toy):
        if (run.name, arguments.seed) in done:
            print(f"{name} {run.name}: done before", flush=True)
            continue
        epochs = 2 if arguments.toy else arguments.epochs or run.epochs
        lines, summary = train(run, family, data, arguments.seed, epochs, deadline)
        key = {"run": run.name, "seed": arguments.seed}
        rows = [{**key, **line} for line in lines]
        rows.append({**key, "finished": True, **summary, **facts})
        append(path, rows)
        print(f"{name} {run.name}: {summary['test_accuracy']:.2f} % in {summary['seconds']:.1f} s", flush=True)


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    with path.open("a") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[dict[str, Any]]:
    return diagnostics.read_records(path) if path.exists() else []


def command_line() -> str:
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


# -- what recording costs ----------------------------------------------------------------------------------------------


def measure_cost(arguments: argparse.Namespace, device: torch.device) -> None:
    """Steps with the recorder and without it, in turns of one interval each, so that both see the same machine."""
    settings = [("32 x 32", 128, 32, False), ("224 x 224", 64, 224, True)]
    turns, width = (2, 4) if arguments.toy else (10, 64)
    every = 5 if arguments.toy else diagnostics.recorder.EVERY
    for title, batch, size, large in settings:
        batch = 4 if arguments.toy else batch
        torch.manual_seed(0)
        model = resnet18(1000 if large else 10, large, width).to(device, memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(batch, 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
        y = torch.randint(10, (batch,), device=device)

        def step(model: nn.Module = model, optimizer: Any = optimizer, x: Tensor = x, y: Tensor = y) -> None:
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(model(x).float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        recorder = diagnostics.Recorder(model, optimizer, every, attach=False)

        def turn(recording: bool, step: Any = step, recorder: Any = recorder) -> float:
            synchronise(device)
            begin = time.perf_counter()
            for _ in range(every):
                step()
                if recording:
                    recorder.advance()
            synchronise(device)
            return 1e3 * (time.perf_counter() - begin) / every

        turn(True)  # warm up both
        turn(False)
        pairs = [(turn(False), turn(True)) for _ in range(turns)]
        without, with_it = (statistics.median(column) for column in zip(*pairs, strict=True))
        added = [100 * (b / a - 1) for a, b in pairs]
        row = {
            "setting": f"ResNet-18, {batch} images of {title}", "every": every, "turns": turns,
            "ms_without": without, "ms_with": with_it, "added_percent": statistics.median(added),
            "added_percent_range": [min(added), max(added)], "own_estimate": str(recorder.cost()),
            "hardware": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "torch": torch.__version__,
            "toy": arguments.toy, "command": command_line(),
        }  # fmt: skip
        append(arguments.out / "cost.jsonl", [row])
        print(
            f"{row['setting']}: {without:.3f} ms a step without, {with_it:.3f} with a recorder every {every} steps: "
            f"{row['added_percent']:+.2f} % (median of {turns} pairs, {min(added):+.2f} to {max(added):+.2f})\n"
            f"  the recorder's own estimate: {row['own_estimate']}", flush=True,
        )  # fmt: skip


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# -- figures -----------------------------------------------------------------------------------------------------------


def draw(out: Path) -> None:
    from equinorm.diagnostics import style

    for name, make in (("vgg", draw_vgg), ("resnet110", draw_resnet110)):
        rows = read(out / f"{name}.jsonl")
        if not rows:
            print(f"{out / name}.jsonl has no runs: nothing drawn")
            continue
        for figure_name, figure in make(rows).items():
            for suffix in ("svg", "png"):
                style.save(figure, out / f"{figure_name}.{suffix}")
                print(out / f"{figure_name}.{suffix}")


def draw_vgg(rows: list[dict[str, Any]]) -> dict[str, Any]:
    summaries = [row for row in rows if row.get("finished")]
    runs = {}
    for summary in summaries:
        own = [row for row in rows if row["run"] == summary["run"] and row["seed"] == summary["seed"]]
        name = f"{summary['run']}, " + ("diverged" if summary["diverged"] else f"{summary['test_accuracy']:.1f} %")
        runs[name] = [(row["step"], row["landscape"]) for row in own if "landscape" in row]
    caption = (
        f"VGG-13 on CIFAR-10, plain SGD, lr {RATE}, batch {BATCH}, {summaries[0]['epochs']} epochs, one run each; test "
        "accuracy above each column. Measured at θ - η∇L(θ) for η from ½ to 4 times the learning rate, on the batch "
        "that is trained on next. Top: the range of the loss there; the line is the loss at θ. Middle: the range of "
        "the distance between the gradients there and at θ. Bottom: the largest ratio of that distance to the distance "
        "moved. Low and narrow is good: a step does what the gradient promises. Methods whose parameters are not the "
        "weights themselves measure lengths in their own units: compare shapes rather than heights. After Santurkar et "
        "al. (2018), figure 4."
    )
    title = "How far the gradient of a VGG net can be trusted, without and with normalization"
    figure = diagnostics.plot_gradient_scans(runs, title=title, caption=caption, highest=20.0)
    return {"vgg_landscape": figure}


def draw_resnet110(rows: list[dict[str, Any]]) -> dict[str, Any]:
    summaries = [row for row in rows if row.get("finished")]
    runs, shares, shrunk = {}, [], []
    for summary in summaries:
        own = [row for row in rows if row["run"] == summary["run"] and None not in row.get("lengths", [None])]
        runs[summary["run"]] = [(row["epoch"], row["lengths"]) for row in own]
        first, last = (torch.tensor(row["lengths"]) for row in (own[0], own[-1]))
        ratio = last / first.clamp_min(1e-12)
        half, tenth = (100 * float((ratio < limit).float().mean()) for limit in (0.5, 0.1))
        shrunk.append(float(ratio.median()) < 0.7)
        shares.append(
            f"{summary['run']}: median {float(last.median()):.2f}; {half:.0f} % of filters have less than half of "
            f"their first length, {tenth:.0f} % less than a tenth; test accuracy {summary['test_accuracy']:.1f} %."
        )
    caption = (
        f"ResNet-110 on CIFAR-10, {summaries[0]['epochs']} epochs, one run each; all filters of the residual blocks. "
        f"{' '.join(shares)} ruff2020 reports about 25 % of filters lost to BatchNorm with weight decay after its 200 "
        "epochs, and all filters near 1 with LUMA."
    )
    title = "Filter lengths: BatchNorm with weight decay, and mean shift rejection with LUMA"
    if shrunk == [True, False]:
        title = "Weight decay shrinks the filters of a BatchNorm net; LUMA keeps them near length 1"
    figure = diagnostics.plot_filter_magnitudes(runs, title=title, caption=caption, x_label="epoch")
    return {"resnet110_filters": figure}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with cifar-10-batches-bin")
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and figures")
    parser.add_argument("--runs", nargs="*", default=None, choices=list(FAMILIES))
    parser.add_argument("--epochs", type=int, default=None, help="other than the family's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this many; finished runs stay")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--cost", action="store_true", help="what recording costs a ResNet-18 step")
    parser.add_argument("--draw", action="store_true", help="draw the figures from the logs")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * arguments.minutes
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    chosen = (
        arguments.runs if arguments.runs is not None else [] if arguments.cost or arguments.draw else list(FAMILIES)
    )
    if chosen:
        if not arguments.toy and arguments.data is None:
            parser.error("give --data DIR, or --toy")
        data = toy(device) if arguments.toy else load(arguments.data, device)
        try:
            for name in chosen:
                run_family(name, arguments, data, deadline)
        except OutOfTimeError:
            print("out of time: the run under way was given up, finished ones are written", flush=True)
    if arguments.cost:
        measure_cost(arguments, device)
    if arguments.draw:
        draw(arguments.out)


if __name__ == "__main__":
    main()
