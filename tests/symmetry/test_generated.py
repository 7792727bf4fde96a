"""Random architectures: what is found keeps the function, and looking for it leaves no trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor, nn

import equinorm
from support.architectures import (
    BARRIERS,
    HOMOGENEOUS,
    LAYERS,
    MIXING,
    Architecture,
    Step,
    example_input,
    homogeneous_plans,
    mixed_plans,
)
from support.grids import examples
from support.nets import assert_function_kept, double_and_trace


def check(plan: list[Step], training: bool = False) -> None:
    model, x, sym = double_and_trace(Architecture(plan), example_input(), training)
    # ten times the tolerance of the hand-written nets: powers of powers amplify rounding
    assert_function_kept(model, x, sym, seed=1, tolerance=1e-11)


@settings(max_examples=examples(15, of=40))
@given(homogeneous_plans)
def test_homogeneous_architectures(plan: list[Step]) -> None:
    check(plan)


@settings(max_examples=examples(20, of=60))
@given(mixed_plans)
def test_architectures_with_barriers(plan: list[Step]) -> None:
    check(plan)


@settings(max_examples=examples(8, of=15))
@given(mixed_plans)
def test_architectures_in_training_mode(plan: list[Step]) -> None:
    """Batch statistics and buffer updates are part of the graph."""
    check(plan, training=True)


@pytest.mark.parametrize("kind", [*LAYERS, *HOMOGENEOUS, *MIXING, *BARRIERS])
def test_every_kind_alone(kind: str) -> None:
    """Each kind between two convolutions, so that a failure above has a small twin."""
    check([("conv", 1, 0), (kind, 1, 1), ("conv", 2, 1), ("relu", 0, 0)])


@settings(max_examples=examples(8, of=15))
@given(mixed_plans)
@example([("norm", 0, 0), ("dropout", 0, 0)])
def test_tracing_leaves_no_trace(plan: list[Step]) -> None:
    """Mode, parameters, gradients, buffers, hooks, the random state and the example input are as before."""
    model = Architecture(plan)
    for k, module in enumerate(model.modules()):
        module.training = k % 2 == 0  # a mixture, which eval() followed by train() would not restore
    x = example_input()
    model(x).sum().backward()
    modes = [m.training for m in model.modules()]
    ids = [id(p) for p in model.parameters()]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    state = copy.deepcopy(model.state_dict())
    kept = x.clone()
    torch.manual_seed(5)
    rng = torch.get_rng_state()

    equinorm.trace(model, x)

    assert [m.training for m in model.modules()] == modes
    assert [id(p) for p in model.parameters()] == ids
    assert all(p.requires_grad for p in model.parameters())
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert (p.grad is None) == (grad is None)
        assert grad is None or torch.equal(p.grad, grad)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert torch.equal(x, kept)
    assert torch.equal(torch.get_rng_state(), rng)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Remembering(nn.Module):
    """Keeps what it has computed once, wherever it can; and calls itself."""

    def __init__(self, decides: bool) -> None:
        super().__init__()
        self.first, self.second, self.decides = nn.Linear(3, 4), nn.Linear(4, 2), decides
        self.places: dict[str, Any] = {"deep": [{}]}
        self.listed: list[Tensor] = []

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        hidden = self.first(x + self(x, False).mean() if again else x).relu()
        self.places.setdefault("bias", 2 * self.first.bias)
        self.places["deep"][0].setdefault("bias", 3 * self.first.bias)
        if not self.listed:
            self.listed.append(4 * self.first.bias)
        if self.decides and hidden.sum() > 0:
            hidden = 2 * hidden
        return self.second(hidden)


def test_what_a_model_remembers_of_a_trace_is_forgotten() -> None:
    net = Remembering(decides=True)
    with pytest.raises(equinorm.TraceError):
        equinorm.trace(net, torch.rand(5, 3))
    assert net.places == {"deep": [{}]}
    assert net.listed == []
    net(torch.rand(5, 3))
    kept = net.places["bias"], net.places["deep"][0]["bias"], net.listed[0]
    net.decides = False
    equinorm.trace(net, torch.rand(5, 3))
    now = net.places["bias"], net.places["deep"][0]["bias"], *net.listed
    assert all(a is b for a, b in zip(kept, now, strict=True))
    model, x, sym = double_and_trace(Remembering(decides=False), torch.rand(5, 3))
    assert sym.num_scales == 4
    assert_function_kept(model, x, sym)


def test_a_model_that_writes_to_its_input_gets_a_copy() -> None:
    """The example is traced as given, and stays as it was."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return self.b(self.a(x).relu_())

    x = torch.randn(5, 3)
    kept = x.clone()
    assert equinorm.trace(Writes(), x).num_scales == 4
    assert torch.equal(x, kept)
