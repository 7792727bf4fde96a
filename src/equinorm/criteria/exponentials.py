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
from itertools import accumulate
from math import gcd

import torch
from torch import Tensor

from ..models.sharding import ALONE, Processes

NEVER = float("-inf")
"""The logarithm of nothing."""
LARGE = {"cpu": 1 << 14, "cuda": 1 << 24}
"""Matrices of more entries are kept in float32 too, for products that need not be exact; by the type of the device, as
a GPU is bound by the number of its kernels rather than by what they read."""


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
        distinct = _distinct(index, exponent)
        factors = (k for k in range(length // distinct, 0, -1) if length % k == 0)
        outer = next(k for k in factors if _periodic(length // k, index, exponent))
        return outer, length // outer, inner


def _distinct(index: Tensor, exponent: Tensor) -> int:
    """The number of different columns."""
    powers, power = exponent.unique(return_inverse=True)
    one = index * len(powers) + power  # a pair as one number: torch sorts those much faster than rows
    return len(one[0].unique()) if len(one) == 1 else len(torch.unique(one, dim=1)[0])


def _periodic(period: int, *values: Tensor) -> bool:
    return all(torch.equal(v[:, period:], v[:, : v.shape[1] - period]) for v in values)


def _run_length(*values: Tensor) -> int:
    """The length of runs of equal columns."""
    changed = torch.stack([(v[:, 1:] != v[:, :-1]).any(0) for v in values]).any(0)
    length = values[0].shape[1]
    edges = torch.cat([changed.new_zeros(1).long(), changed.nonzero().view(-1) + 1, torch.tensor([length])])
    lengths = edges.diff().unique().tolist()
    return gcd(*lengths)


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

    logs: Tensor  # of what every row and column is multiplied by, in the order of Exponentials.index
    log_mass: Tensor  # of all rows and columns
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
        # each side of each matrix of a batch is a run of places; `across` is the run of the other side
        runs = [side.index.shape[0] for side in flat]
        starts = [0, *accumulate(runs)]
        own = [torch.arange(n) + start for n, start in zip(runs, starts, strict=False)]
        other = [own[i ^ 1] for i in range(len(flat))]
        run, across = (
            torch.cat([empty, *(r.repeat_interleave(side.index.shape[1]) for r, side in zip(x, flat, strict=True))])
            for x in (own, other)
        )
        self.run, self.across, self.runs = run.to(device), across.to(device), starts[-1]
        self.matrices: list[Tensor] = []
        self.light: list[Tensor] = []
        self.occupied: Tensor | None = None  # rows and columns that have an entry; computed when it is needed
        self.offset = torch.zeros_like(self.exponent)  # logarithms that every row and column brings along
        self.fixed = torch.zeros(n + 1, dtype=torch.bool, device=device)
        self.fixed[n] = True
        self.loose = torch.zeros(n + 1, dtype=torch.bool, device=device)
        self.passes = 0  # over the matrices: points, quadratics and their products

    def enter(self, matrices: Sequence[Tensor], logs: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Take these entries; `logs` are added to the logarithm of every row and column."""
        self.matrices, self.occupied = list(matrices), None
        # products that need not be exact read half as many bytes
        large = LARGE.get(self.device.type, 1 << 14)
        self.light = [m.float() if m.dtype == torch.float64 and m.numel() > large else m for m in self.matrices]
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

    @property
    def has_light(self) -> bool:
        """Whether some products can be had for half as many bytes, and a few digits less."""
        return any(a is not b for a, b in zip(self.light, self.matrices, strict=True))

    def at(self, s: Tensor, light: bool = False) -> Point:
        """F and its gradient; with `light` to about six digits, where large matrices are kept in float32 too."""
        self.passes += 1
        logs = self.p * self.gather(s) + self.offset
        mass = logs + self._log_crossed(logs, light)
        weight = self.exponent.abs().log() + mass
        ups = self._sum.of_logarithms(torch.where(self.exponent > 0, weight, NEVER))[: self.n]
        downs = self._sum.of_logarithms(torch.where(self.exponent < 0, weight, NEVER))[: self.n]
        rows = torch.cat([mass.new_full((1,), NEVER), *mass.split(self._cuts)[::2]])
        sums = self.processes.log_sum(torch.cat([ups, downs, rows.logsumexp(0, keepdim=True)]))
        up, down, value = sums.split([self.n, self.n, 1])
        return Point(logs, mass, up, down, value[0])

    def tops(self, logs: Tensor) -> Tensor:
        """The largest logarithm of each run of rows or columns; 0 where all are those of nothing."""
        top = torch.full((self.runs,), NEVER, dtype=logs.dtype, device=logs.device)
        return _finite(top.scatter_reduce(0, self.run, logs, "amax"))

    def crossed(self, values: Tensor, light: bool = False) -> Tensor:
        """Every matrix times what stands at its columns, at its rows; and the transposes, at its columns."""
        found = torch.empty_like(values)
        parts, into = values.split(self._cuts), found.split(self._cuts)
        few = values.float().split(self._cuts) if light and self.has_light else parts
        for i, (exact, matrix) in enumerate(zip(self.matrices, self.light if light else self.matrices, strict=True)):
            rows, columns = (parts if matrix is exact else few)[2 * i : 2 * i + 2]
            if matrix is exact:
                _times_into(into[2 * i], matrix, columns)
                _times_into(into[2 * i + 1], matrix.mT, rows)
            else:
                into[2 * i].copy_(_times_into(torch.empty_like(rows), matrix, columns))
                into[2 * i + 1].copy_(_times_into(torch.empty_like(columns), matrix.mT, rows))
        return found

    def _log_crossed(self, logs: Tensor, light: bool) -> Tensor:
        """log Σ_j M_ij exp(x_j) for every row, and for every column. What a product in floating point loses is added
        up in logarithms."""
        tops = self.tops(logs)
        found = self.crossed((logs - tops[self.run]).exp(), light)
        lost = found <= (FAINT if light else 0.0)
        found = found.log() + tops[self.across]
        if bool(lost.any()):
            if self.occupied is None:
                self.occupied = self.crossed(torch.ones_like(found)) > 0
            lost &= self.occupied
            if light and bool(lost.any()):
                return self._log_crossed(logs, light=False)
            self._found_again(found, logs, lost)
        return found

    def _found_again(self, found: Tensor, logs: Tensor, lost: Tensor) -> None:
        """The sums of these rows and columns, from logarithms to logarithms."""
        for matrix, own, where, x in zip(
            self.matrices, self.split(found), self.split(lost), self.split(logs), strict=True
        ):
            for way, into, some, other in ((matrix, own[0], where[0], x[1]), (matrix.mT, own[1], where[1], x[0])):
                batch, row = some.nonzero(as_tuple=True)
                if len(batch):
                    into[batch, row] = (way[batch, row].log() + other[batch]).logsumexp(1)

    def quadratic(self, point: Point, guess: Tensor | None = None) -> Quadratic:
        return Quadratic(self, point, guess)


FAINT = 1e-30
"""Sums below this may have lost something in float32, next to a largest factor of 1."""


class Quadratic:
    """F to second order, about its present masses (Newton's method) or about a guess of what they will be.

    With y_e = m_e exp(-a_row - a_column) in place of the masses m_e, the optimum Σ k m exp(p k·x) = 0 becomes, to first
    order in what then is the error of the guess,

        Σ_e k_e y_e (1 + a_row + a_column + p k_e·x) = 0,

    a symmetric system for x. a = 0 is Newton's. Where masses are e^100 away from their optimum a better guess is that
    all rows and columns will have the same: then one step balances a chain of any length.

    y is factor · u_row · M · u_column, with factors that are at most 1 on each side of a matrix.
    """

    def __init__(self, function: Exponentials, point: Point, guess: Tensor | None) -> None:
        self.function = function
        function.passes += 1
        present = point.log_mass > NEVER
        a = torch.where(present, guess, 0.0) if guess is not None else torch.zeros_like(point.log_mass)
        # without a guess the largest mass becomes 1
        both = torch.cat([point.log_up, point.log_down])
        centre = both.amax() if guess is None and len(both) else 0.0
        logs = point.logs - a
        tops = function.tops(logs)
        self.side = (logs - tops[function.run]).exp()
        self.factor = (tops[function.run] + tops[function.across] - centre).exp()
        if guess is None:
            self.mass = (point.log_mass - centre).exp()  # the present masses, which are known
            pull = self.mass
        else:
            self.mass = self._crossed(torch.ones_like(a))
            pull = self.mass + self.mass * a + self._crossed(a)
        k = function.exponent
        self.gradient = function.scatter(k * pull)
        self.diagonal = function.scatter(k.square() * self.mass)

    def _crossed(self, values: Tensor) -> Tensor:
        """Σ_j y_ij x_j for every row, and for every column."""
        return self.factor * self.side * self.function.crossed(self.side * values, light=True)

    def times(self, x: Tensor) -> Tensor:
        """The curvature times a vector, up to p²."""
        f = self.function
        f.passes += 1
        moved = f.gather(x)
        return f.scatter(f.exponent * (self.mass * moved + self._crossed(moved)))

    def between(self, groups: Groups, live: Tensor) -> Tensor:
        """The curvature restricted to vectors that are constant on groups of variables: groups × groups, up to p².

        Only variables that are `live` belong to their groups.
        """
        f = self.function
        f.passes += 1
        k = f.exponent * torch.cat([live, live.new_zeros(1)])[f.index]
        n = groups.count + 1
        crossed = torch.zeros(n * n, dtype=f.dtype, device=f.device)
        crossed.index_add_(0, groups.places, groups.linked(f, self.side * k, self.factor * self.side * k))
        own = torch.zeros(n, dtype=f.dtype, device=f.device).index_add_(0, groups.member, k.square() * self.mass)
        total = crossed.view(n, n) + crossed.view(n, n).mT + torch.diag(own)
        return f.processes.sum(total[:-1, :-1])


class Groups:
    """Groups of variables, and where those of the rows of each matrix meet those of its columns.

    >>> groups = Groups(function, birth)          # variables without a group have the largest number
    """

    def __init__(self, function: Exponentials, group: Tensor, count: int) -> None:
        self.of, self.count = group, count
        self.member = torch.cat([group, group.new_full((1,), count)])[function.index]
        self._spread: list[Tensor | None] = []  # per matrix, which of the groups of its columns each column belongs to
        places = [self.member[:0]]
        for light, (row, column) in zip(function.light, function.split(self.member), strict=True):
            local, place = column.unique(return_inverse=True)
            spread = torch.nn.functional.one_hot(place, len(local)).to(light.dtype) if len(local) > 1 else None
            self._spread.append(spread)
            places.append((row[:, :, None] * (count + 1) + local).reshape(-1))
        self.places = torch.cat(places)

    def linked(self, function: Exponentials, columns: Tensor, rows: Tensor) -> Tensor:
        """For every row and every group of columns in its matrix, what they have in common."""
        parts = [columns[:0]]
        for matrix, spread, (_, v), (u, _) in zip(
            function.light, self._spread, function.split(columns), function.split(rows), strict=True
        ):
            v = v.to(matrix.dtype)
            found = times(matrix, v)[:, :, None] if spread is None else matrix @ (spread * v[:, :, None])
            parts.append((u[:, :, None] * found).reshape(-1))
        return torch.cat(parts)


def times(matrices: Tensor, vectors: Tensor) -> Tensor:
    """A batch of matrices times a batch of vectors (one fast product for each shape that occurs)."""
    batch, rows, columns = matrices.shape
    if batch == 1:
        return torch.mv(matrices.squeeze(0), vectors.squeeze(0))[None]
    if rows == 1 or columns == 1:
        return (matrices * vectors[:, None, :]).sum(-1)
    return torch.bmm(matrices, vectors[:, :, None])[:, :, 0]


def _times_into(out: Tensor, matrices: Tensor, vectors: Tensor) -> Tensor:
    """The same, of vectors one behind the other, written into `out`."""
    batch, rows, columns = matrices.shape
    if batch == 1:
        torch.mv(matrices[0], vectors, out=out)
    elif columns == 1:
        torch.mul(matrices.squeeze(2), vectors.view(batch, 1), out=out.view(batch, rows))
    elif rows == 1:
        torch.sum(matrices.squeeze(1) * vectors.view(batch, columns), -1, out=out)
    else:
        torch.bmm(matrices, vectors.view(batch, columns, 1), out=out.view(batch, rows, 1))
    return out


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
