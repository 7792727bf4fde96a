"""All or nothing: a fault at any write leaves the model as it was, and an interrupt waits for the end."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import equinorm
from equinorm.models.undo import interrupts_deferred, model_kept, tensors_kept


class FaultError(Exception):
    """What is injected."""


class Faulty(TorchDispatchMode):
    """Raises at the n-th write to one of these tensors."""

    def __init__(self, tensors: list[Tensor], n: int) -> None:
        super().__init__()
        self.ours = {t.untyped_storage()._cdata for t in tensors}
        self.left = n

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        written = func._schema.arguments and func._schema.arguments[0].alias_info
        if written and written.is_write and isinstance(first, Tensor) and first.untyped_storage()._cdata in self.ours:
            self.left -= 1
            if self.left == 0:
                raise FaultError
        return func(*args, **(kwargs or {}))


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)).double()


def images() -> Tensor:
    return torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()


def assert_as_before(model: nn.Module, before: nn.Module) -> None:
    assert str(model) == str(before)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in before.named_modules()]
    for (name, tensor), (other, expected) in zip(model.state_dict().items(), before.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(tensor, expected), name
    assert torch.equal(model.eval()(images()), before.eval()(images()))


@pytest.mark.parametrize("n", range(1, 7))
def test_a_fault_while_rescaling_changes_nothing(n: int) -> None:
    model, before = net(), net()
    symmetry = equinorm.trace(model, images())
    with pytest.raises(FaultError), Faulty(list(model.parameters()), n):
        symmetry.rescale_(torch.ones(symmetry.num_scales))
    assert_as_before(model, before)


@pytest.mark.parametrize("n", [1, 3, 6])
@pytest.mark.parametrize("method", ["weightnorm", "msr", "none", "unit_filters"])
def test_a_fault_while_converting_changes_nothing(method: str, n: int) -> None:
    model, before = net(), net()
    handle = model.register_forward_hook(lambda *_: None)
    before.register_forward_hook(lambda *_: None)
    try:
        with Faulty([*model.parameters(), *model.buffers()], n):
            equinorm.convert(model, method, images(), inplace=True)
    except FaultError:
        assert_as_before(model, before)
        handle.remove()  # it still knows its hook
        assert not model._forward_hooks


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_fault_while_folding_changes_nothing(n: int) -> None:
    model, _ = equinorm.convert(net(), "weightnorm", images())
    before = copy.deepcopy(model)
    try:
        with Faulty([*model.parameters(), *model.buffers()], n):
            equinorm.fold(model, images(), inplace=True)
    except FaultError:
        assert_as_before(model, before)


def test_classes_and_modules_come_back() -> None:
    model, before = net(), net()

    def rebuild_and_fail() -> None:
        equinorm.convert(model, "weightnorm", images(), inplace=True)
        model[0] = nn.Identity()
        model.extra = torch.ones(2)
        raise FaultError

    with pytest.raises(FaultError), model_kept(model):
        rebuild_and_fail()
    assert type(model[0]) is nn.Conv2d
    assert not hasattr(model, "extra")
    assert_as_before(model, before)


def test_tensors_come_back_from_an_interrupt() -> None:
    x = torch.ones(3)

    def write_and_stop() -> None:
        x.zero_()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), tensors_kept([x]):
        write_and_stop()
    assert torch.equal(x, torch.ones(3))


def test_an_interrupt_waits_for_the_end() -> None:
    done = []

    def work() -> None:
        with interrupts_deferred():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(True)
        done.append(False)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [True]
