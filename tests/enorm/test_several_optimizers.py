"""ENorm on several optimizers, on compiled ones, and on one that was resumed without its state."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equinorm

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
Y = torch.arange(8) % 2


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2))


def split(model: nn.Module, *kinds: Any) -> list[Any]:
    """An optimizer for matrices and one for the rest."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [kinds[0](matrices), kinds[1]([p for p in model.parameters() if p.ndim < 2])]


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01)


def train(model: nn.Module, optimizers: Sequence[Any], steps: int = 4, around: Any = None) -> Tensor:
    loss = torch.zeros(())
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(X), Y)
        loss.backward()
        if around is not None:
            around.before_step()
        for optimizer in optimizers:
            optimizer.step()
        if around is not None:
            around.step()
    return loss


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q, p)


@pytest.mark.parametrize("backend", ["plain", "foreach"])
@pytest.mark.parametrize("kind", [sgd, adamw])
def test_two_of_a_kind_are_as_one(kind: Any, backend: str) -> None:
    whole, parts = net(), net()
    optimizers = split(parts, kind, kind)
    one = kind(whole.parameters())
    enorm = equinorm.ENorm(whole, one, X, c=1.3, backend=backend)
    both = equinorm.ENorm(parts, optimizers, X, c=1.3, backend=backend)
    enorm.attach()
    assert repr(both.attach()) == f"<ENorm attached to {type(one).__name__} and {type(one).__name__}>"
    train(whole, [one])
    train(parts, optimizers)
    assert both.calls == enorm.calls == 4
    assert_same(whole, parts)
    torch.testing.assert_close(both.log_t, enorm.log_t)


@pytest.mark.parametrize("swapped", [False, True])
def test_each_follows_by_its_own_rule(swapped: bool) -> None:
    """Momentum of SGD, whose step is linear, for the matrices, and Adam's averages, whose is not, for the biases."""
    model, twin = net(), net()
    attached, by_hand = split(model, sgd, adamw), split(twin, sgd, adamw)
    enorm = equinorm.ENorm(model, attached[:: -1 if swapped else 1], X, c=1.3)
    other = equinorm.ENorm(twin, by_hand, X, c=1.3, backend="plain")
    enorm.attach()
    train(model, attached)
    train(twin, by_hand, around=other)
    assert enorm.calls == other.calls == 4
    assert_same(twin, model)
    weight, bias = model[0].weight, model[0].bias
    before = attached[0].state[weight]["momentum_buffer"].clone(), attached[1].state[bias]["exp_avg_sq"].clone()
    values = weight.detach().clone(), bias.detach().clone()
    with torch.no_grad():
        model[2].weight.mul_(4.0)
    enorm.step()
    torch.testing.assert_close(attached[0].state[weight]["momentum_buffer"] * weight, before[0] * values[0])
    torch.testing.assert_close(attached[1].state[bias]["exp_avg_sq"] * bias**2, before[1] * values[1] ** 2)


def test_a_cycle_comes_when_all_have_stepped() -> None:
    model = net()
    first, second = split(model, sgd, sgd)
    enorm = equinorm.ENorm(model, [first, second], X, c=1.3)
    enorm.attach()
    nn.functional.cross_entropy(model(X), Y).backward()
    calls = []
    for optimizer in (first, second, second, first, first, first, second, first, second):
        optimizer.step()
        calls.append(enorm.calls)
    #     both      both     first again  again  both     both
    assert calls == [0, 1, 1, 2, 2, 3, 4, 4, 5]


def test_its_copies_and_its_state() -> None:
    model = net()
    optimizers = split(model, sgd, adamw)
    enorm = equinorm.ENorm(model, optimizers, X, c=1.3)
    assert enorm.optimizer == optimizers
    enorm.attach()
    train(model, optimizers, 2)
    twin = copy.deepcopy(enorm)
    state = [enorm.state_dict(), model.state_dict(), *(each.state_dict() for each in optimizers)]
    saved = copy.deepcopy(state)
    train(model, optimizers, 2)
    train(twin.symmetry.model, twin.optimizer, 2)
    assert_same(model, twin.symmetry.model)
    resumed = net()
    others = split(resumed, sgd, adamw)
    third = equinorm.ENorm(resumed, others, X, c=1.3)
    for part, of in zip((third, resumed, *others), saved, strict=True):
        part.load_state_dict(of)
    third.attach()
    train(resumed, others, 2)
    assert_same(model, resumed)


