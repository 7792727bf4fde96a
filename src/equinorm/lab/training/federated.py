"""Federated averaging (McMahan et al. 2017) inside one training run: clients in turn, then the mean of their networks.

An epoch is a round: each client starts from the common network, makes one pass over its own images with an optimizer
that remembers nothing, and at the end of the round the common network is the mean of the clients', weighed by their
numbers of images; running statistics are averaged too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from .precision import mixed_seed

__all__ = ["Federation", "dirichlet_shares"]


def dirichlet_shares(labels: Sequence[int] | np.ndarray, clients: int, alpha: float, seed: int) -> list[np.ndarray]:
    """The images of each client: of every class, parts drawn from Dirichlet(alpha) (Hsu et al. 2019).

    A client that would get nothing gets one image of the largest.

    >>> shares = dirichlet_shares(labels, clients=4, alpha=0.1, seed=0)
    """
    if clients < 1 or not alpha > 0:
        raise ValueError(f"expected one client or more and a positive alpha, got {clients} and {alpha}")
    draw = np.random.Generator(np.random.PCG64(mixed_seed(seed, 5)))
    known = np.asarray(labels)
    shares: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in np.unique(known):
        of_class = draw.permutation(np.flatnonzero(known == label))
        cuts = np.cumsum(draw.dirichlet(np.full(clients, alpha)))[:-1]
        for share, part in zip(shares, np.split(of_class, (cuts * len(of_class)).astype(int)), strict=True):
            share.append(part)
    found = [np.sort(np.concatenate(share)) for share in shares]
    for number, images in enumerate(found):
        if not len(images):
            largest = max(range(clients), key=lambda i: len(found[i]))
            found[number], found[largest] = found[largest][:1], found[largest][1:]
    return found


class Federation:
    """Who trains when, and what is averaged."""

    def __init__(self, shares: Sequence[np.ndarray], batch: int) -> None:
        self.shares = [torch.from_numpy(np.asarray(share, dtype=np.int64)) for share in shares]
        self.batch = batch
        self.steps = [math.ceil(len(share) / batch) for share in self.shares]  # the last batch is filled up
        self.ends = np.cumsum(self.steps).tolist()
        images = sum(map(len, self.shares))
        self.weights = [len(share) / images for share in self.shares]
        self._common: dict[str, Tensor] = {}
        self._sum: dict[str, Tensor] = {}

    @property
    def steps_per_round(self) -> int:
        return sum(self.steps)

    def order(self, generator: torch.Generator, device: torch.device) -> Tensor:
        """The images of a round, client after client, each in an order of its own."""
        parts = []
        for share, steps in zip(self.shares, self.steps, strict=True):
            shuffled = share.to(device)[torch.randperm(len(share), generator=generator, device=device)]
            parts.append(shuffled.repeat(math.ceil(steps * self.batch / len(share)))[: steps * self.batch])
        return torch.cat(parts)

    def left(self, step: int) -> int:
        """How many steps there are to the end of the client that makes this step of a round."""
        return int(next(end for end in self.ends if end > step) - step)

    @torch.no_grad()
    def start(self, network: Mapping[str, Tensor]) -> None:
        """The common network is this one. `network`: the tensors themselves, which clients train."""
        self._common = {name: t.clone() for name, t in network.items()}
        self._sum = {name: torch.zeros_like(t, dtype=_exact(t)) for name, t in network.items()}

    @torch.no_grad()
    def after(self, done: int, network: Mapping[str, Tensor], forget: Callable[[], None]) -> None:
        """What follows the last step of a client, `done` steps of a round: the next one starts from the common network,
        or the mean of all is the common one."""
        weight = self.weights[self.ends.index(done)]
        for name, t in network.items():
            self._sum[name].add_(t, alpha=weight) if t.is_floating_point() else self._sum[name].copy_(t)
        forget()
        if done == self.ends[-1]:
            for name, t in self._common.items():
                t.copy_(self._sum[name])
                self._sum[name].zero_()
        for name, t in network.items():
            t.copy_(self._common[name])

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold."""
        found = {f"common.{name}": t for name, t in self._common.items()}
        return found | {f"sum.{name}": t for name, t in self._sum.items()}


def _exact(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32) if t.is_floating_point() else t.dtype
