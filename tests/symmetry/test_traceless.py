"""Tracing leaves no trace: whatever a forward does outside of itself is as it was afterwards."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import equinorm
from support.nets import Net

Program = Callable[[Any, Tensor], Tensor]
PROGRAMS: dict[str, tuple[Program, dict[str, Callable[[], Any]]]] = {}
TABLES: dict[str, Tensor] = {}
SEEN: list[Tensor] = []


def program(**attributes: Callable[[], Any]) -> Callable[[Program], Program]:
    """A forward, and attributes that its model has before."""

    def add(run: Program) -> Program:
        PROGRAMS[run.__name__] = run, attributes
        return run

    return add


def table() -> Tensor:
    return torch.linspace(1, 2, 8, dtype=torch.float64)


@functools.lru_cache
def cached_table(n: int) -> Tensor:
    return torch.linspace(1, 2, n, dtype=torch.float64)


# -- tables, attributes and lists made in forward ----------------------------------------------------------------------


@program()
def a_buffer_is_registered(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "table"):
        m.register_buffer("table", table())
    return m.c(m.a(x).relu() * m.table)


@program()
def an_attribute_is_made(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "made"):
        m.made = table()
    return m.c(m.a(x).relu() * m.made)


@program(made=lambda: None)
def an_attribute_is_filled(m: Any, x: Tensor) -> Tensor:
    if m.made is None:
        m.made = table()
    return m.c(m.a(x).relu() * m.made)


@program()
def a_list_is_made(m: Any, x: Tensor) -> Tensor:
    m.outputs = [m.a(x).relu()]
    return m.c(m.outputs[0])


@program(outputs=lambda: ([], {}))
def lists_grow(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    m.outputs[0].append(h)
    m.outputs[1]["last"] = h
    return m.c(h)


@program(state=SimpleNamespace)
def an_object_remembers(m: Any, x: Tensor) -> Tensor:
    m.state.last = m.a(x).relu()
    return m.c(m.state.last)


@program()
def a_module_is_made(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "lazy"):
        m.lazy = nn.ReLU()
    return m.c(m.lazy(m.a(x)))


@program(calls=lambda: 0)
def calls_are_counted(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return m.c(m.a(x).relu())


@program()
def the_file_remembers(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    SEEN.append(h)
    return m.c(h * TABLES.setdefault("k", table()))


@program()
def a_cached_function_remembers(m: Any, x: Tensor) -> Tensor:
    return m.c(m.a(x).relu() * cached_table(8))


# -- writes ------------------------------------------------------------------------------------------------------------


@program(kept=table)
def a_plain_tensor_is_written(m: Any, x: Tensor) -> Tensor:
    m.kept.mul_(2)
    return m.c(m.a(x).relu() * m.kept)


@program(kept=table)
def a_plain_tensor_is_replaced(m: Any, x: Tensor) -> Tensor:
    m.kept = m.kept * 2
    return m.c(m.a(x).relu() * m.kept)


@program(kept=lambda: {"k": [table()]})
def a_tensor_in_a_list_is_written(m: Any, x: Tensor) -> Tensor:
    m.kept["k"][0].mul_(2)
    return m.c(m.a(x).relu() * m.kept["k"][0])


@program()
def a_parameter_is_clipped(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.a.weight.clamp_(-0.1, 0.1)
    return m.c(m.a(x).relu())


@program()
def the_mode_is_changed(m: Any, x: Tensor) -> Tensor:
    return m.eval().c(m.a(x).relu())


# -- random states and settings ----------------------------------------------------------------------------------------


@program()
def random_numbers_are_drawn(m: Any, x: Tensor) -> Tensor:
    factor = (2 if random.random() < 0.5 else 3) * float(np.random.rand() + 1)  # noqa: NPY002
    return m.c(m.a(x).relu() * factor * torch.rand(8, dtype=x.dtype))


@program(
    python=lambda: random.Random(0),
    numpy=lambda: np.random.default_rng(0),
    old=lambda: np.random.RandomState(0),
    torchs=lambda: torch.Generator().manual_seed(3),
)
def own_generators_are_used(m: Any, x: Tensor) -> Tensor:
    factor = m.python.random() + m.numpy.random() + m.old.rand()
    return m.c(m.a(x).relu() * factor * torch.rand(8, generator=m.torchs, dtype=x.dtype))


@program()
def settings_are_changed(m: Any, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return m.c(m.a(x).relu())


def seed() -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)


def random_states() -> list[Any]:
    numpy = np.random.get_state()  # noqa: NPY002
    return [random.getstate(), numpy[2], numpy[1].tolist(), torch.get_rng_state().tolist()]


def forget() -> None:
    TABLES.clear()
    SEEN.clear()
    cached_table.cache_clear()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_traced_model_is_as_it_was(name: str) -> None:
    run, attributes = PROGRAMS[name]
    torch.manual_seed(0)
    model = Net(run, a=nn.Linear(6, 8), c=nn.Linear(8, 3)).double()
    for attribute, make in attributes.items():
        setattr(model, attribute, make())
    twin, x = copy.deepcopy(model), torch.randn(4, 6, dtype=torch.float64)
    names = {path: list(vars(module)) for path, module in model.named_modules()}
    state = {key: value.clone() for key, value in model.state_dict().items()}
    settings = torch.get_default_dtype(), torch.is_grad_enabled()
    forget()
    seed()
    before = random_states()

    symmetry = equinorm.trace(model, x)

    assert symmetry.verification.done, symmetry.verification
    assert symmetry.verification.frozen == ()
    assert random_states() == before
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == settings
    assert model.training
    assert {path: list(vars(module)) for path, module in model.named_modules()} == names
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert not TABLES
    assert not SEEN
    assert not cached_table.cache_info().currsize
    outputs = []
    for other in (model, twin):
        forget()
        seed()
        try:
            outputs.append(other(x))
        finally:
            torch.set_default_dtype(settings[0])
            torch.set_grad_enabled(settings[1])
    assert torch.equal(*outputs)
    forget()


def test_what_others_write_to_a_file_meanwhile_stays() -> None:
    """Only tensors are taken out of what is not the model's own."""

    def forward(m: Any, x: Tensor) -> Tensor:
        LOG.append("called")
        return m.c(m.a(x).relu())

    LOG.clear()
    equinorm.trace(Net(forward, a=nn.Linear(6, 8), c=nn.Linear(8, 3)), torch.randn(4, 6))
    assert LOG


LOG: list[str] = []


@pytest.mark.parametrize("inner", [False, True])
def test_autocast_around_a_trace_is_no_part_of_the_model(inner):
    """What surrounded the call rounded every convolution to bfloat16, and nothing was free; a model's own stays."""

    class Rounding(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16, enabled=inner):
                x = self.first(x)
            return self.second(x.float().relu())

    model, x = Rounding(), torch.randn(2, 3, 8, 8)
    plain = equinorm.trace(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        found = equinorm.trace(model, x)
        assert torch.is_autocast_enabled("cpu")
    assert found.num_scales == plain.num_scales
    assert found.verification == plain.verification
    assert found.num_scales == (0 if inner else 8)
