"""The ENorm step in few torch operations, for a CPU; its plain twin is `steps/plain.py`.

As the Triton kernels do, it works on matrix views (`structure.py`): stretches of memory as rows and columns, with one
factor for each. Columns with the same scales (a convolution's kernel) are taken together as the memory lies; a plain
sum is taken where no scale of the other side has moved yet, a matrix-vector product where one has; and the factors of
all parameters are computed at once, and used a piece at a time while they are in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from ...criteria.norm import Side, Sum, powers_of
from ..biases import Gains
from .fused import FusedStep, TensorSet
from .moves import Moves
from .protocol import Problem
from .structure import COLUMN, ROW, MatrixView, NetStructure, may_cancel, net_structure

__all__ = ["ForeachStep"]

PIECE = 2**18
"""Elements of factors that are made at a time: a megabyte in float32, which the second cache of a core holds."""


@dataclass(frozen=True, eq=False)
class GroupedView:
    """A matrix view with columns of the same scales taken together: its memory is rows × outer × columns × inner."""

    parameter: int
    offset: int
    shape: tuple[int, int, int, int]
    rows: slice  # its entries, in the table of all
    columns: slice
    scaled: bool  # whether its factors can differ from 1
    gained: bool  # belongs to a safe bias
    dead: Tensor | None  # entries with one scale in row and column that cancels (the diagonal in x + conv(x))

    def of(self, tensor: Tensor) -> Tensor:
        """Its part of a tensor that lies in memory as the parameter does: rows × all columns."""
        rows, *repeated = self.shape
        pitch = prod(repeated)
        return tensor.detach().as_strided((rows, pitch), (pitch, 1), tensor.storage_offset() + self.offset)

    def powers(self, tensor: Tensor, p: float, dtype: torch.dtype) -> Tensor:
        """Sums of |w|^p, rows × columns."""
        rows, outer, columns, inner = self.shape
        parts = self.of(tensor).view(rows, outer, -1).unbind(1)  # one, or those of a kernel with the channels last
        total = powers_of(parts[0], p, dtype)
        for part in parts[1:]:
            total += powers_of(part, p, dtype)
        if inner > 1:  # far quicker than a sum over a short axis
            total = torch.mv(total.view(-1, inner), total.new_ones(inner)).view(rows, columns)
        return total if self.dead is None else total.masked_fill_(self.dead, 0.0)

    def spread(self, factors: Tensor) -> Tensor:
        """The factors of its columns, for all columns of memory."""
        _, outer, columns, inner = self.shape
        if outer == inner == 1:
            return factors
        return factors[None, :, None].expand(outer, columns, inner).reshape(-1)

    def pieces(self) -> Iterator[slice]:
        """Its rows, so many at a time that their factors stay in the cache."""
        rows, *repeated = self.shape
        step = max(PIECE // prod(repeated), 1)
        return (slice(start, start + step) for start in range(0, rows, step))


@dataclass(frozen=True, eq=False)
class Scaled:
    """Parts of tensors with one matrix of factors: those that are multiplied by it, and those divided by it."""

    matrix: GroupedView
    channel: int
    multiplied: list[Tensor]
    divided: list[Tensor]


@dataclass(frozen=True, eq=False)
class MatrixSide:
    """One side of one matrix, on which variables of a block lie."""

    matrix: int
    kind: int
    own: slice  # entries of this side
    other: slice | None  # of the other side, where a scale there may have moved
    weigh_own: bool  # whether a scale on this side may have moved


@dataclass(frozen=True, eq=False)
class BlockUpdate:
    """Variables updated together."""

    variables: slice | Tensor
    sides: tuple[MatrixSide, ...]
    taken: Tensor | None  # of the masses on all rows and columns of these, those that belong to the block; None: all
    pull: Tensor  # what each of them does
    total: Sum | None  # adds them up: first what pulls up, then what pulls down; None: they are in this order already
    rate: Tensor  # step / (p · reach)
    last: tuple[int, ...] = ()  # matrices that no later block reads


class ForeachStep(FusedStep):
    """ENorm cycles and the move to new coordinates, by products of matrices and vectors."""

    name = "foreach"

    def __init__(self, problem: Problem, log_t: Tensor, gains: Gains) -> None:
        super().__init__(problem, log_t, gains)
        self.p, self.dtype = float(problem.p), problem.dtype
        net, dtype = net_structure(problem), problem.dtype
        together = [_taken_together(view) for view in net.views]
        views = [view for view, _ in together]
        self._matrices = [
            _grouped(view, shape, entry, net.n, bool(weight), self.device)
            for (view, shape), entry, weight in zip(together, _first_entries(views), net.weight, strict=True)
        ]
        index = torch.cat([x for view in views for x in (view.row_index, view.column_index)]).T
        exponent = torch.cat([x for view in views for x in (view.row_exponent, view.column_exponent)]).T
        self._index = index.contiguous().to(self.device)
        self._exponent = exponent.contiguous().to(self.device, dtype)
        self._two = bool((index[1] < net.n).any())
        gain = torch.cat([x for view in views for x in _gain_entries(view)])
        self._gained = (gain >= 0).nonzero().view(-1).to(self.device)
        self._gain_of = gain[gain >= 0].to(self.device)
        self.s = torch.zeros(net.n + 1, dtype=dtype, device=self.device)
        self._weights: list[Tensor] = []
        self._parts: list[Scaled] = []
        self._moves = Moves(problem.dtype)
        kinds = (True, False) if problem.cycles > 1 else (True,)
        blocks = [list(self._blocks(net, views, first)) for first in kinds]
        self._first, self._later = _with_last(blocks[0]), _with_last(blocks[-1])

    # -- which tensors -------------------------------------------------------------------------------------------------

    def bind(self, sets: Sequence[TensorSet]) -> None:
        """Look at these tensors as matrices."""
        self._weights = [q for q in sets[0].tensors if q is not None]
        self._channels: list[tuple[float, bool]] = []
        self._parts = []
        for matrix in self._matrices:
            parts: dict[tuple[float, bool], Scaled] = {}
            for x in sets:
                tensor, gained = x.tensors[matrix.parameter], x.gained and matrix.gained
                if tensor is None or not (matrix.scaled or gained):
                    continue
                inverse = parts.get((-x.power, False)) if not gained else None
                if inverse is not None:  # momentum, say: no factors of its own
                    inverse.divided.append(matrix.of(tensor))
                    continue
                channel = (x.power, gained)
                if channel not in parts:
                    if channel not in self._channels:
                        self._channels.append(channel)
                    parts[channel] = Scaled(matrix, self._channels.index(channel), [], [])
                parts[channel].multiplied.append(matrix.of(tensor))
            self._parts += parts.values()

    # -- the cycle -----------------------------------------------------------------------------------------------------

    def sweep(self, cycles: int = 1) -> Tensor:
        s = self.s.zero_()
        powers: dict[int, Tensor] = {}
        for cycle in range(cycles):
            for block in self._later if cycle else self._first:
                masses = [self._mass(side, powers) for side in block.sides]
                mass = torch.cat(masses) if len(masses) > 1 else masses[0]
                pull = (mass if block.taken is None else mass[block.taken]) * block.pull
                up, down = (pull if block.total is None else block.total(pull)).view(2, -1)
                # as solver.step_towards: a mass that is zero or not finite leaves the variable where it is
                move = torch.nan_to_num((down.log() - up.log()) * block.rate, 0.0, 0.0, 0.0)
                s[block.variables] += move
                for matrix in block.last if cycle == cycles - 1 else ():
                    del powers[matrix]
        return s

    def _mass(self, side: MatrixSide, powers: dict[int, Tensor]) -> Tensor:
        """Σ|w|^p on every row, or column, of a matrix."""
        if side.matrix not in powers:
            matrix = self._matrices[side.matrix]
            powers[side.matrix] = matrix.powers(self._weights[matrix.parameter], self.p, self.dtype)
        x = powers[side.matrix] if side.kind == ROW else powers[side.matrix].T
        if side.other is None:
            mass = x.sum(1)
        elif x.shape[1] == 1:
            mass = x[:, 0] * self._weights_of(side.other)
        else:
            mass = torch.mv(x, self._weights_of(side.other))
        return mass * self._weights_of(side.own) if side.weigh_own else mass

    def _weights_of(self, entries: slice) -> Tensor:
        """exp(p · log-factor) of some entries."""
        return self._log_factors(entries).mul_(self.p).exp_()

    def _log_factors(self, entries: slice) -> Tensor:
        total = self.s[self._index[0, entries]] * self._exponent[0, entries]
        return total.addcmul_(self.s[self._index[1, entries]], self._exponent[1, entries]) if self._two else total

    # -- new coordinates -----------------------------------------------------------------------------------------------

    def begin_move(self) -> None:
        self.log_t += self.s[:-1]
        self.gains.measure_(self.log_t)
        total = self._log_factors(slice(None))
        factors = []
        for power, gained in self._channels:
            powered = total * power if power != 1.0 else total
            if gained and power < 0 and len(self._gain_of):
                powered = powered.index_add(0, self._gained, -power * self.gains.change[self._gain_of].to(self.dtype))
            factors.append(powered.exp())
        self._moves.clear()
        for part in self._parts:
            matrix, own = part.matrix, factors[part.channel]
            by_row, by_column = own[matrix.rows, None], matrix.spread(own[matrix.columns])[None]
            for piece in matrix.pieces():
                self._moves.add_products(
                    [tensor[piece] for tensor in part.multiplied],
                    [tensor[piece] for tensor in part.divided],
                    by_row[piece],
                    by_column,
                )
        self._moves.reserve()
        self._weights, self._parts = [], []  # gradients may be freed when all is done

    def finish_move(self) -> BaseException | None:
        raised = self._moves.make()
        self._moves.clear()
        return raised

    # -- setting up ----------------------------------------------------------------------------------------------------

    def _blocks(self, net: NetStructure, views: list[MatrixView], first: bool) -> Iterator[BlockUpdate]:
        both_sides = [
            (number, kind, index, exponent * weight, net.rank[index], net.rank[other].min())
            for number, (view, weight) in enumerate(zip(views, net.weight, strict=True))
            if weight
            for kind, index, exponent, other in (
                (ROW, view.row_index, view.row_exponent, view.column_index),
                (COLUMN, view.column_index, view.column_exponent, view.row_index),
            )
        ]
        for name in range(net.never):
            variables = (net.rank == name).nonzero().view(-1)
            if not len(variables):
                continue
            place = torch.zeros(net.n + 1, dtype=torch.int64)
            place[variables] = torch.arange(len(variables))
            sides, taken, pulls, into, start = [], [], [], [], 0
            for number, kind, index, pull, rank, across in both_sides:
                here = rank == name
                if not bool(here.any()):
                    continue
                rows, columns = self._matrices[number].rows, self._matrices[number].columns
                own, other = (rows, columns) if kind == ROW else (columns, rows)
                weighted = not first or bool(across < name)
                weigh_own = not first or bool((rank < name).any())
                sides.append(MatrixSide(number, kind, own, other if weighted else None, weigh_own))
                entry, term = here.nonzero(as_tuple=True)
                useless = (index[:, 0] == index[:, 1]) & (pull.sum(1).abs() < 1e-9)
                entry, term = entry[~useless[entry]], term[~useless[entry]]
                taken.append(start + entry)
                pulls.append(pull[entry, term])
                into.append(place[index[entry, term]] + len(variables) * (pull[entry, term] < 0))
                start += len(index)
            entries, pull, target = torch.cat(taken), torch.cat(pulls), torch.cat(into)
            everything = torch.equal(entries, torch.arange(start))
            in_order = torch.equal(target, torch.arange(2 * len(variables)))
            run = torch.equal(variables, torch.arange(len(variables)) + variables[0])
            step = 0.5 if name in net.coupled else 1.0
            yield BlockUpdate(
                variables=slice(int(variables[0]), int(variables[-1]) + 1) if run else variables.to(self.device),
                sides=tuple(sides),
                taken=None if everything else entries.to(self.device),
                pull=pull.abs().to(self.device, self.dtype),
                total=None if in_order else Sum(target, 2 * len(variables), self.device),
                rate=(step / (self.p * net.reach[variables])).to(self.device, self.dtype),
            )


def _with_last(blocks: list[BlockUpdate]) -> list[BlockUpdate]:
    last = {side.matrix: i for i, block in enumerate(blocks) for side in block.sides}
    return [replace(block, last=tuple(k for k, where in last.items() if where == i)) for i, block in enumerate(blocks)]


def _taken_together(view: MatrixView) -> tuple[MatrixView, tuple[int, int, int, int]]:
    """A view with one column for all that have the same scales, and its memory as rows × outer × columns × inner."""
    if view.column_gain is not None:
        return view, (view.rows, 1, view.columns, 1)
    outer, columns, inner = Side(view.column_index.T, view.column_exponent.T).repeats()
    index, exponent = (x[::inner][:columns] for x in (view.column_index, view.column_exponent))
    return replace(view, column_index=index, column_exponent=exponent), (view.rows, outer, columns, inner)


def _first_entries(views: list[MatrixView]) -> list[int]:
    return list(accumulate((view.rows + view.columns for view in views), initial=0))[:-1]


def _gain_entries(view: MatrixView) -> tuple[Tensor, Tensor]:
    none = torch.full((view.columns,), -1)
    return torch.full((view.rows,), -1), none if view.column_gain is None else view.column_gain


def _grouped(
    view: MatrixView, shape: tuple[int, int, int, int], entry: int, n: int, counts: bool, device: torch.device
) -> GroupedView:
    rows, columns = view.row_index[:, None, 0], view.column_index[None, :, 0]
    dead = None
    if counts and may_cancel(view, n):
        net = view.row_exponent[:, None, 0] + view.column_exponent[None, :, 0]
        dead = ((rows == columns) & (rows < n) & (net.abs() < 1e-9)).to(device)
    return GroupedView(
        parameter=view.parameter,
        offset=view.offset,
        shape=shape,
        rows=slice(entry, entry + view.rows),
        columns=slice(entry + view.rows, entry + view.rows + view.columns),
        scaled=bool((view.row_index < n).any()) or bool((view.column_index < n).any()),
        gained=view.column_gain is not None,
        dead=dead,
    )
