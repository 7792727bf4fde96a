"""Filters as gain times direction: which layers, the same function, plain layers again."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import equinorm
from equinorm.unitfilters import UnitFilter, parameter_groups, unit_filters_


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, groups=2),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 4, 2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 10),
        nn.ReLU(),
        nn.Linear(10, 5),
    ).to(dtype)


def images(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(4, 3, 9, 9, dtype=dtype)


def vs(model: nn.Module) -> list[tuple[torch.Tensor, int]]:
    found = []
    for layer in model.modules():
        if isinstance(layer, nn.modules.conv._ConvNd | nn.Linear) and hasattr(layer, "parametrizations"):
            kernel = layer.parametrizations["weight"]  # type: ignore[index]
            found.append((kernel.original, kernel[0].dim))
    return found


@pytest.mark.parametrize("learned", [False, True])
def test_the_function_stays_and_filters_have_length_one(learned: bool) -> None:
    model, x = net(), images()
    expected, weights = model(x), [layer.weight for layer in model if hasattr(layer, "weight")]
    report = unit_filters_(model, learned=learned)
    assert report.applied == ("0", "2", "4", "7")
    assert report.skipped == {"9": "the last layer"}
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    for (v, dim), weight in zip(vs(model), weights, strict=False):
        assert v is weight, "the parameter object of the weight is to stay"
        torch.testing.assert_close(v.transpose(0, dim).flatten(1).norm(dim=1), torch.ones(v.shape[dim]).double())
    names = {name for name, _ in model.named_parameters()}
    assert ("0.parametrizations.weight.0.gain" in names) == learned
    assert "0.parametrizations.weight.0.gain" in model.state_dict()


def test_gains_are_vectors_so_that_no_muon_takes_them_for_filters() -> None:
    model = net()
    unit_filters_(model, learned=True)
    assert all(p.ndim == 1 for name, p in model.named_parameters() if name.endswith("gain"))


@given(st.sampled_from([True, "filter", "window"]), st.integers(0, 100))
def test_zero_mean_filters_keep_what_is_left_of_them(zero_mean: bool, seed: int) -> None:
    torch.manual_seed(seed)
    layer = nn.Conv2d(3, 4, 3).double()
    weight = layer.weight.detach().clone()
    over = (2, 3) if zero_mean == "window" else (1, 2, 3)
    unit_filters_(layer, zero_mean=zero_mean, classifier=True)
    torch.testing.assert_close(layer.weight.detach(), weight - weight.mean(over, keepdim=True))


def test_keep_and_classifier() -> None:
    assert unit_filters_(net(), keep=["0", "7.weight"], classifier=True).applied == ("2", "4", "9")
    with pytest.raises(ValueError, match="matches no module"):
        unit_filters_(net(), keep=["stem"])
    with pytest.raises(ValueError, match='"filter" or "window"'):
        unit_filters_(net(), zero_mean="channel")  # type: ignore[arg-type]


def test_what_is_skipped_and_why() -> None:
    model = net()
    model[0].weight.data[1] = 0.0
    model[4] = nn.ConvTranspose2d(6, 4, 2, groups=2)
    model[7].weight = model[9].weight = nn.Parameter(torch.randn(10, 16))
    unit_filters_(model[2], classifier=True)
    report = unit_filters_(model, classifier=True)
    assert report.applied == ()
    reasons = list(report.skipped.values())
    assert "length 0, which has no direction" in reasons[0]
    assert reasons[1] == "its weight is parametrized already"
    assert "grouped transposed" in reasons[2]
    assert "shared" in reasons[3]
    depthwise = nn.Sequential(nn.Conv2d(4, 4, 1, groups=4))
    assert "filters of one weight" in unit_filters_(depthwise, zero_mean=True, classifier=True).skipped["0"]


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("zero_mean", [False, "window"])
def test_folded_it_is_plain_and_computes_the_same(learned: bool, zero_mean: bool) -> None:
    model, x = net(), images()
    unit_filters_(model, learned=learned, zero_mean=zero_mean)
    plain, _ = equinorm.fold(model)
    assert torch.equal(plain(x), model(x))
    assert "UnitFilter" not in repr(plain)
    assert set(plain.state_dict()) == set(net().state_dict())


def test_an_assigned_weight_is_taken_apart() -> None:
    layer = nn.Linear(3, 2)
    unit_filters_(layer, classifier=True)
    layer.weight = torch.tensor([[0.0, 3.0, 4.0], [0.0, 0.0, 0.0]])
    gains = layer.parametrizations["weight"][0]  # type: ignore[index]
    assert gains.gain.tolist() == [5.0, 1.0]
    torch.testing.assert_close(layer.weight.tolist(), [[0.0, 3.0, 4.0], [0.0, 0.0, 0.0]])
    assert "fixed gain" in repr(gains)


def test_copies_and_states() -> None:
    model, x = net(), images()
    unit_filters_(model)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    fresh = net()
    for p in fresh.parameters():
        p.data.normal_()
    unit_filters_(fresh)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(x), model(x))


def test_groups_without_and_with_decay() -> None:
    model = net()
    unit_filters_(model, learned=True)
    free, decayed = parameter_groups(model, weight_decay=0.1)
    assert (free["weight_decay"], decayed["weight_decay"]) == (0.0, 0.1)
    assert ids(free["params"]) >= ids(v for v, _ in vs(model))
    assert len(free["params"]) == 8
    assert ids(free["params"]) | ids(decayed["params"]) == ids(model.parameters())


def ids(parameters: Iterable[torch.Tensor]) -> set[int]:
    return {id(p) for p in parameters}


def test_the_room_is_reached_by_its_names() -> None:
    assert equinorm.unit_filters_ is unit_filters_
    assert isinstance(UnitFilter(torch.ones(2, 2)), nn.Module)
