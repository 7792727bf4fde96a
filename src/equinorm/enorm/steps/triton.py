# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and numbers that Python has no types for)
"""The ENorm step in a few Triton launches; its plain twin is `steps/plain.py`.

One step (stock2019, algorithm 2) of a net with B blocks is B + 5 launches, whatever the number of layers:

- `_sum_tiles` reads all weights once and leaves sums of |w|^p over rows and columns of tiles, and of each kernel of a
  convolution; `_combine` adds them up per variable: the pull of every line that no earlier scale in the cycle changes.
  With a `Descent` it first makes SGD's step on what it reads, so that the weights are read once for both.
- `_update_block`, once per block in forward order: lines that earlier blocks weigh, then log d = log(R / L) / 2p.
- `_measure_gains`: the new gains of safe biases; `_raise_factors`: factors of all rows and columns.
- `_rescale` reads and writes weights, optimizer state, gradients and companions once.

Tables say what to do (`tables.py`); tensors are reached by their addresses, in a table of their own. Sums run in a
fixed order: the same numbers on every run, so data-parallel copies of a model stay the same. Nothing waits for the
device and nothing is allocated after the first step, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import DeviceTable, Launch, is_capturing, on_device
from ..biases import Gains
from .fused import FusedStep, ParameterLayouts, TensorSet
from .protocol import Problem
from .structure import InexpressibleError, is_dense, net_structure
from .tables import BlockTables, step_tables, stretch

__all__ = ["Descent", "TritonStep", "can_launch"]

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
MIXED = -1
DEPENDENT_LAUNCHES: bool | None = None
"""Let each kernel read its tables and weights while the one before it ends (Hopper's programmatic dependent launch).

By default (None) where the device and Triton can; `TritonStep.early` says what is done, and may be set.
"""

# -- kernels that begin before the one ahead of them has ended --------------------------------------------------------

CAN_WAIT = hasattr(tl.extra, "cuda") and hasattr(tl.extra.cuda, "gdc_wait")
"""Whether this Triton knows how: from 3.4 on. Before, even a name that is not reached keeps a kernel from compiling."""

if CAN_WAIT:

    @triton.jit
    def _let_next_begin():
        tl.extra.cuda.gdc_launch_dependents()

    @triton.jit
    def _wait_for_last():
        tl.extra.cuda.gdc_wait()

else:

    @triton.jit
    def _let_next_begin():
        pass

    @triton.jit
    def _wait_for_last():
        pass


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
def _write_as(address, start, at, inside, x, DTYPE: tl.constexpr, ACC: tl.constexpr):
    rounded = x.to(DTYPE)
    tl.store(address.to(tl.pointer_type(DTYPE)) + start + at, rounded, mask=inside)
    return rounded.to(ACC)


@triton.jit
def _write(address, start, at, inside, x, kind, KIND: tl.constexpr, ACC: tl.constexpr):
    """Write elements `start + at` of the tensor at an address; what was written, as ACC."""
    if KIND == 0:
        x = _write_as(address, start, at, inside, x, tl.float32, ACC)
    elif KIND == 1:
        x = _write_as(address, start, at, inside, x, tl.bfloat16, ACC)
    elif KIND == 2:
        x = _write_as(address, start, at, inside, x, tl.float16, ACC)
    elif KIND == 3:
        x = _write_as(address, start, at, inside, x, tl.float64, ACC)
    elif kind == 0:
        x = _write_as(address, start, at, inside, x, tl.float32, ACC)
    elif kind == 1:
        x = _write_as(address, start, at, inside, x, tl.bfloat16, ACC)
    elif kind == 2:
        x = _write_as(address, start, at, inside, x, tl.float16, ACC)
    else:
        x = _write_as(address, start, at, inside, x, tl.float64, ACC)
    return x


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


@triton.jit
def _read_all(addresses, at, inside, kinds, KIND: tl.constexpr, ACC: tl.constexpr):
    """As `_read`, of several tensors at once; where their dtypes differ, one after the other."""
    if KIND >= 0:
        x = _read(addresses, 0, at, inside, kinds, KIND, ACC)
    else:
        x = _read(addresses, 0, at, inside & (kinds == 0), kinds, 0, ACC)
        x += _read(addresses, 0, at, inside & (kinds == 1), kinds, 1, ACC)
        x += _read(addresses, 0, at, inside & (kinds == 2), kinds, 2, ACC)
        x += _read(addresses, 0, at, inside & (kinds == 3), kinds, 3, ACC)
    return x


# -- sums --------------------------------------------------------------------------------------------------------------


@triton.jit
def _sum_tiles(
    tiles,
    pointers,
    kinds,
    partial,
    matrices,
    groups,
    numbers,
    gain,
    gains,
    slots,
    KIND: tl.constexpr,
    P: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NESTED: tl.constexpr,
    FILTERS: tl.constexpr,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    DESCEND: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Σ|w|^p over columns that are taken together, of one stretch of a matrix view; and sums over its columns and rows.

    DESCEND: after a step of SGD; the addresses of the gradient and its average come after the weight's.
    """
    if EARLY:
        _let_next_begin()
    tile = tiles + 15 * tl.program_id(0)
    parameter = tl.load(tile)
    pointers += parameter * slots
    kind = tl.load(kinds + parameter * slots)
    if DESCEND:
        numbers += 6 * tl.load(groups + parameter)
    if NESTED:
        if tl.load(tile + 5) > 1:
            _sum_neighbours(
                tile,
                pointers,
                kind,
                numbers,
                gain,
                gains,
                partial,
                matrices,
                KIND,
                P,
                ACC,
                FILTERS,
                CHANNELS,
                KERNEL,
                DESCEND,
            )
        else:
            _sum_copies(
                tile, pointers, kind, numbers, gain, gains, partial, matrices, KIND, P, ACC, ROWS, COLUMNS, DESCEND
            )
    else:
        _sum_copies(tile, pointers, kind, numbers, gain, gains, partial, matrices, KIND, P, ACC, ROWS, COLUMNS, DESCEND)


@triton.jit
def _sum_copies(
    tile,
    pointers,
    kind,
    numbers,
    gain,
    gains,
    partial,
    matrices,
    KIND: tl.constexpr,
    P: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DESCEND: tl.constexpr,
):
    """Columns that stand alone, or all at one distance (channels last)."""
    height, width, pitch = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    outer, apart = tl.load(tile + 6), tl.load(tile + 7)
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], ACC)
    for top in range(0, height, ROWS):
        at = (top + row) * pitch + column
        inside = (top + row < height) & (column < width)
        w = _weights_at(tile, pointers, at, inside, kind, numbers, gain, gains, KIND, ACC, DESCEND)
        x = _powers(w, P)
        for copy in range(1, outer):
            there = at + copy * apart
            w = _weights_at(tile, pointers, there, inside, kind, numbers, gain, gains, KIND, ACC, DESCEND)
            x += _powers(w, P)
        total += x
        _leave_tile(tile, top, height, width, x, partial, matrices, ROWS, COLUMNS)
    _leave_columns(tile, width, total, partial, COLUMNS)


