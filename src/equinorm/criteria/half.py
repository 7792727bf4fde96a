"""Everything inside the range of a half precision, by exact rescaling alone.

The largest excess over the range, of any activation and any weight, is made as small as it can be; then the next. Too
small counts as too large does: what is typical of a channel, or the largest weight of a row, should not come below the
smallest normal number. Where not both can be had, nothing overflows and something underflows.
"""

from __future__ import annotations

from math import log
from typing import Any

import torch
from torch import Tensor

from ..solver import Solution
from ..symmetry import Symmetry, Term
from .criterion import Counts, Criterion
from .exponentials import NEVER, Side
from .norm import Layout, layouts
from .observed import Observed, observe
from .range import LeastMaximum

__all__ = ["Half", "HalfProblem"]

YIELDING = (0.0, 3.0, 6.0, 9.0, 12.0, 16.0)
"""How much less (in logarithms) underflow counts than overflow, as long as something overflows."""


class Half(Criterion):
    """Every activation and weight inside the range of a dtype, or the names of those that cannot be.

    equinorm.balance_(model, x, criterion=equinorm.criteria.Half(x, torch.float16))
    model.half()

    What norms absorb is moved too, with their ε. (`balance_` traces so by itself; a symmetry of your own needs
    `trace(model, x, invariances=True)` for that.) `value` is the largest excess: at most 1 where everything fits.

    Args:
        inputs: what the model is called with, or a list of batches; activations are measured on them.
        dtype: whose range everything is to be in.
        headroom: how many times larger than measured an activation may become before it overflows.
    """

    convex = True
    tol = 1e-2
    unit = "largest excess over the range"
    invariances = True

    def __init__(self, inputs: Any, dtype: torch.dtype = torch.float16, headroom: float = 4.0) -> None:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating dtype, got {dtype}")
        if not 1 <= headroom < float("inf"):
            raise ValueError(f"headroom must be at least 1, got {headroom!r}")
        self.inputs, self.dtype, self.headroom = inputs, dtype, float(headroom)

    def __repr__(self) -> str:
        return f"Half({str(self.dtype).removeprefix('torch.')}, headroom={self.headroom:g})"

    def problem(self, symmetry: Symmetry, counted: Counts, example_inputs: Any = None) -> HalfProblem:
        seen = observe(symmetry, self.inputs, stored_only=self.dtype.itemsize < 4)
        return HalfProblem(symmetry, seen, self.dtype, self.headroom)


