"""Ten nets with a handful of free scales each, small enough for slow references and general optimizers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["SMALL_NETS", "example", "randomized"]


def example() -> Tensor:
    return torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def chain(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU, bias: bool = True) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b, bias=bias), activation()]
    return nn.Sequential(*layers[:-1])


class Net(nn.Module):
    """Layers by name, and a function that says how they are joined."""

    def __init__(self, forward: Callable[[Net, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.join = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self, x)


def residual() -> nn.Module:
    """A stream with a branch: one scale for each of its channels, two readers."""
    return Net(
        lambda m, x: m.head((h := m.stem(x)) + m.out(F.relu(m.into(h)))),
        stem=nn.Linear(3, 3),
        into=nn.Linear(3, 4),
        out=nn.Linear(4, 3),
        head=nn.Linear(3, 2),
    )


def joined() -> nn.Module:
    return Net(
        lambda m, x: m.head(torch.cat([F.relu(m.one(x)), F.leaky_relu(m.two(x), 0.1)], 1)),
        one=nn.Linear(3, 3),
        two=nn.Linear(3, 2),
        head=nn.Linear(5, 2),
    )


def gated() -> nn.Module:
    return Net(
        lambda m, x: m.down(torch.sigmoid(m.gate(x)) * m.up(x)),
        gate=nn.Linear(3, 4),
        up=nn.Linear(3, 4),
        down=nn.Linear(4, 2),
    )


def convolutions() -> nn.Module:
    layers = nn.Conv1d(1, 3, 2), nn.ReLU(), nn.Conv1d(3, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)
    return nn.Sequential(nn.Unflatten(1, (1, 3)), *layers)


def two_readers() -> nn.Module:
    return Net(
        lambda m, x: m.one(h := F.relu(m.stem(x))) * torch.tanh(m.two(h)),
        stem=nn.Linear(3, 4),
        one=nn.Linear(4, 2),
        two=nn.Linear(4, 2),
    )


SMALL_NETS: dict[str, Callable[[], nn.Module]] = {
    "one hidden layer": lambda: chain(3, 4, 2),
    "two hidden layers": lambda: chain(3, 4, 3, 2),
    "without biases": lambda: chain(3, 4, 3, 2, bias=False),
    "leaky": lambda: chain(3, 3, 3, 2, activation=lambda: nn.LeakyReLU(0.2)),
    "four layers": lambda: chain(3, 2, 2, 2, 2),
    "residual": residual,
    "joined": joined,
    "gated": gated,
    "convolutions": convolutions,
    "two readers": two_readers,
}


@torch.no_grad()
def randomized(name: str) -> nn.Module:
    """A net in float64 whose channels are of very different sizes."""
    torch.manual_seed(1)
    net = SMALL_NETS[name]().double()
    for parameter in net.parameters():
        spread = torch.randn(len(parameter), dtype=torch.float64).mul(1.5).exp()
        parameter.copy_(torch.randn_like(parameter) * spread.view(-1, *[1] * (parameter.ndim - 1)))
    return net