@triton.jit
def _sum_neighbours(
    tile,
    pointers,
    kind,
    numbers,
    gain,
    gains,
    partial,
    matrices,
    KIND: tl.constexpr,
    P: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KERNEL: tl.constexpr,
    DESCEND: tl.constexpr,
):
    """Columns that are taken together with their neighbours: a third axis, so that memory is still read in order."""
    height, width, pitch = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    inner, outer, apart = tl.load(tile + 5), tl.load(tile + 6), tl.load(tile + 7)
    row, column = tl.arange(0, ROWS)[:, None, None], tl.arange(0, COLUMNS)[None, :, None]
    neighbour = tl.arange(0, KERNEL)[None, None, :]
    total = tl.zeros([ROWS, COLUMNS], ACC)
    for top in range(0, height, ROWS):
        x = tl.zeros([ROWS, COLUMNS], ACC)
        for copy in range(outer):
            for first in range(0, inner, KERNEL):
                at = (top + row) * pitch + copy * apart + column * inner + first + neighbour
                inside = (top + row < height) & (column < width) & (first + neighbour < inner)
                w = _weights_at(tile, pointers, at, inside, kind, numbers, gain, gains, KIND, ACC, DESCEND)
                x += tl.sum(_powers(w, P), 2)
        total += x
        _leave_tile(tile, top, height, width, x, partial, matrices, ROWS, COLUMNS)
    _leave_columns(tile, width, total, partial, COLUMNS)


