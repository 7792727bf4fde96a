"""Orthogonalized momentum: the same numbers as its plain twin, and an optimizer like any other."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from equinorm.unitfilters.muon import Muon, update_scale
from equinorm.unitfilters.reference import PlainMuon

SHAPES = [(8, 4, 3, 3), (6, 20), (20, 6), (8, 4, 3, 3), (8, 36), (5, 3, 3), (4, 2, 2, 2, 2), (12, 1, 2, 2)]


def parameters(seed: int = 0, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    made = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
    made[3] = nn.Parameter(made[3].detach().clone(memory_format=torch.channels_last))
    return made


def random_gradients(params: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, dtype=p.dtype)


OPTIONS = [
    {},
    {"nesterov": False, "momentum": 0.6},
    {"weight_decay": 0.1, "steps": 5},
    {"momentum": 0.0, "nesterov": False, "steps": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_hundred_steps_equal_the_plain_twin(options: dict[str, float]) -> None:
    fast, plain = parameters(), parameters()
    optimizers = [Muon(fast, lr=0.1, **options), PlainMuon(plain, lr=0.1, **options)]  # type: ignore[arg-type]
    for step in range(100):
        for params, optimizer in zip((fast, plain), optimizers, strict=True):
            random_gradients(params, step)
            if step % 3 == 0:
                params[1].grad = None
            optimizer.step()
    for p, q in zip(fast, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


def test_filters_turn_by_lr() -> None:
    """The root mean square of the filters' updates is near lr, for wide matrices and for tall ones."""
    params = parameters()
    before = [p.detach().clone() for p in params]
    random_gradients(params, 1)
    Muon(params, lr=0.1, steps=5).step()
    for p, old in zip(params, before, strict=True):
        lengths = (p - old).flatten(1).norm(dim=1)
        assert 0.06 < lengths.square().mean().sqrt() < 0.125
    assert [update_scale(p) for p in params[:3]] == [1.0, 1.0, pytest.approx(math.sqrt(20 / 6))]


def test_the_size_of_the_loss_does_not_matter() -> None:
    results = []
    for size in (1e-6, 1.0, 1e6):
        params = parameters()
        optimizer = Muon(params, lr=0.1)
        for step in range(3):
            random_gradients(params, step)
            for p in params:
                p.grad *= size  # type: ignore[operator]
            optimizer.step()
        results.append(params)
    for one, two, three in zip(*results, strict=True):
        torch.testing.assert_close(one, two)
        torch.testing.assert_close(three, two)


def test_a_rate_that_is_a_tensor_is_the_same_rate() -> None:
    numbers, tensors = parameters(), parameters()
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizers = [Muon(numbers, lr=0.1, weight_decay=0.01), Muon(tensors, lr=rate, weight_decay=0.01)]
    for step in range(4):
        for params, optimizer in zip((numbers, tensors), optimizers, strict=True):
            random_gradients(params, step)
            optimizer.step()
        optimizers[0].param_groups[0]["lr"] *= 0.5
        rate *= 0.5
    for p, q in zip(numbers, tensors, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_resumed_it_goes_on_bit_by_bit() -> None:
    params = parameters(dtype=torch.float32)
    optimizer = Muon(params, lr=0.1)
    for step in range(3):
        random_gradients(params, step)
        optimizer.step()
    others = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = Muon(others, lr=0.7, momentum=0.1)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twins, copied = copy.deepcopy((params, optimizer))
    assert list(optimizer.state[params[0]]) == ["momentum_buffer"]
    for step in range(3, 6):
        for those, stepper in ((params, optimizer), (others, resumed), (twins, copied)):
            random_gradients(those, step)
            stepper.step()
    for p, q, r in zip(params, others, twins, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p, r)


def test_groups_and_closures() -> None:
    p, q = parameters()[:2]
    optimizer = Muon([{"params": [p]}, {"params": [q], "lr": 0.0}], lr=0.1)
    before = q.detach().clone()

    def closure() -> float:
        optimizer.zero_grad()
        loss = p.square().sum() + q.square().sum()
        loss.backward()
        return loss.item()

    losses = [optimizer.step(closure) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert torch.equal(q, before)
    optimizer.zero_grad()
    optimizer.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must not be negative"),
        ({"lr": torch.ones(2)}, "one number"),
        ({"momentum": 1.0}, r"momentum must lie in \[0, 1\)"),
        ({"steps": 0}, "1 or more"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative"),
    ],
)
def test_settings_that_mean_nothing(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon(parameters(), **options)  # type: ignore[arg-type]


def test_biases_are_refused_and_nothing_is_added() -> None:
    conv = nn.Conv2d(3, 4, 3)
    with pytest.raises(ValueError, match=r"parameter 1 of the group, of shape \(4,\)"):
        Muon(conv.parameters())
    optimizer = Muon([conv.weight])
    with pytest.raises(ValueError, match="another optimizer"):
        optimizer.add_param_group({"params": [conv.bias]})
    assert len(optimizer.param_groups) == 1
    conv(torch.randn(1, 3, 5, 5)).sum().backward()
    optimizer.step()


@pytest.mark.gpu
def test_a_captured_step_is_a_step_and_follows_its_rate() -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(8, 4, 3, 3, device="cuda")), nn.Parameter(torch.randn(20, 6, device="cuda"))]
    twins = copy.deepcopy(params)
    rate = torch.tensor(0.1, device="cuda")
    optimizer, plain = Muon(params, lr=rate), Muon(twins, lr=0.1)
    for p, q in zip(params, twins, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    plain.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for factor in (1.0, 0.5):
        rate.fill_(0.1 * factor)
        plain.param_groups[0]["lr"] = 0.1 * factor
        graph.replay()
        plain.step()
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-3)
