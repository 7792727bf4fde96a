"""Everything inside the range of a half precision, by exact rescaling alone.

The largest excess over the range, of any activation and any weight, is made as small as it can be; then the next. Too
small counts as too large does: what is typical of a channel should not come below the smallest normal number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..symmetry import Symmetry
from .criterion import Counts, Criterion
from .exponentials import NEVER, Side
from .norm import layouts
from .observed import Observed, observe
from .range import LeastMaximum

__all__ = ["Half"]


class Half(Criterion):
    """Every activation and weight inside the range of a dtype, or the names of those that cannot be.

    equinorm.balance_(model, x, criterion=equinorm.criteria.Half(inputs, torch.float16))

    Args:
        inputs: what the model is called with, or a list of batches; activations are measured on them.
        dtype: whose range everything is to be in.
        headroom: how many times larger than measured an activation may become before it overflows.
    """

    convex = True
    tol = 1e-2
    unit = "largest number over the dtype's"

    def __init__(self, inputs: Any, dtype: torch.dtype = torch.float16, headroom: float = 4.0) -> None:
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating dtype, got {dtype}")
        if not 1 <= headroom < float("inf"):
            raise ValueError(f"headroom must be at least 1, got {headroom!r}")
        self.inputs, self.dtype, self.headroom = inputs, dtype, float(headroom)

    def problem(self, symmetry: Symmetry, counted: Counts, example_inputs: Any = None) -> HalfProblem:
        return HalfProblem(symmetry, observe(symmetry, self.inputs), self.dtype, self.headroom)


class HalfProblem(LeastMaximum):
    def __init__(self, symmetry: Symmetry, seen: Observed, dtype: torch.dtype, headroom: float) -> None:
        n = symmetry.num_scales
        limits = torch.finfo(dtype)
        most, least = torch.tensor([limits.max, limits.tiny], dtype=torch.float64).log()
        self.dtype, self.seen, self.headroom = dtype, seen, headroom
        found = layouts(symmetry, 1.0, 1.0, lambda w: True)
        sides = [(x.rows, x.columns) for x in found]
        self.names = [x.name for x in found]
        logs = [x.largest(symmetry.tensor(x.name).detach().double().cpu()).log() - most for x in found]
        logs = [
            log if x.cancels is None else log.masked_fill(x.cancels, NEVER) for log, x in zip(logs, found, strict=True)
        ]
        margin = float(torch.tensor(headroom).log())
        for log, sign in ((seen.log_largest - most + margin, 1.0), (least - seen.log_typical, -1.0)):
            rows = Side(seen.variables[:, None], sign * seen.exponents[:, None])
            none = Side(torch.full_like(rows.index, n), torch.zeros_like(rows.exponent))
            sides.append((rows, none))
            logs.append(log[:, None, None])
        super().__init__(symmetry, sides, logs, largest_p=2.0**12)

    def value(self, s: Tensor) -> float:
        """The largest number over what the dtype holds: above 1 something overflows."""
        largest = self.largest(s)
        return max((x for _, x in largest), default=0.0)

    def largest(self, s: Tensor) -> list[tuple[str, float]]:
        """Of every weight, of all activations that move and of each that does not: the largest over the limit."""
        f = self.function
        parts = []
        moved = list(zip(self.logs, f.split(f.gather(s)), strict=True))
        for name, (x, (row, column)) in zip([*self.names, "activations"], moved[:-1], strict=True):
            if x.numel():
                parts.append((name, float((x + row[:, :, None] + column[:, None, :]).amax().exp())))
        limit = torch.finfo(self.dtype).max
        return parts + [(name, self.headroom * top / limit) for name, top in self.seen.frozen]

    def notes(self, s: Tensor) -> tuple[str, ...]:
        over = [(name, x) for name, x in self.largest(s) if x > 1]
        frozen = {name for name, _ in self.seen.frozen}
        return tuple(
            f"{name}: {x:.3g} times the largest {str(self.dtype).removeprefix('torch.')} (with headroom "
            f"{self.headroom:g}); " + ("no free scale moves it" if name in frozen else "lower, it would raise another")
            for name, x in over
        )
