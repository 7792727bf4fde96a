"""Canonical forms and distances: the same for all rescalings of a model, different for different models."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import equinorm
from equinorm.comparison import compare
from support.architectures import SIZE, Architecture, mixed_plans
from support.grids import examples
from support.nets import outputs, relative_error

X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
FEW: Any = settings(
    max_examples=examples(4, of=6),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)).double()


def rescaled(model: nn.Module, x: Tensor, seed: int, size: float = 2.0) -> nn.Module:
    """A copy with every scale moved at random."""
    other = copy.deepcopy(model)
    symmetry = equinorm.trace(other, x)
    generator = torch.Generator().manual_seed(seed)
    symmetry.rescale_(size * torch.randn(symmetry.num_scales, generator=generator, dtype=torch.float64))
    return other


def with_dead_units() -> nn.Sequential:
    """Units that feed nothing, that read nothing (with a bias and without), a chain of them, and one of zeros only."""
    model = net()
    with torch.no_grad():
        model[2].weight[:, 0] = 0  # unit 0 feeds nothing
        model[0].weight[1] = 0  # unit 1 is its bias
        model[0].weight[2], model[0].bias[2] = 0, 0  # unit 2 is zero
        model[4].weight[:, 3] = 0  # unit 3 of the next layer feeds nothing, and unit 4 of the first feeds it alone
        model[2].weight[[0, 1, 2, 4, 5], 4] = 0
        model[0].weight[5], model[0].bias[5], model[2].weight[:, 5] = 0, 0, 0  # nothing at all
    return model


def test_a_rescaling_is_at_distance_0() -> None:
    model = net()
    other = rescaled(model, X, 1)
    assert equinorm.distance(model, other, X) < 1e-8
    found = compare(model, other, X)
    assert found.same
    assert found.as_they_are > 0.1
    assert "the same up to rescaling" in str(found)


def test_dead_units_have_a_scale_too() -> None:
    model = with_dead_units()
    for seed in range(4):
        other = rescaled(model, X, seed)
        assert equinorm.distance(model, other, X) < 1e-8
    twin = copy.deepcopy(model)
    report = equinorm.canonical_(twin, X)
    assert report.converged
    assert report.dead == 6
    assert f"{report.dead} of them of dead units" in str(report)
    assert relative_error(outputs(twin, X)[0], outputs(model, X)[0]) < 1e-12
    # what a dead unit reads makes it another network, however it is scaled
    with torch.no_grad():
        other[0].weight[0, 0] *= 3
    assert equinorm.distance(model, other, X) > 1e-2


def test_canonical_form_is_least_and_the_same_again() -> None:
    model = net()
    balanced = copy.deepcopy(model)
    report = equinorm.canonical_(model, X)
    best = equinorm.balance_(balanced, X, tol=1e-12)
    assert report.norm_after <= report.norm_before
    for a, b in zip(model.parameters(), balanced.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)
    assert best.converged
    before = copy.deepcopy(model.state_dict())
    equinorm.canonical_(model, X)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], atol=1e-9, rtol=0)


def test_distance_sees_what_is_different() -> None:
    a, b, c = net(0), net(1), net(2)
    ab, bc, ac = (equinorm.distance(*pair, X) for pair in ((a, b), (b, c), (a, c)))
    assert min(ab, bc, ac) > 0.1
    assert ab == pytest.approx(equinorm.distance(b, a, X), rel=1e-9)
    assert ac <= ab + bc
    assert equinorm.distance(rescaled(a, X, 3), rescaled(b, X, 4), X) == pytest.approx(ab, rel=1e-6)
    nearly = copy.deepcopy(a)
    with torch.no_grad():
        nearly[4].bias[0] += 1e-3  # which no scale moves
    assert equinorm.distance(a, nearly, X) == pytest.approx(1e-3, rel=1e-6)
    found = compare(a, nearly, X)
    assert found.parts[0][0] == "4.bias"
    assert not found.same
    assert "most in 4.bias" in str(found)


def test_neither_model_is_changed() -> None:
    a, b = net(0).float(), rescaled(net(1).float(), X.float(), 0)
    before = [copy.deepcopy(m.state_dict()) for m in (a, b)]
    equinorm.distance(a, b, X.float())
    for m, state in zip((a, b), before, strict=True):
        assert all(torch.equal(t, state[name]) for name, t in m.state_dict().items())


def test_what_norms_absorb_can_be_taken_out_too() -> None:
    """With a symmetry of one's own: a stream read by a LayerNorm has one form, its ε with it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5, eps=0.1), nn.Linear(5, 2)).double()
    other = copy.deepcopy(model)
    symmetry = equinorm.trace(model, X, invariances=True)
    symmetry.bind(other).rescale_(torch.linspace(-1, 1, symmetry.num_scales))
    assert compare(model, other, X).distance > 0.1
    assert compare(model, other, X, symmetry=symmetry).distance < 1e-8
    for each in (model, other):
        equinorm.canonical_(each, symmetry=symmetry.bind(each))
    assert model[1].eps == pytest.approx(other[1].eps)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"one architecture.*the first has 4\.weight, the second has not"):
        equinorm.distance(net(), net()[:4], X)
    with pytest.raises(ValueError, match=r"0\.weight has shape \(6, 3\) in the first and \(5, 3\)"):
        equinorm.distance(net(), nn.Sequential(nn.Linear(3, 5), *net()[1:]).double(), X)
    broken = net()
    with torch.no_grad():
        broken[0].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"0\.weight.*no canonical form"):
        equinorm.canonical_(broken, X)
    with pytest.raises(ValueError, match="tol"):
        equinorm.canonical_(net(), X, tol=0)
    with pytest.raises(TypeError, match="example_inputs"):
        equinorm.canonical_(net())
    still = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double()
    assert "its own canonical form" in str(equinorm.canonical_(still, X))


