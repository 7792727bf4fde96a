"""Sums of exponentials of linear forms in log-scales, computed in logarithms.

    F(s) = Σ_e a_e · exp(p · k_e·s),        k_e·s = k_row s_row + k_column s_column

is what most criteria come to (`norm.py`, `range.py`, `path.py`, ...): every entry e of a batch of matrices belongs to
one scale variable by its row and to one by its column. F is convex. Entries may be of any size: masses are kept as
logarithms, so that weights of 1e±200, or a hundred layers that each count twice as much as the next, neither overflow
nor vanish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

import torch
from torch import Tensor

from ..models.sharding import ALONE, Processes

NEVER = float("-inf")
"""The logarithm of nothing."""
LARGE = 1 << 14
"""Matrices of more entries are kept in float32 too, for products that need not be exact."""


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

    def of_logarithms(self, logs: Tensor) -> Tensor:
        """log Σ exp(x[i]), from logarithms to logarithms."""
        top = torch.full((self.size,), NEVER, dtype=logs.dtype, device=logs.device)
        top = top.scatter_reduce(0, self.index, logs, "amax")
        safe = top.masked_fill(top == NEVER, 0.0)
        return self((logs - safe[self.index]).exp()).log() + safe


@dataclass(eq=False)
class Point:
    """F at one point: the mass of every row and column, and what it says about each variable; all as logarithms."""

    row_logs: list[Tensor]
    column_logs: list[Tensor]
    log_mass: Tensor  # of all rows and columns, in the order of Exponentials.index
    log_up: Tensor  # per variable log Σ k·mass over entries with exponent k > 0: the incoming mass
    log_down: Tensor  # per variable log Σ |k|·mass over entries with k < 0: the outgoing mass
    log_value: Tensor  # log F

    @property
    def mass(self) -> Tensor:
        return self.log_mass.exp()

    @property
    def up(self) -> Tensor:
        return self.log_up.exp()

    @property
    def down(self) -> Tensor:
        return self.log_down.exp()

    @property
    def value(self) -> Tensor:
        return self.log_value.exp()

    @property
    def gradient(self) -> Tensor:
        """∂F/∂s, up to the factor p."""
        return self.up - self.down

    @property
    def gap(self) -> Tensor:
        """log(incoming / outgoing mass) of every variable that has both, else 0."""
        both = (self.log_up > NEVER) & (self.log_down > NEVER)
        return torch.where(both, self.log_up - self.log_down, 0.0)


class Exponentials:
    """F with given entries, as a function of log-scales; its value, gradient and curvature.

    `fixed` variables stay where they are while their entries count. `loose` ones are linked to no fixed one. (The last
    place of both means "no variable".)

    With `processes` that hold parts of the weights, matrices and masses are those of the parts that are here. What
    there is per variable is summed over all of them, so it is the same in each.
    """

    def __init__(
        self,
        n: int,
        p: float,
        sides: Sequence[tuple[Side, Side]],
        dtype: torch.dtype,
        device: torch.device,
        processes: Processes = ALONE,
    ) -> None:
        self.n, self.p, self.sides, self.processes = n, p, list(sides), processes
        self.dtype, self.device = dtype, device
        flat = [side for pair in sides for side in pair]
        empty = torch.zeros(0, dtype=torch.int64)
        index = torch.cat([empty, *(side.index.reshape(-1) for side in flat)])
        self.index = index.to(device)
        self._sum = Sum(index, n + 1, device)
        exponents = torch.cat([empty.double(), *(side.exponent.reshape(-1) for side in flat)])
        self.exponent = exponents.to(device, dtype)
        self._cuts = [side.index.numel() for side in flat]
        self.matrices: list[Tensor] = []
        self.light: list[Tensor] = []
        self.offset = torch.zeros_like(self.exponent)  # logarithms that every row and column brings along
        self.fixed = torch.zeros(n + 1, dtype=torch.bool, device=device)
        self.fixed[n] = True
        self.loose = torch.zeros(n + 1, dtype=torch.bool, device=device)
        self.passes = 0  # over the matrices: points, quadratics and their products

    def enter(self, matrices: Sequence[Tensor], logs: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Take these entries; `logs` are added to the logarithm of every row and column."""
        self.matrices = list(matrices)
        # products that need not be exact read half as many bytes
        self.light = [m.float() if m.dtype == torch.float64 and m.numel() > LARGE else m for m in self.matrices]
        parts = [log.reshape(-1).to(self.offset) for pair in logs for log in pair]
        self.offset = torch.cat(parts) if parts else torch.zeros_like(self.exponent)

    @property
    def free(self) -> Tensor:
        return ~self.fixed[: self.n]

    def zeros(self) -> Tensor:
        return torch.zeros(self.n, dtype=self.dtype, device=self.device)

    def split(self, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        """A vector over all rows and columns, as batch × rows and batch × columns of each matrix."""
        parts = values.split(self._cuts)
        return [
            (parts[2 * i].view(rows.index.shape), parts[2 * i + 1].view(columns.index.shape))
            for i, (rows, columns) in enumerate(self.sides)
        ]

    def gather(self, values: Tensor) -> Tensor:
        """A vector over variables, at every row and column, times the exponents there."""
        return torch.cat([values, values.new_zeros(1)])[self.index] * self.exponent

    def scatter(self, values: Tensor) -> Tensor:
        """The transpose of `gather` without the exponents."""
        return self.processes.sum(self._sum(values)[: self.n])

    def at(self, s: Tensor) -> Point:
        self.passes += 1
        row_logs, column_logs, masses = [], [], []
        for matrix, (row, column) in zip(self.matrices, self.split(self.p * self.gather(s) + self.offset), strict=True):
            row_logs.append(row)
            column_logs.append(column)
            masses += [(row + log_times(matrix, column)).view(-1), (column + log_times(matrix.mT, row)).view(-1)]
        mass = torch.cat(masses) if masses else self.exponent
        weight = self.exponent.abs().log() + mass
        ups = self._sum.of_logarithms(torch.where(self.exponent > 0, weight, NEVER))[: self.n]
        downs = self._sum.of_logarithms(torch.where(self.exponent < 0, weight, NEVER))[: self.n]
        rows = torch.cat([mass.new_full((1,), NEVER), *masses[::2]])
        sums = self.processes.log_sum(torch.cat([ups, downs, rows.logsumexp(0, keepdim=True)]))
        up, down, value = sums.split([self.n, self.n, 1])
        return Point(row_logs, column_logs, mass, up, down, value[0])

    def quadratic(self, point: Point, guess: Tensor | None = None) -> Quadratic:
        return Quadratic(self, point, guess)


class Quadratic:
    """F to second order, about its present masses (Newton's method) or about a guess of what they will be.

    With y_e = m_e exp(-a_row - a_column) in place of the masses m_e, the optimum Σ k m exp(p k·x) = 0 becomes, to first
    order in what then is the error of the guess,

        Σ_e k_e y_e (1 + a_row + a_column + p k_e·x) = 0,

    a symmetric system for x. a = 0 is Newton's. Where masses are e^100 away from their optimum a better guess is that
    all rows and columns will have the same: then one step balances a chain of any length.
    """

    def __init__(self, function: Exponentials, point: Point, guess: Tensor | None) -> None:
        self.function = function
        function.passes += 1
        present = point.log_mass > NEVER
        a = torch.where(present, guess, 0.0) if guess is not None else torch.zeros_like(point.log_mass)
        # without a guess the largest mass becomes 1
        both = torch.cat([point.log_up, point.log_down])
        centre = both.amax() if guess is None and len(both) else 0.0
        self.entries: list[tuple[Tensor, Tensor, Tensor]] = []
        masses, extra = [], []
        for matrix, light, row, column, (a_row, a_column) in zip(
            function.matrices, function.light, point.row_logs, point.column_logs, function.split(a), strict=True
        ):
            v_log = column - a_column
            shift = v_log.amax(1, keepdim=True)
            shift = shift.masked_fill(shift == NEVER, 0.0)
            u, v = (row - a_row + shift - centre).exp(), (v_log - shift).exp()
            self.entries.append((u, v, light))
            if guess is not None:
                y_row, y_column = u * times(matrix, v), v * times(matrix.mT, u)
                masses += [y_row.view(-1), y_column.view(-1)]
                extra.append((y_row * a_row + u * times(matrix, v * a_column)).view(-1))
                extra.append((y_column * a_column + v * times(matrix.mT, u * a_row)).view(-1))
        empty = function.exponent.new_zeros(0)
        # without a guess these are the present masses, which are known
        self.mass = torch.cat([empty, *masses]) if guess is not None else (point.log_mass - centre).exp()
        k = function.exponent
        pull = self.mass + torch.cat(extra) if extra else self.mass
        self.gradient = function.scatter(k * pull)
        self.diagonal = function.scatter(k.square() * self.mass)

    def times(self, x: Tensor) -> Tensor:
        """The curvature times a vector, up to p²."""
        f = self.function
        f.passes += 1
        moved, parts = f.gather(x), []
        for (u, v, matrix), (row, column) in zip(self.entries, f.split(moved), strict=True):
            across, back = (v * column).to(matrix.dtype), (u * row).to(matrix.dtype)
            parts += [(u * times(matrix, across)).view(-1), (v * times(matrix.mT, back)).view(-1)]
        crossed = torch.cat(parts) if parts else moved
        return f.scatter(f.exponent * (self.mass * moved + crossed))

    def between(self, group: Tensor, groups: int) -> Tensor:
        """The curvature restricted to vectors that are constant on groups of variables: groups × groups, up to p²."""
        f = self.function
        f.passes += 1
        member = torch.cat([group, group.new_full((1,), groups)])[f.index]
        total = torch.zeros((groups + 1) ** 2, dtype=f.dtype, device=f.device)
        total.index_add_(0, member * (groups + 2), f.exponent.square() * self.mass)
        for (u, v, matrix), (k_row, k_column), (row, column) in zip(
            self.entries, f.split(f.exponent), f.split(member), strict=True
        ):
            local, place = column.unique(return_inverse=True)
            spread = torch.zeros(*column.shape, len(local), dtype=matrix.dtype, device=f.device)
            spread.scatter_(2, place[:, :, None], (v * k_column)[:, :, None].to(matrix.dtype))
            linked = ((u * k_row)[:, :, None] * (matrix @ spread)).reshape(-1)  # batch × rows × local groups
            total.index_add_(0, (row[:, :, None] * (groups + 1) + local).reshape(-1), linked)
            total.index_add_(0, (local * (groups + 1) + row[:, :, None]).reshape(-1), linked)
        return f.processes.sum(total.view(groups + 1, groups + 1)[:groups, :groups])


def times(matrices: Tensor, vectors: Tensor) -> Tensor:
    """A batch of matrices times a batch of vectors (one fast product for each shape that occurs)."""
    batch, rows, columns = matrices.shape
    if batch == 1:
        return torch.mv(matrices.squeeze(0), vectors.squeeze(0))[None]
    if rows == 1 or columns == 1:
        return (matrices * vectors[:, None, :]).sum(-1)
    return torch.bmm(matrices, vectors[:, :, None])[:, :, 0]


def log_times(matrices: Tensor, logs: Tensor) -> Tensor:
    """log Σ_j M_ij exp(x_j), for a batch. What a product in floating point loses is added up in logarithms."""
    shift = logs.amax(1, keepdim=True)
    shift = shift.masked_fill(shift == NEVER, 0.0)
    found = times(matrices, (logs - shift).exp()).log() + shift
    lost = found == NEVER
    if bool(lost.any()):
        batch, row = lost.nonzero(as_tuple=True)
        some = (matrices[batch, row] > 0).any(1)
        batch, row = batch[some], row[some]
        if len(batch):
            found[batch, row] = (matrices[batch, row].log() + logs[batch]).logsumexp(1)
    return found


def equilibrated(logs: Tensor, present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Matrices with a largest entry of 1 in every row and column, and the logarithms taken out: batch × rows × columns.

    >>> matrix, row_logs, column_logs = equilibrated(log_matrix, log_matrix > float("-inf"))
    """
    rows = _finite(logs.amax(2))
    columns = _finite((logs - rows[:, :, None]).amax(1))
    matrix = (logs - rows[:, :, None] - columns[:, None, :]).exp()
    # an entry too small to be seen still links its row to its column
    return torch.where(present, matrix.clamp_min(1e-300), 0.0), rows, columns


def _finite(logs: Tensor) -> Tensor:
    return logs.masked_fill(logs == NEVER, 0.0)


def imbalance(point: Point, free: Tensor) -> Tensor:
    """max |log(incoming / outgoing mass)| over free variables: 0 exactly at the optimum (stock2019, section 3.3)."""
    gap = (point.log_up - point.log_down).abs()
    return torch.where(free, gap, 0.0).max() if len(free) else gap.new_zeros(())
