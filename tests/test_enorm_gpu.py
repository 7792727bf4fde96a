"""ENorm on a GPU: inside a captured step, the same on every run, and equal to the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equinorm

pytestmark = pytest.mark.gpu


def net(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in ((12, 32), (32, 32), (32, 32), (32, 5)):
        layers += [nn.Linear(a, b, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def batches(n: int, device: str = "cuda") -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(64, 12, generator=draw).to(device), torch.randint(5, (64,), generator=draw).to(device))
        for _ in range(n)
    ]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def trained(model: nn.Module, optimizer_class: type[torch.optim.Optimizer], steps: int, **options: object) -> nn.Module:
    device = str(next(model.parameters()).device)
    optimizer = optimizer_class(model.parameters(), **options)
    equinorm.ENorm(model, optimizer, torch.zeros(2, 12, device=device), c=1.2).attach()
    for x, y in batches(steps, device):
        step(model, optimizer, x, y)
    return model


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_training_on_the_gpu_equals_training_on_the_cpu(optimizer_class: type[torch.optim.Optimizer]) -> None:
    options = {"lr": 0.05, "momentum": 0.9} if optimizer_class is torch.optim.SGD else {"lr": 1e-3}
    cpu = net().double()
    gpu = copy.deepcopy(cpu).cuda()
    for model in (cpu, gpu):
        device = next(model.parameters()).device
        optimizer = optimizer_class(model.parameters(), **options)
        equinorm.ENorm(model, optimizer, torch.zeros(2, 12, device=device).double(), c=1.2).attach()
        for x, y in batches(5, str(device)):
            step(model, optimizer, x.double(), y)
    for a, b in zip(cpu.parameters(), gpu.parameters(), strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-8, atol=1e-10)


def test_a_run_is_the_same_every_time() -> None:
    """Copies of a model on several GPUs see the same gradients and must stay the same."""
    first, second = (trained(net().cuda(), torch.optim.SGD, 20, lr=0.05, momentum=0.9) for _ in range(2))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("fused", [False, True])
def test_a_captured_step_equals_an_eager_one(fused: bool) -> None:
    data = batches(12)
    models = [net().cuda(), net().cuda()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, fused=fused) for m in models]
    for m, o in zip(models, optimizers, strict=True):
        equinorm.ENorm(m, o, torch.zeros(2, 12, device="cuda"), c=1.2).attach()
    for x, y in data:
        step(models[0], optimizers[0], x, y)
    x, y = (t.clone() for t in data[0])
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(models[1], optimizers[1], x, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(models[1], optimizers[1], x, y)
    for new_x, new_y in data[1:]:
        x.copy_(new_x)
        y.copy_(new_y)
        graph.replay()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_balance_on_the_gpu() -> None:
    model, x = net().double().cuda(), torch.randn(4, 12, device="cuda").double()
    before = model(x)
    report = equinorm.balance_(model, x)
    assert report.converged
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-13)
