"""Parameters that are sharded over processes (FSDP2, tensor parallel): as one process, number by number."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD, AdamW, Optimizer

import equinorm
from equinorm.lab.bench.llama import Llama
from support.ranks import Ranks

STEPS, BATCH = 20, 8
Pools = Callable[[int], Ranks]
TOLERANCE = 1e-6
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.02, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda parameters: AdamW(parameters, lr=3e-3, weight_decay=1e-2),
}


# -- networks ------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Convolutions with biases around a stream, and two layers at the end; no number of ranks divides the widths."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 7, 3, padding=1)
        self.inner = nn.ModuleList(nn.Conv2d(7, 9, 3, padding=1) for _ in range(2))
        self.outer = nn.ModuleList(nn.Conv2d(9, 7, 1) for _ in range(2))
        self.grouped = nn.Conv2d(7, 14, 3, groups=7)
        self.hidden, self.head = nn.Linear(14, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for inner, outer in zip(self.inner, self.outer, strict=True):
            x = F.relu(x + outer(F.relu(inner(x))))
        x = F.relu(self.grouped(x)).mean((2, 3))
        return self.head(F.relu(self.hidden(x)))


def net(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "llama":
        return Llama(layers=2, width=16, heads=4, groups=2, hidden=22, vocabulary=11).double()
    return Residual().double()


def example(name: str) -> Tensor:
    return torch.zeros(2, 5, dtype=torch.int64) if name == "llama" else torch.zeros(2, 3, 6, 6, dtype=torch.float64)


@cache
def batches(name: str) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    if name == "llama":
        tokens = torch.randint(11, (STEPS, BATCH, 6), generator=generator)
        return [(each[:, :-1], each[:, 1:]) for each in tokens]
    images = torch.rand(STEPS, BATCH, 3, 6, 6, generator=generator, dtype=torch.float64)
    return list(zip(images, torch.randint(3, (STEPS, BATCH), generator=generator), strict=True))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    scores, labels = model(batch[0]), batch[1]
    return F.cross_entropy(scores.flatten(0, -2), labels.flatten())


# -- sharding ------------------------------------------------------------------------------------------------------


def shard_(model: nn.Module, how: str) -> tuple[int, int]:
    """Shard a model in place; which part of a batch this process sees: part `number` of `count`."""
    size = dist.get_world_size()
    if how == "fsdp":
        fsdp_(model, init_device_mesh("cpu", (size,)))
        return dist.get_rank(), size
    if how == "tensor":
        tensor_parallel_(model, init_device_mesh("cpu", (size,)))
        return 0, 1
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    tensor_parallel_(model, mesh["tensor"])
    fsdp_(model, mesh["data"])
    return mesh.get_local_rank("data"), size // 2


def fsdp_(model: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    inside = model.blocks if isinstance(model, Llama) else [*model.inner, *model.outer, model.hidden]
    for module in inside:
        fully_shard(module, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def tensor_parallel_(model: nn.Module, mesh: DeviceMesh) -> None:
    if isinstance(model, Llama):
        across, back = ("q", "k", "v", "gate", "up"), ("o", "down")
        plan = {name: ColwiseParallel() for name in across} | {name: RowwiseParallel() for name in back}
        for block in model.blocks:
            parallelize_module(block, mesh, plan)
            block.heads, block.groups = block.heads // mesh.size(), block.groups // mesh.size()
    else:
        parallelize_module(model, mesh, {"hidden": ColwiseParallel(), "head": RowwiseParallel()})


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# -- ENorm ---------------------------------------------------------------------------------------------------------


def train(
    model: nn.Module, optimizer: Optimizer, name: str, part: tuple[int, int] = (0, 1), steps: int = STEPS
) -> None:
    number, count = part
    for images, labels in batches(name):
        optimizer.zero_grad()
        loss_of(model, (images.chunk(count)[number], labels.chunk(count)[number])).backward()
        optimizer.step()


State = dict[str, Any]


def state_of(model: nn.Module, optimizer: Optimizer, enorm: equinorm.ENorm) -> State:
    """All that moved, whole."""
    state: State = {}
    for name, q in model.named_parameters():
        state[name] = whole(q.detach())
        state[f"{name}.grad"] = whole(q.grad)
        for key, value in optimizer.state[q].items():
            state[f"{name}.{key}"] = whole(value)
    return state | {"log_t": enorm.log_t, "imbalance": torch.tensor(enorm.imbalance())}


def sharded_run(name: str, how: str, optimizer_name: str, bias: str) -> State:
    model = net(name)
    symmetry = equinorm.trace(model, example(name))
    part = shard_(model, how)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    enorm = equinorm.ENorm(model, optimizer, symmetry=symmetry, c=1.2, bias=bias)
    assert enorm.backend == "sharded"
    enorm.attach()
    train(model, optimizer, name, part)
    return state_of(model, optimizer, enorm)


@cache
def alone(name: str, optimizer_name: str, bias: str) -> State:
    model = net(name)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    enorm = equinorm.ENorm(model, optimizer, example(name), c=1.2, bias=bias)
    enorm.attach()
    train(model, optimizer, name)
    return state_of(model, optimizer, enorm)


def assert_equal(states: list[State], expected: State) -> None:
    """Every process has what one process has, and all have the same to the last bit."""
    for state in states:
        assert list(state) == list(expected)
        for key, value in expected.items():
            scale = max(float(value.abs().max()), 1e-3)
            assert float((state[key] - value).abs().max()) <= TOLERANCE * scale, key
            assert torch.equal(state[key], states[0][key]), key


@pytest.mark.parametrize("how", ["fsdp", "tensor"])
@pytest.mark.parametrize(
    ("name", "optimizer", "bias"),
    [("llama", "adamw", "plain"), ("residual", "sgd", "safe"), ("residual", "adamw", "safe")],
)
def test_enorm_is_that_of_one_process(how: str, name: str, optimizer: str, bias: str, ranks: Pools) -> None:
    assert_equal(ranks(2).run(sharded_run, name, how, optimizer, bias), alone(name, optimizer, bias))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fsdp", "both"])
@pytest.mark.parametrize("bias", ["plain", "safe"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["llama", "residual"])
def test_enorm_over_four_processes(how: str, name: str, optimizer: str, bias: str, ranks: Pools) -> None:
    assert_equal(ranks(4).run(sharded_run, name, how, optimizer, bias), alone(name, optimizer, bias))


# -- balance_ ------------------------------------------------------------------------------------------------------


def balanced(name: str, how: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    model = net(name)
    symmetry = equinorm.trace(model, example(name))
    shard_(model, how)
    report = equinorm.balance_(model, symmetry=symmetry, **options)
    return {key: whole(q.detach()) for key, q in model.named_parameters()}, report


@pytest.mark.parametrize("how", ["fsdp", "tensor"])
@pytest.mark.parametrize(
    ("name", "options"), [("llama", {}), ("residual", {"c": 1.2}), ("residual", {"parameters": ["inner", "hidden"]})]
)
def test_balancing_is_that_of_one_process(how: str, name: str, options: dict[str, Any], ranks: Pools) -> None:
    model = net(name)
    report = equinorm.balance_(model, example(name), **options)
    for weights, other in ranks(2).run(balanced, name, how, options):
        assert other.converged
        assert (other.num_scales, other.held, other.held_in) == (report.num_scales, report.held, report.held_in)
        assert other.norm_before == pytest.approx(report.norm_before, rel=1e-12)
        assert other.norm_after == pytest.approx(report.norm_after, rel=1e-12)
        for key, q in model.named_parameters():
            torch.testing.assert_close(weights[key], q.detach(), rtol=1e-6, atol=1e-9)
