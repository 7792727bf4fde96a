"""What a normalization adds to a training step: ResNet-18 and 50, and a Llama-shaped net of a billion parameters.

Forward, backward and SGD with momentum on random inputs; on a GPU bfloat16 autocast, channels_last and fused SGD, timed
by CUDA events; on a CPU by the clock, or with a single thread by the time that the process had. The variants of a
network take turns, so that a slow moment of the machine hits all of them.

A host that is slow to launch kernels hides what they cost, or adds to it. So whole training steps are measured as CUDA
graphs too, which the host has no part in. ENorm costs so little that the optimizer's step is measured by itself, with
and without it, and a cycle beside what it takes to move its bytes.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from ... import ENorm, MeanShiftRejection, convert
from ...enorm.sgd import ENormSGD
from ...msr import parameter_groups, scaled_kernels
from .. import nets as models
from ..nets.fused import fused_kernels
from . import norm_traffic
from .llama import Llama
from .norm_traffic import NormTraffic
from .output import Timing

WITHOUT = ("RMSNorm", "no norm")
"""What a variant with ENorm is compared with: the first of these that the network has."""

GREEDY = ("GN", "LN")
"""Variants that take so much memory and so long that nobody asks what they cost as a graph."""

RATE = 1e-6
"""The time of a step does not depend on the learning rate, and nets without a norm stay finite with this one."""

__all__ = ["Network", "StepCost", "Variant", "measure", "networks", "sentences", "table"]


def _sgd(model: nn.Module, params: Any, x: Tensor) -> torch.optim.Optimizer:
    fast = {"fused": True} if x.is_cuda else {"foreach": True}
    return torch.optim.SGD(params, lr=RATE, momentum=0.9, **fast)


@dataclass(frozen=True)
class Variant:
    """A network with a normalization: how to build it, its optimizer, and what is attached to that."""

    name: str
    build: Callable[[], nn.Module]
    attach: Callable[[nn.Module, torch.optim.Optimizer, Tensor], object] = lambda *_: None
    optimizer: Callable[[nn.Module, Any, Tensor], torch.optim.Optimizer] = _sgd
    fused: bool = False
    """Whether layers take in what stands beside them: sum, ReLU and convolution, as the laboratory trains them."""


@dataclass(frozen=True)
class Network:
    name: str
    variants: tuple[Variant, ...]
    inputs: Callable[[torch.device], tuple[Tensor, Tensor]]
    image: bool = True
    accumulate: int = 1  # passes before each optimizer step


@dataclass(frozen=True)
class StepCost:
    """One variant of one network, eager or compiled."""

    network: str
    variant: str
    mode: str
    step: Timing
    adds: float  # milliseconds more than the variant without a norm
    of_bn: float | None  # that, as a part of what BatchNorm adds
    peak: float | None  # GiB at the height of a step
    adds_memory: float | None  # GiB more than the variant without a norm
    cycle: Timing | None = None  # an ENorm cycle by itself
    floor: Timing | None = None  # reading and writing weights and momentum once: a copy
    moved: int | None = None  # bytes, that is
    bandwidth: float | None = None  # bytes per second that a copy of a gigabyte moves
    update: Timing | None = None  # the optimizer's step by itself, ENorm's included
    passes: Timing | None = None  # a forward and a backward pass by themselves, where a step has several
    traffic: NormTraffic | None = None  # what the norm must at least move and launch,
    traffic_bytes: int | None = None  # and that of a step in bytes
    captured: Timing | None = None  # the whole training step as a CUDA graph,
    captured_adds: float | None = None  # and the same of that
    captured_of_bn: float | None = None
    failed: str = ""


# -- what is measured --------------------------------------------------------------------------------------------------


def _enorm(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, gradients: bool = False) -> object:
    enorm = ENorm(model, optimizer, _example(x), gradients=gradients)  # which are zeroed after every step
    enorm.attach()
    return enorm


def _enorm_sgd(model: nn.Module, params: Any, x: Tensor) -> torch.optim.Optimizer:
    return ENormSGD(model, _example(x), lr=RATE, momentum=0.9, params=params)


def _example(x: Tensor) -> Tensor:
    """What to trace a network with: one image, or the beginning of one text."""
    return x[:1] if x.is_floating_point() else x[:1, :64]


def _msr(model: nn.Module, optimizer: torch.optim.Optimizer, _: Tensor) -> object:
    return MeanShiftRejection(model, optimizer).attach()


def resnet(depth: int, batch: int, size: int = 224, classes: int = 1000, **options: Any) -> Network:
    """ResNet-18 or 50 for ImageNet, every normalization in its place."""

    def build(norm: str, **norm_options: Any) -> nn.Module:
        shape = (3, size, size)
        return models.build(
            f"resnet{depth}", classes=classes, in_shape=shape, norm=norm, norm_options=norm_options, **options
        )

    def pairs(**norm_options: Any) -> nn.Module:
        """EquiNorm with ReLUs that leave their sums, which is drop-in."""
        model = build("equinorm", **norm_options)
        return convert(model, "equinorm", torch.zeros(2, 3, size, size), pairs=True, inplace=True)[0]

    variants = (
        Variant("no norm", partial(build, "none")),
        Variant("BN", partial(build, "batchnorm")),
        Variant("GN", partial(build, "groupnorm", **({"groups": 1} if "width" in options else {}))),
        Variant("LN", partial(build, "layernorm")),
        Variant("ENorm", partial(build, "none"), _enorm),
        Variant("ENorm, fused with SGD", partial(build, "none"), optimizer=_enorm_sgd),
        Variant("EquiNorm", partial(build, "equinorm")),
        Variant("EquiNorm, fused pairs", pairs),
        Variant("EquiNorm, fused blocks", pairs, fused=True),
        Variant("EquiNorm, a quarter", partial(build, "equinorm", stats_fraction=0.25)),
        Variant("EquiNorm, a quarter, fused pairs", partial(pairs, stats_fraction=0.25)),
        Variant("EquiNorm, a quarter, fused blocks", partial(pairs, stats_fraction=0.25), fused=True),
        Variant("MSR", partial(build, "msr"), _msr),
        Variant("WN", partial(build, "weightnorm")),
    )

    def inputs(device: torch.device) -> tuple[Tensor, Tensor]:
        x = torch.rand(batch, 3, size, size, device=device)
        if device.type == "cuda":
            x = x.contiguous(memory_format=torch.channels_last)
        return x, torch.randint(classes, (batch,), device=device)

    return Network(f"ResNet-{depth}, batch {batch}", variants, inputs)


def fc(batch: int, **options: Any) -> Network:
    """FC-19 of stock2019 on images of CIFAR's size: its step is short beside its weights."""

    def build(norm: str) -> nn.Module:
        return models.build("fc", classes=10, in_shape=(3, 32, 32), norm=norm, bias=False, **{"hidden": 19, **options})

    variants = (
        Variant("no norm", partial(build, "none")),
        Variant("BN", partial(build, "batchnorm")),
        Variant("ENorm", partial(build, "none"), _enorm),
        Variant("ENorm, gradients too", partial(build, "none"), partial(_enorm, gradients=True)),
    )

    def inputs(device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.rand(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)

    return Network(f"FC-19, batch {batch}", variants, inputs, image=False)


def llama(batch: int, length: int = 2048, accumulate: int = 1, **options: Any) -> Network:
    """A Llama-shaped net; it has RMSNorm of its own, which ENorm keeps and sees through."""

    def build(norm: type[nn.Module]) -> nn.Module:
        return Llama(norm=norm, **options)

    variants = (
        Variant("no norm", partial(build, nn.Identity)),
        Variant("RMSNorm", partial(build, nn.RMSNorm)),
        Variant("LN", partial(build, nn.LayerNorm)),
        Variant("RMSNorm + ENorm", partial(build, nn.RMSNorm), _enorm),
        Variant("RMSNorm + ENorm, fused with SGD", partial(build, nn.RMSNorm), optimizer=_enorm_sgd),
    )
    vocabulary = options.get("vocabulary", 32000)

    def inputs(device: torch.device) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(vocabulary, (2, batch // accumulate, length), device=device)
        return tokens[0], tokens[1]

    return Network(f"Llama shape, {batch} x {length} tokens", variants, inputs, False, accumulate)


def networks(device: torch.device, quick: bool = False) -> dict[str, Network]:
    """What to measure on a device; on a CPU smaller images and batches."""
    if quick:
        tiny = {"layers": 2, "width": 64, "heads": 4, "groups": 2, "hidden": 128, "vocabulary": 100}
        return {
            "resnet18": resnet(18, 4, 32, 10, width=8),
            "llama": llama(1, 16, **tiny),
            "fc19": fc(4, hidden=2, width=16),
        }
    if device.type == "cuda":
        return {
            "resnet18": resnet(18, 256),
            "llama": llama(256, 1024, accumulate=16),
            "resnet50": resnet(50, 256),
            "fc19": fc(256),
            "resnet18-32": resnet(18, 32),
            "resnet50-32": resnet(50, 32),
            "llama-32": llama(32, 1024, accumulate=2),
        }
    return {
        "resnet18": resnet(18, 8),
        "resnet50": resnet(50, 4),
        "llama": llama(1, 128, layers=2, width=512, hidden=1408),
        "fc19": fc(256),
    }


# -- measuring ---------------------------------------------------------------------------------------------------------


class Stepper:
    """One variant, ready to make training steps."""

    def __init__(self, network: Network, variant: Variant, device: torch.device, compiled: bool) -> None:
        torch.manual_seed(0)
        self.device, self.image, self.accumulate = device, network.image, network.accumulate
        self.kernels = fused_kernels if variant.fused and not compiled else nullcontext
        gc.collect()  # what is freed later would count as memory that this variant does without
        before = self._allocated()
        self.x, self.y = network.inputs(device)
        with torch.device(device):
            self.model = variant.build()
        if self.image and device.type == "cuda":
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        groups: Any = list(self.model.parameters())
        if any(True for _ in scaled_kernels(self.model)):
            groups = parameter_groups(self.model)
        self.optimizer = variant.optimizer(self.model, groups, self.x)
        self.method = variant.attach(self.model, self.optimizer, self.x)
        self.run = torch.compile(self.model) if compiled else self.model
        for _ in range(3):
            self.step(min(self.accumulate, 2))
        self._wait()
        self.static = self._allocated() - before

    def step(self, passes: int | None = None) -> None:
        """One training step; `passes` instead of all that it accumulates where only memory matters."""
        for _ in range(passes or self.accumulate):
            self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self) -> None:
        with self.kernels(), torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            out = self.run(self.x)
            loss = F.cross_entropy(out.flatten(0, -2).float(), self.y.flatten())
        loss.backward()

    def peak(self) -> float | None:
        """GiB at the height of a step: what this variant keeps, and what a step adds to it."""
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        rest = self._allocated()
        self.step(min(self.accumulate, 2))
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - rest + self.static) / 2**30

    def traffic(self) -> dict[str, Any]:
        """What its norms must at least move and launch: fields of `StepCost`."""
        if not self.image or self.kernels is fused_kernels:  # in which it is not known who takes in what
            return {}
        with self.kernels(), torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            found = norm_traffic.count(self.model, self.x[:2].contiguous(memory_format=torch.channels_last))
        activation = 2 if self.device.type == "cuda" else 4
        moved = None if found is None else found.bytes(len(self.x), activation, 4)
        return {"traffic": found, "traffic_bytes": moved}

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @property
    def enorm(self) -> ENorm | None:
        if isinstance(self.optimizer, ENormSGD):
            return self.optimizer.enorm
        return self.method if isinstance(self.method, ENorm) else None

    @property
    def moved(self) -> int:
        """Bytes that an ENorm cycle reads and writes at least: weights and momentum, once."""
        return 4 * sum(p.numel() * p.element_size() for p in self.model.parameters() if p.ndim > 1)


def copying(moved: int, device: torch.device) -> Callable[[], object]:
    """A copy that reads and writes so many bytes, taken together."""
    source, target = (torch.empty(moved // 2, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def measure_alone(steppers: dict[str, Stepper], repeats: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """ENorm by itself, where there is one: fields of `StepCost` by variant. As graphs on CUDA, taking turns."""
    with_enorm = {name: stepper for name, stepper in steppers.items() if stepper.enorm is not None}
    if not with_enorm:
        return {}
    base = {name: steppers[name] for name in WITHOUT if name in steppers}
    bodies: dict[tuple[str, str], Callable[[], object]] = {}
    passes = {name: s.backward for name, s in (base | with_enorm).items() if s.accumulate > 1}
    found: dict[str, dict[str, Any]] = {name: {} for name in base | with_enorm}
    for name, timing in take_turns(passes, repeats, 2, device).items():
        found[name]["passes"] = timing
    for name, stepper in (base | with_enorm).items():
        stepper.backward()  # gradients, which stay where they are
        bodies[name, "update"] = captured(stepper.optimizer.step, device)
        if isinstance(stepper.method, ENorm):
            bodies[name, "cycle"] = captured(stepper.method.step, device)
            bodies[name, "floor"] = captured(copying(stepper.moved, device), device)
    for (name, what), timing in take_turns(bodies, repeats, 10 if device.type == "cuda" else 2, device).items():
        found[name][what] = timing
    bodies.clear()
    most = 2**30 if device.type == "cuda" else 2**27
    copy = copying(most, device)
    seconds = min(milliseconds(copy, 5, device) for _ in range(4)) / 1e3  # the first touches the memory
    for name, stepper in with_enorm.items():
        found[name].update(moved=stepper.moved, bandwidth=most / seconds)
    for name in found:
        steppers[name].optimizer.zero_grad()
    return found


def measure_captured(steppers: dict[str, Stepper], repeats: int, device: torch.device) -> dict[str, Timing]:
    """Whole training steps as CUDA graphs, taking turns. Each keeps memory of its own, so the greediest have none."""
    chosen = {
        name: stepper.step for name, stepper in steppers.items() if stepper.accumulate == 1 and name not in GREEDY
    }
    if device.type != "cuda" or len(chosen) < 2:
        return {}
    return take_turns({name: captured(step, device) for name, step in chosen.items()}, repeats, 10, device)


Name = TypeVar("Name")


def take_turns(
    bodies: Mapping[Name, Callable[[], object]], repeats: int, times: int, device: torch.device
) -> dict[Name, Timing]:
    """The time of one call of each, so many calls at a time."""
    found: dict[Name, list[float]] = {name: [] for name in bodies}
    for _ in range(repeats):
        for name, body in bodies.items():
            found[name].append(milliseconds(body, times, device))
    return {name: Timing.of(values) for name, values in found.items()}


def captured(body: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`body` as a CUDA graph; itself on a CPU."""
    if device.type != "cuda":
        return body
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return partial(_replay, graph, body)


def _replay(graph: torch.cuda.CUDAGraph, body: Callable[[], object]) -> None:
    """`body` is here because the graph reads tensors that belong to it."""
    graph.replay()


def _prepare(device: torch.device) -> None:
    """Give back what another network had, and let torch allocate what matrix products share.

    Else the one would be missing, and the other count as memory of the first variant.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.zeros(64, 64, device=device, dtype=dtype, requires_grad=True)
            # the backward pass has a thread of its own, and that a workspace
            (F.linear(x, x, torch.zeros(64, device=device, dtype=dtype)) @ x).sum().backward()


def milliseconds(body: Callable[[], object], times: int, device: torch.device) -> float:
    """The time of one call, measured over several."""
    if device.type != "cuda":
        # with one thread the time of the process itself, which others that the machine works for do not lengthen
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        begin = clock()
        for _ in range(times):
            body()
        return 1e3 * (clock() - begin) / times
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        body()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / times


def measure(
    network: Network,
    device: torch.device,
    *,
    compiled: bool = False,
    only: tuple[str, ...] = (),
    repeats: int = 7,
    steps: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[StepCost]:
    """Time every variant of a network, taking turns of so many steps, or of a fifth of a second.

    A variant that fails is named with its error; the others go on.
    """
    steppers: dict[str, Stepper] = {}
    failed: dict[str, str] = {}
    mode = "compiled" if compiled else "eager"
    _prepare(device)
    for variant in network.variants:
        if only and variant.name not in only:
            continue
        say(f"{network.name}, {mode}: preparing {variant.name}")
        try:
            steppers[variant.name] = Stepper(network, variant, device, compiled)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            failed[variant.name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    say(f"{network.name}, {mode}: {repeats} turns")
    bodies: dict[str, Callable[[], object]] = {name: stepper.step for name, stepper in steppers.items()}
    if steps is None:  # a queue takes a while to fill: what comes in one step is not what it costs in many
        first = milliseconds(next(iter(bodies.values()), lambda: None), 1, device)
        steps = max(1, min(20, round(200 / max(first, 1e-3))))
    times = take_turns(bodies, repeats, steps, device)
    peaks = {name: stepper.peak() for name, stepper in steppers.items()}
    say(f"{network.name}, {mode}: ENorm by itself")
    alone = measure_alone(steppers, repeats, device)
    for name, stepper in steppers.items():
        alone.setdefault(name, {}).update(stepper.traffic())
    try:
        whole = measure_captured(steppers, repeats, device)
    except RuntimeError as error:  # no memory for several graphs, say: what was measured is worth keeping
        say(f"{network.name}: no whole step was captured, {error}")
        whole = {}
    rows = list(_rows(network.name, mode, times, peaks, alone, whole))
    rows += [
        StepCost(network.name, name, mode, Timing.of([float("nan")]), float("nan"), None, None, None, failed=why)
        for name, why in failed.items()
    ]
    return rows


def _rows(
    network: str,
    mode: str,
    times: dict[str, Timing],
    peaks: dict[str, float | None],
    alone: dict[str, dict[str, Any]],
    whole: dict[str, Timing],
) -> Iterator[StepCost]:
    base = peaks.get("no norm")
    for name, timing in times.items():
        adds, of_bn = _added(times, name)
        peak = peaks[name]
        memory = peak - base if peak is not None and base is not None else None
        more = dict(alone.get(name, {}))
        if name in whole:
            more["captured"] = whole[name]
            more["captured_adds"], more["captured_of_bn"] = _added(whole, name)
        yield StepCost(network, name, mode, timing, adds, of_bn, peak, memory, **more)


def _added(times: dict[str, Timing], name: str) -> tuple[float, float | None]:
    """Milliseconds more than without a norm, and that as a part of what BatchNorm adds."""
    plain, bn = times.get("no norm"), times.get("BN")
    if plain is None:
        return float("nan"), None
    adds = times[name].median - plain.median
    return adds, adds / (bn.median - plain.median) if bn and bn.median != plain.median else None


def table(rows: list[StepCost]) -> Table:
    """Milliseconds per training step, and what each normalization adds to it."""
    n = next((row.step.n for row in rows if not row.failed), 0)
    title = f"{rows[0].network}, {rows[0].mode}: ms per training step, median (middle half) of {n}, taking turns"
    columns: list[tuple[str, list[str]]] = [
        ("step", ["failed" if row.failed else str(row.step) for row in rows]),
        ("adds", [_number(row.adds, "+.2f") for row in rows]),
        ("of BN's", [_number(row.of_bn, ".2f") for row in rows]),
        ("as a CUDA graph", ["" if row.captured is None else str(row.captured) for row in rows]),
        ("adds", [_number(row.captured_adds, "+.2f") for row in rows]),
        ("of BN's", [_number(row.captured_of_bn, ".2f") for row in rows]),
        ("peak GiB", [_number(row.peak, ".2f") for row in rows]),
        ("adds GiB", [_number(row.adds_memory, "+.2f") for row in rows]),
    ]
    columns = [(head, cells) for head, cells in columns if any(cells)]
    shown = Table(title=title, title_justify="left")
    shown.add_column("variant", no_wrap=True)
    for head, _ in columns:
        shown.add_column(head, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        shown.add_row(row.variant, *(cells[i] for _, cells in columns))
    return shown


def _number(value: float | None, form: str) -> str:
    return "" if value is None or math.isnan(value) else format(value, form)


def sentences(rows: list[StepCost]) -> list[str]:
    """What ENorm costs by itself, against the bytes it moves, BatchNorm and the step."""
    by_bn = next((row.adds for row in rows if row.variant == "BN"), None)
    said = [sentence for row in rows for sentence in (*_of_cycle(row, by_bn), *_of_floor(row))]
    said += _of_traffic(rows)
    said += _compared(rows, "update", "the optimizer's step by itself", by_bn)
    said += _compared(rows, "passes", "a forward and a backward pass by themselves", by_bn)
    said += _compared(rows, "captured", "the whole step as a CUDA graph", by_bn)
    return said + [f"{row.network}, {row.mode}, {row.variant} failed: {row.failed}" for row in rows if row.failed]


def _of_cycle(row: StepCost, by_bn: float | None) -> Iterator[str]:
    if row.cycle is None or row.floor is None:
        return
    parts = [f"{row.network}, {row.mode}: an ENorm cycle with momentum by itself {row.cycle} ms"]
    parts.append(f"{row.cycle.median / row.floor.median:.1f} times the floor of {row.floor} ms")
    parts.append(f"{100 * row.cycle.median / row.step.median:.2f} % of the step")
    if by_bn is not None:
        parts.append(f"{row.cycle.median / by_bn:.3f} of what BN adds")
    yield ", ".join(parts)


def _of_floor(row: StepCost) -> Iterator[str]:
    if row.floor is None or row.moved is None or row.bandwidth is None:
        return
    least = 1e3 * row.moved / row.bandwidth
    yield (
        f"{row.network}: the floor is to read and write weights and momentum once, {row.moved / 1e6:.1f} MB: "
        f"{row.floor} ms as a copy, {least:.3f} ms at the {row.bandwidth / 1e9:.0f} GB/s of a large copy"
    )


def _of_traffic(rows: list[StepCost]) -> Iterator[str]:
    """What norms must at least move, in bytes and at the speed of a large copy."""
    bandwidth = next((row.bandwidth for row in rows if row.bandwidth is not None), None)
    for row in rows:
        if row.traffic is None or row.traffic_bytes is None:
            continue
        least = "" if bandwidth is None else f", {1e3 * row.traffic_bytes / bandwidth:.2f} ms at the speed of a copy"
        yield (
            f"{row.network}: {row.variant} reads and writes at least {row.traffic_bytes / 1e9:.2f} GB more in an eager "
            f"step than no norm{least}, in {row.traffic.launches} launches of its own"
        )


def _compared(rows: list[StepCost], field: str, what: str, by_bn: float | None) -> Iterator[str]:
    """How much longer something takes with ENorm."""
    found = {row.variant: (row, timing) for row in rows if (timing := getattr(row, field)) is not None}
    base = next((found[name][1] for name in WITHOUT if name in found), None)
    for variant, (row, timing) in found.items():
        if "ENorm" not in variant or base is None:
            continue
        added = timing.median - base.median
        parts = [
            f"{row.network}, {row.mode}: {what} {timing} ms with {row.variant}, {base} ms without: {added:+.3f} ms"
        ]
        parts.append(f"{100 * added / row.step.median:.2f} % of the step")
        if by_bn is not None:
            parts.append(f"{added / by_bn:.3f} of what BN adds")
        yield ", ".join(parts)
