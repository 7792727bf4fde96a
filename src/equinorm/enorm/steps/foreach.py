"""The ENorm step in few torch operations, for a CPU; the plain twin is `equinorm.solver.Cycle` and `ENorm`'s own lines.

As the Triton kernels do, it works on slabs (`enorm_plan`): two-dimensional views of memory with one factor per row and
one per column. Columns with the same scales (a convolution's kernel) are taken together as the memory lies; a plain sum
is taken where no scale of the other side has moved yet, a matrix-vector product where one has; and the factors of all
parameters are found at once, and used a piece at a time while they are in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...criteria.norm import Side, Sum, powers_of
from .plan import COLUMN, ROW, Anatomy, Followers, Slab, Slot, may_cancel

if TYPE_CHECKING:
    from ..enorm import Gains


PIECE = 2**17
"""Elements of factors that are made at a time."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """A slab with columns of the same scales taken together: its memory is rows × outer × columns × inner."""

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
        return factors[None, :, None].expand(outer, columns, inner).reshape(-1)

    def pieces(self) -> Iterator[slice]:
        """Its rows, so many at a time that their factors stay in the cache."""
        rows, *repeated = self.shape
        step = max(PIECE // prod(repeated), 1)
        return (slice(start, start + step) for start in range(0, rows, step))


@dataclass(frozen=True, eq=False)
class Touch:
    """One side of one matrix, on which variables of a block lie."""

    matrix: int
    kind: int
    own: slice  # entries of this side
    other: slice | None  # of the other side, where a scale there may have moved
    weigh_own: bool  # whether a scale on this side may have moved


@dataclass(frozen=True, eq=False)
class Block:
    """Variables updated together."""

    variables: slice | Tensor
    touches: tuple[Touch, ...]
    taken: Tensor | None  # of the masses on all touched rows and columns, those that belong to the block; None: all
    pull: Tensor  # what each of them does
    total: Sum | None  # adds them up: first what pulls up, then what pulls down; None: they are in this order already
    rate: Tensor  # step / (p · reach)
    last: tuple[int, ...] = ()  # matrices that no later block touches


class ForeachCycle(Followers):
    """ENorm cycles and the move to new coordinates; used like `kernels.enorm.FusedCycle`."""

    def __init__(
        self,
        net: Anatomy,
        tensors: Sequence[Tensor],
        p: float,
        dtype: torch.dtype,
        log_t: Tensor,
        gains: Gains,
        cycles: int = 1,
    ) -> None:
        super().__init__(tensors)
        self.p, self.dtype = float(p), dtype
        self._log_t, self._gains = log_t, gains
        together = [_taken_together(slab) for slab in net.slabs]
        slabs = [slab for slab, _ in together]
        self._matrices = [
            _matrix(slab, shape, entry, net.n, bool(weight), self.device)
            for (slab, shape), entry, weight in zip(together, _first_entries(slabs), net.weight, strict=True)
        ]
        index = torch.cat([x for slab in slabs for x in (slab.row_index, slab.column_index)]).T
        exponent = torch.cat([x for slab in slabs for x in (slab.row_exponent, slab.column_exponent)]).T
        self._index = index.contiguous().to(self.device)
        self._exponent = exponent.contiguous().to(self.device, dtype)
        self._two = bool((index[1] < net.n).any())
        gain = torch.cat([x for slab in slabs for x in _gain_entries(slab)])
        self._gained = (gain >= 0).nonzero().view(-1).to(self.device)
        self._gain = gain[gain >= 0].to(self.device)
        self.s = torch.zeros(net.n + 1, dtype=dtype, device=self.device)
        self._weights: list[Tensor] = []
        self._views: list[tuple[Matrix, int, list[Tensor]]] = []
        blocks = [list(self._blocks(net, slabs, first)) for first in ((True, False) if cycles > 1 else (True,))]
        self._first, self._later = _with_last(blocks[0]), _with_last(blocks[-1])

    # -- which tensors -------------------------------------------------------------------------------------------------

    def bind(self, slots: Sequence[Slot]) -> None:
        """Look at these tensors as matrices; slot 0 holds the parameters."""
        kinds = [(slot.power, slot.gained) for slot in slots]
        self._channels = list(dict.fromkeys([(power, False) for power, _ in kinds] + kinds))
        self._weights = [q for q in slots[0].tensors if q is not None]
        self._views = []
        for matrix in self._matrices:
            views: dict[int, list[Tensor]] = {}
            for slot in slots:
                tensor, gained = slot.tensors[matrix.parameter], slot.gained and matrix.gained
                if tensor is not None and (matrix.scaled or gained):
                    views.setdefault(self._channels.index((slot.power, gained)), []).append(matrix.of(tensor))
            self._views += [(matrix, channel, chosen) for channel, chosen in views.items()]

    # -- the cycle -----------------------------------------------------------------------------------------------------

    def sweep(self, cycles: int = 1) -> Tensor:
        """The log-scales of this step: `cycles` ENorm cycles from 0. (The last place means "no variable".)"""
        s = self.s.zero_()
        powers: dict[int, Tensor] = {}
        for cycle in range(cycles):
            for block in self._later if cycle else self._first:
                masses = [self._mass(touch, powers) for touch in block.touches]
                mass = torch.cat(masses) if len(masses) > 1 else masses[0]
                pull = (mass if block.taken is None else mass[block.taken]) * block.pull
                up, down = (pull if block.total is None else block.total(pull)).view(2, -1)
                # as solver.step_towards: a mass that is zero or not finite leaves the variable where it is
                move = torch.nan_to_num((down.log() - up.log()) * block.rate, 0.0, 0.0, 0.0)
                s[block.variables] += move
                for matrix in block.last if cycle == cycles - 1 else ():
                    del powers[matrix]
        return s

    def _mass(self, touch: Touch, powers: dict[int, Tensor]) -> Tensor:
        """Σ|w|^p on every row, or column, of a matrix."""
        if touch.matrix not in powers:
            matrix = self._matrices[touch.matrix]
            powers[touch.matrix] = matrix.powers(self._weights[matrix.parameter], self.p, self.dtype)
        x = powers[touch.matrix] if touch.kind == ROW else powers[touch.matrix].T
        if touch.other is None:
            mass = x.sum(1)
        elif x.shape[1] == 1:
            mass = x[:, 0] * self._weights_of(touch.other)
        else:
            mass = torch.mv(x, self._weights_of(touch.other))
        return mass * self._weights_of(touch.own) if touch.weigh_own else mass

    def _weights_of(self, entries: slice) -> Tensor:
        """exp(p · log-factor) of some entries."""
        return self._log_factors(entries).mul_(self.p).exp_()

    def _log_factors(self, entries: slice) -> Tensor:
        total = self.s[self._index[0, entries]] * self._exponent[0, entries]
        return total.addcmul_(self.s[self._index[1, entries]], self._exponent[1, entries]) if self._two else total

    # -- new coordinates -----------------------------------------------------------------------------------------------

    def move(self) -> None:
        """Multiply all slots by the factors of `s`, and add it to log_t."""
        self._log_t += self.s[:-1]
        self._gains.measure_(self._log_t)
        total = self._log_factors(slice(None))
        factors = []
        for power, gained in self._channels:
            powered = total * power if power != 1.0 else total
            if gained and power < 0 and len(self._gain):
                powered = powered.index_add(0, self._gained, -power * self._gains.change[self._gain].to(self.dtype))
            factors.append(powered.exp())
        for matrix, channel, views in self._views:
            by_row, by_column = factors[channel][matrix.rows], matrix.spread(factors[channel][matrix.columns])
            for piece in matrix.pieces():
                factor = by_row[piece, None] * by_column
                for view in views:
                    view[piece].mul_(factor)
        self._weights, self._views = [], []  # gradients may be freed now

    # -- setting up ----------------------------------------------------------------------------------------------------

    def _blocks(self, net: Anatomy, slabs: list[Slab], first: bool) -> Iterator[Block]:
        sides = [
            (number, kind, index, exponent * weight, net.rank[index], net.rank[other].min())
            for number, (slab, weight) in enumerate(zip(slabs, net.weight, strict=True))
            if weight
            for kind, index, exponent, other in (
                (ROW, slab.row_index, slab.row_exponent, slab.column_index),
                (COLUMN, slab.column_index, slab.column_exponent, slab.row_index),
            )
        ]
        for name in range(net.never):
            variables = (net.rank == name).nonzero().view(-1)
            if not len(variables):
                continue
            place = torch.zeros(net.n + 1, dtype=torch.int64)
            place[variables] = torch.arange(len(variables))
            touches, taken, pulls, into, start = [], [], [], [], 0
            for number, kind, index, pull, rank, across in sides:
                here = rank == name
                if not bool(here.any()):
                    continue
                rows, columns = self._matrices[number].rows, self._matrices[number].columns
                own, other = (rows, columns) if kind == ROW else (columns, rows)
                weighted = not first or bool(across < name)
                touches.append(
                    Touch(number, kind, own, other if weighted else None, not first or bool((rank < name).any()))
                )
                entry, term = here.nonzero(as_tuple=True)
                useless = (index[:, 0] == index[:, 1]) & (pull.sum(1).abs() < 1e-9)
                entry, term = entry[~useless[entry]], term[~useless[entry]]
                taken.append(start + entry)
                pulls.append(pull[entry, term])
                into.append(place[index[entry, term]] + len(variables) * (pull[entry, term] < 0))
                start += len(index)
            chosen, pull, target = torch.cat(taken), torch.cat(pulls), torch.cat(into)
            everything = torch.equal(chosen, torch.arange(start))
            in_order = torch.equal(target, torch.arange(2 * len(variables)))
            run = torch.equal(variables, torch.arange(len(variables)) + variables[0])
            step = 0.5 if name in net.coupled else 1.0
            yield Block(
                variables=slice(int(variables[0]), int(variables[-1]) + 1) if run else variables.to(self.device),
                touches=tuple(touches),
                taken=None if everything else chosen.to(self.device),
                pull=pull.abs().to(self.device, self.dtype),
                total=None if in_order else Sum(target, 2 * len(variables), self.device),
                rate=(step / (self.p * net.reach[variables])).to(self.device, self.dtype),
            )


def _with_last(blocks: list[Block]) -> list[Block]:
    last = {touch.matrix: i for i, block in enumerate(blocks) for touch in block.touches}
    return [replace(block, last=tuple(k for k, where in last.items() if where == i)) for i, block in enumerate(blocks)]


def _taken_together(slab: Slab) -> tuple[Slab, tuple[int, int, int, int]]:
    """A slab with one column for all that have the same scales, and its memory as rows × outer × columns × inner."""
    if slab.column_gain is not None:
        return slab, (slab.rows, 1, slab.columns, 1)
    outer, columns, inner = Side(slab.column_index.T, slab.column_exponent.T).repeats()
    index, exponent = (x[::inner][:columns] for x in (slab.column_index, slab.column_exponent))
    return replace(slab, column_index=index, column_exponent=exponent), (slab.rows, outer, columns, inner)


def _first_entries(slabs: list[Slab]) -> list[int]:
    return list(accumulate((slab.rows + slab.columns for slab in slabs), initial=0))[:-1]


def _gain_entries(slab: Slab) -> tuple[Tensor, Tensor]:
    none = torch.full((slab.columns,), -1)
    return torch.full((slab.rows,), -1), none if slab.column_gain is None else slab.column_gain


def _matrix(
    slab: Slab, shape: tuple[int, int, int, int], entry: int, n: int, counts: bool, device: torch.device
) -> Matrix:
    rows, columns = slab.row_index[:, None, 0], slab.column_index[None, :, 0]
    dead = None
    if counts and may_cancel(slab, n):
        net = slab.row_exponent[:, None, 0] + slab.column_exponent[None, :, 0]
        dead = ((rows == columns) & (rows < n) & (net.abs() < 1e-9)).to(device)
    return Matrix(
        parameter=slab.parameter,
        offset=slab.offset,
        shape=shape,
        rows=slice(entry, entry + slab.rows),
        columns=slice(entry + slab.rows, entry + slab.rows + slab.columns),
        scaled=bool((slab.row_index < n).any()) or bool((slab.column_index < n).any()),
        gained=slab.column_gain is not None,
        dead=dead,
    )
