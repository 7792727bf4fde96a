"""Private gradients against a loop over the examples; what mixes examples is refused; the recipe's noise is enough."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from equinorm.equilibrium.layers import EquiNormConv2d
from equinorm.lab import nets
from equinorm.lab.experiments import private
from equinorm.lab.experiments.artifacts import Cell
from equinorm.lab.training.inputs import inputs_of
from equinorm.lab.training.private import PrivateGradients, per_example_gradients
from equinorm.lab.training.training import Training


def net(norm: str = "groupnorm") -> nets.Chain:
    torch.manual_seed(0)
    options = {"norm_options": {"groups": 2}} if "groupnorm" in norm else {}
    return nets.build(
        "wrn", classes=10, in_shape=(3, 8, 8), norm=norm, depth=10, widen=1, width=4, data_init=False, **options
    ).double()


def images(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, 8, 8, dtype=torch.float64), torch.arange(n) % 10


@pytest.mark.parametrize("norm", ["groupnorm", "weight_standardization+groupnorm", "unit_filters", "msr", "none"])
def test_gradients_of_examples_are_those_of_a_loop(norm: str) -> None:
    model, (x, y) = net(norm), images(5)
    found, losses, logits = per_example_gradients(model, F.cross_entropy, x, y)
    for i in range(len(x)):
        model.zero_grad()
        one = model(x[i : i + 1]).float()
        loss = F.cross_entropy(one, y[i : i + 1])
        loss.backward()
        torch.testing.assert_close(losses[i], loss.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logits[i], one[0].detach(), rtol=1e-5, atol=1e-5)
        for name, p in model.named_parameters():
            torch.testing.assert_close(found[name][i], p.grad, rtol=1e-4, atol=1e-6)


@settings(max_examples=15)
@given(st.integers(0, 2**16), st.integers(1, 7), st.sampled_from([1e-3, 1.0, 1e3]), st.integers(1, 4))
def test_a_private_gradient_is_its_equation(seed: int, n: int, clip: float, chunk: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(n, 3, dtype=torch.float64), torch.randint(0, 2, (n,))
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(n):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1]).float(), y[i : i + 1]).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        length = math.sqrt(sum(float(g.square().sum()) for g in grads))
        for total, g in zip(expected, grads, strict=True):
            total += g * min(1.0, clip / length) / n
    PrivateGradients(model, F.cross_entropy, clip, 0.0, chunk)(x, y)
    for p, wanted in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, wanted, rtol=1e-5, atol=1e-7 * clip)


def test_noise_has_the_size_that_the_accountant_was_told() -> None:
    model = nn.Linear(400, 100, bias=False)
    x, y = torch.zeros(8, 400), torch.zeros(8, dtype=torch.int64)  # no gradient but the noise
    torch.manual_seed(0)
    PrivateGradients(model, F.cross_entropy, clip=0.5, multiplier=3.0)(x, y)
    assert model.weight.grad is not None
    assert float(model.weight.grad.std()) == pytest.approx(0.5 * 3.0 / 8, rel=0.02)


@pytest.mark.parametrize("mixing", [nn.BatchNorm2d(3), EquiNormConv2d(3, 3, 3)])
def test_what_mixes_examples_is_refused(mixing: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"mixes the examples of a batch.*take groupnorm"):
        PrivateGradients(nn.Sequential(mixing), F.cross_entropy, 1.0, 1.0)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="clip must be positive"):
        PrivateGradients(nn.Linear(2, 2), F.cross_entropy, 0.0, 1.0)


def test_a_run_steps_along_the_private_gradient() -> None:
    """A checkpoint in the middle of private training goes on as if nothing had happened."""
    (cell, *_) = find_cells()
    run = replace(cell.runs[0], epochs=1)
    inputs = inputs_of(run, None, torch.device("cpu"))
    whole = Training(run, inputs)
    part = Training(run, inputs)
    for _ in range(2):
        whole.step()
        part.step()
    resumed = Training(run, inputs, part.state_dict())
    while not whole.finished:
        whole.step()
        resumed.step()
    for a, b in zip(whole.parts.model.parameters(), resumed.parts.model.parameters(), strict=True):
        assert torch.equal(a, b)
    noiseless = Training(replace(run, optim=replace(run.optim, noise_multiplier=0.0)), inputs)
    noiseless.step()
    assert not torch.equal(next(noiseless.parts.model.parameters()), next(whole.parts.model.parameters()))


def find_cells() -> tuple[Cell, ...]:
    return tuple(private.artifacts({})[1].toy().cells)


def test_the_noise_of_the_recipe_is_private_enough() -> None:
    """By the accountant of Opacus where it is installed (`make test-integrations`)."""
    assert private.STEPS == 980
    accountants = pytest.importorskip("opacus.accountants")
    accountant = accountants.PRVAccountant()
    accountant.history = [(private.NOISE, private.BATCH / private.IMAGES, private.STEPS)]
    assert 0.98 * private.EPSILON < accountant.get_epsilon(private.DELTA) < private.EPSILON