@triton.jit
def _weights_at(
    tile,
    pointers,
    at,
    inside,
    kind,
    numbers,
    gain,
    gains,
    KIND: tl.constexpr,
    ACC: tl.constexpr,
    DESCEND: tl.constexpr,
):
    """Elements of a tile; DESCEND: after a step of SGD (torch.optim.SGD, its letters), if there is a gradient."""
    address, start = tl.load(pointers), tl.load(tile + 1)
    w = _read(address, start, at, inside, kind, KIND, ACC)
    if DESCEND:
        gradient, momentum = tl.load(pointers + 1), tl.load(pointers + 2)
        nothing = tl.zeros_like(at)  # the interpreter cannot join a mask with a number
        steps = inside & (gradient + nothing != 0)
        averages = steps & (momentum + nothing != 0)
        # all that is read is asked for before any of it is needed
        g = _read(gradient, start, at, steps, kind, KIND, ACC)
        b = _read(momentum, start, at, averages, kind, KIND, ACC)
        lr, decay, mu = tl.load(numbers).to(ACC), tl.load(numbers + 1).to(ACC), tl.load(numbers + 2).to(ACC)
        undamped, nesterov, sign = tl.load(numbers + 3).to(ACC), tl.load(numbers + 4), tl.load(numbers + 5).to(ACC)
        entry = tl.load(tile + 14)
        if entry >= 0:  # a safe bias: t² of its layer's input
            number = tl.load(gain + entry + at, mask=steps, other=-1)
            t = tl.load(gains + number, mask=number >= 0, other=1.0).to(ACC)
            g *= t * t
        g = sign * g + decay * w
        b = _write(momentum, start, at, averages, mu * b + undamped * g, kind, KIND, ACC)
        g = tl.where(momentum == 0, g, tl.where(nesterov != 0, g + mu * b, b))
        w = tl.where(steps, _write(address, start, at, steps, w - lr * g, kind, KIND, ACC), w)
    return w


