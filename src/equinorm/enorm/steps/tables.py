"""What the Triton kernels have to do, as tables: made once, on the host, from the structure of a net.

A cycle starts at s = 0. A line whose other scales come later in the cycle is a plain sum of |w|^p: all of these are
read in one pass over **tiles** of the weights. The others are weighted by scales of earlier blocks and are read block
by block, by **programs** that take a few variables each: from the weights themselves, or, where columns are taken
together, from a small **matrix of sums** that the tiles leave (rows × distinct columns). **Chunks** are all memory that
gets a factor, in pieces.

Every table has one record per row, and kernels know the columns by number:

    tile   0 parameter             5 neighbours taken together     10 from one row sum to the next
           1 first element         6 copies taken together         11 where the matrix of sums begins
           2 rows                  7 elements from copy to copy    12 its step from row to row
           3 columns               8 where column sums go          13 its step from column to column
           4 elements per row      9 where row sums go             14 entry of the first element of a safe bias
           (in 8, 9, 11 and 14, -1 stands for none)

    job    0 parameter, or -1 for the matrices of sums             5 first entry of the lines' own scales
           1 first element         3 from variable to variable     6 from one of these to the next
           2 length of a line      4 from element to element       7, 8 the same of the scales across

    chunk  0 parameter             2 length                        5 row entry of the first element
           1 first element         3 columns of its matrix view    6 first column entry of the view
                                   4 column of the first element

>>> tables = step_tables(net_structure(problem))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...symmetry import Term
from .structure import COLUMN, ROW, Lines, MatrixView, NetStructure, Repeats, Tiles, may_cancel

__all__ = ["BlockTables", "StepTables", "step_tables", "stretch"]


@dataclass(frozen=True, eq=False)
class BlockTables:
    """Programs that update the variables of one block.

    A job is one line for each variable of a program, rows or columns of one matrix view:

                     element  0 1 2 3 4 ...
        variable 0           [. . . . . . .]
        variable 1           [. . . . . . .]    at first element + (row or column of the variable) · step between
        ...                                        variables + element · step between elements
        variable V-1         [. . . . . . .]

    It is flat where elements are neighbours in memory, tall where variables are. A program takes some jobs at a time:

        turn 0               flat job | flat job | tall job
        turn 1               flat job | flat job | tall job      J = 3 jobs in each of G = 2 turns

    What is missing is filled up with lines of length 0. Everything a program needs is at a place that follows from its
    number.
    """

    variables: Tensor  # programs × V; n where there is none
    jobs: Tensor  # programs × G × J × 9
    positions: Tensor  # programs × G × J × V: row or column of each variable's line; -1 where it has none
    pulls: Tensor  # programs × G × J × V
    flat: tuple[int, int]  # flat jobs in a turn, elements of their lines at a time,
    tall: tuple[int, int]  # and the same of tall ones
    warps: int
    pieces: int  # in which lines are taken
    raw: bool  # some lines are read from weights,
    kept: bool  # some from matrices
    coupled: bool  # a program reads scales that another one of this block writes
    cancels: bool  # some element has to be left out, see `may_cancel`

    def to(self, device: torch.device, dtype: torch.dtype) -> BlockTables:
        return BlockTables(**_moved(self.__dict__, device, dtype))


@dataclass(frozen=True, eq=False)
class StepTables:
    """All tables of a fused step. Integers are int32: no parameter may have 2³¹ elements."""

    n: int  # scale variables; index n stands for none
    rates: Tensor  # per variable, of log(R / L): see `_rates`
    # entries: rows and columns of all views
    index: Tensor  # 2 × entries
    exponent: Tensor
    gain: Tensor  # per entry: which gain of a safe bias, -1 for none
    # memory
    tiles: Tensor  # × 15
    rest: Tensor  # tiles of all other memory, which leave nothing: for a pass that changes weights as it reads them
    nested: bool  # some take neighbouring columns together
    partials: int  # sums that the tiles leave,
    matrices: int  # and elements of the matrices
    chunks: Tensor  # × 7
    # what each variable takes from the partial sums
    starts: Tensor
    items: Tensor
    pulls: Tensor
    # the cycle: first from s = 0, and from anywhere
    first: tuple[BlockTables, ...]
    later: tuple[BlockTables, ...]
    # safe biases
    gain_starts: Tensor
    gain_index: Tensor
    gain_exponent: Tensor
    sizes: Tiles

    def to(self, device: torch.device, dtype: torch.dtype) -> StepTables:
        """On a device, with real numbers of this dtype."""
        blocks = {k: tuple(b.to(device, dtype) for b in getattr(self, k)) for k in ("first", "later")}
        return StepTables(**{**_moved(self.__dict__, device, dtype), **blocks})


def _moved(fields: dict[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {
        k: v.to(device, dtype if v.is_floating_point() else v.dtype) if isinstance(v, Tensor) else v
        for k, v in fields.items()
    }


def step_tables(net: NetStructure, cycles: int = 1) -> StepTables:
    """The tables; those of cycles that do not start at 0 only where there are more than one."""
    n, sizes, table = net.n, net.tiles, net.table()
    lines = net.lines()
    plain, weighted = lines[~lines.weighted], lines[lines.weighted]
    readings = _readings(net.views, plain, lines if cycles > 1 else weighted, sizes)
    tile_table = _tiles(net.views, readings, table)
    sources = _sources(readings, table)
    starts, items, pulls = _items(plain, readings, n)
    return StepTables(
        n=n,
        rates=_rates(net),
        index=net.index.to(torch.int32),
        exponent=net.exponent,
        gain=net.gain.to(torch.int32),
        tiles=tile_table.to(torch.int32),
        rest=_rest(net.views, readings, table, sizes).to(torch.int32),
        nested=bool((tile_table[:, 5] > 1).any()),
        partials=max((reading.partials_end for reading in readings), default=0),
        matrices=max((reading.matrix_end for reading in readings), default=0),
        chunks=_chunks(net.views, table, sizes).to(torch.int32),
        starts=starts,
        items=items,
        pulls=pulls,
        first=tuple(_blocks(weighted, net, sources)),
        later=tuple(_blocks(lines, net, sources)) if cycles > 1 else (),
        **_gain_tables(net.fan_ins),
        sizes=sizes,
    )


def _rates(net: NetStructure) -> Tensor:
    """Per variable: its share of log(R / L) in a step (solver.step_towards), less where two meet in one weight."""
    coupled = torch.isin(net.rank, torch.tensor(sorted(net.coupled), dtype=net.rank.dtype))
    return torch.where(coupled, 0.5, 1.0) / (net.p * net.reach)


def _gain_tables(fan_ins: list[Term]) -> dict[str, Tensor]:
    """The inputs whose mean log-scale is each gain, one list per gain."""
    lengths = [n for t in fan_ins for n in [t.index.shape[-1]] * t.index[..., 0].numel()]
    index = [t.index.reshape(-1).cpu() for t in fan_ins]
    exponent = [t.exponent.expand_as(t.index).reshape(-1).cpu().double() for t in fan_ins]
    empty = torch.zeros(0)
    return {
        "gain_starts": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "gain_index": torch.cat([empty, *index]).to(torch.int32),
        "gain_exponent": torch.cat([empty.double(), *exponent]),
    }


def _chunks(views: list[MatrixView], table: Tensor, sizes: Tiles) -> Tensor:
    rows = []
    for view, (_, _, _, _, row_entry, column_entry) in zip(views, table.tolist(), strict=True):
        start = torch.arange(0, view.rows * view.columns, sizes.chunk)
        length = (view.rows * view.columns - start).clamp_max(sizes.chunk)
        row, column = start // view.columns, start % view.columns
        same = [torch.full_like(start, x) for x in (view.parameter, view.columns, column_entry)]
        rows.append(torch.stack([same[0], view.offset + start, length, same[1], column, row_entry + row, same[2]], 1))
    return torch.cat(rows)


# -- plain sums, for all blocks at once --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TileReading:
    """How tiles read one view, and where they leave the sums; -1 for what nobody needs."""

    view: int
    rows: int
    repeats: Repeats
    height: int  # of a program's share, in rows
    width: int  # in columns
    column_sums: int
    row_sums: int
    matrix: int
    turned: bool  # the matrix is stored by columns
    partials_end: int  # sums left by this view and those before it,
    matrix_end: int  # and elements of matrices

    @property
    def down(self) -> int:
        return -(-self.rows // self.height)

    @property
    def across(self) -> int:
        return -(-self.repeats.columns // self.width)

    @property
    def steps(self) -> tuple[int, int]:
        """From row to row, and from column to column, of the matrix."""
        return (1, self.rows) if self.turned else (self.repeats.columns, 1)


def _readings(views: list[MatrixView], plain: Lines, weighed: Lines, sizes: Tiles) -> list[TileReading]:
    """All views that have plain lines, or weighted ones on columns that are taken together."""
    needed = {(number, kind) for number, kind in torch.stack([plain.view, plain.kind], 1).unique(dim=0).tolist()}
    kept = {number for number in weighed.view.unique().tolist() if views[number].repeats.times > 1}
    upright = kept - set(weighed.view[weighed.kind == ROW].tolist())  # only columns are read of these
    read = sorted({number for number, _ in needed} | kept)
    share = max(sizes.share, sum(views[number].rows * views[number].columns for number in read) // sizes.shares)
    readings: list[TileReading] = []
    sums = elements = 0
    for number in read:
        view = views[number]
        together = number in kept or (number, COLUMN) in needed  # rows alone are best read as they lie
        repeats = view.repeats if together else Repeats(1, view.columns, 1)
        tile = (sizes.filters, sizes.channels) if repeats.inner > 1 else (sizes.rows, sizes.columns)
        height = -(-share // (tile[1] * repeats.times) // tile[0]) * tile[0]  # in whole tiles
        height, turned = max(height, tile[0]), number in upright
        reading = TileReading(number, view.rows, repeats, height, tile[1], -1, -1, -1, turned, sums, elements)
        if (number, COLUMN) in needed:
            reading, sums = replace(reading, column_sums=sums), sums + reading.down * repeats.columns
        if (number, ROW) in needed:
            reading, sums = replace(reading, row_sums=sums), sums + reading.across * view.rows
        if number in kept:
            reading, elements = replace(reading, matrix=elements), elements + view.rows * repeats.columns
        readings.append(replace(reading, partials_end=sums, matrix_end=elements))
    return readings


def _tiles(views: list[MatrixView], readings: list[TileReading], table: Tensor) -> Tensor:
    """Tiles that cover all views that are read."""
    tiles = [torch.zeros(0, 15, dtype=torch.int64)]
    for reading in readings:
        parameter, offset, rows, pitch, _, column_entry = table[reading.view].tolist()
        outer, columns, inner = reading.repeats
        r, k = torch.meshgrid(torch.arange(reading.down), torch.arange(reading.across), indexing="ij")
        r, k = r.reshape(-1), k.reshape(-1)
        top, left = r * reading.height, k * reading.width
        nowhere, steps = torch.full_like(r, -1), reading.steps
        records = [
            torch.full_like(r, parameter),
            offset + top * pitch + left * inner,
            (rows - top).clamp_max(reading.height),
            (columns - left).clamp_max(reading.width),
            torch.full_like(r, pitch),
            torch.full_like(r, inner),
            torch.full_like(r, outer),
            torch.full_like(r, columns * inner),
            nowhere if reading.column_sums < 0 else reading.column_sums + r * columns + left,
            nowhere if reading.row_sums < 0 else reading.row_sums + top * reading.across + k,
            torch.full_like(r, reading.across),
            nowhere if reading.matrix < 0 else reading.matrix + top * steps[0] + left * steps[1],
            torch.full_like(r, steps[0]),
            torch.full_like(r, steps[1]),
            # a safe bias is one row, so its elements are its columns
            nowhere if views[reading.view].column_gain is None else column_entry + left * inner,
        ]
        tiles.append(torch.stack(records, 1))
    return torch.cat(tiles)


def _rest(views: list[MatrixView], readings: list[TileReading], table: Tensor, sizes: Tiles) -> Tensor:
    """Tiles of views that nobody reads."""
    read = {reading.view for reading in readings}
    tiles = [torch.zeros(0, 15, dtype=torch.int64)]
    for number, (view, (parameter, offset, *_, column_entry)) in enumerate(zip(views, table.tolist(), strict=True)):
        if number not in read:
            entry = -1 if view.column_gain is None else column_entry
            tiles.append(stretch(parameter, offset, view.rows * view.columns, sizes, entry))
    return torch.cat(tiles)


def stretch(parameter: int, start: int, length: int, sizes: Tiles, entry: int = -1) -> Tensor:
    """Tiles of so many elements in a row, as `_tiles` tells them; they leave nothing."""
    width = sizes.columns
    step = max(sizes.share // width, sizes.rows) * width
    whole = length - length % width
    # all full lines, some at a time, and what is left of the last one
    first = torch.tensor([*range(0, whole, step), *((whole,) if whole < length else ())], dtype=torch.int64)
    full = first < whole
    tiles = torch.zeros(len(first), 15, dtype=torch.int64)
    tiles[:, 0], tiles[:, 1] = parameter, start + first
    tiles[:, 2] = torch.where(full, (whole - first).clamp_max(step) // width, 1)
    tiles[:, 3] = torch.where(full, width, length - whole)
    tiles[:, 4] = width
    tiles[:, 5:7] = 1
    tiles[:, [8, 9, 11]] = -1
    tiles[:, 14] = -1 if entry < 0 else entry + first
    return tiles


def _items(lines: Lines, readings: list[TileReading], n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each variable, the partial sums that its plain lines consist of, and what they do to it."""
    size = max((reading.view for reading in readings), default=-1) + 1
    # of each view and kind: where its sums begin; from line to line; how many stretches; from one to the next
    of = torch.zeros(size, 2, 4, dtype=torch.int64)
    for reading in readings:
        columns = reading.repeats.columns
        of[reading.view, ROW] = torch.tensor([reading.row_sums, reading.across, reading.across, 1])
        of[reading.view, COLUMN] = torch.tensor([reading.column_sums, 1, reading.down, columns])
    begin, apart, stretches, step = of[lines.view, lines.kind].T
    line = torch.repeat_interleave(torch.arange(len(stretches)), stretches)
    stretch = torch.arange(len(line)) - (stretches.cumsum(0) - stretches)[line]
    item = (begin + lines.position * apart)[line] + stretch * step[line]
    owner = lines.variable[line]
    order = torch.argsort(owner, stable=True)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(owner, minlength=n + 1).cumsum(0)])
    return starts.to(torch.int32), item[order].to(torch.int32), lines.pull[line][order]


