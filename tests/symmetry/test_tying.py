"""Numbers of norms that have one entry in a config: tied they change together, held they stay."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import equinorm

X = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class TwoStreams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 4), nn.Linear(3, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(4, eps=0.1) for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.norms[0](self.one(x))) + torch.tanh(self.norms[1](self.two(x)))


def test_tied_numbers_change_together() -> None:
    model = TwoStreams()
    before = model(X)
    symmetry = equinorm.trace(model, X, invariances=True)
    names = [carried.name for carried in symmetry.carried]
    assert names == ["norms.0.eps", "norms.1.eps"]
    assert symmetry.num_scales == 2
    tied = symmetry.tying([names])
    assert tied.num_scales == 1
    tied.rescale_(torch.tensor([0.7]))
    torch.testing.assert_close(model(X), before, rtol=1e-12, atol=1e-12)
    assert model.norms[0].eps == model.norms[1].eps != 0.1
    assert symmetry.tying([names[:1]]) is symmetry


def test_held_numbers_stay() -> None:
    model = TwoStreams()
    before = model(X)
    symmetry = equinorm.trace(model, X, invariances=True).holding(["norms.0.eps"])
    assert [carried.name for carried in symmetry.carried] == ["norms.1.eps"]
    symmetry.rescale_(torch.full((symmetry.num_scales,), 0.5))
    torch.testing.assert_close(model(X), before, rtol=1e-12, atol=1e-12)
    assert model.norms[0].eps == 0.1 != model.norms[1].eps
