"""What an ENorm cycle communicates beside the training step that it follows: bytes, collectives and time.

    equinorm bench sharded                  two and four processes on this machine's CPU (gloo)
    equinorm bench sharded --only llama     one of the networks

Bytes are those that torch hands to its collectives (`traffic`): of a gather what comes out, of a reduction what goes
in, of an all-reduce twice that. They depend neither on the machine nor on what connects machines. Times are of
processes that share the cores of one machine: they say what work there is, not how fast a cluster is.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ... import ENorm, trace
from .llama import Llama
from .traffic import Traffic

__all__ = ["NAMES", "Exchange", "measure", "table_of"]

NAMES = ("llama", "resnet18")
PROCESSES = (2, 4)


@dataclass(frozen=True)
class Exchange:
    """What one process of several communicates in a step, and in the cycle after it."""

    network: str
    way: str
    processes: int
    parameters: int
    scales: int
    step_bytes: int
    step_collectives: int
    cycle_bytes: int
    cycle_collectives: int
    cycle_kinds: list[str]
    cycle_numbers: int  # that are added up over processes
    step_ms: float  # forward, backward and the optimizer's step
    cycle_ms: float

    @property
    def numbers_per_scale(self) -> float:
        return self.cycle_numbers / self.scales

    @property
    def share(self) -> float:
        return self.cycle_bytes / self.step_bytes


class ResNet(nn.Sequential):
    """ResNet-18 for small images, without norms: four stages of two blocks of two convolutions."""

    def __init__(self, width: int, classes: int) -> None:
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        blocks = [
            Block(before if first else after, after, 2 if first and after > before else 1)
            for before, after in pairwise(widths)
            for first in (True, False)
        ]
        end = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))
        super().__init__(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), *blocks, end)


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1)
        self.second = nn.Conv2d(after, after, 3, padding=1)
        self.skip = nn.Conv2d(before, after, 1, stride) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.skip(x) + self.second(F.relu(self.first(x))))


class Network(NamedTuple):
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]  # of one process
    ways: tuple[str, ...]


def networks(quick: bool) -> dict[str, Network]:
    """A Llama of 12 million parameters and a ResNet-18 of 11 million, or tiny ones."""
    words, length, examples = (50, 8, 2) if quick else (4096, 128, 4)
    sizes: dict[str, Any] = (
        {"layers": 2, "width": 32, "heads": 4, "groups": 4, "hidden": 48}
        if quick
        else {"layers": 8, "width": 320, "heads": 8, "groups": 4, "hidden": 896}
    )
    width, classes, size = (4, 10, 16) if quick else (64, 100, 32)

    def llama() -> nn.Module:
        return Llama(**sizes, vocabulary=words)

    def resnet() -> nn.Module:
        return ResNet(width, classes)

    def tokens() -> tuple[Tensor, Tensor]:
        drawn = torch.randint(words, (examples, length + 1))
        return drawn[:, :-1], drawn[:, 1:].flatten()

    def images() -> tuple[Tensor, Tensor]:
        return torch.randn(examples, 3, size, size), torch.randint(classes, (examples,))

    return {
        "llama": Network(llama, tokens, ("DDP", "FSDP2", "tensor parallel", "FSDP2 of tensor parallel")),
        "resnet18": Network(resnet, images, ("DDP", "FSDP2")),
    }


def measure(
    only: Iterable[str] = NAMES, repeats: int = 7, quick: bool = False, say: Callable[[str], object] = lambda text: None
) -> list[Exchange]:
    """Start the processes, let them train, and collect what the first of them saw."""
    found: list[Exchange] = []
    for count in PROCESSES[:1] if quick else PROCESSES:
        say(f"{count} processes")
        with tempfile.TemporaryDirectory(prefix="equinorm-bench-") as folder:
            arguments = (count, folder, tuple(only), repeats, quick)
            multiprocessing.spawn(_work, arguments, count)
            found += [Exchange(**row) for row in json.loads((Path(folder) / "rows.json").read_text())]
    return sorted(found, key=lambda row: (NAMES.index(row.network), row.processes))


def _work(rank: int, count: int, folder: str, only: tuple[str, ...], repeats: int, quick: bool) -> None:
    """One of the processes."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    dist.init_process_group("gloo", f"file://{folder}/store", world_size=count, rank=rank)
    rows = [
        asdict(_exchange(name, network, way, repeats))
        for name, network in networks(quick).items()
        for way in network.ways
        if name in only and (count > 2 or way != "FSDP2 of tensor parallel")
    ]
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _exchange(name: str, network: Network, way: str, repeats: int) -> Exchange:
    torch.manual_seed(0)
    model, batch = network.make(), network.batch()
    parameters = sum(q.numel() for q in model.parameters())
    symmetry = trace(model, batch[0], verify=False)
    model = _shared(model, way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    enorm = ENorm(model, optimizer, symmetry=symmetry, gradients=False)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1]).backward()
        optimizer.step()

    for action in (step, enorm.step):  # once to warm up: gradients and the optimizer's state come into being
        action()
    of_step, of_cycle = (_traffic(action) for action in (step, enorm.step))
    times = [[_seconds(action) for action in (step, enorm.step)] for _ in range(repeats)]
    step_ms, cycle_ms = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    return Exchange(
        network=name,
        way=way,
        processes=dist.get_world_size(),
        parameters=parameters,
        scales=symmetry.num_scales,
        step_bytes=of_step.sent,
        step_collectives=len(of_step.collectives),
        cycle_bytes=of_cycle.sent,
        cycle_collectives=len(of_cycle.collectives),
        cycle_kinds=sorted({one.name for one in of_cycle.collectives}),
        cycle_numbers=of_cycle.numbers,
        step_ms=step_ms,
        cycle_ms=cycle_ms,
    )


