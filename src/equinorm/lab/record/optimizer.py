"""The optimizer of a run, made for capture: few kernels, and nothing is read from the host.

All filters lie one after another in one vector of float32, everything else in another; the net's parameters are views
of copies in half precision. A step is Muon (or SGD) for the first vector and SGD with Nesterov for the second. Rates
are tables on the device, with one entry per step.

>>> optimizer = FlatOptimizer(net, config, torch.float16, steps=400)
>>> optimizer.step(torch.autograd.grad(loss, optimizer.parameters), t)       # t: the number of the step, on the device
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...unitfilters.functional import orthogonalize
from .config import Config, Rates, rates

__all__ = ["FlatOptimizer", "schedule"]


def schedule(steps: int, warmup: float, last: int | None = None) -> Tensor:
    """Multipliers of the rates: up to 1 in the first part, linearly, then down to zero at step `last`."""
    last = steps if last is None else min(last, steps)
    t = torch.arange(steps, dtype=torch.float32)
    rising = (t + 1) / (warmup * steps) if warmup > 0 else torch.ones(steps)
    start = warmup * steps
    falling = (last - t) / max(last - start, 1.0)
    return torch.minimum(rising, falling).clamp(0.0, 1.0)


class FlatOptimizer:
    """The vectors, their tables and a step. The net is changed: its parameters become views."""

    def __init__(self, net: nn.Module, config: Config, dtype: torch.dtype, steps: int) -> None:
        self.config, self.rates = config, rates(config)
        named = dict(net.named_parameters())
        filters = sorted((name for name, p in named.items() if p.ndim == 4), key=lambda name: tuple(named[name].shape))
        others = [name for name, p in named.items() if p.ndim != 4]
        self.names = filters + others
        self.parameters = [named[name] for name in self.names]
        self.number_of_filters = len(filters)
        device = self.parameters[0].device
        sizes = [p.numel() for p in self.parameters]
        self.sizes = sizes[: len(filters)], sizes[len(filters) :]
        self.filters = torch.zeros(sum(self.sizes[0]), device=device)
        self.others = torch.zeros(sum(self.sizes[1]), device=device)
        self.half = [vector.to(dtype) for vector in (self.filters, self.others)]
        self.momenta = [torch.zeros_like(vector) for vector in (self.filters, self.others)]
        self.averages = [torch.zeros_like(vector) for vector in (self.filters, self.others)]
        self.matrices = self._matrices([named[name] for name in filters])
        self.load(net)
        for i, view in enumerate(self._views()):
            self.parameters[i].data = view

        # what is the rate of each entry of the second vector
        self.kinds = [_kind(name) for name in others]
        self.rate = torch.zeros_like(self.others)
        self.whitening_rate = torch.zeros_like(self.others)
        self.decay = torch.zeros_like(self.others)
        self.filters_rate = torch.zeros(1, device=device)
        self.filters_decay = torch.zeros(1, device=device)
        self.tables = [torch.zeros(steps, device=device) for _ in range(2)]
        self.set_rates(config, steps, steps)

    def _matrices(self, filters: list[nn.Parameter]) -> list[tuple[int, int, int, int]]:
        """For each shape of filters: where they begin, how many, rows, columns."""
        out, start = [], 0
        for shape, group in groupby(filters, key=lambda p: tuple(p.shape)):
            count = len(list(group))
            rows, columns = shape[0], shape[1] * shape[2] * shape[3]
            out.append((start, count, rows, columns))
            start += count * rows * columns
        return out

    def _views(self) -> list[Tensor]:
        """The parameters as parts of the vectors in half precision; filters with channels last."""
        views = []
        for vector, sizes, parameters in zip(
            self.half,
            self.sizes,
            (self.parameters[: self.number_of_filters], self.parameters[self.number_of_filters :]),
            strict=True,
        ):
            for part, p in zip(vector.split(sizes), parameters, strict=True):
                if p.ndim == 4:
                    o, i, h, w = p.shape
                    views.append(part.view(o, h, w, i).permute(0, 3, 1, 2))
                else:
                    views.append(part.view(p.shape))
        return views

    def _flat(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Tensors in the order of the parameters as two vectors."""
        n = self.number_of_filters
        filters = [tensor.permute(0, 2, 3, 1).reshape(-1) for tensor in tensors[:n]]
        return torch.cat(filters), torch.cat([tensor.reshape(-1) for tensor in tensors[n:]])

    @torch.no_grad()
    def load(self, net: nn.Module) -> None:
        """Start from the parameters of this net, with empty momenta."""
        named = dict(net.named_parameters())
        for vector, source in zip((self.filters, self.others), self._flat([named[n] for n in self.names]), strict=True):
            vector.copy_(source)
        for momentum in self.momenta:
            momentum.zero_()
        self.hold_()
        self.publish_()
        self.restart_averages()

    @torch.no_grad()
    def take_others(self) -> None:
        """Gains and offsets were set in the net: take them over."""
        self.others.copy_(self.half[1])
        self.restart_averages()

    def restart_averages(self) -> None:
        for average, vector in zip(self.averages, (self.filters, self.others), strict=True):
            average.copy_(vector)

    def set_rates(self, config: Config, steps: int, whitening_steps: int) -> None:
        """Other rates for the same captured step."""
        own: Rates = rates(config)
        by_kind = {"offset": own.offsets, "gain": own.gains, "head": own.head, "whitening": own.whitening}
        decayed = {"offset", "head", "whitening"}

        def spread(values: list[float]) -> Tensor:
            parts = [torch.full((size,), value) for size, value in zip(self.sizes[1], values, strict=True)]
            return torch.cat(parts)

        self.rate.copy_(spread([0.0 if kind == "whitening" else by_kind[kind] for kind in self.kinds]))
        self.whitening_rate.copy_(spread([own.whitening if kind == "whitening" else 0.0 for kind in self.kinds]))
        # the decay of a step does not depend on the rate
        decay = [own.decay / by_kind[kind] if kind in decayed and by_kind[kind] else 0.0 for kind in self.kinds]
        self.decay.copy_(spread(decay))
        self.filters_rate.fill_(own.filters)
        self.filters_decay.fill_(own.filters_decay / own.filters if own.filters else 0.0)
        self.tables[0].copy_(schedule(steps, config.warmup))
        self.tables[1].copy_(schedule(steps, config.warmup, whitening_steps))

    # -- a step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], t: Tensor) -> None:
        """One step with these gradients of the summed loss (times `loss_scale`), in the order of `parameters`."""
        config = self.config
        flat = [gradient.float() for gradient in self._flat(gradients)]
        factor: float | Tensor = 1.0 / config.loss_scale
        if self.rates.clip is not None:
            length = (flat[0].square().sum() + flat[1].square().sum()).sqrt() / config.loss_scale
            factor = (self.rates.clip / (length + 1e-6)).clamp_max(1.0) / config.loss_scale
        filters, others = (gradient * factor for gradient in flat)
        now, now_whitening = (table.index_select(0, t) for table in self.tables)

        others = others + self.decay * self.others
        self.momenta[1].mul_(config.momentum).add_(others)
        direction = others + config.momentum * self.momenta[1]
        self.others.sub_(direction * (self.rate * now + self.whitening_rate * now_whitening))

        if config.norm == "msr":
            filters = self._centred(filters)
        if self.rates.agc is not None:
            filters = self._clipped_by_filter(filters, self.rates.agc)
        if config.filters == "sgd":
            filters = filters + self.filters_decay * self.filters
        m = config.filters_momentum if config.filters == "muon" else config.momentum
        self.momenta[0].mul_(m).add_(filters)
        direction = filters + m * self.momenta[0]
        if config.filters == "muon":
            direction = self._orthogonalized(direction)
        self.filters.sub_(direction * (self.filters_rate * now))
        self.hold_()
        self.publish_()
        if config.average:
            for average, vector in zip(self.averages, (self.filters, self.others), strict=True):
                average.lerp_(vector, 1.0 - config.average)

    def _by_shape(self, vector: Tensor) -> list[Tensor]:
        """A vector like `filters` as one stack of matrices for each shape, a filter a row."""
        return [
            vector[start : start + count * rows * columns].view(count, rows, columns)
            for start, count, rows, columns in self.matrices
        ]

    def _orthogonalized(self, direction: Tensor) -> Tensor:
        """All matrices in one stack, with zeros beside and below the smaller ones, which change nothing.

        Small steps are bound by the number of their kernels, and so a fourth of them is saved.
        """
        stacks = self._by_shape(direction)
        rows, columns = (max(stack.shape[axis] for stack in stacks) for axis in (1, 2))
        padded = [F.pad(stack, (0, columns - stack.shape[2], 0, rows - stack.shape[1])) for stack in stacks]
        done = orthogonalize(torch.cat(padded), self.config.newton_schulz).split([len(stack) for stack in stacks])
        cut = [part[:, : stack.shape[1], : stack.shape[2]] for part, stack in zip(done, stacks, strict=True)]
        return torch.cat([part.reshape(-1) for part in cut])

    def _clipped_by_filter(self, gradient: Tensor, limit: float) -> Tensor:
        """Adaptive gradient clipping (Brock et al. 2021, equation 3), of the mean loss; at least 1e-3 for a filter."""
        clipped = []
        for g, w in zip(self._by_shape(gradient), self._by_shape(self.filters), strict=True):
            length = torch.linalg.vector_norm(g, dim=-1, keepdim=True) / self.config.batch
            allowed = limit * torch.linalg.vector_norm(w, dim=-1, keepdim=True).clamp_min(1e-3)
            clipped.append((g * (allowed / length.clamp_min(1e-6)).clamp_max(1.0)).reshape(-1))
        return torch.cat(clipped)

    def _centred(self, gradient: Tensor, z: float = 0.85, luma: float = 5e-4) -> Tensor:
        """Mean shift rejection's gradient (ruff2020, 3.3 and 3.4): plus LUMA's, less z times its window means."""
        out = []
        luma = luma * self.config.batch  # of the mean loss
        for g, v in zip(self._by_shape(gradient), self._by_shape(self.filters), strict=True):
            length = torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp_min(1e-12)
            g = g + v * (2 * luma * (length - 1) / length)
            windows = g.view(*g.shape[:2], 9, -1)
            out.append((windows - z * windows.mean(2, keepdim=True)).reshape(-1))
        return torch.cat(out)

    @torch.no_grad()
    def hold_(self) -> None:
        """Filters back to where the method keeps them.

        Unit filters have length 1 each; filters in front of a norm, whose length does not count, 1 on average
        (airbench94_muon); what SGD moves is left alone.
        """
        if self.config.filters != "muon":
            return
        for stack in self._by_shape(self.filters):
            if self.config.norm != "unit":
                stack.mul_(stack.shape[1] ** 0.5 / torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True))
                continue
            if self.config.centred:
                stack.sub_(stack.mean(-1, keepdim=True))
            stack.div_(torch.linalg.vector_norm(stack, dim=-1, keepdim=True).clamp_min(1e-12))

    @torch.no_grad()
    def publish_(self) -> None:
        """Round the vectors into the net."""
        self.half[0].copy_(self.filters)
        self.half[1].copy_(self.others)

    @torch.no_grad()
    def use_averages(self) -> None:
        """Evaluate the running average of the weights from here on."""
        self.filters.copy_(self.averages[0])
        self.others.copy_(self.averages[1])
        self.hold_()
        self.publish_()


def _kind(name: str) -> str:
    last = name.rpartition(".")[2]
    kinds = {"whitening_bias": "whitening", "head": "head", "gain": "gain", "offset": "offset", "bias": "offset"}
    return kinds[last]
