"""Adaptive gradient clipping against its unit-by-unit reference, before the steps of optimizers of several kinds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import equinorm
from equinorm.agc import clip_gradients_, unit_norms
from equinorm.agc.reference import clipped


@given(
    st.integers(0, 2**16),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.sampled_from([1e-3, 0.1, 1.0]),
    st.sampled_from([1e-3, 0.5]),
    st.sampled_from([0.0, 1.0, 100.0]),
)
def test_it_is_its_equation(seed: int, shape: list[int], clipping: float, eps: float, size: float) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(shape, dtype=torch.float64).requires_grad_()
    weight.grad = size * torch.randn(shape, dtype=torch.float64)
    expected = clipped(weight.detach(), weight.grad.clone(), clipping, eps)
    clip_gradients_([weight], clipping, eps)
    torch.testing.assert_close(weight.grad, expected, rtol=1e-12, atol=1e-12)
    longest = clipping * unit_norms(weight.detach()).clamp_min(eps)
    assert bool((unit_norms(weight.grad) <= longest * (1 + 1e-9)).all())


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))


def loss_of(model: nn.Module) -> torch.Tensor:
    x = torch.linspace(-9, 9, 2 * 3 * 36).view(2, 3, 6, 6)
    loss: torch.Tensor = 100 * model(x).square().sum()
    return loss


def test_a_step_moves_no_unit_by_more_than_its_part() -> None:
    model = net()
    before = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    clipping = equinorm.AdaptiveGradientClipping(model, optimizer, clipping=0.01, keep=["3"])
    with clipping.attach():
        loss_of(model).backward()
        optimizer.step()
    for old, new, kept in zip(before.parameters(), model.parameters(), (False, False, True, True), strict=True):
        part = unit_norms(new.detach() - old.detach()) / unit_norms(old.detach())
        assert bool((part <= 0.0101).all()) != kept


def test_closures_and_steps_without_are_the_same() -> None:
    models = net(), net()
    for model, closure in zip(models, (False, True), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        equinorm.AdaptiveGradientClipping(model, optimizer).attach()
        for _ in range(3):

            def compute(model: nn.Module = model, optimizer: Any = optimizer) -> float:
                optimizer.zero_grad()
                loss = loss_of(model)
                loss.backward()
                return loss.item()

            if closure:
                optimizer.step(compute)
            else:
                compute()
                optimizer.step()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


def test_it_acts_on_the_parameters_of_the_optimizer_that_steps() -> None:
    model = net()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.Adam(model[3].parameters())
    equinorm.AdaptiveGradientClipping(model, [first, second]).attach()
    loss_of(model).backward()
    raw = model[3].weight.grad.clone()
    first.step()
    assert torch.equal(model[3].weight.grad, raw)
    second.step()
    assert not torch.equal(model[3].weight.grad, raw)


def test_after_remove_nothing_is_clipped() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clipping = equinorm.AdaptiveGradientClipping(model, optimizer)
    handle = clipping.attach()
    with pytest.raises(RuntimeError, match="already attached"):
        clipping.attach()
    handle.remove()
    loss_of(model).backward()
    raw = model[0].weight.grad.clone()
    optimizer.step()
    assert torch.equal(model[0].weight.grad, raw)


@pytest.mark.parametrize("wrong", [{"clipping": 0.0}, {"eps": -1.0}])
def test_a_wrong_setting_is_refused(wrong: dict[str, float]) -> None:
    model = net()
    with pytest.raises(ValueError, match="must be positive"):
        equinorm.AdaptiveGradientClipping(model, torch.optim.SGD(model.parameters()), **wrong)


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="expected the optimizer that trains"):
        equinorm.AdaptiveGradientClipping(net(), "sgd")  # type: ignore[arg-type]
