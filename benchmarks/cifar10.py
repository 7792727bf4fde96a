"""Short CIFAR-10 runs that show what each method does, one line of JSON per run.

    python benchmarks/cifar10.py --data DIR --out results/cifar10.jsonl --runs fc wrn resnet110

DIR holds the official `cifar-10-batches-bin`. Runs already in the file (same name, same seed) are skipped. On CUDA a
whole training step, augmentation and method included, is captured as a graph. `--toy` runs everything in seconds on
random images, to see that it runs.

Protocols. fc: repro2019 (3072-500-...-10, He initialization, SGD without momentum, batch 256, weight decay 1e-3, 60
epochs, learning rate decayed linearly to 0 from repro2019's table 1). wrn: defazio2018 section 6.2 without mixup
(WRN-20-96, 30 epochs of "super-convergence", batch 128, weight decay 1e-4). resnet110: ruff2020's schedule cut short
(lr 0.4, momentum 0.9, batch 128). The test set is looked at once per epoch for the log; nothing is chosen by it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equinorm
from equinorm.meanshift import InputNoise, MeanShiftRejection, apply_mean_shift_rejection_, parameter_groups
from equinorm.nn import EquiNormConv2d

MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)

# -- data: uint8 on the device, augmented there ------------------------------------------------------------------------


def load(folder: Path, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def read(names: Iterable[str]) -> tuple[Tensor, Tensor]:
        raw = b"".join((folder / "cifar-10-batches-bin" / name).read_bytes() for name in names)
        rows = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, 3073)
        return rows[:, 1:].reshape(-1, 3, 32, 32).to(device), rows[:, 0].long().to(device)

    return *read(f"data_batch_{i}.bin" for i in range(1, 6)), *read(["test_batch.bin"])


def toy(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x, y = (
        torch.randint(256, (512, 3, 32, 32), generator=draw, dtype=torch.uint8),
        torch.randint(10, (512,), generator=draw),
    )
    return x[:384].to(device), y[:384].to(device), x[384:].to(device), y[384:].to(device)


def crop_and_flip(x: Tensor) -> Tensor:
    """Random crops of the image padded by 4 pixels, and random flips; one draw per image."""
    n = len(x)
    padded = F.pad(x, (4, 4, 4, 4))
    offsets = torch.randint(9, (2, n, 1), device=x.device)
    row, column = torch.arange(32, device=x.device) + offsets
    flip = torch.rand(n, 1, device=x.device) < 0.5
    column = torch.where(flip, column.flip(1), column)
    image = torch.arange(n, device=x.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[image, row[:, :, None], column[:, None, :]].permute(0, 3, 1, 2)


# -- models ------------------------------------------------------------------------------------------------------------

Conv = Callable[..., nn.Module]  # (in, out, kernel, stride) -> convolution with its normalization


def fully_connected(hidden: int, bias: bool, norm: bool = False, width: int = 500) -> nn.Sequential:
    """repro2019: an input layer, `hidden` intermediary ones and an output layer."""
    sizes = [3072, *[width] * (hidden + 1), 10]
    layers: list[nn.Module] = [nn.Flatten()]
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        layer = nn.Linear(a, b, bias=bias)
        nn.init.kaiming_normal_(layer.weight)
        if bias:
            nn.init.zeros_(layer.bias)
        last = i == len(sizes) - 2
        layers += [layer] if last else [layer, *([nn.BatchNorm1d(b)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers)


class Residual(nn.Module):
    def __init__(self, a: int, b: int, stride: int, conv: Conv, noise: nn.Module | None = None) -> None:
        super().__init__()
        self.noise = nn.Identity() if noise is None else noise
        self.one, self.two = conv(a, b, 3, stride), conv(b, b, 3, 1)
        self.skip = nn.Identity() if a == b and stride == 1 else conv(a, b, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        x = self.noise(x)
        return F.relu(self.two(F.relu(self.one(x))) + self.skip(x))


class OptionA(nn.Module):
    """The parameter-free shortcut: every second pixel, new channels are zero."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.extra = (b - a) // 2

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra, self.extra))


def residual_net(blocks: int, width: int, conv: Conv, option_a: bool = False, noise: float = 0.0) -> nn.Sequential:
    layers: list[nn.Module] = [conv(3, width, 3, 1), nn.ReLU()]
    a = width
    for stage in range(3):
        for i in range(blocks):
            b, stride = width * 2**stage, 2 if stage and not i else 1
            block = Residual(a, b, stride, conv, InputNoise(noise) if noise else None)
            if option_a and a != b:
                block.skip = OptionA(a, b)
            layers.append(block)
            a = b
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(a, 10))


def batchnorm_conv(a: int, b: int, kernel: int, stride: int) -> nn.Module:
    conv = nn.Conv2d(a, b, kernel, stride, kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(b))