def test_frozen_is_what_no_optimizer_holds() -> None:
    model = net()
    first, _ = split(model, sgd, adamw)
    with pytest.raises(ValueError, match="every scale of Sequential is held by parameters that do not train"):
        equinorm.ENorm(model, first, X)
    assert not equinorm.ENorm(model, split(model, sgd, adamw), X).kept
    with pytest.raises(ValueError, match="expected an optimizer, got an empty list"):
        equinorm.ENorm(model, [], X)


def test_mean_shift_rejection_takes_the_one_that_holds_the_kernels() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Conv2d(2, 2, 2), nn.Conv2d(2, 2, 2), nn.Flatten())
    model.append(nn.Linear(8, 2))
    equinorm.mean_shift_rejection_(model)
    head, body = sgd(model[5].parameters()), sgd(model[:4].parameters())
    assert equinorm.MeanShiftRejection(model, [head, body]).optimizer is body
    halves = [sgd(model[:3].parameters()), sgd(model[3:].parameters())]
    with pytest.raises(ValueError, match="acts on one optimizer, and 2 of the 2 hold its kernels"):
        equinorm.MeanShiftRejection(model, halves)


# -- compiled ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [sgd, adamw])
def test_a_compiled_step_calls_what_is_attached(kind: Any) -> None:
    """Guards against BackendCompilerFailed: the hooks are not compiled along with the step."""
    torch._dynamo.reset()
    ends = []
    for compiled in (False, True):
        model = net()
        optimizer = kind(model.parameters())
        enorm = equinorm.ENorm(model, optimizer, X, c=1.3)
        enorm.attach()
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X), Y).backward()
            step()
        assert enorm.calls == 3
        ends.append(model)
    assert_same(*ends)


# -- resumed -----------------------------------------------------------------------------------------------------------

WITHOUT = "AdamW has made steps already and this ENorm begins anew: if training is resumed, load its state too"


def test_an_optimizer_that_begins_with_state_has_made_no_step() -> None:
    """Adagrad has its sums before the first step: nothing is resumed, so there is no warning."""
    model = net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    with equinorm.ENorm(model, optimizer, X, c=1.3).attach():
        train(model, [optimizer], 2)


def test_a_resumed_optimizer_without_the_state_of_safe_biases() -> None:
    model = net()
    optimizer = adamw(model.parameters())
    first = equinorm.ENorm(model, optimizer, X, c=1.3)
    with first.attach():
        train(model, [optimizer], 2)
    second = equinorm.ENorm(model, optimizer, X, c=1.3)
    with second.attach(), pytest.warns(UserWarning, match=WITHOUT) as caught:
        train(model, [optimizer], 2)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    by_hand = equinorm.ENorm(model, optimizer, X, c=1.3)
    with pytest.warns(UserWarning, match=WITHOUT) as caught:
        train(model, [optimizer], 2, around=by_hand)
    assert caught[0].filename == __file__


def test_no_warning_where_it_is_right() -> None:
    model = net()
    optimizer = adamw(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enorm = equinorm.ENorm(model, optimizer, X, c=1.3)
        with enorm.attach():
            train(model, [optimizer], 2)
        with enorm.attach():
            train(model, [optimizer], 2)  # the same one goes on
        resumed = equinorm.ENorm(model, optimizer, X, c=1.3)
        resumed.load_state_dict(enorm.state_dict())
        with resumed.attach():
            train(model, [optimizer], 2)
        anew = equinorm.ENorm(model, optimizer, X, c=1.3)
        anew.load_state_dict(anew.state_dict())  # which says that it begins here
        with anew.attach():
            train(model, [optimizer], 2)
        with equinorm.ENorm(model, optimizer, X, bias="plain").attach():
            train(model, [optimizer], 2)
