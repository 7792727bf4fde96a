"""The sphere and the orthogonalization against their slow twins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from equinorm.unitfilters.functional import Filters, orthogonalize, project_, project_all_, tangent_all_
from equinorm.unitfilters.reference import (
    newton_schulz_curve,
    orthogonalized_by_svd,
    projected_by_loop,
    tangent_by_loop,
)
from support.filters import SHAPES

SEEDS = st.integers(0, 2**16)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


def weight_of(shape: tuple[int, int, list[int]], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(seed)
    filters, inputs, window = shape
    size = 10.0 ** torch.randint(-3, 3, ()).item()
    return (size * torch.randn(filters, inputs, *window)).to(dtype)


# -- the sphere --------------------------------------------------------------------------------------------------------


@given(SHAPES, SEEDS, DTYPES, st.sampled_from(["", "filter", "window"]), st.sampled_from([0, 1]))
def test_projection_equals_its_twin(shape: tuple, seed: int, dtype: torch.dtype, over: str, dim: int) -> None:
    weight = weight_of(shape, seed, dtype)
    weight.select(dim, 0).zero_()
    assume_directions(Filters(weight, dim, over or None))  # type: ignore[arg-type]
    expected = projected_by_loop(weight, bool(over), over or "filter", dim)  # type: ignore[arg-type]
    result = project_(weight, bool(over), over=over or "filter", dim=dim)  # type: ignore[arg-type]
    assert result is weight
    tolerance = 40 * torch.finfo(dtype).eps
    torch.testing.assert_close(weight.double(), expected, rtol=tolerance, atol=tolerance)
    assert not weight.select(dim, 0).any()


def assume_directions(filters: Filters) -> None:
    """Leave out filters of which their mean leaves next to nothing, and with it few digits."""
    w = filters.weight.double()
    centred = w - w.mean(filters.mean_axes, keepdim=True) if filters.mean_axes else w
    left, before = (torch.linalg.vector_norm(t, dim=filters.within) for t in (centred, w))
    assume(bool((left >= 0.1 * before).all()))


@given(SHAPES, SEEDS, st.booleans())
def test_filters_have_length_one(shape: tuple, seed: int, zero_mean: bool) -> None:
    weight = weight_of(shape, seed)
    assume_directions(Filters(weight, over="filter" if zero_mean else None))
    project_(weight, zero_mean)
    lengths = weight.double().flatten(1).norm(dim=1)
    assert (lengths - 1).abs().max() < 1e-6
    if zero_mean:
        assert weight.flatten(1).mean(1).abs().max() < 2e-6


@pytest.mark.parametrize("value", [0.0, 0.1, 1e-20, 3e4])
def test_what_is_nothing_but_its_mean_becomes_zero_and_no_noise(value: float) -> None:
    weight = torch.full((3, 5, 3, 3), value)
    project_(weight, zero_mean=True)
    assert not weight.any()


def test_a_window_of_one_point_keeps_its_weights_under_window_means() -> None:
    weight = torch.randn(4, 3, 1, 1)
    expected = weight / weight.flatten(1).norm(dim=1).view(4, 1, 1, 1)
    torch.testing.assert_close(project_(weight, zero_mean=True, over="window"), expected)


def test_layouts_of_memory_do_not_matter() -> None:
    weight = torch.randn(8, 4, 3, 3)
    channels_last = weight.clone(memory_format=torch.channels_last)
    project_all_([Filters(channels_last, over="window")])
    assert channels_last.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(channels_last.contiguous(), project_(weight, True, over="window"))


def test_many_at_once_are_each_by_itself() -> None:
    weights = [torch.randn(4, 3, 3, 3), torch.randn(2, 7), torch.randn(5, 4, 2, dtype=torch.float64)]
    alone = [
        project_(weight.clone(), over is not None, over=over or "filter")
        for weight, over in zip(weights, (None, "filter", "window"), strict=True)
    ]  # type: ignore[arg-type]
    project_all_([Filters(weights[0]), Filters(weights[1], 0, "filter"), Filters(weights[2], 0, "window")])
    for weight, expected in zip(weights, alone, strict=True):
        assert torch.equal(weight, expected)
    project_all_([])


@given(SHAPES, SEEDS)
def test_tangents_equal_their_twin_and_do_not_lengthen(shape: tuple, seed: int) -> None:
    weight = weight_of(shape, seed).requires_grad_()
    weight.grad = torch.randn_like(weight)
    weight.data[0] = 0.0
    expected = tangent_by_loop(weight, weight.grad)
    tangent_all_([Filters(weight)])
    torch.testing.assert_close(weight.grad.double(), expected, rtol=1e-5, atol=1e-5)
    w = weight.detach().double().flatten(1)
    along = (w / w.norm(dim=1, keepdim=True).clamp_min(1e-30) * weight.grad.double().flatten(1)).sum(1)
    assert along.abs().max() < 1e-5


def test_zero_mean_tangents_have_no_mean() -> None:
    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    project_(weight, zero_mean=True)
    weight.grad = torch.randn_like(weight)
    tangent_all_([Filters(weight, over="filter"), Filters(torch.randn(2, 2))])  # the second one has no gradient
    assert weight.grad.mean((1, 2, 3)).abs().max() < 1e-6


# -- orthogonalization -------------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 6), SEEDS)
def test_orthogonalization_equals_its_twin(rows: int, columns: int, steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    matrix = 10.0 ** torch.randint(-6, 6, ()).item() * torch.randn(rows, columns)
    expected = orthogonalized_by_svd(matrix, steps)
    torch.testing.assert_close(orthogonalize(matrix, steps).double(), expected, rtol=0.0, atol=2e-4)
    torch.testing.assert_close(orthogonalize(matrix.double(), steps), expected, rtol=0.0, atol=1e-10)


@given(st.integers(1, 10), st.integers(1, 10), SEEDS)
def test_singular_values_lie_in_the_known_band(rows: int, columns: int, seed: int) -> None:
    torch.manual_seed(seed)
    matrix = torch.randn(rows, columns, dtype=torch.float64)
    sigma = torch.linalg.svdvals(matrix)
    result = torch.linalg.svdvals(orthogonalize(matrix, steps=3))
    assert result.max() <= 1.21
    large = int((sigma >= 0.02 * sigma.norm()).sum())
    assert (result >= 0.68).sum() >= large


def test_the_band_is_that_of_the_curve() -> None:
    sigma = torch.linspace(0.02, 1.0, 10_001, dtype=torch.float64)
    curve = newton_schulz_curve(sigma, 3)
    assert 0.68 < curve.min() < curve.max() < 1.21
    tiny = torch.tensor([1e-6], dtype=torch.float64)
    assert newton_schulz_curve(tiny, 3) / tiny == pytest.approx(41, abs=0.2)


def test_batches_are_matrices_one_by_one() -> None:
    for shape in ((2, 3, 4, 9), (5, 9, 4), (1, 6, 6)):
        batch = torch.randn(shape)
        result = orthogonalize(batch)
        assert result.shape == batch.shape
        flat = zip(batch.flatten(0, -3), result.flatten(0, -3), strict=True)
        for matrix, expected in flat:
            torch.testing.assert_close(orthogonalize(matrix), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-18, 1e-13, 1e18])
def test_no_size_makes_it_infinite(size: float) -> None:
    result = orthogonalize(size * torch.ones(3, 4))
    assert torch.isfinite(result).all()
    assert result.abs().max() <= 1.0


def test_half_precision_comes_back_in_its_dtype() -> None:
    matrix = torch.randn(4, 6)
    result = orthogonalize(matrix.bfloat16())
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), orthogonalize(matrix), rtol=0.0, atol=0.1)
