"""What two processes do in `test_equilibrium.py`: a module of its own, since each of them imports it."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from equinorm.equilibrium import EquiNormConv2d, EquiNormLinear, input_means


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Equal up to `tolerance` times the largest number in sight."""
    assert actual.shape == expected.shape
    scale = max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)


def _net(group: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        EquiNormConv2d(3, 4, 3, padding=1, process_group=group, dtype=torch.float64),
        nn.ReLU(),
        EquiNormConv2d(4, 5, 3, stride=2, groups=1, process_group=group, dtype=torch.float64),
        nn.ReLU(),
        nn.Flatten(),
        EquiNormLinear(45, 2, process_group=group, dtype=torch.float64),
    )


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def _data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.rand(6, 3, 8, 8, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)


def compute_together() -> None:
    rank = dist.get_rank()
    _over_the_group(rank)
    _per_process(rank)
    _unequal_batches(rank)
    _copies(rank)


def _over_the_group(rank: int) -> None:
    """Two processes with half of the batch each compute what one does with all of it, gradients included."""
    x, target = _data()
    mine = slice(3 * rank, 3 * rank + 3)
    single = _net(None)
    whole = x.clone().requires_grad_()
    y = single(whole)
    _loss(y, target).backward()

    model = DistributedDataParallel(_net(dist.group.WORLD))
    part = x[mine].clone().requires_grad_()
    output = model(part)
    _loss(output, target[mine]).backward()
    assert_close(output, y[mine], 1e-12)
    for ours, theirs in zip(model.module.parameters(), single.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, 1e-12)
    # the whole loss is the mean of the two: each process has the gradient of their sum
    assert_close(part.grad, 2 * whole.grad[mine], 1e-12)
    for ours, theirs in zip(model.module.buffers(), single.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    # evaluation waits for nobody
    if rank == 0:
        model.module.eval()(x)
    no_stats = EquiNormLinear(3, 2, track_running_stats=False, process_group=dist.group.WORLD).eval()
    if rank == 0:
        no_stats(torch.rand(4, 3))


def _per_process(rank: int) -> None:
    """By default every process normalizes by its own batch, and DDP averages the gradients."""
    x, target = _data()
    gradients = []
    for r in range(2):
        single = _net(None)
        part = slice(3 * r, 3 * r + 3)
        y = single(x[part])
        gradients.append(torch.autograd.grad(_loss(y, target[part]), list(single.parameters())))
        if r == rank:
            expected = y

    model = DistributedDataParallel(_net(None))
    mine = slice(3 * rank, 3 * rank + 3)
    output = model(x[mine])
    _loss(output, target[mine]).backward()
    assert_close(output, expected, 1e-12)
    for parameter, *both in zip(model.module.parameters(), *gradients, strict=True):
        assert_close(parameter.grad, (both[0] + both[1]) / 2, 1e-12)


def _unequal_batches(rank: int) -> None:
    x = torch.arange(12.0).view(6, 2)
    mine = (x[:1] if rank == 0 else x[1:]).clone().requires_grad_()
    means = input_means(mine, process_group=dist.group.WORLD)
    torch.testing.assert_close(means, x.mean(0))
    ((rank + 1.0) * means.sum()).backward()
    torch.testing.assert_close(mine.grad, torch.full_like(mine, (1.0 + 2.0) / 6))
    # a part of each process's batch, none of a process that has no samples
    half = input_means(x[:4], 0.5, process_group=dist.group.WORLD)
    torch.testing.assert_close(half, x[:2].mean(0))
    nothing = input_means(x[: 6 * rank], process_group=dist.group.WORLD)
    torch.testing.assert_close(nothing, x.mean(0))


def _copies(rank: int) -> None:
    layer = EquiNormLinear(3, 2, process_group=dist.group.WORLD)
    clone = copy.deepcopy(nn.Sequential(layer))[0]
    assert clone.process_group is layer.process_group
    x = torch.rand(4, 3) + rank
    assert torch.equal(clone(x), layer(x))
