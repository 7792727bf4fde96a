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
from itertools import pairwise
from math import gcd, prod

import torch
from torch import Tensor

from ..models.sharding import ALONE, Processes
from ..symmetry import ScaledParameter, Symmetry, Term


@dataclass(frozen=True, eq=False)
class Side:
    """The scale variables of the rows (or columns) of a batch of matrices, and their exponents; both batch × length."""

    index: Tensor  # n stands for "no variable"
    exponent: Tensor

    def reshaped(self, *shape: int) -> Side:
        return Side(self.index.reshape(shape), self.exponent.reshape(shape))

    def every(self, step: int) -> Side:
        return Side(self.index[::step], self.exponent[::step])

    def run_length(self) -> int:
        """The length of runs of equal batch entries."""
        return _run_length(self.index.T, self.exponent.T)

    def repeats(self) -> tuple[int, int, int]:
        """The length as outer × distinct × inner: what repeats in runs (a flattened image) or periodically."""
        inner = _run_length(self.index, self.exponent)
        index, exponent = self.index[:, ::inner], self.exponent[:, ::inner]
        length = index.shape[1]
        distinct = len(torch.unique(torch.stack([index.double(), exponent]), dim=2)[0, 0])
        factors = (k for k in range(length // distinct, 0, -1) if length % k == 0)
        outer = next(k for k in factors if _periodic(length // k, index, exponent))
        return outer, length // outer, inner


def _periodic(period: int, *values: Tensor) -> bool:
    return all(torch.equal(v[:, period:], v[:, : v.shape[1] - period]) for v in values)


def _run_length(*values: Tensor) -> int:
    """The length of runs of equal columns."""
    changed = torch.stack([(v[:, 1:] != v[:, :-1]).any(0) for v in values]).any(0)
    edges = [0, *(changed.nonzero().view(-1) + 1).tolist(), values[0].shape[1]]
    return gcd(*(b - a for a, b in pairwise(edges)))


@dataclass(frozen=True, eq=False)
class Layout:
    """How one parameter becomes a batch of matrices whose rows and columns each belong to one scale variable."""

    name: str
    order: tuple[int, ...]  # axes of the parameter: those both sides depend on, rows, columns, what no scale depends on
    view: tuple[int, ...]  # its shape then: batch, and rows and columns as outer × distinct × inner, and the rest
    weight: float  # c ** (p · depth), less where others hold copies
    rows: Side
    columns: Side
    cancels: Tensor | None  # where row and column are one scale to the same power, which then has no effect

    def reduce(self, parameter: Tensor, p: float, dtype: torch.dtype) -> Tensor:
        """Sums of |w|^p over the elements that share a row and a column, times the depth weight."""
        laid = parameter.permute(self.order).reshape(self.view)
        summed = [axis for axis, n in enumerate(self.view) if n > 1 and axis not in (0, 2, 5)]
        if summed and p == 2 and not laid.requires_grad:
            powers = torch.linalg.vector_norm(laid, 2, summed, keepdim=True, dtype=dtype).square_()
        else:
            powers = powers_of(laid, p, dtype)
            powers = powers.sum(summed, keepdim=True) if summed else powers
        matrices = powers.reshape(self.view[0], self.view[2], self.view[5])
        return matrices * self.weight if self.weight != 1.0 else matrices


def powers_of(x: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """|x|^p."""
    x = x.to(dtype)
    return x.square() if p == 2 else x.abs() if p == 1 else x.abs().pow(p)


def layouts(symmetry: Symmetry, p: float, c: float, counted: Callable[[ScaledParameter], bool]) -> list[Layout]:
    """The layout of every parameter, or part of one, that counts in the norm and can move."""
    n = symmetry.num_scales
    return [_layout(w, n, c ** (p * w.depth) * w.share) for w in symmetry.moving if counted(w) and w.shape.numel()]


def _layout(w: ScaledParameter, n: int, weight: float) -> Layout:
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
        weight=weight,
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


class Sum:
    """Sums of values by an index that never changes: y[j] = Σ x[i] over index[i] = j, always in the same order.

    (On a GPU `index_add_` adds in any order, and data-parallel copies of a model would drift apart.)
    """

    def __init__(self, index: Tensor, size: int, device: torch.device) -> None:
        self.index, self.size = index.to(device), size
        self._sorted = torch.argsort(index, stable=True).to(device) if device.type != "cpu" else None
        self._lengths = torch.bincount(index, minlength=size).to(device)

    def __call__(self, values: Tensor) -> Tensor:
        if self._sorted is None:
            return torch.zeros(self.size, dtype=values.dtype).index_add_(0, self.index, values)
        return torch.segment_reduce(values[self._sorted], "sum", lengths=self._lengths, unsafe=True)


@dataclass(eq=False)
class Point:
    """F at one point: the mass Σ|w|^p on every row and column, and what it says about each variable."""

    row_factors: list[Tensor]
    column_factors: list[Tensor]
    mass: Tensor  # of all rows and columns, in the order of Objective.index
    up: Tensor  # per variable Σ k·mass over entries with exponent k > 0: the incoming mass
    down: Tensor  # per variable Σ |k|·mass over entries with k < 0: the outgoing mass
    value: Tensor  # F

    @property
    def gradient(self) -> Tensor:
        """∂F/∂s, up to the factor p."""
        return self.up - self.down


class Objective:
    """F on given weights, as a function of log-scales, with gradient and Hessian products.

    `dropped` variables are dead or cannot be balanced: their entries leave the objective. `fixed` ones stay at 0 while
    their entries count. `loose` ones are not linked to any fixed one. (The last place means "no variable".)

    With `processes` that hold parts of the weights, layouts and masses are those of the parts that are here. What there
    is per variable is summed over all of them, so it is the same in each.
    """

    def __init__(
        self,
        n: int,
        p: float,
        layouts: Sequence[Layout],
        dtype: torch.dtype,
        device: torch.device,
        processes: Processes = ALONE,
    ) -> None:
        self.n, self.p, self.layouts, self.processes = n, p, list(layouts), processes
        self.dtype, self.device = dtype, device
        sides = [side for layout in layouts for side in (layout.rows, layout.columns)]
        empty = torch.zeros(0, dtype=torch.int64)
        index = torch.cat([empty, *(side.index.reshape(-1) for side in sides)])
        self.index = index.to(device)
        self._sum = Sum(index, n + 1, device)
        exponents = torch.cat([empty.double(), *(side.exponent.reshape(-1) for side in sides)])
        self.exponent = exponents.to(device, dtype)
        self._cuts = [side.index.numel() for side in sides]
        self.matrices: list[Tensor] = []
        self._cancels = [None if x.cancels is None else x.cancels.to(device) for x in layouts]
        self.dropped = torch.zeros(n + 1, dtype=torch.bool, device=device)
        self.fixed = torch.zeros(n + 1, dtype=torch.bool, device=device)
        self.fixed[n] = True
        self.loose = torch.zeros_like(self.dropped)

    def load(self, tensors: Callable[[str], Tensor]) -> None:
        """Read the weights: reduce every parameter to its matrices."""
        self.matrices = [x.reduce(tensors(x.name).detach(), self.p, self.dtype).to(self.device) for x in self.layouts]
        for matrices, cancels in zip(self.matrices, self._cancels, strict=True):
            if cancels is not None:
                matrices.masked_fill_(cancels, 0.0)

    @property
    def free(self) -> Tensor:
        return ~(self.dropped | self.fixed)[: self.n]

    def split(self, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        """A vector over all rows and columns, as batch × rows and batch × columns of each layout."""
        parts = values.split(self._cuts)
        return [
            (parts[2 * i].view(x.rows.index.shape), parts[2 * i + 1].view(x.columns.index.shape))
            for i, x in enumerate(self.layouts)
        ]

    def gather(self, values: Tensor) -> Tensor:
        """A vector over variables, at every row and column, times the exponents there."""
        return torch.cat([values, values.new_zeros(1)])[self.index] * self.exponent

    def scatter(self, values: Tensor) -> Tensor:
        """The transpose of `gather` without the exponents."""
        return self.processes.sum(self._sum(values)[: self.n])

    def at(self, s: Tensor) -> Point:
        kept = (~self.dropped).to(self.dtype)[self.index]
        row_factors, column_factors, masses = [], [], []
        for matrix, (row, column), (keep_row, keep_column) in zip(
            self.matrices, self.split(self.p * self.gather(s)), self.split(kept), strict=True
        ):
            # one number moved from one side to the other keeps both exponentials in range
            shift = column.amax()
            u, v = (row + shift).exp() * keep_row, (column - shift).exp() * keep_column
            row_factors.append(u)
            column_factors.append(v)
            masses += [(u * times(matrix, v)).view(-1), (v * times(matrix.mT, u)).view(-1)]
        mass = torch.cat(masses) if masses else self.exponent.new_zeros(0)
        pull = self.exponent * mass
        value = sum((m.sum() for m in masses[::2]), torch.zeros((), dtype=self.dtype, device=self.device))
        sums = [self._sum(pull.clamp_min(0))[: self.n], self._sum((-pull).clamp_min(0))[: self.n], value.view(1)]
        up, down, value = self.processes.sum(torch.cat(sums)).split([self.n, self.n, 1])
        return Point(row_factors, column_factors, mass, up, down, value[0])

    def hessian_diagonal(self, point: Point) -> Tensor:
        """Σ k²·mass per variable, up to p². (A variable on both sides of an entry adds a cross term left out here.)"""
        return self.scatter(self.exponent.square() * point.mass)

    def hessian_times(self, point: Point, x: Tensor) -> Tensor:
        """The Hessian at a point times a vector, up to p²."""
        moved, parts = self.gather(x), []
        for matrix, u, v, (row, column) in zip(
            self.matrices, point.row_factors, point.column_factors, self.split(moved), strict=True
        ):
            parts += [(u * times(matrix, v * column)).view(-1), (v * times(matrix.mT, u * row)).view(-1)]
        crossed = torch.cat(parts) if parts else moved
        return self.scatter(self.exponent * (point.mass * moved + crossed))

    def hessian_between(self, point: Point, group: Tensor, groups: int) -> Tensor:
        """The Hessian restricted to vectors that are constant on groups of variables: groups × groups, up to p²."""
        padded = torch.cat([group, group.new_full((1,), groups)])
        member = padded[self.index]
        total = torch.zeros(groups + 1, groups + 1, dtype=self.dtype, device=self.device)
        own = self.exponent.square() * point.mass
        total.view(-1).index_add_(0, member * (groups + 2), own)
        weighted = self.split(self.exponent)
        for matrix, u, v, (k_row, k_column), (row, column) in zip(
            self.matrices, point.row_factors, point.column_factors, weighted, self.split(member), strict=True
        ):
            local, place = column.unique(return_inverse=True)
            spread = torch.zeros(*column.shape, len(local), dtype=self.dtype, device=self.device)
            spread.scatter_(2, place[:, :, None], (v * k_column)[:, :, None])
            linked = (u * k_row)[:, :, None] * (matrix @ spread)  # batch × rows × local groups
            cell = row[:, :, None] * (groups + 1) + local
            half = torch.zeros_like(total)
            half.view(-1).index_add_(0, cell.reshape(-1), linked.reshape(-1))
            total += half + half.T
        return self.processes.sum(total[:groups, :groups])


def times(matrices: Tensor, vectors: Tensor) -> Tensor:
    """A batch of matrices times a batch of vectors (one fast product for each shape that occurs)."""
    batch, rows, columns = matrices.shape
    if batch == 1:
        return torch.mv(matrices.squeeze(0), vectors.squeeze(0))[None]
    if rows == 1 or columns == 1:
        return (matrices * vectors[:, None, :]).sum(-1)
    return torch.bmm(matrices, vectors[:, :, None])[:, :, 0]


def imbalance(point: Point, free: Tensor) -> Tensor:
    """max |log(incoming / outgoing mass)| over free variables: 0 exactly at the optimum (stock2019, section 3.3)."""
    gap = (point.up / point.down).log().abs()
    return torch.where(free, gap, 0.0).max() if len(free) else gap.new_zeros(())
