"""What is left of a symmetry where some parameters must stay as they are."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import equinorm
from support.architectures import Architecture, Step, example_input, mixed_plans
from support.chains import chain
from support.nets import Net, assert_function_kept


@settings(max_examples=6)
@given(plan=mixed_plans, chosen=st.integers(0, 2**20))
def test_held_parameters_stay_and_no_freedom_is_lost_that_a_new_trace_would_find(plan: list[Step], chosen: int) -> None:
    model, x = Architecture(plan).double().eval(), example_input().double()
    symmetry = equinorm.trace(model, x, verify=False)
    names = [w.name for i, w in enumerate(symmetry.moving) if chosen >> i & 1]
    held = symmetry.holding(names)
    assert held.held == tuple(sorted(names))
    assert not {w.name for w in held.moving} & set(names)
    traced = equinorm.trace(model, x, keep=names, verify=False)
    assert held.num_scales >= traced.num_scales
    assert_function_kept(copy.deepcopy(model), x, held.bind(copy.deepcopy(model))) if held.num_scales else None


def test_a_held_layer_ties_what_it_reads_to_what_it_writes() -> None:
    """Every input of a dense layer meets every output: one scale goes through all three."""
    net = Net(
        lambda m, x: m.c(m.b(m.a(x).relu()).relu()),
        a=nn.Linear(5, 4),
        b=nn.Linear(4, 3, bias=False),
        c=nn.Linear(3, 2),
    ).double()
    x = torch.randn(2, 5).double()
    symmetry = equinorm.trace(net, x)
    assert symmetry.num_scales == 7
    held = symmetry.holding(["b.weight"])
    assert held.num_scales == 1
    assert {w.name for w in held.moving} == {"a.weight", "a.bias", "c.weight"}
    before = net.b.weight.clone()
    held.rescale_(torch.ones(1))
    assert torch.equal(net.b.weight, before)
    assert "1 free scale left while b.weight stay as they are" in held.explain().summary
    assert symmetry.holding(["b.weight", "a.bias"]).num_scales == 0


def test_exponents_are_kept() -> None:
    """Behind ReLU² the held layer ties s² to its outputs."""
    net = Net(
        lambda m, x: m.c(m.b(m.a(x).relu().square()).relu()),
        a=nn.Linear(5, 4),
        b=nn.Linear(4, 3, bias=False),
        c=nn.Linear(3, 2),
    ).double()
    x = torch.randn(2, 5).double()
    held = equinorm.trace(net, x).holding(["b.weight"])
    assert held.num_scales == 1
    assert_function_kept(net, x, held)


def test_nothing_held_changes_nothing() -> None:
    symmetry = equinorm.trace(chain(5, 4, 3), torch.zeros(1, 5).double())
    assert symmetry.holding([]) is symmetry
    assert symmetry.holding(["no such parameter"]) is symmetry


# -- balance_ ----------------------------------------------------------------------------------------------------------


def test_balance_keeps_what_is_frozen_beside_what_trains() -> None:
    model, x = chain(5, 8, 8, 8, 3), torch.randn(4, 5).double()
    model[0].requires_grad_(False)
    before, out = copy.deepcopy(model.state_dict()), model(x)
    report = equinorm.balance_(model, x)
    assert report.frozen == "keep"
    assert report.kept == ("0.weight", "0.bias")
    assert "2 frozen parameters stayed (0.weight, 0.bias" in str(report)
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[4].weight, before["4.weight"])
    torch.testing.assert_close(model(x), out)


def test_balance_moves_a_net_for_inference() -> None:
    model, x = chain(5, 8, 8, 3).requires_grad_(False), torch.randn(4, 5).double()
    report = equinorm.balance_(model, x)
    assert (report.frozen, report.kept) == ("move", ())
    assert report.num_scales == 16
    assert report.norm_after < report.norm_before


def test_balance_does_as_it_is_told() -> None:
    model, x = chain(5, 8, 8, 3), torch.randn(4, 5).double()
    model[0].requires_grad_(False)
    assert equinorm.balance_(copy.deepcopy(model), x, frozen="move").num_scales == 16
    with pytest.warns(UserWarning, match="nothing to rescale"):
        report = equinorm.balance_(model.requires_grad_(False), x, frozen="keep")
    assert "stayed" in str(report)
    with pytest.raises(ValueError, match="frozen must be 'keep' or 'move', got 'no'"):
        equinorm.balance_(model, x, frozen="no")  # type: ignore[arg-type]