# -- weighted sums, block by block -------------------------------------------------------------------------------------


def _sources(readings: list[TileReading], table: Tensor) -> Tensor:
    """Views × 9: where weighted lines are read: parameter or -1 for a matrix, start, rows, columns, elements from row
    to row and from column to column; first row entry, first column entry and entries from column to column."""
    parameter, offset, rows, columns, row_entry, column_entry = table.T
    one = torch.ones_like(rows)
    sources = torch.stack([parameter, offset, rows, columns, columns, one, row_entry, column_entry, one], 1)
    for reading in readings:
        if reading.matrix >= 0:
            shape = [reading.rows, reading.repeats.columns, *reading.steps]
            sources[reading.view, :6] = torch.tensor([-1, reading.matrix, *shape])
            sources[reading.view, 8] = reading.repeats.inner
    return sources


def _blocks(lines: Lines, net: NetStructure, sources: Tensor) -> Iterator[BlockTables]:
    rank, never = net.rank, net.never
    cancelling = torch.tensor([may_cancel(view, net.n) for view in net.views])
    order = torch.argsort(rank[lines.variable], stable=True)
    lines = lines[order]
    bounds = torch.searchsorted(rank[lines.variable].contiguous(), torch.arange(never + 1))
    for name in range(never):
        variables = (rank == name).nonzero().view(-1)
        if len(variables):
            its_lines = lines[torch.arange(int(bounds[name]), int(bounds[name + 1]))]
            yield _block(net, variables, its_lines, sources, name in net.coupled, cancelling)


