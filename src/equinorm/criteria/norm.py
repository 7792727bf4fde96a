"""The function ENorm minimises: the Lp norm of a network's weights over all its rescalings.

With log-scales s (stock2019 eq. 4 and 12, on any graph),

    F(s) = Σ_w c^(p·depth(w)) Σ_e |w[e]|^p · exp(p · (s_out(e) - s_in(e))),

a sum of exponentials of linear forms, hence convex. Only sums of |w|^p over elements with the same pair of scales are
needed, so every parameter is first reduced to a batch of matrices: a convolution to out × in, a grouped one to one
matrix per group, a gain to a batch of 1 × 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log, prod
from typing import Any

import torch
from torch import Tensor

from ..models.sharding import ALONE, Processes
from ..symmetry import ScaledParameter, Symmetry, Term
from .criterion import Counts, Criterion, ExponentialProblem
from .exponentials import NEVER, Exponentials, Point, Side, Sum, equilibrated, imbalance, times

__all__ = [
    "Layout",
    "Norm",
    "Objective",
    "Point",
    "Side",
    "Sum",
    "imbalance",
    "layout_of",
    "layouts",
    "powers_of",
    "times",
]


@dataclass(frozen=True, eq=False)
class Layout:
    """How one parameter becomes a batch of matrices whose rows and columns each belong to one scale variable."""

    name: str
    order: tuple[int, ...]  # axes of the parameter: those both sides depend on, rows, columns, what no scale depends on
    view: tuple[int, ...]  # its shape then: batch, and rows and columns as outer × distinct × inner, and the rest
    log_weight: float  # p · depth · log c, less where others hold copies
    rows: Side
    columns: Side
    cancels: Tensor | None  # where row and column are one scale to the same power, which then has no effect

    @property
    def weight(self) -> float:
        """c ** (p · depth), or the largest number there is."""
        return exp(min(self.log_weight, 700.0))

    def reduce(self, parameter: Tensor, p: float, dtype: torch.dtype) -> Tensor:
        """Sums of |w|^p over the elements that share a row and a column, times the depth weight."""
        matrices = self.sums(parameter, p, dtype)
        return matrices * self.weight if self.log_weight else matrices

    def sums(self, parameter: Tensor, p: float, dtype: torch.dtype) -> Tensor:
        """Sums of |w|^p over the elements that share a row and a column: batch × rows × columns."""
        laid, summed = self.laid(parameter), self.summed
        shape = self.view[0], self.view[2], self.view[5]
        if laid.requires_grad or laid.device.type != "cpu" or laid.numel() <= PIECE:
            return _sums(laid, p, summed, dtype).reshape(shape)
        found = torch.empty(shape, dtype=dtype)
        # a piece at a time, in the processor's cache, along the axis that has most of what is not summed
        axis, of_result = max(((0, 0), (2, 1), (5, 2)), key=lambda pair: laid.shape[pair[0]])
        length = max(1, PIECE * laid.shape[axis] // laid.numel())
        for start in range(0, laid.shape[axis], length):
            count = min(length, laid.shape[axis] - start)
            into = found.narrow(of_result, start, count)
            into.copy_(_sums(laid.narrow(axis, start, count), p, summed, dtype).reshape(into.shape))
        return found

    def largest(self, parameter: Tensor) -> Tensor:
        """The largest |w| over the elements that share a row and a column: batch × rows × columns."""
        powers = self.laid(parameter).abs()
        powers = powers.amax(self.summed, keepdim=True) if self.summed else powers
        return powers.reshape(self.view[0], self.view[2], self.view[5])

    def reduce_any(self, parameter: Tensor, p: float) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The same in float64 for weights of any size: matrices, logarithms that belong to their rows and columns, and
        where there are weights that are not finite (None: nowhere)."""
        shape = self.view[0], self.view[2], self.view[5]
        matrix = self.sums(parameter, p, torch.float64)
        rows, columns = (matrix.new_zeros(shape[0], length) for length in shape[1:])
        rows += self.log_weight
        if not matrix.numel():
            return matrix, rows, columns, None
        least, most = (float(x) for x in matrix.aminmax())
        narrow = parameter.dtype != torch.float64 and p <= 5  # the powers of float32 fit into float64
        if narrow and least == 0 and most < float("inf"):
            least = float(matrix.masked_fill(matrix == 0, most).amin())
        if (most < float("inf") and least > most * 1e-60) or (narrow and most == 0):
            return matrix, rows, columns, None
        wrong = None
        if not (narrow or least > 1e-250) or not most < 1e250:
            logs = p * self.laid(parameter.double()).abs().log()
            wrong = (~(logs < float("inf"))).double()
            if self.summed:
                logs, wrong = (x(self.summed, keepdim=True) for x in (logs.logsumexp, wrong.amax))
            wrong = wrong.reshape(shape) > 0
            logs = logs.reshape(shape).masked_fill(wrong, NEVER)
        else:
            logs = matrix.log()
        matrix, log_rows, log_columns = equilibrated(logs, logs > NEVER)
        return matrix, rows + log_rows, log_columns, wrong if wrong is not None and bool(wrong.any()) else None

    def laid(self, parameter: Tensor) -> Tensor:
        return parameter.permute(self.order).reshape(self.view)

    @property
    def summed(self) -> list[int]:
        """The axes of the view that no scale depends on."""
        return [axis for axis, n in enumerate(self.view) if n > 1 and axis not in (0, 2, 5)]