def equinorm_conv(fraction: float) -> Conv:
    return lambda a, b, kernel, stride: EquiNormConv2d(a, b, kernel, stride, kernel // 2, stats_fraction=fraction)


# -- schedules: (learning rate, momentum) at a fraction of an epoch ----------------------------------------------------

Schedule = Callable[[float], tuple[float, float]]


def linear_to_zero(lr: float, epochs: int) -> Schedule:
    return lambda epoch: (lr * (1 - epoch / epochs), 0.0)


def super_convergence(lr: float, epochs: int) -> Schedule:
    """defazio2018 section 6.2: lr up 5-fold until 13/30, down until 26/30, then 100-fold down; momentum the reverse."""

    def at(epoch: float) -> tuple[float, float]:
        t = 30 * epoch / epochs
        if t < 13:
            return lr * (1 + 4 * t / 13), 0.95 - 0.1 * round(t) / 13
        if t < 26:
            return lr * (5 - 4 * (t - 13) / 13), 0.85 + 0.1 * round(t - 13) / 13
        return lr * 100 ** (-(t - 26) / 4), 0.85

    return at


def constant(lr: float, momentum: float = 0.9, warm_up: float = 0.0) -> Schedule:
    return lambda epoch: (lr * min(1.0, (epoch + 1e-3) / warm_up) if warm_up else lr, momentum)


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    name: str
    build: Callable[[], nn.Module]
    epochs: int
    batch: int
    schedule: Schedule
    decay: float = 0.0
    attach: Callable[[nn.Module, torch.optim.Optimizer, Tensor], Any] = lambda *_: None
    groups: Callable[[nn.Module], Any] = lambda model: model.parameters()
    augment: bool = True
    normalize: bool = True  # subtract the mean and divide by the deviation; else pixels are in [0, 1]
    half: bool = True  # bf16 autocast and channels_last
    note: dict[str, Any] = field(default_factory=dict)


# repro2019, table 1: learning rates the authors gave
FC_RATE = {"baseline": {11: 0.05, 15: 0.05, 19: 0.05}, "enorm": {11: 0.05, 15: 0.05, 19: 0.01}}


def enorm(bias: str = "safe", c: float = 1.2) -> Callable[..., Any]:
    def attach(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Any:
        return equinorm.ENorm(model, optimizer, x[:2], c=c, bias=bias).attach()

    return attach


def fc_runs() -> Iterator[Run]:
    common = {"epochs": 60, "batch": 256, "decay": 1e-3, "augment": False, "half": False}
    for depth in (19, 15, 11):
        for name, kind, bias, attach in (
            ("baseline", "baseline", False, None),
            ("enorm-1.2 no biases", "enorm", False, enorm()),
            ("enorm-1.2 safe biases", "enorm", True, enorm("safe")),
            ("enorm-1.2 plain biases", "enorm", True, enorm("plain")),
        ):
            lr = FC_RATE[kind][depth]
            more: dict[str, Any] = {} if attach is None else {"attach": attach}
            yield Run(
                f"fc-{depth} {name}", lambda d=depth, b=bias: fully_connected(d, b), schedule=linear_to_zero(lr, 60),
                note={"lr": lr}, **common, **more,
            )  # fmt: skip


def wrn_runs() -> Iterator[Run]:
    common = {"epochs": 30, "batch": 128, "decay": 1e-4, "schedule": super_convergence(0.1, 30)}
    for name, conv, normalize in (
        ("equinorm", equinorm_conv(1.0), False),
        ("batchnorm", batchnorm_conv, True),
        ("equinorm quarter", equinorm_conv(0.25), False),
    ):
        yield Run(f"wrn-20-96 {name}", lambda c=conv: residual_net(3, 96, c), normalize=normalize, **common)


def mean_shift_rejection(**options: Any) -> Callable[..., Any]:
    def attach(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Any:
        return MeanShiftRejection(model, optimizer, z=0.85, luma=5e-4, **options).attach()

    return attach


def msr_net(noise: float, gain: float, bias: bool, blocks: int = 18) -> nn.Module:
    def conv(a: int, b: int, kernel: int, stride: int) -> nn.Module:
        return nn.Conv2d(a, b, kernel, stride, kernel // 2, bias=bias)

    net = residual_net(blocks, 16, conv, option_a=True, noise=noise)
    apply_mean_shift_rejection_(net, log_gain=math.log(gain))
    return net


def resnet110_runs() -> Iterator[Run]:
    common = {"epochs": 8, "batch": 128}
    unlimited = {"max_step": None, "bias_step": 1.0}
    for name, gain, bias, options in (
        ("msr noise 0.1", 0.5, False, {}),
        ("msr noise 0.1, e^g 0.8", 0.8, False, {}),
        ("msr noise 0.1, biases", 0.5, True, {}),
        ("msr noise 0.1, e^g 0.8, no limits", 0.8, False, unlimited),
        ("msr noise 0.1, biases, no limits", 0.5, True, unlimited),
    ):
        yield Run(
            f"resnet-110 {name}", lambda g=gain, b=bias: msr_net(0.1, g, b), schedule=constant(0.4),
            attach=mean_shift_rejection(**options), groups=lambda m: parameter_groups(m, 5e-4),
            note={"lr": 0.4, "gain": gain, "options": options}, **common,
        )  # fmt: skip
    yield Run(
        "resnet-110 batchnorm", lambda: residual_net(18, 16, batchnorm_conv, option_a=True), decay=5e-4,
        schedule=constant(0.1, warm_up=1.0), note={"warm_up_epochs": 1, "lr": 0.1}, **common,
    )  # fmt: skip


GROUPS: dict[str, Callable[[], Iterator[Run]]] = {"fc": fc_runs, "wrn": wrn_runs, "resnet110": resnet110_runs}

# -- training ----------------------------------------------------------------------------------------------------------


class Step:
    """One training step on rows `index` of the data; on CUDA a captured graph, renewed when the momentum changes."""

    def __init__(self, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        self.run, self.model, self.optimizer, self.x, self.y = run, model, optimizer, x, y
        self.index = torch.zeros(run.batch, dtype=torch.int64, device=x.device)
        self.loss = torch.zeros((), device=x.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.momentum: float | None = None

    def eager(self) -> None:
        x = self.x[self.index]
        x = prepare(crop_and_flip(x) if self.run.augment else x, self.run)
        with autocast(self.run, x.device):
            loss = F.cross_entropy(self.model(x).float(), self.y[self.index])
        self.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        self.optimizer.step()
        self.loss.add_(loss.detach())

    def __call__(self, index: Tensor, lr: float, momentum: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"].fill_(lr)
            group["momentum"] = momentum
        self.index.copy_(index)
        if self.x.device.type != "cuda":
            self.eager()
        elif self.graph is None or momentum != self.momentum:
            self.momentum = momentum
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # a real step; it also warms up what must not happen inside a capture
                self.eager()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.eager()
        else:
            self.graph.replay()


def prepare(x: Tensor, run: Run) -> Tensor:
    x = x.float().div(255)
    if run.normalize:
        x = torch.stack([(x[:, i] - MEAN[i]) / DEVIATION[i] for i in range(3)], 1)
    return x.contiguous(memory_format=torch.channels_last) if run.half else x


def autocast(run: Run, device: torch.device) -> Any:
    if not run.half or device.type != "cuda":
        return nullcontext()
    return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)  # no cache across replays of a graph


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor, run: Run) -> float:
    model.eval()
    right = 0
    for images, labels in zip(x.split(1000), y.split(1000), strict=True):
        with autocast(run, x.device):
            right += int((model(prepare(images, run)).argmax(1) == labels).sum())
    model.train()
    return 100 * right / len(x)


def train(run: Run, data: tuple[Tensor, Tensor, Tensor, Tensor], seed: int, epochs: int) -> dict[str, Any]:
    x, y, test_x, test_y = data
    torch.manual_seed(seed)
    model = run.build().to(x.device)
    model = model.to(memory_format=torch.channels_last) if run.half else model
    fused = x.device.type == "cuda"
    momentum = run.schedule(0.0)[1]
    optimizer = torch.optim.SGD(
        run.groups(model), lr=torch.tensor(0.0, device=x.device), momentum=momentum, weight_decay=run.decay,
        fused=fused, foreach=None if fused else False,
    )  # fmt: skip
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.0, device=x.device)
    run.attach(model, optimizer, prepare(x[:2], run))
    step = Step(run, model, optimizer, x, y)
    steps = len(x) // run.batch
    history: list[float] = []
    losses: list[float] = []
    start = time.monotonic()
    for epoch in range(epochs):
        order = torch.randperm(len(x), device=x.device)
        step.loss.zero_()
        for i in range(steps):
            lr, momentum = run.schedule((epoch + i / steps) * run.epochs / epochs)
            step(order[i * run.batch : (i + 1) * run.batch], lr, momentum)
        losses.append(float(step.loss) / steps)
        history.append(accuracy(model, test_x, test_y, run))
        if not torch.isfinite(step.loss):
            break
    return {
        "name": run.name, "seed": seed, "epochs": epochs, "test_accuracy": history[-1], "history": history,
        "train_loss": losses, "diverged": not all(math.isfinite(loss) for loss in losses),
        "seconds": time.monotonic() - start, **run.note,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after this many minutes")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = toy(device) if arguments.toy else load(arguments.data, device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    done = set()
    if arguments.out.exists():
        done = {(row["name"], row["seed"]) for row in map(json.loads, arguments.out.read_text().splitlines())}
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    begin = time.monotonic()
    for group in arguments.runs:
        for run in GROUPS[group]():
            if (run.name, arguments.seed) in done or time.monotonic() - begin > 60 * arguments.minutes:
                continue
            result = train(run, data, arguments.seed, 2 if arguments.toy else run.epochs)
            result |= {"toy": arguments.toy, "hardware": hardware, "torch": torch.__version__, "command": command}
            with arguments.out.open("a") as file:
                file.write(json.dumps(result) + "\n")
                file.flush()
                os.fsync(file.fileno())
            print(f"{run.name:32s} {result['test_accuracy']:6.2f} %  {result['seconds']:6.1f} s", flush=True)


if __name__ == "__main__":
    main()
