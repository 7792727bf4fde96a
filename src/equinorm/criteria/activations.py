"""SmoothQuant's balance of activations and weights (Xiao et al. 2023), wherever a graph allows it.

A channel that is large in the activations is made smaller there and larger in the weights that read it, until

    max|X|^α = max|W|^(1 - α),

which for a channel that nothing else moves is their equation 4. All channels are solved for together: the sum of
max|X|^(2α) / 2α + max|W|^(2(1 - α)) / 2(1 - α) over them is a convex function of the log-scales.
"""

from __future__ import annotations

from typing import Any

import torch

from ..symmetry import Symmetry
from .criterion import Counts, Criterion, SmoothProblem
from .exponentials import NEVER
from .norm import layouts
from .observed import observe

__all__ = ["Activations"]

SHARP = 32.0
"""Maxima of weights are taken as norms of this order, so that there is a slope."""


class Activations(Criterion):
    """Activations and the weights that read them share the difficulty of being quantized.

    equinorm.balance_(model, x, criterion=equinorm.criteria.Activations(inputs, alpha=0.5))

    Args:
        inputs: what the model is called with, or a list of batches; the largest activations are measured on them.
        alpha: how much of the difficulty goes to the weights: 1 makes all activations alike, 0 all weights.
    """

    convex = True
    tol = 1e-5

    def __init__(self, inputs: Any, alpha: float = 0.5) -> None:
        if not 0 < alpha < 1:
            raise ValueError(f"alpha must be between 0 and 1, got {alpha!r}")
        self.inputs, self.alpha = inputs, float(alpha)

    def problem(self, symmetry: Symmetry, counted: Counts, example_inputs: Any = None) -> SmoothProblem:
        seen = observe(symmetry, self.inputs)
        n, alpha = symmetry.num_scales, self.alpha
        chosen = seen.read & (seen.log_read > NEVER)
        variables, exponents, logs = seen.variables[chosen], seen.exponents[chosen], seen.log_read[chosen]
        found = layouts(symmetry, 1.0, 1.0, counted)
        weights = [x.largest(symmetry.tensor(x.name).detach().double().cpu()).log() for x in found]
        reads = torch.zeros(n + 1, dtype=torch.bool)
        reads[variables] = True
        # What is zero on these inputs says nothing of its channel, and left free the others could run away along it.
        dead = torch.zeros(n + 1, dtype=torch.bool)
        for layout in found:
            dead[layout.columns.index[layout.columns.exponent != 0]] = True
        dead &= ~reads

        def largest(s: torch.Tensor) -> torch.Tensor:
            """SHARP times the logarithm of the largest weight that reads each variable."""
            padded, tops = torch.cat([s, s.new_zeros(1)]), torch.full((n + 1,), NEVER, dtype=s.dtype)
            for log, layout in zip(weights, found, strict=True):
                rows = padded[layout.rows.index] * layout.rows.exponent
                columns = padded[layout.columns.index] * layout.columns.exponent
                if log.numel():
                    readers = (log + rows[:, :, None] + columns[:, None, :]).amax(1)
                    tops.scatter_reduce_(0, layout.columns.index.reshape(-1), readers.reshape(-1), "amax")
            return SHARP * tops.masked_fill(tops == NEVER, 0.0)

        def function(s: torch.Tensor) -> torch.Tensor:
            padded = torch.cat([s, s.new_zeros(1)])
            total = (2 * alpha * (logs + exponents * s[variables])).exp().sum() / (2 * alpha)
            sums = torch.zeros(n + 1, dtype=s.dtype)
            top = largest(s.detach())
            for log, layout in zip(weights, found, strict=True):
                rows = padded[layout.rows.index] * layout.rows.exponent
                columns = padded[layout.columns.index] * layout.columns.exponent
                if not layout.columns.exponent.any():
                    continue
                readers = (SHARP * (log + rows[:, :, None] + columns[:, None, :])).logsumexp(1).reshape(-1)
                where = layout.columns.index.reshape(-1)
                sums = sums.index_add(0, where, (readers - top[where]).exp())
            some = reads & (sums.detach() > 0)
            some[n] = False
            tops = (sums[some].log() + top[some]) / SHARP
            beta = 2 * (1 - alpha)
            return total + (beta * tops).exp().sum() / beta

        problem = SmoothProblem(function, n)
        problem.fixed |= dead
        return problem
