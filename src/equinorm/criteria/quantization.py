"""Weights that suffer least from being rounded to a few bits.

A weight w' = λ w that is rounded to steps of Δ is off by Δ/√12 or so, which in the network as it was is Δ/(λ √12). Let
h be what a squared error of each weight does to the outputs. Then rounding all weights costs

    Σ over groups of  max(λ |w|)² / (12 L²) · Σ_e h_e / λ_e²,        L = 2^(bits - 1) - 1,

over the tensors, channels or groups that share a step. Its logarithm is a convex function of the log-scales: maxima and
log-sum-exps of linear forms. Without inputs h is the path-magnitude (see `path.py`), what a random error of each weight
does to the outputs of the net without signs; with inputs it is the mean square of the outputs' derivative.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..models.inputs import call
from ..solver import Solution
from ..symmetry import ScaledParameter, Symmetry
from .criterion import Counts, Criterion, SmoothProblem
from .path import path_magnitudes

__all__ = ["Quantization", "rounded", "sensitivities"]


class Quantization(Criterion):
    """Least error of the weights' round trip through integers, weighed by what it does to the outputs.

    equinorm.balance_(model, x, criterion=equinorm.criteria.Quantization(bits=8, per="tensor"))

    Where the measured error, of weights that are really rounded, did not fall, nothing is moved.

    Args:
        bits: of a signed integer; steps are symmetric about 0.
        per: what shares a step: "tensor", "channel" (the first axis) or so many consecutive weights of a channel.
        inputs: calibration inputs, or a list of batches; without any the path-magnitudes weigh the error.
        probes: random combinations of the outputs whose derivatives are taken for each batch.
    """

    convex = True
    tol = 1e-4

    def __init__(self, bits: int = 8, per: str | int = "tensor", inputs: Any = None, probes: int = 8) -> None:
        if not isinstance(bits, int) or not 2 <= bits <= 16:
            raise ValueError(f"bits must be an integer from 2 to 16, got {bits!r}")
        if per not in ("tensor", "channel") and not (isinstance(per, int) and per > 0):
            raise ValueError(f'per must be "tensor", "channel" or a group size, got {per!r}')
        self.bits, self.per, self.inputs, self.probes = bits, per, inputs, probes

    def problem(self, symmetry: Symmetry, counted: Counts, example_inputs: Any = None) -> RoundingProblem:
        if self.inputs is not None:
            h = sensitivities(symmetry, self.inputs, self.probes)
        elif example_inputs is not None:
            h = path_magnitudes(symmetry.model, example_inputs)
        else:
            raise TypeError("Quantization runs the model: pass example_inputs too, or Quantization(inputs=)")
        return RoundingProblem(symmetry, counted, self, h)


def rounded(weight: Tensor, bits: int, per: str | int = "tensor") -> Tensor:
    """A weight after its round trip through signed integers, symmetric, with the largest element as the largest step.

    >>> rounded(conv.weight, bits=8, per="channel")
    """
    groups, shape = _groups(weight, per), weight.shape
    levels = 2 ** (bits - 1) - 1
    step = groups.abs().amax(-1, keepdim=True) / levels
    back = torch.where(step > 0, (groups / step).round() * step, groups)
    return _ungrouped(back, shape)


def _groups(weight: Tensor, per: str | int) -> Tensor:
    """Elements that share a step along the last axis; short groups are filled with zeros."""
    if per == "tensor":
        return weight.reshape(1, -1)
    flat = weight.reshape(weight.shape[0], -1)
    if per == "channel":
        return flat
    assert isinstance(per, int)
    short = -flat.shape[1] % per
    flat = torch.nn.functional.pad(flat, (0, short))
    return flat.reshape(flat.shape[0], -1, per)


def _ungrouped(groups: Tensor, shape: torch.Size) -> Tensor:
    flat = groups.reshape(shape[0], -1) if groups.ndim == 3 or len(groups) == shape[0] else groups.reshape(1, -1)
    wide = shape.numel() // shape[0] if len(flat) == shape[0] else shape.numel()
    return flat[:, :wide].reshape(shape)


def sensitivities(symmetry: Symmetry, inputs: Any, probes: int = 8) -> dict[str, Tensor]:
    """What a squared error of each weight does to the outputs: Σ (∂ output / ∂ w)², averaged over the inputs.

    Estimated without bias from random signs: E (∂ Σ ± output / ∂ w)² is that sum.
    """
    twin = copy.deepcopy(symmetry.model).eval()
    names = {name: w for name, w in twin.named_parameters() if w.is_floating_point()}
    for w in names.values():
        w.requires_grad_(True)
    total = {name: torch.zeros_like(w, dtype=torch.float64) for name, w in names.items()}
    generator = torch.Generator().manual_seed(0)
    count = 0
    for batch in list(inputs) if isinstance(inputs, list) else [inputs]:
        for _ in range(probes):
            with torch.enable_grad():
                outputs = [t for t in pytree.tree_leaves(call(twin, batch)) if isinstance(t, Tensor)]
                signs = [torch.randint(0, 2, t.shape, generator=generator).to(t) * 2 - 1 for t in outputs]
                mixed = torch.stack([(t * sign).sum() for t, sign in zip(outputs, signs, strict=True)]).sum()
                grads = torch.autograd.grad(mixed, list(names.values()), allow_unused=True)
            for name, g in zip(names, grads, strict=True):
                if g is not None:
                    total[name] += g.double().square()
            count += len(outputs[0]) if outputs[0].ndim else 1
    return {name: g / count for name, g in total.items()}


class RoundingProblem(SmoothProblem):
    """The logarithm of the error that is expected, and the error that is measured."""

    def __init__(self, symmetry: Symmetry, counted: Counts, criterion: Quantization, h: Mapping[str, Tensor]) -> None:
        self.symmetry, self.criterion = symmetry, criterion
        weights = [w for w in symmetry.parameters if counted(w) and len(w.shape) > 1]
        self.weights = weights
        self.tensors = {w.name: symmetry.tensor(w.name).detach().double().cpu() for w in weights}
        self.h = {w.name: h[w.name].detach().double().cpu() for w in weights}
        self.steps = float(2 ** (criterion.bits - 1) - 1)
        self._entries = [self._reduced(w) for w in weights]
        size = sum(float((x.square() * self.h[name]).sum()) for name, x in self.tensors.items())
        self._size = size or 1.0
        super().__init__(self._log_error, symmetry.num_scales, logarithm=False)

    def _reduced(self, w: ScaledParameter) -> tuple[ScaledParameter, Tensor, Tensor]:
        """log max |w| and log Σ h over the elements that share a factor and a step."""
        weight, h = self.tensors[w.name].abs(), self.h[w.name]
        per = self.criterion.per
        factor = w.factor(torch.zeros(self.symmetry.num_scales + 1, dtype=torch.float64))
        keep = {0} if per == "channel" else set()
        axes = [] if isinstance(per, int) else [
            a for a in range(weight.ndim) if a not in keep and (a >= factor.ndim or factor.shape[a] == 1)
        ]  # fmt: skip
        if axes:
            weight, h = weight.amax(axes, keepdim=True), h.sum(axes, keepdim=True)
        return w, weight.clamp_min(1e-300).log(), h.clamp_min(1e-300).log()

    def _log_error(self, s: Tensor, sharpness: float = 40.0) -> Tensor:
        """log of the expected error, with maxima that are smooth."""
        padded = torch.cat([s, s.new_zeros(1)])
        parts = []
        for w, log_weight, log_h in self._entries:
            log_factor = _log_factor(w, padded)
            top = _groups((log_weight + log_factor).expand(log_weight.shape), self.criterion.per)
            cost = _groups((log_h - 2 * log_factor).expand(log_weight.shape), self.criterion.per)
            if isinstance(self.criterion.per, int):  # groups are filled with zeros, which are not logarithms of nothing
                there = _groups(torch.ones_like(log_weight), self.criterion.per) > 0
                top, cost = (x.masked_fill(~there, -1e4) for x in (top, cost))
            tops = (sharpness * top).logsumexp(-1) / sharpness
            parts.append((2 * tops + cost.logsumexp(-1)).reshape(-1))
        return torch.cat(parts).logsumexp(0)

    def value(self, s: Tensor) -> float:
        """The measured error of weights that are really rounded, relative to their own size."""
        padded = torch.cat([s.detach(), s.new_zeros(1)])
        total = 0.0
        for w in self.weights:
            factor = w.factor(padded)
            moved = self.tensors[w.name] * factor
            error = (rounded(moved, self.criterion.bits, self.criterion.per) - moved) / factor
            total += float((error.square() * self.h[w.name]).sum())
        return total / self._size

    def solve(self, tol: float, deadline: float | None, iterations: int = 200) -> Solution:
        found = self._solved(tol, deadline, iterations)
        # the model of the error is not the error: of the way there, the point where it was least
        best, least = torch.zeros_like(found.log_scales), self.value(torch.zeros_like(found.log_scales))
        for part in (0.25, 0.5, 0.75, 1.0):
            value = self.value(part * found.log_scales)
            if value < least:
                best, least = part * found.log_scales, value
        return found._replace(log_scales=best)

    def _solved(self, tol: float, deadline: float | None, iterations: int) -> Solution:
        measured, self.value = self.value, lambda s: float(self.function(s))  # type: ignore[method-assign]
        try:
            return super().solve(tol, deadline, iterations)
        finally:
            self.value = measured  # type: ignore[method-assign]


def _log_factor(w: ScaledParameter, padded: Tensor) -> Tensor:
    log = torch.zeros([1] * len(w.shape), dtype=padded.dtype)
    if w.out is not None:
        log = log + w.out.log_scale(padded)
    if w.into is not None:
        log = log - w.into.log_scale(padded)
    return log
