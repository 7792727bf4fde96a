"""Opacus: what it is told to refuse, what the fixer makes, and gradients per example against a loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from opacus import GradSampleModule, PrivacyEngine
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import equinorm
from equinorm.integrations import opacus as private
from equinorm.norms import layers as norms


def batch() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(6, 3, 8, 8, generator=made), torch.randint(5, (6,), generator=made)


def with_equinorm(**options: Any) -> nn.Module:
    conv = equinorm.nn.EquiNormConv2d
    return nn.Sequential(
        conv(3, 8, 3, **options),
        nn.ReLU(),
        conv(8, 8, 3, **options),
        nn.ReLU(),
        nn.Flatten(),
        equinorm.nn.EquiNormLinear(128, 16, **options),
        nn.ReLU(),
        nn.Linear(16, 5),
    )


def with_batchnorm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 5),
    )


def one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradients of each example, by a loop over examples."""
    found: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for i in range(len(x)):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            found[name].append(p.grad.clone())
    model.zero_grad()
    return {name: torch.stack(gradients) for name, gradients in found.items()}


def largest_difference(model: nn.Module) -> float:
    """Between Opacus' gradients per example and the loop's, in units of the largest gradient of the parameter."""
    (x, y), model = batch(), copy.deepcopy(model).double()
    x = x.double()
    expected = one_by_one(model, x, y)
    sampled = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    nn.functional.cross_entropy(sampled(x), y, reduction="sum").backward()
    differences = [
        float((p.grad_sample - expected[name]).abs().max() / expected[name].abs().max())
        for name, p in sampled._module.named_parameters()
    ]
    return max(differences)


@pytest.mark.shows("Opacus", "EquiNorm and all layers with batch statistics are refused", "opacus")
def test_what_mixes_examples_is_refused() -> None:
    for tracked in (True, False):
        errors = ModuleValidator.validate(with_equinorm(track_running_stats=tracked))
        assert len(errors) == 3
        assert "EquiNormConv2d takes statistics over the batch" in str(errors[0])
    for kind in (norms.MeanOnlyBatchNorm2d, norms.BatchRenorm2d, norms.MeanOnlyBatchNorm1d, norms.BatchRenorm3d):
        assert len(ModuleValidator.validate(kind(4))) == 1
    assert largest_difference(with_equinorm(track_running_stats=False)) > 0.1  # why


@pytest.mark.parametrize("method", private.METHODS)
@pytest.mark.parametrize("make", [with_equinorm, with_batchnorm])
@pytest.mark.shows("Opacus", "fixed models: gradients per example equal a loop's", "opacus")
def test_a_fixed_model_has_the_gradients_of_a_loop(make: Any, method: str) -> None:
    torch.manual_seed(0)
    model = make()
    before = copy.deepcopy(model.state_dict())
    fixed, report = private.fix(model, batch()[0], method)
    assert report.converted
    assert not private.validate(fixed)
    assert largest_difference(fixed) < 1e-10
    for name, value in model.state_dict().items():
        assert value.equal(before[name]), name


def test_opacus_own_fixer_knows_our_layers() -> None:
    fixed = ModuleValidator.fix(with_equinorm())
    assert not ModuleValidator.validate(fixed)
    assert largest_difference(fixed) < 1e-10
    assert isinstance(ModuleValidator.fix(nn.Sequential(norms.BatchRenorm2d(8)))[0], nn.GroupNorm)


def test_a_parametrized_layer_without_a_bias_is_found() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False), nn.Flatten(), nn.Linear(64, 5))
    equinorm.mean_shift_rejection_(model)
    (error,) = private.validate(model)
    assert "2 has a parametrized weight and no bias" in str(error)


@pytest.mark.parametrize("method", private.METHODS)
@pytest.mark.shows("Opacus", "PrivacyEngine: trained, stopped, resumed bitwise", "opacus")
def test_a_private_training_resumes(method: str) -> None:
    def start() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model, _ = private.fix(with_equinorm(), batch()[0], method)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        loader = DataLoader(TensorDataset(*batch()), batch_size=3)
        return PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )

    def train(model: Any, optimizer: Any, loader: Any, epochs: int) -> None:
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

    whole, first, second = start(), start(), start()
    train(*whole, 4)
    train(*first, 2)
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(first[1].state_dict())
    train(*second, 2)
    for name, expected in whole[0].state_dict().items():
        assert second[0].state_dict()[name].equal(expected), name
