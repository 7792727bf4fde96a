"""Cross-layer equalization on any graph (Nagel et al. 2019, "Data-free quantization through weight equalization").

Each unit's largest incoming weight becomes equal to its largest outgoing one: the fixed point of their equation 11, and
the limit of `Norm(p)` for p → ∞, which is how it is found. Of a chain it minimises Σ log max |w| over the tensors.
Where a stream has more readers than writers that sum has no least value; the fixed point is there all the same.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from ..solver import Solution, hold_unbalanced, minimise
from ..symmetry import Symmetry
from .criterion import Counts, Criterion, Problem
from .exponentials import NEVER, Exponentials, Point, Side, equilibrated
from .norm import layouts

__all__ = ["LeastMaximum", "Range"]


class Range(Criterion):
    """Every unit's largest incoming weight equals its largest outgoing one.

    equinorm.balance_(model, x, criterion=equinorm.criteria.Range())
    """

    convex = True
    tol = 1e-3
    unit = "largest weight"

    def problem(self, symmetry: Symmetry, counted: Counts, example_inputs: Any = None) -> LeastMaximum:
        found = layouts(symmetry, 1.0, 1.0, counted)
        logs = []
        for layout in found:
            log = layout.largest(symmetry.values(layout.name).detach().double().cpu()).log()
            logs.append(log if layout.cancels is None else log.masked_fill(layout.cancels, NEVER))
        return LeastMaximum(symmetry, [(x.rows, x.columns) for x in found], logs)


class LeastMaximum(Problem):
    """The least of the largest of all entries, then of the next largest, and so on: p → ∞ of a norm.

    It is approached by norms of growing p, each from the optimum of the one before. The imbalance is that of maxima,
    |log(largest incoming / largest outgoing)|.
    """

    moves_absorbed = True

    def __init__(
        self, symmetry: Symmetry, sides: list[tuple[Side, Side]], logs: list[Tensor], largest_p: float = 2.0**16
    ) -> None:
        self.birth, self.largest_p, self.symmetry = symmetry.birth, largest_p, symmetry
        bad = [torch.isnan(x) | (x == float("inf")) for x in logs]
        self.logs = [x.masked_fill(wrong, NEVER) for x, wrong in zip(logs, bad, strict=True)]
        cpu = torch.device("cpu")
        self.function = Exponentials(symmetry.num_scales, 1.0, sides, torch.float64, cpu, symmetry.processes)
        self._enter(1.0, self.function.zeros())
        for wrong, (row, column) in zip(bad, self.function.split(self.function.index), strict=True):
            batch, r, c = wrong.nonzero(as_tuple=True)
            self.function.fixed[row[batch, r]] = True
            self.function.fixed[column[batch, c]] = True

    def _enter(self, p: float, s: Tensor) -> None:
        """All entries to the power of p; those that are lost beside others are so at s, not at the start."""
        f = self.function
        f.p = p
        matrices, logs = [], []
        for x, (row, column) in zip(self.logs, f.split(p * f.gather(s)), strict=True):
            moved = p * x + row[:, :, None] + column[:, None, :]
            matrix, of_rows, of_columns = equilibrated(moved, moved > NEVER)
            matrices.append(matrix)
            logs.append((of_rows - row, of_columns - column))
        f.enter(matrices, logs)

    @property
    def fixed(self) -> Tensor:  # type: ignore[override]
        return self.function.fixed

    def value(self, s: Tensor) -> float:
        """The largest entry."""
        moved = zip(self.logs, self.function.split(self.function.gather(s)), strict=True)
        tops = [(x + row[:, :, None] + column[:, None, :]).amax() for x, (row, column) in moved if x.numel()]
        return float(torch.stack(tops).amax().exp()) if tops else 0.0

    def hold(self) -> None:
        hold_unbalanced(self.function)

    def gap(self, s: Tensor) -> float:
        """The largest |log(largest incoming / largest outgoing)| over free variables."""
        f = self.function
        up, down = (torch.full((f.n + 1,), NEVER, dtype=torch.float64) for _ in range(2))
        parts = []
        for x, (row, column) in zip(self.logs, f.split(f.gather(s)), strict=True):
            moved = x + row[:, :, None] + column[:, None, :]
            parts += [moved.amax(2).view(-1), moved.amax(1).view(-1)]
        tops = torch.cat(parts) if parts else f.exponent
        up.scatter_reduce_(0, f.index, torch.where(f.exponent > 0, tops, NEVER), "amax")
        down.scatter_reduce_(0, f.index, torch.where(f.exponent < 0, tops, NEVER), "amax")
        free = f.free & (up[:-1] > NEVER) & (down[:-1] > NEVER)
        return float(torch.where(free, (up - down)[:-1].abs().nan_to_num(0.0), 0.0).amax()) if f.n else 0.0

    def solve(self, tol: float, deadline: float | None) -> Solution:
        s, p, iterations = self.function.zeros(), 2.0, 0
        gap = self.gap(s)
        point: Point | None = None
        while gap > tol and p <= self.largest_p and not (deadline is not None and time.monotonic() > deadline):
            self._enter(p, s)
            found = minimise(self.function, self.birth, min(0.1, tol * p / 8), deadline, start=s)
            iterations += found.iterations
            reached = self.gap(found.log_scales)
            if reached < gap:  # masses of a large p may be lost to rounding: then it is tried from here again
                s, point, gap = found.log_scales, found.point, reached
            p *= 2
        return Solution(s, point, gap, iterations, gap <= tol)
