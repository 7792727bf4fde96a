"""ENormSGD is SGD with an ENorm attached, and as good an optimizer as SGD: schedulers, hooks, checkpoints, copies."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import equinorm
from equinorm.enorm.sgd import ENormSGD
from support.grids import examples


def net(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


X, EXAMPLE = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).double(), torch.zeros(1, 6).double()


def loss_of(model: nn.Module, x: Tensor = X) -> Tensor:
    return F.cross_entropy(model(x), torch.arange(8) % 3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def assert_same(one: nn.Module, two: nn.Module, rtol: float = 1e-10) -> None:
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-13)


@settings(max_examples=examples(8, of=20))
@given(
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    averages=st.sampled_from(
        [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "dampening": 0.3}]
    ),
    decay=st.sampled_from([0.0, 0.1]),
    c=st.sampled_from([1.0, 1.3]),
    bias=st.sampled_from(["safe", "plain"]),
    every=st.integers(1, 2),
)
def test_it_is_sgd_with_an_attached_enorm(
    widths: list[int], averages: dict[str, Any], decay: float, c: float, bias: str, every: int
) -> None:
    one = net(6, *widths, 3)
    two = copy.deepcopy(one)
    sgd = torch.optim.SGD(one.parameters(), lr=0.1, weight_decay=decay, **averages)
    equinorm.ENorm(one, sgd, EXAMPLE, c=c, bias=bias, every=every, backend="plain").attach()
    ours = ENormSGD(two, EXAMPLE, lr=0.1, weight_decay=decay, **averages, c=c, bias=bias, every=every)
    train(one, sgd)
    train(two, ours)
    assert ours.why_not == "ENorm's backend is 'foreach'"
    assert_same(one, two)


def test_groups_have_their_own_numbers_and_schedulers_move_them() -> None:
    one = net(6, 7, 3)
    two = copy.deepcopy(one)

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters(), "momentum": 0.0}]

    sgd = torch.optim.SGD(groups(one), lr=0.1, momentum=0.9)
    equinorm.ENorm(one, sgd, EXAMPLE).attach()
    ours = ENormSGD(two, EXAMPLE, lr=0.1, momentum=0.9, params=groups(two))
    assert [group["lr"] for group in ours.param_groups] == [0.5, 0.1]
    for model, optimizer in ((one, sgd), (two, ours)):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for _ in range(3):
            train(model, optimizer, 1)
            schedule.step()
    assert ours.param_groups[0]["lr"] == 0.5 / 8
    assert_same(one, two)


def test_the_function_is_that_of_sgd_alone_in_the_first_step() -> None:
    one = net(6, 9, 3)
    two = copy.deepcopy(one)
    train(one, torch.optim.SGD(one.parameters(), lr=0.1), 1)
    train(two, ENormSGD(two, EXAMPLE, lr=0.1), 1)
    assert not torch.equal(one[0].weight, two[0].weight)
    torch.testing.assert_close(one(X), two(X))


def test_a_closure_is_called_once_and_gives_the_loss() -> None:
    one = net(6, 7, 3)
    two = copy.deepcopy(one)
    optimizers = [ENormSGD(m, EXAMPLE, lr=0.1, momentum=0.9, c=1.2) for m in (one, two)]
    calls = []

    def closure() -> float:
        calls.append(1)
        optimizers[1].zero_grad()
        loss = loss_of(two)
        loss.backward()
        return loss.item()

    for _ in range(3):
        train(one, optimizers[0], 1)
        assert optimizers[1].step(closure) > 0
    assert len(calls) == 3
    assert_same(one, two)


def test_hooks_are_called_once_whoever_made_an_sgd_before() -> None:
    """torch wraps SGD's `step` in calls of hooks when the first is made; `super().step()` would call them again."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    model = net(6, 7, 3)
    optimizer = ENormSGD(model, EXAMPLE, lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, optimizer, 2)
    assert calls == ["before", "after"] * 2


def test_gradients_stay_or_move_along() -> None:
    for moves in (False, True):
        model = net(6, 7, 3)
        optimizer = ENormSGD(model, EXAMPLE, lr=0.1, c=1.2, gradients=moves)
        loss_of(model).backward()
        before = model[0].weight.grad.clone()
        optimizer.step()
        assert torch.equal(before, model[0].weight.grad) is not moves


# -- state -------------------------------------------------------------------------------------------------------------


def test_training_goes_on_from_a_checkpoint() -> None:
    model = net(6, 7, 8, 3)
    optimizer = ENormSGD(model, EXAMPLE, lr=0.1, momentum=0.9, c=1.2)
    train(model, optimizer)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer)
    other = net(6, 7, 8, 3)
    restored = ENormSGD(other, EXAMPLE, lr=0.5, c=1.2)
    other.load_state_dict(saved["model"])
    restored.load_state_dict(saved["optimizer"])
    train(other, restored)
    assert_same(model, other, rtol=0.0)
    assert restored.enorm.calls == 6


def test_a_state_of_sgd_can_be_loaded_and_one_of_another_net_cannot() -> None:
    model = net(6, 7, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, sgd)
    optimizer = ENormSGD(model, EXAMPLE, lr=0.2)
    optimizer.load_state_dict(sgd.state_dict())
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert not optimizer.enorm.log_t.any()
    other = ENormSGD(net(6, 8, 3), EXAMPLE, lr=0.3)
    with pytest.raises(ValueError, match="this state is for 8 scales, the model has 7"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("of", ["optimizer", "enorm"])
def test_copies_go_on_by_themselves(of: str) -> None:
    model = net(6, 7, 3)
    average = copy.deepcopy(model)
    optimizer = ENormSGD(model, EXAMPLE, lr=0.1, momentum=0.9, c=1.2, companions=[average])
    train(model, optimizer)
    twin = copy.deepcopy(optimizer if of == "optimizer" else optimizer.enorm)
    twin = twin if of == "optimizer" else twin.optimizer
    other = twin.enorm.symmetry.model
    assert other is not model
    assert twin.enorm.companions[0].model is not average
    train(model, optimizer)
    train(other, twin)
    assert_same(model, other, rtol=0.0)
    assert_same(average, twin.enorm.companions[0].model, rtol=0.0)


# -- misuse ------------------------------------------------------------------------------------------------------------


def test_what_does_not_go_together_is_refused() -> None:
    model = net(6, 7, 3)
    with pytest.raises(ValueError, match="the optimizer does not hold"):
        ENormSGD(model, EXAMPLE, params=[model[0].weight])
    with pytest.raises(TypeError, match="unexpected keyword argument 'gain'"):
        ENormSGD(model, EXAMPLE, gain=1)
    with pytest.raises(TypeError, match="pass example_inputs"):
        ENormSGD(model)
    with pytest.raises(ValueError, match="Nesterov"):
        ENormSGD(model, EXAMPLE, nesterov=True)
    with pytest.raises(RuntimeError, match="nothing to attach"):
        ENormSGD(model, EXAMPLE).enorm.attach()
