"""What was made fast computes what the plain way does: factors by rows and columns, ranges piece by piece; and ENorm
takes the criterion that has cycles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import equinorm
from equinorm import criteria
from equinorm.criteria import exponentials, norm
from equinorm.symmetry import symmetry as module
from equinorm.symmetry.capture import PLAIN_DTYPES
from support.small_nets import example, randomized


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16), spread=st.sampled_from([1.0, 30.0, 200.0]), shift=st.sampled_from([0.0, 300.0]))
def test_a_factor_is_one_exponential(seed: int, spread: float, shift: float) -> None:
    """Also where rows or columns by themselves are out of range and their product is not."""
    symmetry = equinorm.trace(randomized("two hidden layers"), example(), verify=False)
    s = spread * torch.randn(symmetry.num_scales, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    padded = torch.cat([s + shift, s.new_zeros(1)])
    for w in symmetry.moving:
        if w.out is not None and w.into is not None:
            plain = (w.out.log_scale(padded) - w.into.log_scale(padded)).exp()
            torch.testing.assert_close(w.factor(padded), plain, rtol=1e-11, atol=0)


def test_ranges_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(9, 7, generator=generator)
    tensor[3, 2], tensor[4, 4], tensor[0, 0] = float("inf"), 0.0, 1e-30
    factor = torch.randn(9, 7, generator=generator, dtype=torch.float64).mul(60).exp()
    whole = module.out_of_range(tensor, factor)
    monkeypatch.setattr(module, "PIECE", 10)
    assert torch.equal(module.out_of_range(tensor, factor), whole)
    assert 0 < int(whole.sum()) < whole.numel()


@pytest.mark.parametrize("name", ["two hidden layers", "residual", "joined"])
def test_weights_piece_by_piece(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read and multiplied in pieces, weights are what they are as a whole."""
    whole, pieces = randomized(name), randomized(name)
    x = example()
    for net, size in ((whole, 1 << 30), (pieces, 5)):
        monkeypatch.setattr(module, "PIECE", size)
        monkeypatch.setattr(norm, "PIECE", size)
        symmetry = equinorm.trace(net, x, verify=False)
        generator = torch.Generator().manual_seed(0)
        symmetry.rescale_(torch.randn(symmetry.num_scales, generator=generator, dtype=torch.float64))
    for a, b in zip(whole.parameters(), pieces.parameters(), strict=True):
        assert torch.equal(a, b)
    for layout in norm.layouts(symmetry, 2.0, 1.0, lambda w: True):
        found = layout.sums(symmetry.tensor(layout.name).detach(), 2.0, torch.float64)
        monkeypatch.setattr(norm, "PIECE", 1 << 30)
        torch.testing.assert_close(found, layout.sums(symmetry.tensor(layout.name).detach(), 2.0, torch.float64))
        monkeypatch.setattr(norm, "PIECE", 5)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**16), spread=st.sampled_from([1.0, 20.0, 60.0]), dtype=st.sampled_from(PLAIN_DTYPES))
def test_what_surely_fits_does_fit(seed: int, spread: float, dtype: torch.dtype) -> None:
    symmetry = equinorm.trace(randomized("two hidden layers").to(dtype), example().to(dtype), verify=False)
    s = spread * torch.randn(symmetry.num_scales, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    padded = symmetry.padded(s)
    for w in symmetry.moving:
        tensor = symmetry.tensor(w.name).detach()
        if bool(w.surely_fits(tensor, padded)):
            assert not bool(module.out_of_range(tensor, w.factor(padded)).any())
    if spread == 1.0 and dtype == torch.float32:
        assert all(bool(w.surely_fits(symmetry.tensor(w.name).detach(), padded)) for w in symmetry.moving)


@pytest.mark.parametrize("criterion", [criteria.Norm(), criteria.Norm(p=1), criteria.Range(), criteria.Path()])
def test_float32_on_the_way_leads_to_the_same_optimum(
    criterion: criteria.Criterion, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, rough = randomized("residual"), randomized("residual")
    seen: list[bool] = []
    values: list[float] = []
    for net, large in ((exact, 1 << 30), (rough, 0)):
        monkeypatch.setitem(exponentials.LARGE, "cpu", large)
        with monkeypatch.context() as patch:
            at = exponentials.Exponentials.at
            patch.setattr(
                exponentials.Exponentials,
                "at",
                lambda self, s, light=False, at=at: seen.append(light and self.has_light) or at(self, s, light),
            )
            report = equinorm.balance_(net, example(), criterion=criterion)
            assert report.converged
            values.append(report.value_after)
    assert any(seen) or isinstance(criterion, criteria.Path)
    assert values[1] == pytest.approx(values[0], rel=1e-6)
    if isinstance(criterion, criteria.Range):
        return  # whose least value many scales have
    for a, b in zip(exact.parameters(), rough.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_enorm_takes_the_norm_as_a_criterion() -> None:
    net, x = randomized("residual"), example()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    enorm = equinorm.ENorm(net, optimizer, x, criterion=criteria.Norm(p=3, c=1.1))
    assert (enorm.p, enorm.c) == (3.0, 1.1)
    with pytest.raises(TypeError, match=r"there is none for Range: .*balance_\(model, x, criterion=Range"):
        equinorm.ENorm(net, optimizer, x, criterion=criteria.Range())
    with pytest.raises(TypeError, match="not both"):
        equinorm.ENorm(net, optimizer, x, p=3, criterion=criteria.Norm(p=3))


def test_balancing_says_nothing_of_its_own() -> None:
    """Warnings are errors here: a criterion that autograd differentiates gives none (it once did)."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    assert equinorm.balance_(net, example(), criterion=criteria.Activations(example())).converged