class HalfProblem(LeastMaximum):
    """Logarithms of numbers over the largest that the dtype holds, and of the smallest normal one over numbers."""

    def __init__(self, symmetry: Symmetry, seen: Observed, dtype: torch.dtype, headroom: float) -> None:
        limits = torch.finfo(dtype)
        self.most, self.least, self.margin = log(limits.max), log(limits.tiny), log(headroom)
        self.dtype, self.seen, self.headroom, self.n = dtype, seen, headroom, symmetry.num_scales
        self.names: list[str] = []  # of those that may overflow, one for each entry or one for all
        sides: list[tuple[Side, Side]] = []
        over: list[Tensor] = []
        under: list[tuple[tuple[Side, Side], Tensor]] = []
        shift = {w.name: w.shift for w in symmetry.moving}
        for layout in layouts(symmetry, 1.0, 1.0, lambda w: True):
            weight = symmetry.values(layout.name).detach().double().cpu()
            tops = layout.largest(weight + shift[layout.name]).log()
            tops = tops if layout.cancels is None else tops.masked_fill(layout.cancels, NEVER)
            self.names.append(layout.name)
            sides.append((layout.rows, layout.columns))
            over.append(tops - self.most)
            under += _leaders(layout, tops, self.least)
        for carried in symmetry.carried:
            value = carried.value(symmetry.model)
            if isinstance(value, Tensor):
                self.names.append(carried.name)
                sides.append(_rows(carried.term, value.shape, self.n))
                over.append(value.detach().double().cpu().abs().log().reshape(-1, 1, 1) - self.most)
        self.names.append("activations")
        sides.append(_singles(seen.variables, seen.exponents, self.n))
        over.append((seen.log_largest + self.margin - self.most)[:, None, None])
        below = (self.least - seen.log_typical)[:, None, None]
        under.append((_singles(seen.variables, -seen.exponents, self.n), below))
        self.over = len(over)
        # what is below the range from the start is wanted no further up than to its edge
        self.under = [logs.clamp_max(0.0) for _, logs in under]
        self.still = _still(symmetry, seen, headroom, limits.max)
        super().__init__(symmetry, [*sides, *(pair for pair, _ in under)], [*over, *self.under], largest_p=2.0**12)

    def value(self, s: Tensor) -> float:
        """The largest excess over the range, up or down: at most 1 where everything fits."""
        moved = self._moved(s)
        top = torch.stack([x.amax() for x in moved if x.numel()] or [torch.tensor(NEVER)]).amax()
        return max([float(top.exp()), *(excess for _, excess in self.still)])

    def _moved(self, s: Tensor) -> list[Tensor]:
        found = zip([*self.logs[: self.over], *self.under], self.function.split(self.function.gather(s)), strict=True)
        return [x + row[:, :, None] + column[:, None, :] for x, (row, column) in found]

    def overflow(self, s: Tensor) -> float:
        """The largest number that a scale moves over the largest of the dtype."""
        tops = [float(x.amax().exp()) for x in self._moved(s)[: self.over] if x.numel()]
        return max(tops, default=0.0)

    def solve(self, tol: float, deadline: float | None) -> Solution:
        best: Solution | None = None
        for yielding in YIELDING:
            self.logs[self.over :] = [x - yielding for x in self.under]
            found = super().solve(tol, deadline)
            if best is not None and self.overflow(found.log_scales) > 0.99 * self.overflow(best.log_scales):
                break
            best = found
            if self.overflow(found.log_scales) <= 1:
                break
        assert best is not None
        return best

    def too_large(self, s: Tensor) -> list[tuple[str, float, bool]]:
        """What is beyond the largest number, how many times, and whether a scale moves it; the worst first."""
        found: dict[tuple[str, bool], float] = {}
        for name, x in zip(self.names, self._moved(s), strict=False):
            for i in (x.exp() > 1).nonzero()[:, 0].unique().tolist():
                place = f"activation in {self.seen.where[i]}" if name == "activations" else name
                found[place, True] = max(found.get((place, True), 0.0), float(x[i].amax().exp()))
        found |= {(name, False): excess for name, excess in self.still if excess > 1}
        return sorted(((name, x, moves) for (name, moves), x in found.items()), key=lambda row: -row[1])

    def notes(self, s: Tensor) -> tuple[str, ...]:
        dtype = str(self.dtype).removeprefix("torch.")
        lines = [
            f"{name}: {x:.3g} times the largest {dtype}"
            + (f" (with headroom {self.headroom:g}); " if name.startswith("activation") else "; ")
            + ("lower, it would raise another" if moves else "no free scale moves it")
            for name, x, moves in self.too_large(s)
        ]
        low = sum(int((x > 1e-2).sum()) for x in self._moved(s)[self.over :])
        if low:
            lines.append(f"{low:,} channels come below the smallest normal {dtype}, and lose digits")
        return tuple(lines)


def _singles(variables: Tensor, exponents: Tensor, n: int) -> tuple[Side, Side]:
    """Entries that belong to one variable each."""
    rows = Side(variables[:, None], exponents[:, None])
    return rows, Side(torch.full_like(rows.index, n), torch.zeros_like(rows.exponent))


def _rows(term: Term, shape: torch.Size, n: int) -> tuple[Side, Side]:
    index, exponent = (x.expand(shape).reshape(-1) for x in (term.index, term.exponent))
    return _singles(index, torch.where(index < n, exponent, 0.0), n)


def _leaders(layout: Layout, tops: Tensor, least: float) -> list[tuple[tuple[Side, Side], Tensor]]:
    """The smallest number over the largest weight of every row and of every column, as it is before anything moves.

    A row is at least as large as this one weight of it, wherever the scales go; so a linear form is enough.
    """
    found = []
    for axis in (2, 1):
        values, at = tops.max(axis)
        batch = torch.arange(tops.shape[0])[:, None].expand_as(at)
        along = torch.arange(tops.shape[3 - axis])[None].expand_as(at)
        row, column = (along, at) if axis == 2 else (at, along)
        some = values > NEVER
        batch, row, column = batch[some], row[some], column[some]
        one = Side(layout.rows.index[batch, row][:, None], -layout.rows.exponent[batch, row][:, None])
        other = Side(layout.columns.index[batch, column][:, None], -layout.columns.exponent[batch, column][:, None])
        found.append(((one, other), (least - values[some])[:, None, None]))
    return found


def _still(symmetry: Symmetry, seen: Observed, headroom: float, limit: float) -> list[tuple[str, float]]:
    """What no scale moves, over the largest number: parameters, and activations with their headroom."""
    moving = {w.name for w in symmetry.moving}
    weights = [(w.name, symmetry.values(w.name).detach()) for w in symmetry.parameters if w.name not in moving]
    found = [(name, float(x.abs().amax().double()) / limit) for name, x in weights if x.numel()]
    return found + [(f"activation in {name}", headroom * top / limit) for name, top in seen.frozen]
