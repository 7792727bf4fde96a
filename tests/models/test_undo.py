"""All or nothing: a fault at any write leaves the model as it was, and an interrupt waits for the end."""

from __future__ import annotations

import copy
import os
import signal

import pytest
import torch
from torch import Tensor, nn

import equinorm
from equinorm.models.undo import copy_all_, interrupts_deferred, model_kept, tensors_kept
from support.faults import FaultError, Faulty, run


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
    with pytest.raises(FaultError), Faulty(model.parameters(), n):
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


def test_signals_that_arrive_together_are_all_heard() -> None:
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append("user"))

    def work() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGUSR1)
            assert not heard

    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert heard == ["user"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("interrupt", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_copies_are_all_made(n: int, interrupt: bool) -> None:
    tensors = [torch.zeros(2) for _ in range(3)]
    with pytest.raises((FaultError, KeyboardInterrupt)), Faulty(tensors, n, interrupt):
        copy_all_((t, torch.ones(2)) for t in tensors)
    assert all(bool(t.all()) for t in tensors)


def test_faults_in_random_nets_change_nothing() -> None:
    """A few of what `python -m support.faults` does; seed 1 has a fault while the step of a safe bias is shortened."""
    _, ends, faults = run(range(1, 3))
    assert not faults
    assert ends["ENorm.step, foreach", "complete"] + ends["ENorm.step, plain", "complete"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(4))
def test_faults_in_five_hundred_random_nets_change_nothing(shard: int) -> None:
    assert not run(range(1000 + shard, 1500, 4))[2]