@triton.jit
def _leave_tile(tile, top, height, width, x, partial, matrices, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row_sums, across, matrix = tl.load(tile + 9), tl.load(tile + 10), tl.load(tile + 11)
    row, column = top + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    if row_sums >= 0:
        tl.store(partial + row_sums + row * across, tl.sum(x, 1), mask=row < height)
    if matrix >= 0:
        at = matrix + row[:, None] * tl.load(tile + 12) + column[None, :] * tl.load(tile + 13)
        tl.store(matrices + at, x, mask=(row < height)[:, None] & (column < width)[None, :])


@triton.jit
def _leave_columns(tile, width, total, partial, COLUMNS: tl.constexpr):
    column_sums, column = tl.load(tile + 8), tl.arange(0, COLUMNS)
    if column_sums >= 0:
        tl.store(partial + column_sums + column, tl.sum(total, 0), mask=column < width)


@triton.jit
def _combine(
    starts,
    items,
    pulls,
    partial,
    up,
    down,
    s,
    count,
    ACC: tl.constexpr,
    V: tl.constexpr,
    ITEMS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """What pulls each variable up and down, of the partial sums; and every log-scale to 0, where a cycle starts."""
    if EARLY:
        _let_next_begin()
    variable = tl.program_id(0) * V + tl.arange(0, V)
    known = variable < count
    first = tl.load(starts + variable, mask=known, other=0)
    last = tl.load(starts + variable + 1, mask=known, other=0)
    if EARLY:
        _wait_for_last()
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
def _find_lines(
    jobs,
    positions,
    pulls,
    first,
    piece,
    index,
    exponent,
    entries,
    pointers,
    kinds,
    slots,
    matrices,
    n,
    KIND: tl.constexpr,
    P: tl.constexpr,
    ACC: tl.constexpr,
    V: tl.constexpr,
    J: tl.constexpr,
    LINE: tl.constexpr,
    TALL: tl.constexpr,
    RAW: tl.constexpr,
    KEPT: tl.constexpr,
    TWO: tl.constexpr,
    CANCELS: tl.constexpr,
):
    """Σ|w|^p of every element of J lines of V variables, and where the scales that weigh them stand.

    The axes are job × variable × element, or job × element × variable where lines stand upright in memory (TALL).
    """
    if TALL:
        element, lane = tl.arange(0, LINE)[None, :, None], tl.arange(0, V)[None, None, :]
    else:
        element, lane = tl.arange(0, LINE)[None, None, :], tl.arange(0, V)[None, :, None]
    element += piece * LINE
    number = first + tl.arange(0, J)[:, None, None]
    job = jobs + 9 * number
    what, start, length = tl.load(job), tl.load(job + 1), tl.load(job + 2)
    position = tl.load(positions + number * V + lane)
    pull = tl.load(pulls + number * V + lane)
    on = element < length
    inside = on & (position >= 0)
    position = tl.maximum(position, 0)
    own = tl.load(job + 5) + position * tl.load(job + 6)
    other = tl.load(job + 7) + element * tl.load(job + 8)
    at = start + position * tl.load(job + 3) + element * tl.load(job + 4)
    if RAW:
        which = tl.maximum(what, 0) * slots
        address, kind = tl.load(pointers + which), tl.load(kinds + which)
        x = _powers(_read_all(address, at, inside & (what >= 0), kind, KIND, ACC), P)
        if KEPT:
            x += tl.load(matrices + at, mask=inside & (what < 0), other=0.0)
    else:
        x = tl.load(matrices + at, mask=inside, other=0.0)
    variable, power = tl.load(index + other, mask=on, other=n), tl.load(exponent + other, mask=on, other=0.0)
    if CANCELS:
        net = tl.load(exponent + own) + power
        x = tl.where((tl.load(index + own) == variable) & (tl.abs(net) < 1e-6), 0.0, x)
    if TWO:
        other += entries
        second, its_power = tl.load(index + other, mask=on, other=n), tl.load(exponent + other, mask=on, other=0.0)
    else:
        second, its_power = variable, power
    return x, variable, power, second, its_power, own, pull


@triton.jit
def _weights(variable, power, second, its_power, s, P: tl.constexpr, TWO: tl.constexpr):
    """By how much the present scales multiply |w|^p."""
    total = power * tl.load(s + variable)
    if TWO:
        total += its_power * tl.load(s + second)
    return tl.exp(P * total)


@triton.jit
def _pull(
    x,
    own,
    pull,
    index,
    exponent,
    entries,
    s,
    P: tl.constexpr,
    TALL: tl.constexpr,
    FIRST: tl.constexpr,
    TWO: tl.constexpr,
):
    """What pulls V variables up, and down, by weighted elements of their lines."""
    mass = tl.sum(x, 1 if TALL else 2, keep_dims=True)
    if TWO or not FIRST:  # else their own scale is 1 still
        mass *= tl.exp(P * _log_factor(index, exponent, entries, own, own >= 0, s, TWO))
    up, down = tl.where(pull > 0, pull * mass, 0.0), tl.where(pull < 0, -pull * mass, 0.0)
    return tl.sum(tl.sum(up, 1 if TALL else 2), 0), tl.sum(tl.sum(down, 1 if TALL else 2), 0)


@triton.jit
def _update_block(
    variables,
    jobs,
    positions,
    pulls,
    index,
    exponent,
    pointers,
    kinds,
    matrices,
    up_before,
    down_before,
    rates,
    s,
    updated,
    entries,
    slots,
    n,
    groups,
    pieces,
    KIND: tl.constexpr,
    P: tl.constexpr,
    ACC: tl.constexpr,
    V: tl.constexpr,
    FLAT: tl.constexpr,
    FLAT_LINE: tl.constexpr,
    TALL: tl.constexpr,
    TALL_LINE: tl.constexpr,
    RAW: tl.constexpr,
    KEPT: tl.constexpr,
    FIRST: tl.constexpr,
    TWO: tl.constexpr,
    CANCELS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A few variables of a block to their own optimum, all others held (stock2019, eq. 5).

    Everything but the scales is read before the kernel waits for the block ahead of it.
    """
    if EARLY:
        _let_next_begin()
    program = tl.program_id(0)
    variable = tl.load(variables + program * V + tl.arange(0, V))
    rate = tl.load(rates + variable)
    if FIRST:
        up, down = tl.load(up_before + variable), tl.load(down_before + variable)
    else:
        up, down = tl.zeros([V], ACC), tl.zeros([V], ACC)
    if FLAT + TALL > 0:
        for turn in range(groups * pieces):
            first, piece = (program * groups + turn // pieces) * (FLAT + TALL), turn % pieces
            if FLAT > 0:
                x, v, k, v2, k2, own, pull = _find_lines(
                    jobs,
                    positions,
                    pulls,
                    first,
                    piece,
                    index,
                    exponent,
                    entries,
                    pointers,
                    kinds,
                    slots,
                    matrices,
                    n,
                    KIND,
                    P,
                    ACC,
                    V,
                    FLAT,
                    FLAT_LINE,
                    False,
                    RAW,
                    KEPT,
                    TWO,
                    CANCELS,
                )
            if TALL > 0:
                y, w, m, w2, m2, its, drag = _find_lines(
                    jobs,
                    positions,
                    pulls,
                    first + FLAT,
                    piece,
                    index,
                    exponent,
                    entries,
                    pointers,
                    kinds,
                    slots,
                    matrices,
                    n,
                    KIND,
                    P,
                    ACC,
                    V,
                    TALL,
                    TALL_LINE,
                    True,
                    RAW,
                    KEPT,
                    TWO,
                    CANCELS,
                )
            if EARLY:
                _wait_for_last()
            if FLAT > 0:
                x *= _weights(v, k, v2, k2, s, P, TWO)
            if TALL > 0:
                y *= _weights(w, m, w2, m2, s, P, TWO)
            if FLAT > 0:
                ups, downs = _pull(x, own, pull, index, exponent, entries, s, P, False, FIRST, TWO)
                up += ups
                down += downs
            if TALL > 0:
                ups, downs = _pull(y, its, drag, index, exponent, entries, s, P, True, FIRST, TWO)
                up += ups
                down += downs
    elif EARLY:
        _wait_for_last()
    # as solver.step_towards: mass on one side only, or too large a one, leaves the variable where it is
    both = (up > 0) & (down > 0) & (up < float("inf")) & (down < float("inf"))
    ratio = tl.log(tl.where(both, down, 1.0)) - tl.log(tl.where(both, up, 1.0))
    moved = tl.where(both, rate * ratio, 0.0)
    if not FIRST:
        moved += tl.load(s + variable)
    tl.store(updated + variable, moved, mask=variable < n)


@triton.jit
def _commit(variables, updated, s, count, n, B: tl.constexpr, EARLY: tl.constexpr):
    """Make the new log-scales of a block visible, where its own programs had to read the old ones."""
    if EARLY:
        _let_next_begin()
        _wait_for_last()
    at = tl.program_id(0) * B + tl.arange(0, B)
    variable = tl.load(variables + at, mask=at < count, other=0)
    inside = (at < count) & (variable < n)
    tl.store(s + variable, tl.load(updated + variable, mask=inside), mask=inside)


# -- factors -----------------------------------------------------------------------------------------------------------


@triton.jit
def _measure_gains(starts, index, exponent, log_t, s, gains, change, n, B: tl.constexpr, EARLY: tl.constexpr):
    """t of each safe bias, the geometric mean of its layer's input scales after this step; and the change of log t²."""
    if EARLY:
        _let_next_begin()
        _wait_for_last()
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
    index,
    exponent,
    gain,
    change,
    s,
    log_t,
    powers,
    gained,
    factors,
    entries,
    n,
    TWO: tl.constexpr,
    B: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The factor of every entry to each power, exact to rounding; and the step added to the scales since the start."""
    if EARLY:
        _let_next_begin()
        _wait_for_last()
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
    chunks,
    pointers,
    kinds,
    channels,
    factors,
    slots,
    entries,
    KIND: tl.constexpr,
    ACC: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
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
            _wait_for_last()
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


def can_begin_early(device: torch.device) -> bool:
    """Whether a kernel can start before the one ahead of it has ended, and wait for it later."""
    return CAN_WAIT and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@dataclass(frozen=True, eq=False)
class TileSource:
    """What `_sum_tiles` reads: the weights alone, or with what a `Descent` adds."""

    tiles: Tensor
    pointers: Tensor
    kinds: Tensor
    groups: Tensor
    numbers: Tensor
    slots: int  # addresses per parameter
    kind: int


class TritonStep(FusedStep):
    """ENorm cycles and the move to new coordinates, by kernels that reach all tensors through a table of addresses.

    The kernels write `log_t`, the log-scales since the start of training, and the gains of safe biases. All buffers
    keep their addresses for ever, so captured graphs stay valid.
    """

    name = "triton"

    def __init__(self, problem: Problem, log_t: Tensor, gains: Gains) -> None:
        super().__init__(problem, log_t, gains)
        device, dtype, net = self.device, problem.dtype, net_structure(problem)
        self.tables, self.dtype = step_tables(net, problem.cycles).to(device, dtype), dtype
        self.p = float(problem.p)
        self.early = can_begin_early(device) if DEPENDENT_LAUNCHES is None else DEPENDENT_LAUNCHES
        self._series: dict[tuple[object, ...], list[Callable[[], None]]] = {}
        self._descent: Descent | None = None
        n, self._entries = self.tables.n, self.tables.index.shape[1]
        self.s, self._updated, self._up, self._down = (torch.zeros(n + 1, dtype=dtype, device=device) for _ in range(4))
        self._partial = torch.zeros(max(self.tables.partials, 1), dtype=dtype, device=device)
        self._matrices = torch.zeros(max(self.tables.matrices, 1), dtype=dtype, device=device)
        self._two = bool((net.index[1] < n).any())
        self._even = bool((self.tables.chunks[:, 1] % 16 == 0).all())
        self._aligned = False
        self._shape: tuple[tuple[float, bool], ...] = ()
        self._host_kinds: list[int] = []
        self._kept: list[object] = []  # what captured graphs read

    # -- which tensors -------------------------------------------------------------------------------------------------

    @property
    def repeats(self) -> bool:
        """Whether a step on the same tensors needs no new `bind`: not after one that was only captured."""
        return self._table.known

    def bind(self, sets: Sequence[TensorSet]) -> None:
        """Write the addresses of these tensors. Costs nothing where none has changed."""
        tensors = [t for row in zip(*(x.tensors for x in sets), strict=True) for t in row]
        addresses = tuple(0 if t is None else t.data_ptr() for t in tensors)
        shape = tuple((x.power, x.gained) for x in sets)
        # what is not there is taken to be of the parameter's dtype, as a gradient will be
        parameters = [q for q in sets[0].tensors if q is not None for _ in sets]
        kinds = [KINDS[(q if t is None else t).dtype] for t, q in zip(tensors, parameters, strict=True)]
        if shape != self._shape or kinds != self._host_kinds:
            if is_capturing(self.device):
                raise RuntimeError(
                    "the tensors that ENorm moves are not those of the step before: run one whole step, with the "
                    "optimizer's, before capturing one"
                )
            self._reshape(shape, kinds)
        aligned = self._even and all(a % 16 == 0 for a in addresses)
        if self._table.write(addresses) or aligned != self._aligned:
            self.forget()
        self._aligned = aligned

    def _reshape(self, shape: tuple[tuple[float, bool], ...], kinds: list[int]) -> None:
        device = self.device
        self._shape, self._host_kinds, self._slots = shape, kinds, len(shape)
        channels = list(dict.fromkeys(shape))
        self._channels = torch.tensor([channels.index(x) for x in shape], dtype=torch.int32, device=device)
        self._powers = torch.tensor([power for power, _ in channels], dtype=torch.float64, device=device)
        # gradients change by gain / factor, so their power -k by (gain / factor)^k
        gained = [max(-power, 0.0) if gained else 0.0 for power, gained in channels]
        self._gained = torch.tensor(gained, dtype=torch.float64, device=device)
        self._factors = torch.ones(len(channels), self._entries, dtype=self.dtype, device=device)
        self._kinds = torch.tensor(kinds, dtype=torch.int32, device=device)
        self._weight_kind, self._kind = _common(kinds[:: self._slots]), _common(kinds)
        self._table = DeviceTable(len(kinds), torch.int64, device)
        self.forget()

    def forget(self) -> None:
        """Some table has another address now."""
        self._series.clear()

    @contextmanager
    def descending(self, descent: Descent) -> Iterator[None]:
        """A sweep in here makes a step of SGD on the weights before it looks at them."""
        self._descent = descent
        try:
            yield
        finally:
            self._descent = None

    # -- launches ------------------------------------------------------------------------------------------------------

    def sweep(self, cycles: int = 1) -> Tensor:
        self._note_capture()
        self._launch(("sweep", cycles, self.early, self._descent), lambda: self._sweeping(cycles))
        return self.s

    def move(self) -> None:
        """Nothing comes between the kernels: what they write themselves needs no copy."""
        self.begin_move()
        self.finish_move()

    def begin_move(self) -> None:
        self._launch(("begin", self.early), self._raising)

    def finish_move(self) -> None:
        self._launch(("finish", self.early), self._rescaling)

    def _launch(self, series: tuple[object, ...], make: Callable[[], Iterator[Callable[[], None]]]) -> None:
        """Launch a series of kernels; they are made once, for tensors and numbers stay the same from step to step."""
        if series not in self._series:
            self._series[series] = [*make()]
        with on_device(self.device):
            for launch in self._series[series]:
                launch()

    def _sweeping(self, cycles: int) -> Iterator[Callable[[], None]]:
        yield from self._summing()
        for cycle in range(cycles):
            for number, block in enumerate(self.tables.later if cycle else self.tables.first):
                # the first waits for the sums, which all may then read before they wait
                yield from self._updating(block, cycle == 0, chained=cycle + number > 0)

    def _summing(self) -> Iterator[Callable[[], None]]:
        tables, sizes, V, items, device = self.tables, self.tables.sizes, 16, 64, self.device
        source = self._tile_source() if self._descent is None else self._descent.tile_source()
        if len(source.tiles):
            yield Launch(
                _sum_tiles,
                (len(source.tiles),),
                device,
                slots=source.slots,
                KIND=source.kind,
                P=self.p,
                ACC=_TL[self.dtype],
                ROWS=sizes.rows,
                COLUMNS=sizes.columns,
                NESTED=tables.nested,
                FILTERS=sizes.filters,
                CHANNELS=sizes.channels,
                KERNEL=sizes.kernel,
                DESCEND=self._descent is not None,
                EARLY=self.early,
            ).on(
                source.tiles,
                source.pointers,
                source.kinds,
                self._partial,
                self._matrices,
                source.groups,
                source.numbers,
                tables.gain,
                self.gains.t,
            )
        yield Launch(
            _combine,
            (triton.cdiv(tables.n + 1, V),),
            device,
            early=self.early,
            count=tables.n + 1,
            ACC=_TL[self.dtype],
            V=V,
            ITEMS=items,
            EARLY=self.early,
        ).on(tables.starts, tables.items, tables.pulls, self._partial, self._up, self._down, self.s)

    def _tile_source(self) -> TileSource:
        # what is not read without a descent is any tensor
        return TileSource(
            tiles=self.tables.tiles,
            pointers=self._table.values,
            kinds=self._kinds,
            groups=self._kinds,
            numbers=self._partial,
            slots=self._slots,
            kind=self._weight_kind,
        )

    def _updating(self, block: BlockTables, first: bool, chained: bool) -> Iterator[Callable[[], None]]:
        tables, (programs, V), groups = self.tables, block.variables.shape, block.jobs.shape[1]
        updated = self._updated if block.coupled else self.s
        yield Launch(
            _update_block,
            (programs,),
            self.device,
            num_warps=block.warps,
            early=self.early and chained,
            entries=self._entries,
            slots=self._slots,
            n=tables.n,
            groups=groups,
            pieces=block.pieces,
            KIND=self._weight_kind,
            P=self.p,
            ACC=_TL[self.dtype],
            V=V,
            FLAT=block.flat[0],
            FLAT_LINE=block.flat[1],
            TALL=block.tall[0],
            TALL_LINE=block.tall[1],
            RAW=block.raw,
            KEPT=block.kept,
            FIRST=first,
            TWO=self._two,
            CANCELS=block.cancels,
            EARLY=self.early,
        ).on(
            block.variables,
            block.jobs,
            block.positions,
            block.pulls,
            tables.index,
            tables.exponent,
            self._table.values,
            self._kinds,
            self._matrices,
            self._up,
            self._down,
            tables.rates,
            self.s,
            updated,
        )
        if block.coupled:
            B = 256
            yield Launch(
                _commit,
                (triton.cdiv(programs * V, B),),
                self.device,
                early=self.early,
                count=programs * V,
                n=tables.n,
                B=B,
                EARLY=self.early,
            ).on(block.variables, updated, self.s)

    def _raising(self) -> Iterator[Callable[[], None]]:
        tables, B = self.tables, 512
        gains = self.gains
        if len(gains):
            yield Launch(
                _measure_gains, (len(gains),), self.device, early=self.early, n=tables.n, B=B, EARLY=self.early
            ).on(tables.gain_starts, tables.gain_index, tables.gain_exponent, self.log_t, self.s, gains.t, gains.change)
        yield Launch(
            _raise_factors,
            (triton.cdiv(max(self._entries, tables.n), B), len(self._powers)),
            self.device,
            early=self.early,
            entries=self._entries,
            n=tables.n,
            TWO=self._two,
            B=B,
            EARLY=self.early,
        ).on(
            tables.index,
            tables.exponent,
            tables.gain,
            gains.change,
            self.s,
            self.log_t,
            self._powers,
            self._gained,
            self._factors,
        )

    def _rescaling(self) -> Iterator[Callable[[], None]]:
        tables = self.tables
        yield Launch(
            _rescale,
            (len(tables.chunks), self._slots),
            self.device,
            num_warps=8,
            early=self.early,
            slots=self._slots,
            entries=self._entries,
            KIND=self._kind,
            ACC=_TL[self.dtype],
            ALIGNED=self._aligned,
            CHUNK=tables.sizes.chunk,
            EARLY=self.early,
        ).on(tables.chunks, self._table.values, self._kinds, self._channels, self._factors)

    def _note_capture(self) -> None:
        if not is_capturing(self.device):
            return
        self._table.keep()
        if self._descent is not None:
            self._descent.keep()
        read = (self._table, self._kinds, self._channels, self._powers, self._gained, self._factors, self._descent)
        self._kept += [x for x in read if not any(x is kept for kept in self._kept)]


class Descent(ParameterLayouts):
    """A step of SGD on all parameters of an optimizer, in the pass of a `TritonStep` that sums.

        descent = Descent(step, parameters, groups)           # group: the number of each one's parameter group
        descent.bind(gradients, momenta, numbers)             # looks at addresses only
        with step.descending(descent):
            step.sweep()

    The first parameters are those of the step, in its order; all lie dense in memory, and gradients and momenta as
    their parameters do. Of a parameter without a gradient only the masses are read.
    """

    def __init__(self, step: TritonStep, parameters: Sequence[Tensor], groups: Sequence[int]) -> None:
        super().__init__(parameters)
        tables, device, own = step.tables, step.device, step.memory.count
        for i, q in enumerate(parameters):
            if not self._fits(i, q) or q.device != device or q.numel() >= 2**31 or not is_dense(q):
                raise InexpressibleError(
                    f"a parameter of shape {tuple(q.shape)} is no ordinary, dense tensor on {device}"
                )
        others = [stretch(own + i, 0, q.numel(), tables.sizes) for i, q in enumerate(parameters[own:])]
        self.tiles = torch.cat([tables.tiles, tables.rest, *(x.to(device, torch.int32) for x in others)])
        self.parameters, self._groups = list(parameters), list(groups)
        kinds = [KINDS[q.dtype] for q in parameters for _ in range(3)]
        self.kinds, self.kind = torch.tensor(kinds, dtype=torch.int32, device=device), _common(kinds)
        self.groups = torch.tensor(groups, dtype=torch.int32, device=device)
        self.table = DeviceTable(len(kinds), torch.int64, device)
        self.numbers = DeviceTable(6 * (max(groups) + 1), torch.float64, device)
        self._step = step

    def tile_source(self) -> TileSource:
        """What the pass that sums reads with this."""
        return TileSource(
            tiles=self.tiles,
            pointers=self.table.values,
            kinds=self.kinds,
            groups=self.groups,
            numbers=self.numbers.values,
            slots=3,
            kind=self.kind,
        )

    def is_for(self, step: TritonStep, parameters: Sequence[Tensor], groups: Sequence[int]) -> bool:
        """Whether it was made for these."""
        same = len(parameters) == self.count and all(a is b for a, b in zip(parameters, self.parameters, strict=True))
        return same and step is self._step and list(groups) == self._groups and self.fits(parameters)

    def bind(
        self,
        gradients: Sequence[Tensor | None],
        momenta: Sequence[Tensor | None],
        numbers: Sequence[Sequence[float | Tensor]],
    ) -> None:
        """Write the addresses of these tensors, and take over the numbers of each parameter group.

        These are lr, weight decay, momentum, 1 - dampening, whether it is Nesterov's, and the gradient's sign; each a
        float, or a tensor on the device, which is read when the step is made.
        """
        rows = zip(self.parameters, gradients, momenta, strict=True)
        moves = self.table.write(tuple(0 if t is None else t.data_ptr() for row in rows for t in row))
        flat = [x for row in numbers for x in row]
        moves |= self.numbers.write(tuple(0.0 if isinstance(x, Tensor) else x for x in flat))
        if moves:
            self._step.forget()
        held = [(place, x) for place, x in zip(self.numbers.places, flat, strict=True) if isinstance(x, Tensor)]
        if held:
            torch._foreach_copy_([place for place, _ in held], [x.view(1) for _, x in held])

    def keep(self) -> None:
        """Call inside a capture: the graph reads the tables as they are."""
        self.table.keep()
        self.numbers.keep()


_TL = {torch.float32: tl.float32, torch.float64: tl.float64}


def _common(kinds: Sequence[int]) -> int:
    return kinds[0] if len(set(kinds)) == 1 else MIXED
