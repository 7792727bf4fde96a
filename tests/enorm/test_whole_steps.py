"""A step of ENorm is whole: it asks for no memory after its first write, and Ctrl-C is heard when it is complete."""

from __future__ import annotations

import functools
import itertools
import signal
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import equinorm
from equinorm.enorm.steps.moves import Moves
from support.faults import FaultError, Faulty


def net() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    return model, torch.randn(6, 5, dtype=torch.float64)


@functools.cache
def symmetry() -> equinorm.Symmetry:
    return equinorm.trace(*net())


def trained(backend: str, kind: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> equinorm.ENorm:
    """An ENorm whose next step moves weights, gradients and state; the same each time."""
    model, x = net()
    optimizer = kind(model.parameters(), lr=0.01, **options)  # type: ignore[call-arg]
    enorm = equinorm.ENorm(model, optimizer, symmetry=symmetry(), c=1.2, backend=backend)
    for _ in range(2):
        enorm.before_step()
        model(x).square().mean().backward()
        optimizer.step()
        enorm.step()
    enorm.before_step()
    optimizer.step()
    return enorm


def moved(enorm: equinorm.ENorm) -> list[Tensor]:
    """All that a step writes."""
    parameters = list(enorm.symmetry.model.parameters())
    state = [t for p in parameters for t in enorm.optimizer.state[p].values() if isinstance(t, Tensor)]
    return [*parameters, *(p.grad for p in parameters if p.grad is not None), *state, enorm.log_t]


class Watching(Faulty):
    """Notes the operations that make new memory after the first write to one of its tensors."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__(tensors)
        self.late: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        given = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = {t.untyped_storage()._cdata for t in pytree.tree_leaves(result) if isinstance(t, Tensor)}
        if self.writes and made - given:
            self.late.append(str(func))
        return result


@pytest.mark.parametrize("backend", ["plain", "foreach"])
def test_no_memory_is_asked_for_after_the_first_write(backend: str) -> None:
    enorm = trained(backend, momentum=0.9)
    weights = [t for t in moved(enorm) if t is not enorm.log_t]
    enorm.biases.after_step()  # gives gradients back, which is no part of the balance
    with Watching(weights) as watching:
        enorm.step()
    assert watching.writes > 10
    assert watching.late == []


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adafactor])
@pytest.mark.parametrize("backend", ["plain", "foreach"])
def test_every_write_may_fail_once(backend: str, kind: type[torch.optim.Optimizer]) -> None:
    """Whatever is raised, and wherever: what is due to safe biases is done or not, and so is the balance."""
    whole, prepared = trained(backend, kind), trained(backend, kind)
    prepared.biases.after_step()
    with Faulty(moved(whole)) as count:
        whole.step()
    for n, interrupt in itertools.product(range(1, count.writes + 1), (False, True)):
        twin = trained(backend, kind)
        before = [t.detach().clone() for t in moved(twin)]
        with pytest.raises((FaultError, KeyboardInterrupt)), Faulty(moved(twin), n, interrupt):
            twin.step()
        if not any(all(map(torch.equal, moved(twin), state)) for state in (before, moved(prepared))):
            for a, b in zip(moved(twin), moved(whole), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


def test_an_attached_step_is_whole() -> None:
    enorm, whole = trained("foreach"), trained("foreach")
    for each in (enorm, whole):
        each.step()
        each.attach()
    whole.optimizer.step()
    with pytest.raises(KeyboardInterrupt), Faulty([enorm.log_t], 1, interrupt=True):
        enorm.optimizer.step()
    for a, b in zip(moved(enorm), moved(whole), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("n", range(1, 6))
def test_what_fails_twice_is_taken_back(n: int) -> None:
    tensors = [torch.full((3, 4), k + 1.0, dtype=torch.float64) for k in range(4)]
    before = [t.clone() for t in tensors]
    logs = [torch.arange(3.0, dtype=torch.float64)[:, None], torch.ones(1, 4, dtype=torch.float64)]
    moves = Moves(torch.float64)
    for t in tensors[:2]:
        moves.add(t, logs)
    moves.add_products(tensors[2:3], tensors[3:], logs[0] + 1, logs[1])
    moves.reserve()
    if n == 5:
        assert moves.make() is None
        torch.testing.assert_close(tensors[1], before[1] * (logs[0] + logs[1]).exp())
        torch.testing.assert_close(tensors[2], before[2] * (logs[0] + 1))
        torch.testing.assert_close(tensors[3], before[3] / (logs[0] + 1))
        return
    with pytest.raises(FaultError), Faulty(tensors, n, times=2):
        moves.make()
    for a, b in zip(tensors, before, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["plain", "foreach"])
def test_the_scales_of_half_precision_count_what_was_applied(backend: str, dtype: torch.dtype) -> None:
    """Moves within the rounding of the weights were counted and not applied, so that log_t drifted without bound."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)).to(dtype)
    enorm = equinorm.ENorm(
        model, torch.optim.SGD(model.parameters(), lr=0.0), torch.randn(8, 6).to(dtype), backend=backend
    )
    before = {w.name: enorm.symmetry.tensor(w.name).detach().double() for w in enorm.symmetry.moving}
    for _ in range(100):
        enorm.step()
    settled = enorm.log_t.clone()
    for _ in range(100):
        enorm.step()
    assert torch.equal(enorm.log_t, settled)
    assert enorm.imbalance() < 0.05
    padded = torch.cat([settled, settled.new_zeros(1)])
    for w in enorm.symmetry.moving:
        applied = enorm.symmetry.tensor(w.name).detach().double().norm() / before[w.name].norm()
        counted = (before[w.name] * w.factor(padded)).norm() / before[w.name].norm()
        torch.testing.assert_close(applied, counted, rtol=0.02, atol=0)


def test_a_second_enorm_on_one_optimizer_is_refused_by_name() -> None:
    model, _ = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first, second = (equinorm.ENorm(model, optimizer, symmetry=symmetry()) for _ in range(2))
    handle = first.attach()
    with pytest.raises(RuntimeError, match=r"SGD has an ENorm already, which moves '0.weight' too: ENorm\(16 scales"):
        second.attach()
    with pytest.raises(RuntimeError, match="SGD has an ENorm already"):
        second.before_step()
    handle.remove()
    second.attach().remove()


def test_an_enorm_beside_that_of_enormsgd_is_refused() -> None:
    model, x = net()
    optimizer = equinorm.ENormSGD(model, x, lr=0.01)
    with pytest.raises(RuntimeError, match="ENormSGD has an ENorm already"):
        equinorm.ENorm(model, optimizer, symmetry=symmetry()).attach()


def test_two_models_in_one_optimizer_have_an_enorm_each() -> None:
    (one, _), (two, _) = net(), net()
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.01)
    for model in (one, two):
        equinorm.ENorm(model, optimizer, symmetry=symmetry()).attach()


@pytest.mark.parametrize("habit", [True, False])
def test_weights_that_others_write_to_are_named(habit: bool) -> None:
    """Tied by copying, which no forward shows; a checkpoint that is loaded once is no habit."""
    model, x = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    equinorm.ENorm(model, optimizer, symmetry=symmetry()).attach()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(6):
            model(x).square().mean().backward()
            optimizer.step()
            if habit or number == 2:
                with torch.no_grad():
                    model[2].weight.copy_(model[2].weight.clone())
    assert [str(w.message).startswith("2.weight is written to between steps") for w in said] == [True] * habit
