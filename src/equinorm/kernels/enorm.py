# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and numbers that Python has no types for)
"""The ENorm step in a few Triton launches; the plain twin is `equinorm.solver.Cycle` and `ENorm`'s own torch lines.

One step (stock2019, algorithm 2) of a net with B blocks is B + 5 launches, whatever the number of layers:

- `_sum_tiles` reads all weights once and leaves sums of |w|^p over rows and columns of tiles; `_combine` adds them up
  per variable: the pull of every line that no scale moved before it in the cycle can change.
- `_update_block`, once per block in forward order: lines that earlier blocks weigh, then log d = log(R / L) / 2p.
- `_measure_gains`: the new gains of safe biases; `_raise_factors`: factors of all rows and columns.
- `_rescale` reads and writes weights, optimizer state, gradients and companions once.

Tables say what to do (`enorm_plan`); tensors are reached by their addresses, in a table of their own. Sums run in a
fixed order: the same numbers on every run, so data-parallel copies of a model stay the same. Nothing waits for the
device and nothing is allocated after the first step, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .enorm_plan import Anatomy, Block, Followers, Slot, make_plan

if TYPE_CHECKING:
    from ..enorm import Gains

__all__ = ["FusedCycle", "can_launch"]

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
MIXED = -1
DEPENDENT_LAUNCHES = False
"""Let each kernel read its tables and weights while the one before it ends (Hopper's programmatic dependent launch)."""
_ROW = tl.constexpr(0)

# -- memory of any dtype -----------------------------------------------------------------------------------------------


@triton.jit
def _read_as(address, start, at, inside, DTYPE: tl.constexpr, ACC: tl.constexpr):
    return tl.load(address.to(tl.pointer_type(DTYPE)) + start + at, mask=inside, other=0.0).to(ACC)


@triton.jit
def _read(address, start, at, inside, kind, KIND: tl.constexpr, ACC: tl.constexpr):
    """Elements `start + at` of the tensor at an address, as ACC; 0 where not `inside`."""
    if KIND == 0:
        x = _read_as(address, start, at, inside, tl.float32, ACC)
    elif KIND == 1:
        x = _read_as(address, start, at, inside, tl.bfloat16, ACC)
    elif KIND == 2:
        x = _read_as(address, start, at, inside, tl.float16, ACC)
    elif KIND == 3:
        x = _read_as(address, start, at, inside, tl.float64, ACC)
    elif kind == 0:
        x = _read_as(address, start, at, inside, tl.float32, ACC)
    elif kind == 1:
        x = _read_as(address, start, at, inside, tl.bfloat16, ACC)
    elif kind == 2:
        x = _read_as(address, start, at, inside, tl.float16, ACC)
    else:
        x = _read_as(address, start, at, inside, tl.float64, ACC)
    return x


@triton.jit
def _multiply_as(address, start, at, inside, factor, DTYPE: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr):
    elements = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        elements = tl.multiple_of(elements, 16)
    elements = elements + start + at
    tl.store(elements, (tl.load(elements, mask=inside).to(ACC) * factor).to(DTYPE), mask=inside)


@triton.jit
def _multiply(address, start, at, inside, factor, kind, KIND: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr):
    """Multiply elements `start + at` of the tensor at an address by factors, in ACC, rounding once."""
    if KIND == 0:
        _multiply_as(address, start, at, inside, factor, tl.float32, ACC, ALIGNED)
    elif KIND == 1:
        _multiply_as(address, start, at, inside, factor, tl.bfloat16, ACC, ALIGNED)
    elif KIND == 2:
        _multiply_as(address, start, at, inside, factor, tl.float16, ACC, ALIGNED)
    elif KIND == 3:
        _multiply_as(address, start, at, inside, factor, tl.float64, ACC, ALIGNED)
    elif kind == 0:
        _multiply_as(address, start, at, inside, factor, tl.float32, ACC, ALIGNED)
    elif kind == 1:
        _multiply_as(address, start, at, inside, factor, tl.bfloat16, ACC, ALIGNED)
    elif kind == 2:
        _multiply_as(address, start, at, inside, factor, tl.float16, ACC, ALIGNED)
    else:
        _multiply_as(address, start, at, inside, factor, tl.float64, ACC, ALIGNED)


@triton.jit
def _powers(x, P: tl.constexpr):
    """|x|^p."""
    x = tl.abs(x)
    if P == 2:
        x = x * x
    elif P != 1:
        zero = x == 0
        x = tl.where(zero, 0.0, tl.exp2(P * tl.log2(tl.where(zero, 1.0, x))))
    return x


@triton.jit
def _log_factor(index, exponent, entries, at, inside, s, TWO: tl.constexpr):
    """The logarithm of the factors of entries: the log-scales of their variables, times exponents."""
    total = tl.load(exponent + at, mask=inside, other=0.0) * tl.load(s + tl.load(index + at, mask=inside, other=0))
    if TWO:
        at += entries
        total += tl.load(exponent + at, mask=inside, other=0.0) * tl.load(s + tl.load(index + at, mask=inside, other=0))
    return total


# -- sums --------------------------------------------------------------------------------------------------------------


@triton.jit
def _sum_tiles(
    tiles, pointers, kinds, slots, partial,
    KIND: tl.constexpr, P: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Sums of |w|^p over the columns, and over the rows, of one stretch of a slab."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tiles + 8 * tl.program_id(0)
    at = tl.load(tile) * slots
    address, kind = tl.load(pointers + at), tl.load(kinds + at)
    start, height, width, pitch = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    column_sums, row_sums, apart = tl.load(tile + 5), tl.load(tile + 6), tl.load(tile + 7)
    column = tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], ACC)
    for top in range(0, height, ROWS):
        row = top + tl.arange(0, ROWS)
        inside = (row < height)[:, None] & (column < width)[None, :]
        x = _powers(_read(address, start, row[:, None] * pitch + column[None, :], inside, kind, KIND, ACC), P)
        total += x
        if row_sums >= 0:
            tl.store(partial + row_sums + row * apart, tl.sum(x, 1), mask=row < height)
    if column_sums >= 0:
        tl.store(partial + column_sums + column, tl.sum(total, 0), mask=column < width)


