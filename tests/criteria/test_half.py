"""Half precision: what overflowed does not after balancing, the function stays, and what cannot be helped is named."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import equinorm
from equinorm.criteria import Half
from equinorm.criteria.observed import observe
from equinorm.symmetry.verify import outputs_of, relative_change
from support.nets import randomize_constants

X = torch.randn(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def chain(factor: float = 1e6) -> nn.Module:
    """A hidden layer beyond float16's range, brought back by the layer after it."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    with torch.no_grad():
        net[2].weight.mul_(factor)
        net[2].bias.mul_(factor)
        net[4].weight.div_(factor)
    return net


class Stream(nn.Module):
    """A residual stream that grows, read by norms alone, some of which compute in float32 as language models do."""

    def __init__(self, norm: Callable[[int], nn.Module], factor: float = 3e5) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.head = nn.Linear(3, 6, bias=False), nn.Linear(6, 2)
        self.branches = nn.ModuleList(
            nn.Sequential(norm(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2)
        )
        self.norm = norm(6)
        randomize_constants(self)
        with torch.no_grad():
            self.branches[1][3].weight.mul_(factor)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for branch in self.branches:
            x = x + branch(x)
        return self.head(self.norm(x))


class RMSNorm(nn.Module):
    def __init__(self, n: int, plus: float = 0.0) -> None:
        super().__init__()
        self.weight, self.eps, self.plus = nn.Parameter(torch.ones(n) - plus), 1e-5, plus

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (self.plus + self.weight.float())).to(x.dtype)


def infinities(model: nn.Module, x: Tensor) -> int:
    """Of the outputs in float16."""
    return sum(int((~torch.isfinite(t)).sum()) for t in outputs_of(copy.deepcopy(model).half(), x.half()))


def error(model: nn.Module, x: Tensor, reference: list[Tensor]) -> float:
    return relative_change([t.double() for t in outputs_of(copy.deepcopy(model).half(), x.half())], reference)


NETS: dict[str, Callable[[], nn.Module]] = {
    "chain": chain,
    "layer_norm": lambda: Stream(lambda n: nn.LayerNorm(n)),
    "rms_norm": lambda: Stream(RMSNorm),
    "gains_stored_minus_one": lambda: Stream(lambda n: RMSNorm(n, plus=1.0)),
}


@pytest.mark.parametrize("name", NETS)
def test_what_overflowed_fits(name: str) -> None:
    model = NETS[name]()
    before = outputs_of(model, X)
    assert infinities(model, X) > 0
    report = equinorm.balance_(model, X, criterion=Half(X))
    assert relative_change(outputs_of(model, X), before) < (1e-12 if name in ("chain", "layer_norm") else 1e-5)
    assert infinities(model, X) == 0
    assert error(model, X, before) < 1e-2
    assert report.value_before > 1 > report.value_after
    assert report.converged
    assert not report.notes


def test_the_optimum_is_least() -> None:
    """No scale by itself, and no random direction, makes the largest excess smaller."""
    model = Stream(lambda n: nn.LayerNorm(n))
    symmetry = equinorm.trace(model, X, invariances=True)
    criterion = Half(X)
    report = equinorm.balance_(model, X, criterion=criterion, symmetry=symmetry)
    problem = criterion.problem(symmetry, lambda w: True)
    zero = torch.zeros(symmetry.num_scales, dtype=torch.float64)
    assert problem.value(zero) == pytest.approx(report.value_after, rel=1e-6)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        step = torch.randn(symmetry.num_scales, generator=generator, dtype=torch.float64) * 0.05
        assert problem.value(step) > report.value_after * 0.99


def test_what_no_scale_moves_is_named() -> None:
    """Behind a tanh's input nothing can be rescaled: the report says where, how far, and why."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    with torch.no_grad():
        net[0].weight.mul_(1e6)
    report = equinorm.balance_(net, X, criterion=Half(X))
    assert report.value_after > 1
    assert any("activation in 0" in note and "no free scale moves it" in note for note in report.notes)
    assert any(note.startswith("0.weight") for note in report.notes)
    assert "times the largest float16" in str(report)


def test_underflow_yields_to_overflow() -> None:
    """A stream that starts at 1e-4 and ends at 1e9 cannot fit; what must not happen is an infinity."""
    model = Stream(lambda n: nn.LayerNorm(n, eps=1e-12), factor=1.0)
    with torch.no_grad():
        model.embed.weight.mul_(1e-4)
        model.branches[0][3].weight.mul_(1e-4)
        model.branches[0][3].bias.mul_(1e-4)
        model.branches[1][3].weight.mul_(1e8)
    report = equinorm.balance_(model, X, criterion=Half(X))
    assert infinities(model, X) == 0
    assert any("below the smallest normal float16" in note for note in report.notes)
    assert not any("times the largest" in note for note in report.notes)


def test_what_stays_in_float32_does_not_count() -> None:
    """Inside RMSNorm squares are taken in float32, in half precision too: they are no reason to shrink the stream."""
    model = Stream(RMSNorm, factor=1.0)
    with torch.no_grad():
        model.embed.weight.mul_(1e3)
    symmetry = equinorm.trace(model, X, invariances=True)
    everything, stored = (observe(symmetry, X, stored_only=only) for only in (False, True))
    assert (everything.exponents == 2).any()
    assert not (stored.exponents == 2).any()


def test_dtypes_and_headroom() -> None:
    for bad in (0.5, float("inf")):
        with pytest.raises(ValueError, match="headroom"):
            Half(X, headroom=bad)
    with pytest.raises(ValueError, match="dtype"):
        Half(X, torch.int8)
    wide = equinorm.balance_(chain(), X, criterion=Half(X, torch.bfloat16))
    assert wide.value_before < 1
    symmetry = equinorm.trace(chain(), X)
    small, large = (Half(X, headroom=h).problem(symmetry, lambda w: True) for h in (1.0, 8.0))
    zero = torch.zeros(symmetry.num_scales, dtype=torch.float64)
    assert large.overflow(zero) == pytest.approx(8 * small.overflow(zero))


def test_several_batches_and_names() -> None:
    """The largest of all batches counts, by keyword too."""
    symmetry = equinorm.trace(chain(), X)
    zero = torch.zeros(symmetry.num_scales, dtype=torch.float64)
    one = Half([{"input": X}, {"input": 10 * X[:3]}]).problem(symmetry, lambda w: True).overflow(zero)
    assert one == Half(torch.cat([X, 10 * X[:3]])).problem(symmetry, lambda w: True).overflow(zero)
    with pytest.raises(ValueError, match="inputs is empty"):
        Half([]).problem(symmetry, lambda w: True)