def _block(
    net: NetStructure, variables: Tensor, lines: Lines, sources: Tensor, coupled: bool, cancelling: Tensor
) -> BlockTables:
    n, sizes = net.n, net.tiles
    # what, start, length, steps to the next variable and the next element, own entry and step, those across
    what, start, rows, columns, down, right, row_entry, column_entry, step = sources[lines.view].T
    one, by_row = torch.ones_like(step), (lines.kind == ROW)[:, None]
    records = torch.where(
        by_row,
        torch.stack([what, start, columns, down, right, row_entry, one, column_entry, step], 1),
        torch.stack([what, start, rows, right, down, column_entry, step, row_entry, one], 1),
    )
    length = records[:, 2]
    tall = ((length > 1) & (records[:, 4] > 1)).long()
    longest = [_largest(length[tall == k]) for k in (0, 1)]
    alone = max(longest) <= sizes.alone and not longest[1]
    at_once = [min(max(_power_of_2(k), 16), sizes.line) for k in longest]
    V = 1 if alone else min(sizes.variables, max(sizes.area // max(at_once), 1))
    programs = -(-len(variables) // V)
    padded = torch.full((programs * V,), n)
    padded[: len(variables)] = variables
    place = torch.zeros(n + 1, dtype=torch.int64)
    place[variables] = torch.arange(len(variables))
    program, lane = place[lines.variable] // V, place[lines.variable] % V
    # lines of one kind in one view make one job, with at most one line per variable
    alike = torch.stack([program, tall, lines.view, lines.kind], 1)
    _, same = torch.cat([alike, lane[:, None]], 1).unique(dim=0, return_inverse=True)
    key, job = torch.cat([alike, _occurrence(same)[:, None]], 1).unique(dim=0, return_inverse=True)
    number = _occurrence(key[:, :2].unique(dim=0, return_inverse=True)[1])  # of a job in its program, flat or tall
    most = [_largest(number[key[:, 1] == k] + 1) for k in (0, 1)]
    area = 2 * sizes.alone if alone else sizes.area
    room = [max(area // (V * line), 1) for line in at_once]
    J = [min(_power_of_2(k), j) if k else 0 for k, j in zip(most, room, strict=True)]
    G = max((-(-k // j) for k, j in zip(most, J, strict=True) if j), default=1)
    each = torch.tensor(J)[key[:, 1]]
    spot = (key[:, 0] * G + number // each) * sum(J) + number % each + J[0] * key[:, 1]
    jobs = torch.zeros(programs * G * sum(J), 9, dtype=torch.int64)
    positions = torch.full((len(jobs), V), -1)
    pulls = torch.zeros(len(jobs), V, dtype=torch.float64)
    jobs[spot[job]] = records
    positions[spot[job], lane] = lines.position
    pulls[spot[job], lane] = lines.pull
    elements = V * sum(j * line for j, line in zip(J, at_once, strict=True))
    return BlockTables(
        variables=padded.view(programs, V).to(torch.int32),
        jobs=jobs.view(programs, G, sum(J), 9).to(torch.int32),
        positions=positions.view(programs, G, sum(J), V).to(torch.int32),
        pulls=pulls.view(programs, G, sum(J), V),
        flat=(J[0], at_once[0]),
        tall=(J[1], at_once[1]),
        warps=_power_of_2(elements // 512) if alone else min(max(_power_of_2(elements // 1024), 4), 16),
        pieces=max(1, *(-(-k // line) for k, line in zip(longest, at_once, strict=True))),
        raw=bool((what >= 0).any()),
        kept=bool((what < 0).any()),
        coupled=coupled and len(key) > 0,
        cancels=bool(cancelling[lines.view].any()),
    )


def _largest(values: Tensor) -> int:
    return int(values.max()) if len(values) else 0


def _power_of_2(number: int) -> int:
    """The least that is not smaller."""
    return 1 << max(number - 1, 0).bit_length()


def _occurrence(values: Tensor) -> Tensor:
    """How many times each value came before."""
    order = torch.argsort(values, stable=True)
    lengths = torch.bincount(values)
    first = lengths.cumsum(0) - lengths
    seen = torch.empty_like(values)
    seen[order] = torch.arange(len(values)) - first[values[order]]
    return seen