def _sums(laid: Tensor, p: float, summed: list[int], dtype: torch.dtype) -> Tensor:
    powers = powers_of(laid, p, dtype)
    return powers.sum(summed, keepdim=True) if summed else powers


PIECE = 1 << 16


def powers_of(x: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """|x|^p."""
    x = x.to(dtype)
    return x.square() if p == 2 else x.abs() if p == 1 else x.abs().pow(p)


def layouts(symmetry: Symmetry, p: float, c: float, counted: Callable[[ScaledParameter], bool]) -> list[Layout]:
    """The layout of every parameter, or part of one, that counts in the norm and can move."""
    chosen = [w for w in symmetry.moving if counted(w) and w.shape.numel()]
    return [layout_of(w, symmetry.num_scales, p * w.depth * log(c) + log(w.share)) for w in chosen]


def layout_of(w: ScaledParameter, n: int, log_weight: float = 0.0) -> Layout:
    """How one parameter becomes a batch of matrices.

    >>> matrix = layout_of(w, symmetry.num_scales).largest(symmetry.tensor(w.name))
    """
    axes = range(len(w.shape))
    out = {a for a in axes if w.out is not None and w.out.index.shape[a] > 1}
    into = {a for a in axes if w.into is not None and w.into.index.shape[a] > 1}
    shared, row_axes, column_axes = sorted(out & into), sorted(out - into), sorted(into - out)
    batch = prod(w.shape[a] for a in shared)
    rows = _side(w.out, w.shape, shared + row_axes, batch, n, sign=1.0)
    columns = _side(w.into, w.shape, shared + column_axes, batch, n, sign=-1.0)
    rows, columns = _grouped(rows, columns)
    rest = [a for a in axes if a not in (*shared, *row_axes, *column_axes)]
    (r_outer, r, r_inner), (c_outer, c, c_inner) = rows.repeats(), columns.repeats()
    rows, columns = (
        Side(x.index[:, ::k][:, :length], x.exponent[:, ::k][:, :length])
        for x, k, length in ((rows, r_inner, r), (columns, c_inner, c))
    )
    return Layout(
        w.name,
        order=(*shared, *row_axes, *column_axes, *rest),
        view=(len(rows.index), r_outer, r, r_inner, c_outer, c, c_inner, *(w.shape[a] for a in rest)),
        log_weight=log_weight,
        rows=rows,
        columns=columns,
        cancels=_cancelling(rows, columns, n),
    )


def _side(term: Term | None, shape: torch.Size, axes: list[int], batch: int, n: int, sign: float) -> Side:
    if term is None:
        length = prod(shape[a] for a in axes) // batch
        return Side(torch.full((batch, length), n), torch.zeros(batch, length, dtype=torch.float64))
    full = [shape[a] if a in axes else 1 for a in range(len(shape))]
    order = [*axes, *(a for a in range(len(shape)) if a not in axes)]
    index, exponent = (x.expand(full).permute(order).reshape(batch, -1) for x in (term.index, term.exponent))
    return Side(index, torch.where(index < n, exponent * sign, 0.0))


def _grouped(rows: Side, columns: Side) -> tuple[Side, Side]:
    """A grouped convolution as one matrix per group: its batch axis has runs that share their columns (or rows)."""
    if len(rows.index) > 1 and rows.index.shape[1] == 1 < columns.index.shape[1] and (run := columns.run_length()) > 1:
        return rows.reshaped(-1, run), columns.every(run)
    if len(rows.index) > 1 and columns.index.shape[1] == 1 < rows.index.shape[1] and (run := rows.run_length()) > 1:
        return columns.reshaped(-1, run), rows.every(run)  # transposed: the batch axis runs over the inputs
    return rows, columns


def _cancelling(rows: Side, columns: Side, n: int) -> Tensor | None:
    """Entries with one variable on both sides, to opposite powers: constants (the diagonal in x + conv(x))."""
    common = rows.index.unique()
    if not bool(torch.isin(common[common < n], columns.index.reshape(-1)).any()):
        return None
    row, column = rows.index[:, :, None], columns.index[:, None, :]
    net = rows.exponent[:, :, None] + columns.exponent[:, None, :]
    cancels = (row == column) & (net.abs() < 1e-9)
    return cancels if bool(cancels.any()) else None


class Norm(Criterion):
    """Σ |w|^p over all parameters that count, each weighted with c^(p · layers after it): the norm of stock2019.

    equinorm.balance_(model, x, criterion=equinorm.criteria.Norm(p=2, c=1.0))

    Args:
        p: which norm, any p > 0.
        c: asymmetry (stock2019, section 3.7): c > 1 moves energy towards the output.
    """

    convex = True
    on_shards = True
    tol = 1e-8
    unit = "norm"

    def __init__(self, p: float = 2.0, c: float = 1.0) -> None:
        for name, number in (("p", p), ("c", c)):
            if not 0 < number < float("inf"):
                raise ValueError(f"{name} must be a positive number, got {number!r}")
        self.p, self.c = float(p), float(c)

    def problem(self, symmetry: Symmetry, counted: Counts, example_inputs: Any = None) -> ExponentialProblem:
        """The sums of |w|^p stay where the weights are, and so does the work."""
        found = layouts(symmetry, self.p, self.c, counted)
        device = _device(symmetry)
        objective = Objective(symmetry.num_scales, self.p, found, torch.float64, device, symmetry.processes)
        objective.load_any(symmetry.values)
        return ExponentialProblem(objective, symmetry.birth)


def _device(symmetry: Symmetry) -> torch.device:
    """The CUDA device that holds all weights, if there is one; else the CPU."""
    devices = {symmetry.values(w.name).device for w in symmetry.moving}
    here = devices.pop() if len(devices) == 1 else torch.device("cpu")
    return here if here.type == "cuda" else torch.device("cpu")


class Objective(Exponentials):
    """F on given weights, as a function of log-scales, with gradient and curvature."""

    def __init__(
        self,
        n: int,
        p: float,
        layouts: Sequence[Layout],
        dtype: torch.dtype,
        device: torch.device,
        processes: Processes = ALONE,
    ) -> None:
        super().__init__(n, p, [(layout.rows, layout.columns) for layout in layouts], dtype, device, processes)
        self.layouts = list(layouts)
        self._cancels = [None if x.cancels is None else x.cancels.to(device) for x in layouts]

    def load(self, tensors: Callable[[str], Tensor]) -> None:
        """Read the weights: reduce every parameter to its matrices. No value is looked at by the host."""
        self.matrices = [x.reduce(tensors(x.name).detach(), self.p, self.dtype).to(self.device) for x in self.layouts]
        self.light, self.occupied = self.matrices, None
        for matrices, cancels in zip(self.matrices, self._cancels, strict=True):
            if cancels is not None:
                matrices.masked_fill_(cancels, 0.0)

    def load_any(self, tensors: Callable[[str], Tensor]) -> None:
        """The same for weights of any size: what leaves the range of float64 is kept as logarithms.

        The scales of infinite and undefined weights are fixed, and these weights do not count.
        """
        matrices, logs = [], []
        for layout, (row, column), cancels in zip(self.layouts, self.split(self.index), self._cancels, strict=True):
            matrix, log_rows, log_columns, wrong = layout.reduce_any(tensors(layout.name).detach(), self.p)
            matrix, log_rows, log_columns = (x.to(self.device, self.dtype) for x in (matrix, log_rows, log_columns))
            if wrong is not None:
                batch, r, c = wrong.to(self.device).nonzero(as_tuple=True)
                self.fixed[row[batch, r]] = True
                self.fixed[column[batch, c]] = True
            if cancels is not None:
                matrix = matrix.masked_fill(cancels, 0.0)
            matrices.append(matrix)
            logs.append((log_rows, log_columns))
        self.fixed = self.processes.any(self.fixed)
        self.enter(matrices, logs)
