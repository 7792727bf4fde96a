"""What EquiNorm and mean shift rejection add to a training step, beside BatchNorm, in one run.

    python benchmarks/kernels_equinorm.py                     # ResNet-18, 256 × 224², bfloat16 autocast, on CUDA
    python benchmarks/kernels_equinorm.py --eager-only        # half a minute; --compiled-only takes two
    python benchmarks/kernels_equinorm.py --toy               # a few seconds on a CPU: does it run?

All variants are warmed up first and then take turns, a few steps at a time, so that they meet the same clocks
and temperatures. Printed are medians over the turns in ms per step with the extremes, what each adds to the net
without a norm, and that as a part of what BatchNorm adds; the time that the device itself was busy (summed over
its kernels by torch.profiler) and the host (until all of a step is queued), the longer of which a step takes; and
the peak of memory of a step, parameters and optimizer included.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equinorm.kernels.dispatch import plain_only
from equinorm.meanshift import MeanShiftRejection, apply_mean_shift_rejection_, parameter_groups
from equinorm.nn import EquiNormConv2d

MIB = 2**20


# -- ResNet-18 -----------------------------------------------------------------------------------------------

Layer = Callable[..., nn.Module]
"""Makes a convolution with whatever norm goes with it: (inputs, outputs, kernel, stride)."""


def plain_conv(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Module:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


def conv_and_batchnorm(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Module:
    return nn.Sequential(plain_conv(inputs, outputs, kernel, stride), nn.BatchNorm2d(outputs))


def equinorm_conv(fraction: float) -> Layer:
    return lambda inputs, outputs, kernel, stride: EquiNormConv2d(
        inputs, outputs, kernel, stride, kernel // 2, stats_fraction=fraction
    )


class Block(nn.Module):
    """Two 3 × 3 layers and a shortcut."""

    def __init__(self, layer: Layer, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = layer(inputs, outputs, 3, stride), layer(outputs, outputs, 3, 1)
        self.shortcut = layer(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.relu(self.conv1(x), inplace=True))
        return F.relu(y + self.shortcut(x), inplace=True)


class ResNet18(nn.Module):
    """As in torchvision, with its layers made by `layer`."""

    def __init__(self, layer: Layer, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = layer(3, width, 7, 2)
        blocks, inputs = [], width
        for stage in range(4):
            for i in range(2):
                blocks.append(Block(layer, inputs, width * 2**stage, 2 if stage and i == 0 else 1))
                inputs = width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(x), inplace=True), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


# -- variants ------------------------------------------------------------------------------------------------


@dataclass
class Variant:
    """A net in training, and what was measured of it."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    plain: bool = False
    """Without the kernels of equinorm."""
    run: Any = None
    """The model as it is called: itself, or compiled."""
    times: list[float] = field(default_factory=list)
    busy: float = float("nan")
    host: float = float("nan")
    peak: float = float("nan")
    kernels: dict[str, float] = field(default_factory=dict)

    def step(self, x: Tensor, target: Tensor, autocast: Any) -> None:
        with plain_only() if self.plain else nullcontext():
            self.optimizer.zero_grad(set_to_none=True)
            with autocast():
                loss = F.cross_entropy(self.run(x), target)
            loss.backward()
            self.optimizer.step()

    def bytes(self) -> int:
        """Of parameters, buffers and optimizer state."""
        state = [t for values in self.optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
        return sum(t.numel() * t.element_size() for t in (*self.model.parameters(), *self.model.buffers(), *state))


EAGER = ["no norm", "BatchNorm", "EquiNorm, plain", "EquiNorm", "EquiNorm 1/4", "MSR, plain", "MSR"]
COMPILED = ["no norm", "BatchNorm", "EquiNorm", "EquiNorm 1/4"]


def build(name: str, device: torch.device, width: int, compiled: bool) -> Variant:
    layer: Layer = plain_conv
    if name == "BatchNorm":
        layer = conv_and_batchnorm
    elif name.startswith("EquiNorm"):
        layer = equinorm_conv(0.25 if name.endswith("1/4") else 1.0)
    torch.manual_seed(0)
    model: nn.Module = ResNet18(layer, width)
    msr = name.startswith("MSR")
    if msr:
        apply_mean_shift_rejection_(model)
    model = model.to(device, memory_format=torch.channels_last)
    groups: Any = parameter_groups(model) if msr else model.parameters()
    # a rate at which also the net without a norm stays finite; the time of a step does not depend on it
    optimizer = torch.optim.SGD(groups, lr=1e-4, momentum=0.9, fused=True)
    if msr:
        MeanShiftRejection(model, optimizer).attach()
    return Variant(name, model, optimizer, name.endswith("plain"), torch.compile(model) if compiled else model)


# -- measuring -----------------------------------------------------------------------------------------------


class Clock:
    """Times between marks, on the device's own clock if it has one."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, begin: Any, end: Any) -> float:
        if not self.cuda:
            return 1e3 * (end - begin)
        end.synchronize()
        return begin.elapsed_time(end)


def measure(variants: list[Variant], step: Callable[[Variant], None], clock: Clock, turns: int, burst: int) -> None:
    """Medians of bursts of steps; the first step of a burst fills the queue and is not counted."""
    for turn in range(turns):
        order = variants if turn % 2 == 0 else variants[::-1]
        marks = []
        for variant in order:
            step(variant)
            begin = clock.mark()
            for _ in range(burst):
                step(variant)
            marks.append((variant, begin, clock.mark()))
        for variant, begin, end in marks:
            variant.times.append(clock.ms(begin, end) / burst)


def measure_memory(variant: Variant, step: Callable[[Variant], None]) -> None:
    variant.optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(variant)
    torch.cuda.synchronize()
    variant.peak = (torch.cuda.max_memory_allocated() - before + variant.bytes()) / MIB
    variant.optimizer.zero_grad(set_to_none=True)


def measure_host(variant: Variant, step: Callable[[Variant], None], steps: int = 8) -> None:
    """How long it takes to queue a step on an idle device."""
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step(variant)
        times.append(1e3 * (time.perf_counter() - begin))
    variant.host = statistics.median(times)


OURS = (
    "_sum_rows", "_sum_planes", "_add_rows", "_add_planes", "_transform", "_weight_gradient", "_scale",
    "_scale_backward", "_write", "_adapt", "_limit", "_scale_gradients",
)  # fmt: skip


def measure_busy(variant: Variant, step: Callable[[Variant], None], steps: int = 3) -> None:
    """How long the device is busy in a step, and for how long with kernels of ours."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            step(variant)
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.device_time / 1e3 / steps
    variant.busy = sum(times.values())
    variant.kernels = {name: times[name] for name in OURS if name in times}


def table(title: str, variants: list[Variant]) -> None:
    by_name = {variant.name: variant for variant in variants if variant.times}
    base, batchnorm = by_name.get("no norm"), by_name.get("BatchNorm")
    print(f"\n{title}")
    heads = {"ms per step": 12, "[least, most]": 18, "adds": 8, "of BN": 7, "busy": 9, " adds": 8}
    heads.update({"host": 9, "  adds": 8, "peak MiB": 10})
    print(" " * 18 + "".join(f"{head:>{width}}" for head, width in heads.items()))
    for variant in by_name.values():
        median = statistics.median(variant.times)
        row = f"{variant.name:18}{median:12.3f}{f'[{min(variant.times):.2f}, {max(variant.times):.2f}]':>18}"
        if base is not None:
            added = median - statistics.median(base.times)
            row += f"{added:8.3f}"
            if batchnorm is not None:
                row += f"{added / (statistics.median(batchnorm.times) - statistics.median(base.times)):7.2f}"
            row += f"{variant.busy:9.3f}{variant.busy - base.busy:8.3f}"
            row += f"{variant.host:9.3f}{variant.host - base.host:8.3f}"
        print(f"{row}{variant.peak:10.0f}", flush=True)
    for variant in by_name.values():
        if variant.kernels:
            parts = ", ".join(f"{name} {ms:.3f}" for name, ms in variant.kernels.items())
            print(f"  {variant.name}, ms in its kernels: {sum(variant.kernels.values()):.3f} = {parts}", flush=True)


def attempt(what: str, action: Callable[[], Any]) -> Any:
    """What `action` gives; a failure is printed, and the others go on."""
    try:
        return action()
    except Exception:
        print(f"-- {what} failed:")
        traceback.print_exc()
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--burst", type=int, default=4, help="steps of a variant in a row")
    parser.add_argument("--seconds", type=float, default=150.0, help="begin nothing new after this")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--eager-only", action="store_true")
    only.add_argument("--compiled-only", action="store_true")
    options = parser.parse_args()
    started = time.perf_counter()
    cuda = torch.cuda.is_available() and not options.toy
    if not cuda and not options.toy:
        parser.error("no CUDA device; --toy runs on the CPU")
    device = torch.device("cuda" if cuda else "cpu")
    batch, size, width, turns, burst = options.batch, 224, 64, options.turns, options.burst
    if options.toy:
        batch, size, width, turns, burst = 4, 32, 8, 2, 1
    torch.backends.cudnn.benchmark = True
    name = torch.cuda.get_device_name() if cuda else "CPU"
    print(f"ResNet-18, {batch} x {size}², torch {torch.__version__}, {name}", flush=True)

    x = torch.rand(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
    target = torch.randint(1000, (batch,), device=device)

    def step(variant: Variant) -> None:
        variant.step(x, target, lambda: torch.autocast(device.type, torch.bfloat16, enabled=cuda))

    def ready(name: str, compiled: bool) -> Variant:
        variant = build(name, device, width, compiled)
        for _ in range(3 if cuda else 1):
            step(variant)
        if cuda:
            measure_memory(variant, step)
        return variant

    clock = Clock(cuda)
    for title, names, compiled in (("eager", EAGER, False), ("compiled", COMPILED, True)):
        if options.eager_only if compiled else options.compiled_only:
            continue
        variants = []
        for name in names:
            if time.perf_counter() - started > options.seconds:
                print(f"-- {title} {name}: left out, {options.seconds} s are over")
                continue
            variant = attempt(f"{title} {name}", lambda name=name, compiled=compiled: ready(name, compiled))
            if variant is not None:
                variants.append(variant)
                print(f"   ready after {time.perf_counter() - started:.0f} s: {title} {name}", flush=True)
        attempt(f"measuring {title}", lambda variants=variants: measure(variants, step, clock, turns, burst))
        if cuda:
            for variant in variants:
                attempt(f"host time of {title} {variant.name}", lambda variant=variant: measure_host(variant, step))
                attempt(f"profiling {title} {variant.name}", lambda variant=variant: measure_busy(variant, step))
        table(title, variants)
    print(f"{time.perf_counter() - started:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
