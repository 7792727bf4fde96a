"""Which parameters weight decay should leave alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import equinorm


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 5))


def test_biases_and_gains() -> None:
    model = nn.Sequential(nn.Linear(1, 4), nn.LayerNorm(4), equinorm.nn.EquiNormLinear(4, 3))
    assert equinorm.no_weight_decay(model) == {"0.bias", "1.weight", "1.bias", "2.gain", "2.bias"}


@pytest.mark.parametrize("put", [equinorm.weight_norm_, equinorm.centred_weight_norm_])
def test_gains_of_parametrized_weights(put: object) -> None:
    model = net()
    put(model)  # type: ignore[operator]
    gains = {f"{name}.parametrizations.weight.original0" for name in "024"}
    assert equinorm.no_weight_decay(model) == {"0.bias", "2.bias", "4.bias", *gains}
    assert all(model.get_parameter(name).ndim > 1 for name in gains)  # which counting axes would decay


def test_weights_whose_length_is_held() -> None:
    model = net()
    equinorm.mean_shift_rejection_(model)
    held = {"2.parametrizations.weight.original", "2.parametrizations.weight.0.g"}
    assert equinorm.no_weight_decay(model) == {"0.bias", "2.bias", "4.bias", *held}
    undecayed = equinorm.msr.parameter_groups(model, weight_decay=0.1)[0]["params"]
    assert {id(p) for p in undecayed} == {id(model.get_parameter(name)) for name in held}
    model = net()
    equinorm.unit_filters_(model, learned=True)
    undecayed = equinorm.unitfilters.parameter_groups(model, weight_decay=0.1)[0]["params"]
    names = equinorm.no_weight_decay(model) - {"0.bias", "2.bias", "4.bias"}
    assert {id(model.get_parameter(name)) for name in names} == {id(p) for p in undecayed}


def test_what_the_model_names_itself() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.plain = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))

        def no_weight_decay(self) -> set[str]:
            return {"table", "absent"}

    assert equinorm.no_weight_decay(nn.Sequential(Inner())) == {"0.table"}
    assert equinorm.no_weight_decay(Inner()) == {"table"}