def _traffic(action: Callable[[], object]) -> Traffic:
    with Traffic() as seen:
        action()
    return seen


def _seconds(action: Callable[[], object]) -> float:
    dist.barrier()
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


# -- ways to share the work --------------------------------------------------------------------------------------------


def _shared(model: nn.Module, way: str) -> nn.Module:
    size = dist.get_world_size()
    if way == "DDP":
        return DistributedDataParallel(model)
    if way == "FSDP2":
        _fsdp_(model, init_device_mesh("cpu", (size,)))
    elif way == "tensor parallel":
        _tensor_parallel_(model, init_device_mesh("cpu", (size,)))
    else:
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
        _tensor_parallel_(model, mesh["tensor"])
        _fsdp_(model, mesh["data"])
    return model


def _fsdp_(model: nn.Module, mesh: DeviceMesh) -> None:
    blocks = model.blocks if isinstance(model, Llama) else model.children()
    for block in blocks:
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _tensor_parallel_(model: Any, mesh: DeviceMesh) -> None:
    across, back = ("q", "k", "v", "gate", "up"), ("o", "down")
    plan: Any = {name: ColwiseParallel() for name in across} | {name: RowwiseParallel() for name in back}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
        block.heads, block.groups = block.heads // mesh.size(), block.groups // mesh.size()


# -- what is shown -----------------------------------------------------------------------------------------------------


def table_of(rows: list[Exchange]) -> Table:
    title = "Bytes in collectives: of a training step, and of the ENorm cycle after it"
    shown = Table(title=title, title_justify="left")
    shown.add_column("network", no_wrap=True)
    shown.add_column("way", no_wrap=True)
    heads = ("processes", "scales", "step", "cycle", "cycle / step", "numbers per scale", "step, ms", "cycle, ms")
    for head in heads:
        shown.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        cells = (
            str(row.processes),
            f"{row.scales:,}",
            f"{_kb(row.step_bytes)} in {row.step_collectives}",
            f"{_kb(row.cycle_bytes)} in {row.cycle_collectives}" if row.cycle_bytes else "nothing",
            f"{row.share:.2%}",
            f"{row.numbers_per_scale:.2f}",
            f"{row.step_ms:.1f}",
            f"{row.cycle_ms:.1f}",
        )
        shown.add_row(f"{row.network}, {row.parameters / 1e6:.1f} M", row.way, *cells)
    return shown


def _kb(n: int) -> str:
    return f"{n / 1e3:,.1f} kB"