@FEW
@given(plan=mixed_plans, seed=st.integers(0, 1000))
def test_any_architecture_has_one_form(plan: Any, seed: int) -> None:
    """Property: however a random architecture is rescaled, it is at distance 0 of itself and as far from others."""
    model = Architecture(plan, seed % 7).double().eval()
    x = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    other = rescaled(model, x, seed, size=0.5)
    found = compare(model, other, x)
    assert found.distance <= 1e-6 * found.norm, found
    stranger = Architecture(plan, seed % 7 + 1).double().eval()
    apart = equinorm.distance(model, stranger, x)
    assert apart > 1e-3 * found.norm
    assert equinorm.distance(stranger, other, x) == pytest.approx(apart, rel=1e-4)


NETS = """
from torch import nn

def net(width=6):
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))
"""


def test_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from equinorm import cli

    monkeypatch.chdir(tmp_path)
    (tmp_path / "compared_nets.py").write_text(NETS)
    x = torch.randn(2, 3)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    torch.save(model.state_dict(), "a.pt")
    equinorm.balance_(model, x)
    torch.save(model.state_dict(), "b.pt")
    options = ["--model", "compared_nets.py:net", "--input", "2,3"]
    assert cli.main(["compare", "a.pt", "b.pt", *options]) == 0
    assert "the same up to rescaling" in capsys.readouterr().out
    with torch.no_grad():
        model[2].bias += 1
    torch.save(model.state_dict(), "c.pt")
    assert cli.main(["compare", "a.pt", "c.pt", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["same"]
    assert found["parts"]["2.bias"] == pytest.approx(2**0.5, rel=1e-4)
    assert found["distance"] == pytest.approx(2**0.5, rel=1e-4)
    # models that are named themselves; and what is refused
    assert cli.main(["compare", "compared_nets.py:net", "compared_nets.py:net", "--input", "2,3"]) == 0
    assert "different" in capsys.readouterr().out
    assert cli.main(["compare", "a.pt", "b.pt", "--input", "2,3"]) == 1
    assert "--model" in capsys.readouterr().err