@triton.jit
def _combine(
    starts, items, pulls, partial, up, down, s, count,
    ACC: tl.constexpr, V: tl.constexpr, ITEMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What pulls each variable up and down, of the partial sums; and every log-scale to 0, where a cycle starts."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    variable = tl.program_id(0) * V + tl.arange(0, V)
    known = variable < count
    first = tl.load(starts + variable, mask=known, other=0)
    last = tl.load(starts + variable + 1, mask=known, other=0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    ups, downs = tl.zeros([V, ITEMS], ACC), tl.zeros([V, ITEMS], ACC)
    for i in range(0, tl.max(last - first, 0), ITEMS):
        at = first[:, None] + i + tl.arange(0, ITEMS)[None, :]
        inside = at < last[:, None]
        pull = tl.load(pulls + at, mask=inside, other=0.0)
        mass = tl.load(partial + tl.load(items + at, mask=inside, other=0), mask=inside, other=0.0)
        ups += tl.where(pull > 0, pull * mass, 0.0)
        downs += tl.where(pull < 0, -pull * mass, 0.0)
    tl.store(up + variable, tl.sum(ups, 1), mask=known)
    tl.store(down + variable, tl.sum(downs, 1), mask=known)
    tl.store(s + variable, tl.zeros([V], ACC), mask=known)


@triton.jit
def _update_block(
    variables, starts, jobs, positions, pulls, index, exponent, entries, pointers, kinds, slots,
    up_before, down_before, reach, s, updated, n, step,
    KIND: tl.constexpr, P: tl.constexpr, ACC: tl.constexpr, V: tl.constexpr, LINE: tl.constexpr,
    FIRST: tl.constexpr, TWO: tl.constexpr, CANCELS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A few variables of a block to their own optimum, all others held (stock2019, eq. 5)."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    lane = tl.arange(0, V)
    variable = tl.load(variables + program * V + lane)
    up, down = tl.zeros([V], ACC), tl.zeros([V], ACC)
    for number in range(tl.load(starts + program), tl.load(starts + program + 1)):
        job = jobs + 9 * number
        which = tl.load(job) * slots
        start, rows, columns = tl.load(job + 1), tl.load(job + 2), tl.load(job + 3)
        position = tl.load(positions + number * V + lane)
        pull = tl.load(pulls + number * V + lane)
        other = tl.load(job + 8)
        address, kind = tl.load(pointers + which), tl.load(kinds + which)
        has = position >= 0
        position = tl.where(has, position, 0)
        own = tl.load(job + 7) + position
        # weights are read before, and log-scales after, the block before this one is done
        if tl.load(job + 4) == _ROW:
            total = tl.zeros([V, LINE], ACC)
            for left in range(0, columns, LINE):
                column = left + tl.arange(0, LINE)
                inside = column < columns
                at = position[:, None] * columns + column[None, :]
                x = _powers(_read(address, start, at, has[:, None] & inside[None, :], kind, KIND, ACC), P)
                if CANCELS:
                    same = tl.load(index + own)[:, None] == tl.load(index + other + column, mask=inside, other=n)[None]
                    net = tl.load(exponent + own)[:, None] + tl.load(exponent + other + column, mask=inside)[None]
                    x = tl.where(same & (tl.abs(net) < 1e-6), 0.0, x)
                if EARLY:
                    tl.extra.cuda.gdc_wait()
                weight = tl.exp(P * _log_factor(index, exponent, entries, other + column, inside, s, TWO))
                total += x * weight[None, :]
            mass = tl.sum(total, 1)
        else:
            count, apart = tl.load(job + 5), tl.load(job + 6)
            sums = tl.zeros([LINE, V], ACC)
            for first in range(0, rows * count, LINE):
                element = first + tl.arange(0, LINE)
                inside = element < rows * count
                row = element // count
                at = (row * columns + (element - row * count) * apart)[:, None] + position[None, :]
                x = _powers(_read(address, start, at, inside[:, None] & has[None, :], kind, KIND, ACC), P)
                if CANCELS:
                    same = tl.load(index + other + row, mask=inside, other=n)[:, None] == tl.load(index + own)[None]
                    net = tl.load(exponent + other + row, mask=inside)[:, None] + tl.load(exponent + own)[None]
                    x = tl.where(same & (tl.abs(net) < 1e-6), 0.0, x)
                if EARLY:
                    tl.extra.cuda.gdc_wait()
                weight = tl.exp(P * _log_factor(index, exponent, entries, other + row, inside, s, TWO))
                sums += x * weight[:, None]
            mass = tl.sum(sums, 0)
        mass *= tl.exp(P * _log_factor(index, exponent, entries, own, has, s, TWO))
        up += tl.where(pull > 0, pull * mass, 0.0)
        down += tl.where(pull < 0, -pull * mass, 0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if FIRST:
        up += tl.load(up_before + variable)
        down += tl.load(down_before + variable)
    # as solver.step_towards: mass on one side only, or too large a one, leaves the variable where it is
    both = (up > 0) & (down > 0) & (up < float("inf")) & (down < float("inf"))
    ratio = tl.log(tl.where(both, down, 1.0)) - tl.log(tl.where(both, up, 1.0))
    move = tl.where(both, step * ratio / (P * tl.load(reach + variable)), 0.0)
    tl.store(updated + variable, tl.load(s + variable) + move, mask=variable < n)


@triton.jit
def _commit(variables, count, n, updated, s, B: tl.constexpr, EARLY: tl.constexpr):
    """Make the new log-scales of a block visible, where its own programs had to read the old ones."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * B + tl.arange(0, B)
    variable = tl.load(variables + at, mask=at < count, other=0)
    inside = (at < count) & (variable < n)
    tl.store(s + variable, tl.load(updated + variable, mask=inside), mask=inside)


# -- factors -----------------------------------------------------------------------------------------------------------


@triton.jit
def _measure_gains(starts, index, exponent, log_t, s, gains, change, n, B: tl.constexpr, EARLY: tl.constexpr):
    """t of each safe bias, the geometric mean of its layer's input scales after this step; and the change of log t²."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gain = tl.program_id(0)
    first, last = tl.load(starts + gain), tl.load(starts + gain + 1)
    now, moved = tl.zeros([B], tl.float64), tl.zeros([B], tl.float64)
    for i in range(first, last, B):
        at = i + tl.arange(0, B)
        inside = at < last
        variable = tl.load(index + at, mask=inside, other=n)
        k = tl.load(exponent + at, mask=inside, other=0.0)
        step = k * tl.load(s + variable).to(tl.float64)
        moved += step
        now += k * tl.load(log_t + variable, mask=variable < n, other=0.0).to(tl.float64) + step
    tl.store(gains + gain, tl.exp(tl.sum(now, 0) / (last - first)))
    tl.store(change + gain, 2 * tl.sum(moved, 0) / (last - first))


@triton.jit
def _raise_factors(
    index, exponent, gain, change, entries, s, log_t, n, powers, gained, factors,
    TWO: tl.constexpr, B: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The factor of every entry to each power, exact to rounding; and the step added to the scales since the start."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * B + tl.arange(0, B)
    inside = at < entries
    total = _log_factor(index, exponent, entries, at, inside, s, TWO).to(tl.float64)
    channel = tl.program_id(1)
    number = tl.load(gain + at, mask=inside, other=-1)
    by_gain = tl.load(change + number, mask=number >= 0, other=0.0)
    value = tl.exp(tl.load(powers + channel) * total + tl.load(gained + channel) * by_gain)
    tl.store(factors + channel * entries + at, value.to(factors.dtype.element_ty), mask=inside)
    if channel == 0:
        moved = tl.load(s + at, mask=at < n, other=0.0)
        t = tl.load(log_t + at, mask=at < n, other=0.0)
        tl.store(log_t + at, t + moved.to(log_t.dtype.element_ty), mask=at < n)


@triton.jit
def _rescale(
    chunks, pointers, kinds, slots, channels, factors, entries,
    KIND: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply one chunk of one tensor by its row's and its column's factors."""
    chunk = chunks + 7 * tl.program_id(0)
    slot = tl.program_id(1)
    which = tl.load(chunk) * slots + slot
    address, kind = tl.load(pointers + which), tl.load(kinds + which)
    if address != 0:
        start, length, columns = tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 3)
        left, row_entry, column_entry = tl.load(chunk + 4), tl.load(chunk + 5), tl.load(chunk + 6)
        factors += tl.load(channels + slot) * entries
        at = tl.arange(0, CHUNK)
        if ALIGNED:
            start = tl.multiple_of(start, 16)
        if EARLY:
            tl.extra.cuda.gdc_wait()
        if columns % CHUNK == 0:  # a piece of one row
            factor = tl.load(factors + row_entry) * tl.load(factors + column_entry + left + at)
            _multiply(address, start, at, None, factor, kind, KIND, ACC, ALIGNED)
        else:
            column = left + at
            # at most one row further, or few enough columns for a division of small floats to be exact
            wraps = (column >= columns).to(tl.int32)
            quotient = ((column.to(tl.float32) + 0.5) * (1.0 / columns.to(tl.float32))).to(tl.int32)
            row = tl.where(columns > CHUNK, wraps, quotient)
            column -= row * columns
            inside = at < length
            if length == CHUNK:
                factor = tl.load(factors + row_entry + row) * tl.load(factors + column_entry + column)
                _multiply(address, start, at, None, factor, kind, KIND, ACC, ALIGNED)
            else:
                factor = tl.load(factors + row_entry + row, mask=inside, other=1.0)
                factor *= tl.load(factors + column_entry + column, mask=inside, other=1.0)
                _multiply(address, start, at, inside, factor, kind, KIND, ACC, ALIGNED)


# -- the step ----------------------------------------------------------------------------------------------------------


def can_launch(device: torch.device) -> bool:
    """Whether the kernels run on this device: a GPU, or the CPU where Triton interprets them (TRITON_INTERPRET=1)."""
    interpreted = type(_rescale).__name__ == "InterpretedFunction"
    return device.type == ("cpu" if interpreted else "cuda")


class FusedCycle(Followers):
    """ENorm cycles and the move to new coordinates, on tensors that lie in memory as the plan was made for.

        fused = FusedCycle(anatomy(...), parameters, p, dtype, log_t, gains)
        fused.bind([Slot(weights, 1.0), Slot(momentum, -1.0)])       # looks at addresses only
        fused.sweep(cycles=1)                                        # fused.s: this step's log-scales
        fused.move()                                                 # log_t, gains and all slots

    The kernels write `log_t`, the log-scales since the start of training, and the gains of safe biases. All buffers
    keep their addresses for ever, so captured graphs stay valid.
    """

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
        plan, device = make_plan(net, cycles), self.device
        self.plan, self.dtype, self.p = plan.to(device), dtype, float(p)
        self.early = DEPENDENT_LAUNCHES
        self._log_t, self._gains, self._change = log_t, gains.t, gains.change
        n, entries = plan.n, plan.index.shape[1]
        made: dict[str, Any] = {"dtype": dtype, "device": device}
        self.s, self._updated = torch.zeros(n + 1, **made), torch.zeros(n + 1, **made)
        self._up, self._down = torch.zeros(n + 1, **made), torch.zeros(n + 1, **made)
        self._reach, self._exponent = plan.reach.to(**made), plan.exponent.to(**made)
        self._pulls = plan.pulls.to(**made)
        self._block_pulls = {id(b): b.pulls.to(**made) for b in (*self.plan.first, *self.plan.later)}
        self._partial = torch.zeros(max(plan.partials, 1), **made)
        self._two = bool((plan.index[1] < n).any())
        self._even = bool((plan.chunks[:, 1] % 16 == 0).all())
        self._entries = entries
        self._bound: tuple[int, ...] = ()
        self._shape: Any = None
        self._host_kinds: list[int | None] = []
        self._kept: list[Tensor] = []  # what captured graphs read

    # -- which tensors -------------------------------------------------------------------------------------------------

    def bind(self, slots: Sequence[Slot]) -> None:
        """Point the tables at these tensors; slot 0 holds the parameters. Costs nothing where no address changed."""
        rows = zip(*(slot.tensors for slot in slots), strict=True)
        addresses = tuple(0 if t is None else t.data_ptr() for row in rows for t in row)
        shape = tuple((slot.power, slot.gained) for slot in slots)
        if addresses == self._bound and shape == self._shape:
            return
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        rows = zip(*(s.tensors for s in slots), strict=True)
        kinds = [None if t is None else KINDS[t.dtype] for row in rows for t in row]
        if shape != self._shape or any(
            k is not None and k != old for k, old in zip(kinds, self._host_kinds, strict=True)
        ):
            if capturing:
                raise RuntimeError(
                    "the tensors that ENorm moves are not those of the step before: run one whole step, with the "
                    "optimizer's, before capturing one"
                )
            self._reshape(slots, shape, kinds)
        self._aim(addresses, capturing)

    def _reshape(self, slots: Sequence[Slot], shape: Any, kinds: list[int | None]) -> None:
        device = self.device
        self._shape, self._host_kinds = shape, kinds
        channels = list(dict.fromkeys(shape))
        self._slots = len(slots)
        self._channels = torch.tensor([channels.index(x) for x in shape], dtype=torch.int32, device=device)
        self._powers = torch.tensor([power for power, _ in channels], dtype=torch.float64, device=device)
        # gradients change by gain / factor, so their power -k by (gain / factor)^k
        gained = [max(-power, 0.0) if gained else 0.0 for power, gained in channels]
        self._gained = torch.tensor(gained, dtype=torch.float64, device=device)
        self._factors = torch.ones(len(channels), self._entries, dtype=self.dtype, device=device)
        self._kinds = torch.tensor([k or 0 for k in kinds], dtype=torch.int32, device=device)
        self._weight_kind = _common(kinds[:: self._slots])
        self._kind = _common(kinds)
        self._table = torch.zeros(len(kinds), dtype=torch.int64, device=device)
        self._bound = ()

    def _aim(self, addresses: tuple[int, ...], capturing: bool) -> None:
        """Write the addresses to the table by a kernel whose arguments they are: no copy from the host to wait for.

        A table that a captured graph reads is never written again, and one written inside a capture is the graph's own.
        """
        if capturing or any(self._table is kept for kept in self._kept):
            self._table = torch.zeros_like(self._table)
        else:
            self._table.zero_()
        held = [(view, a) for view, a in zip(self._table.split(1), addresses, strict=True) if a]
        torch._foreach_add_([view for view, _ in held], [a for _, a in held])
        self._bound = () if capturing else addresses
        self._aligned = self._even and all(a % 16 == 0 for a in addresses)

    # -- launches ------------------------------------------------------------------------------------------------------

    def sweep(self, cycles: int = 1) -> Tensor:
        """The log-scales of this step: `cycles` ENorm cycles from 0. (The last place means "no variable".)"""
        plan, sizes = self.plan, self.plan.sizes
        self._note_capture()
        options: dict[str, Any] = {"P": self.p, "ACC": _TL[self.dtype], "EARLY": self.early}
        with self._here():
            if len(plan.tiles):
                _sum_tiles[(len(plan.tiles),)](
                    plan.tiles, self._table, self._kinds, self._slots, self._partial,
                    KIND=self._weight_kind, ROWS=sizes.rows, COLUMNS=sizes.columns, num_warps=8, **options,
                )  # fmt: skip
            V, items = 16, 64
            _combine[(triton.cdiv(plan.n + 1, V),)](
                plan.starts, plan.items, self._pulls, self._partial, self._up, self._down, self.s, plan.n + 1,
                ACC=options["ACC"], V=V, ITEMS=items, **self._after(),
            )  # fmt: skip
            for cycle in range(cycles):
                for block in plan.later if cycle else plan.first:
                    self._update(block, cycle == 0)
        return self.s

    def _update(self, block: Block, first: bool) -> None:
        plan, (programs, V) = self.plan, block.variables.shape
        line = max(min(triton.next_power_of_2(block.longest), plan.sizes.line), 16)
        _update_block[(programs,)](
            block.variables, block.starts, block.jobs, block.positions, self._block_pulls[id(block)],
            plan.index, self._exponent, self._entries, self._table, self._kinds, self._slots,
            self._up, self._down, self._reach, self.s, self._updated if block.coupled else self.s, plan.n, block.step,
            KIND=self._weight_kind, P=self.p, ACC=_TL[self.dtype], V=V, LINE=line,
            FIRST=first, TWO=self._two, CANCELS=block.cancels, num_warps=min(max(line * V // 512, 4), 16),
            **self._after(),
        )  # fmt: skip
        if block.coupled:
            B = 256
            _commit[(triton.cdiv(programs * V, B),)](
                block.variables, programs * V, plan.n, self._updated, self.s, B=B, **self._after()
            )  # fmt: skip

    def move(self) -> None:
        """Multiply all slots by the factors of `s`, and add it to log_t."""
        plan, B = self.plan, 512
        with self._here():
            if len(self._gains):
                _measure_gains[(len(self._gains),)](
                    plan.gain_starts, plan.gain_index, plan.gain_exponent, self._log_t, self.s,
                    self._gains, self._change, plan.n, B=B, **self._after(),
                )  # fmt: skip
            channels = len(self._powers)
            _raise_factors[(triton.cdiv(max(self._entries, plan.n), B), channels)](
                plan.index, self._exponent, plan.gain, self._change, self._entries, self.s, self._log_t, plan.n,
                self._powers, self._gained, self._factors, TWO=self._two, B=B, **self._after(),
            )  # fmt: skip
            _rescale[(len(plan.chunks), self._slots)](
                plan.chunks, self._table, self._kinds, self._slots, self._channels, self._factors, self._entries,
                KIND=self._kind, ACC=_TL[self.dtype], ALIGNED=self._aligned, CHUNK=plan.sizes.chunk, num_warps=8,
                **self._after(),
            )  # fmt: skip

    def _after(self) -> dict[str, Any]:
        """Options of a launch that may begin before the one ahead of it has ended."""
        return {"EARLY": True, "launch_pdl": True} if self.early else {"EARLY": False}

    def _note_capture(self) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._kept += [self._table, self._kinds, self._channels, self._powers, self._gained, self._factors]

    def _here(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


_TL = {torch.float32: tl.float32, torch.float64: tl.float64}


def _common(kinds: Sequence[int | None]) -> int:
    found = {kind for kind in kinds if kind is not None}
    return found.pop() if len(found) == 1 else MIXED
