"""What a fused ENorm step has to do, as tables: made once, on the host, from the symmetry and the tensors' strides.

Everything is told in terms of **slabs**. A slab is a stretch of a parameter's memory seen as rows × columns, columns
innermost, such that the factor of an element is that of its row times that of its column. A linear layer is one slab,
a convolution too, contiguous (columns are input channel × kernel) or channels last (kernel × input channel); a grouped
one is a slab per group; a gain, a bias or a depthwise kernel is a slab of one row. So every pass over the weights runs
through memory in order, whatever the layout.

- **Entries**: all rows and columns of all slabs, with the one or two scale variables each depends on.
- **Lines**: where a variable occurs: rows of slabs, and columns, those with the same scales (the k² of an input
  channel) taken as one. The mass Σ|w|^p on a line pulls the variable up or down (stock2019, eq. 5).
- A cycle starts at s = 0. A line whose other scales come later in the cycle is a plain sum of |w|^p: all of these are
  read in one pass over **tiles** of the weights. The others are weighted by scales of earlier blocks and are read block
  by block, by **programs** that take a few variables each: from the weights themselves, or, where columns are taken
  together, from a small **matrix** of sums that the tiles leave (rows × distinct columns).
- **Chunks**: all memory that gets a factor, in pieces.

>>> plan = make_plan(anatomy(terms, tensors, num_scales, birth, counted, p=2.0, c=1.2))
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...criteria.norm import Side
from ...symmetry import ScaledParameter, Term

ROW, COLUMN = 0, 1


class InexpressibleError(ValueError):
    """Some parameter's memory is not made of slabs; the message says which and why."""


@dataclass(frozen=True)
class Tiles:
    """Sizes of the pieces that programs work on. The defaults suit a large GPU; small ones make small nets a test."""

    rows: int = 16  # a tile of the pass that sums: rows × columns at a time,
    columns: int = 128
    filters: int = 2  # or, where neighbours are taken together, rows × channels × elements of a kernel,
    channels: int = 64
    kernel: int = 16
    share: int = 8192  # at least so many elements per program,
    shares: int = 2048  # and about so many programs if there is enough to do
    alone: int = 1024  # a variable with lines no longer than this has a program to itself, a warp or two;
    variables: int = 8  # else so many share one, and what they read of scales,
    line: int = 2048  # so many elements of their lines at a time,
    area: int = 8192  # and so many of several lines of several variables
    chunk: int = 4096  # elements that one program rescales
    flat: int = 65536  # largest parameter that may be laid out as one row although its columns have no scales
    narrow: int = 64  # ... which is done for rows shorter than this
    wide: int = 32768  # columns that a slab may have although a cut further in would leave fewer


DEFAULT = Tiles()


# -- tensors -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Slot:
    """Tensors that follow the parameters, one for each (or None): multiplied by their factors to a power."""

    tensors: Sequence[Tensor | None]
    power: float
    gained: bool = False  # gathers gradients that a safe bias's gain multiplies


class Followers:
    """Knows how parameters lie in memory, and whether what follows them lies the same way."""

    dtypes: Collection[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.device = parameters[0].device
        self._layout = [_layout(t) for t in parameters]

    @property
    def count(self) -> int:
        """How many parameters there are."""
        return len(self._layout)

    @property
    def repeats(self) -> bool:
        """Whether a step on the same tensors needs no new `bind`."""
        return False

    def fits(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the parameters still lie in memory as they did."""
        return all(self._fits(i, q) for i, q in enumerate(parameters))

    def fitting(self, tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
        """Of tensors that follow the parameters, those that lie in memory as their parameters do; None for others."""
        return [t if t is not None and self._fits(i, t) else None for i, t in enumerate(tensors)]

    def _fits(self, number: int, tensor: Tensor) -> bool:
        return (
            type(tensor) in (Tensor, torch.nn.Parameter)
            and tensor.layout == torch.strided
            and tensor.device == self.device
            and tensor.dtype in self.dtypes
            and _layout(tensor) == self._layout[number]
        )


def _layout(tensor: Tensor) -> tuple[torch.Size, list[int]]:
    """Shape and strides. (The stride of an axis of length 1 means nothing: a 1 × 1 kernel is in either format.)"""
    return tensor.shape, [step for step, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill a stretch of memory, in any order of its axes."""
    step = 1
    for a in reversed(_axes(tensor)):
        if tensor.stride(a) != step:
            return False
        step *= tensor.shape[a]
    return True


def _axes(tensor: Tensor) -> list[int]:
    """The axes of more than one element, the outermost in memory first."""
    strides = tensor.stride()
    return sorted((a for a in range(tensor.ndim) if tensor.shape[a] > 1), key=lambda a: -strides[a])


# -- slabs and entries -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Slab:
    """Memory of one parameter as rows × columns; `index` and `exponent` are those of its entries, L × 2."""

    parameter: int
    offset: int  # of its first element from the parameter's, in elements
    row_index: Tensor
    row_exponent: Tensor
    column_index: Tensor
    column_exponent: Tensor
    column_gain: Tensor | None = None  # of a safe bias: the number of its gain

    @property
    def rows(self) -> int:
        return len(self.row_index)

    @property
    def columns(self) -> int:
        return len(self.column_index)

    @cached_property
    def repeats(self) -> Repeats:
        """How columns with the same scales lie."""
        return Repeats(*Side(self.column_index.T, self.column_exponent.T).repeats())

    @property
    def distinct(self) -> tuple[Tensor, Tensor]:
        """Variables and exponents of its columns, of those taken together once."""
        _, columns, inner = self.repeats
        return self.column_index[::inner][:columns], self.column_exponent[::inner][:columns]


class Repeats(NamedTuple):
    """Columns as outer × distinct × inner: inner > 1 for a contiguous convolution, outer > 1 for channels last."""

    outer: int
    columns: int
    inner: int

    @property
    def times(self) -> int:
        return self.outer * self.inner


@dataclass(frozen=True, eq=False)
class _Part:
    """One of a parameter's terms on the axes of its memory: of length one where it does not depend on the axis."""

    index: Tensor
    exponent: Tensor

    @property
    def axes(self) -> list[int]:
        return [a for a, n in enumerate(self.index.shape) if n > 1]

    def within(self, first: int, last: int) -> bool:
        return all(first <= a < last for a in self.axes)

    def flat(self, shape: Sequence[int], first: int, last: int) -> tuple[Tensor, Tensor]:
        full = [n if first <= a < last else 1 for a, n in enumerate(shape)]
        return self.index.expand(full).reshape(-1), self.exponent.expand(full).reshape(-1)

    def narrowed(self, start: int, length: int) -> _Part:
        """A run along the first axis in which nothing changes, as one that does not depend on that axis."""
        if self.index.shape[0] == 1:
            return self
        index, exponent = self.index[start : start + length], self.exponent[start : start + length]
        same = bool((index == index[:1]).all()) and bool((exponent == exponent[:1]).all())
        return _Part(index[:1], exponent[:1]) if same else _Part(index, exponent)

    def run_length(self) -> int:
        """The length of runs along the first axis in which nothing changes."""
        changes = (self.index[1:] != self.index[:-1]) | (self.exponent[1:] != self.exponent[:-1])
        edges = [0, *(changes.flatten(1).any(1).nonzero().view(-1) + 1).tolist(), len(self.index)]
        return gcd(*(b - a for a, b in pairwise(edges)))


def slabs_of(w: ScaledParameter, number: int, tensor: Tensor, n: int, tiles: Tiles, gain: int = -1) -> Iterator[Slab]:
    """The slabs of one parameter; InexpressibleError if there are none. `gain` numbers a safe bias's first gain."""
    shape, strides = tensor.shape, tensor.stride()
    if not tensor.numel():
        raise InexpressibleError(f"{w.name} is empty")
    if tensor.numel() >= 2**31:
        raise InexpressibleError(f"{w.name} has {tensor.numel():,} elements, 2³¹ or more")
    if not is_dense(tensor):
        raise InexpressibleError(f"the memory of {w.name} is not dense: strides {strides} for {tuple(shape)}")
    axes = _axes(tensor)
    parts = [_part(t, axes, sign) for t, sign in ((w.out, 1.0), (w.into, -1.0)) if t is not None]
    lengths = [shape[a] for a in axes]
    if w.fan_in is None or gain < 0:
        yield from _slabs(w.name, number, parts, lengths, 0, n, tiles)
        return
    if tensor.numel() > tiles.flat:
        raise InexpressibleError(f"{w.name} is a safe bias of more than {tiles.flat} numbers")
    numbers = torch.arange(w.fan_in.index[..., 0].numel()).view(w.fan_in.index.shape[:-1]) + gain
    gains = _part(Term(numbers, torch.zeros_like(numbers, dtype=torch.float64)), axes, 1.0)
    yield replace(_slab(number, parts, lengths, 0, 0, n), column_gain=gains.flat(lengths, 0, len(lengths))[0])


def _part(term: Term, axes: list[int], sign: float) -> _Part:
    rest = [a for a in range(term.index.ndim) if a not in axes]
    shape = [term.index.shape[a] for a in axes]
    index, exponent = (x.cpu().permute([*axes, *rest]).reshape(shape) for x in (term.index, term.exponent))
    return _Part(index, exponent * sign)


def _slabs(
    name: str, number: int, parts: list[_Part], shape: list[int], offset: int, n: int, tiles: Tiles
) -> Iterator[Slab]:
    """Cut the axes into rows and columns so that each part depends on one of them, or the first axis into runs."""
    dims, numel = len(shape), prod(shape)
    cuts = [t for t in range(1, dims) if all(part.within(0, t) or part.within(t, dims) for part in parts)]
    cuts = [t for t in cuts if not all(part.within(0, t) for part in parts)] or cuts  # both sides, if it can be
    if cuts:
        # few rows, so that a variable has few lines, unless that makes a long table of columns
        fewest = [t for t in cuts if prod(shape[t:]) <= tiles.wide][:1]
        cut = fewest[0] if fewest else min(cuts, key=lambda t: prod(shape[:t]) + prod(shape[t:]))
        # a depthwise kernel, rows of a few elements without scales of their own, is better one long row
        bare = all(part.within(0, cut) for part in parts) and prod(shape[cut:]) < tiles.narrow
        yield _slab(number, parts, shape, 0 if bare and numel <= tiles.flat else cut, offset, n)
        return
    # a grouped convolution: the columns change from one run of rows to the next
    runs = max((part.run_length() for part in parts if not part.within(0, 1) and 0 in part.axes), default=1)
    if runs > 1:
        for start in range(0, shape[0], runs):
            narrowed = [part.narrowed(start, runs) for part in parts]
            inner = offset + start * numel // shape[0]
            yield from _slabs(name, number, narrowed, [runs, *shape[1:]], inner, n, tiles)
        return
    if numel > tiles.flat and dims > 1:
        raise InexpressibleError(f"the scales of {name} do not separate into rows and columns of its memory")
    yield _slab(number, parts, shape, 0, offset, n)


def _slab(number: int, parts: list[_Part], shape: list[int], cut: int, offset: int, n: int) -> Slab:
    sides: list[list[tuple[Tensor, Tensor]]] = [[], []]
    for part in parts:
        # with a cut at 0 there is one row; what depends on nothing is told once, by the columns
        of_rows = cut > 0 and bool(part.axes) and part.within(0, cut)
        sides[not of_rows].append(part.flat(shape, 0, cut) if of_rows else part.flat(shape, cut, len(shape)))
    entries = [_entries(terms, prod(s), n) for terms, s in zip(sides, (shape[:cut], shape[cut:]), strict=True)]
    return Slab(number, offset, *entries[0], *entries[1])


def _entries(terms: list[tuple[Tensor, Tensor]], length: int, n: int) -> tuple[Tensor, Tensor]:
    index, exponent = torch.full((length, 2), n), torch.zeros(length, 2, dtype=torch.float64)
    for column, (variables, powers) in enumerate(terms):
        index[:, column] = variables
        exponent[:, column] = torch.where(variables < n, powers, 0.0)
    return index, exponent


# -- lines -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Lines:
    """Places where variables occur, one per element of these vectors."""

    variable: Tensor
    slab: Tensor
    kind: Tensor  # ROW or COLUMN
    position: Tensor  # the row, or the column among distinct ones
    pull: Tensor  # exponent times depth weight: what a unit of mass on the line does to F's slope
    weighted: Tensor  # in the first cycle some other scale on the line has moved by the time it is needed

    def __getitem__(self, chosen: Tensor) -> Lines:
        return Lines(**{name: values[chosen] for name, values in self.__dict__.items()})

    @staticmethod
    def joined(parts: Sequence[Lines]) -> Lines:
        return Lines(**{name: torch.cat([getattr(part, name) for part in parts]) for name in parts[0].__dict__})


def lines_of(slab: Slab, number: int, weight: float, rank: Tensor, never: int) -> Iterator[Lines]:
    """The lines of one slab. `rank` is the place of each variable's block in the cycle, `never` for what stays."""
    n = len(rank) - 1
    cancels = may_cancel(slab, n)
    sides = ((slab.row_index, slab.row_exponent, rank[slab.column_index].min()),
             (*slab.distinct, rank[slab.row_index].min()))  # fmt: skip
    for kind, (index, exponent, across) in enumerate(sides):
        # one variable twice in an entry, to powers that cancel, has no effect on it
        useless = (index[:, 0] == index[:, 1]) & (exponent.sum(1).abs() < 1e-9)
        for term in (0, 1):
            variable, partner = index[:, term], index[:, 1 - term]
            at = ((variable < n) & (rank[variable] < never) & ~useless).nonzero().view(-1)
            if not len(at):
                continue
            v = variable[at]
            yield Lines(
                variable=v,
                slab=torch.full_like(v, number),
                kind=torch.full_like(v, kind),
                position=at,
                pull=exponent[at, term] * weight,
                weighted=(across < rank[v]) | (rank[partner[at]] < rank[v]) | cancels,
            )


def may_cancel(slab: Slab, n: int) -> bool:
    """Whether an element may have one variable in its row and its column (the diagonal in x + conv(x))."""
    rows, columns = slab.row_index[slab.row_index < n], slab.column_index[slab.column_index < n]
    return bool(torch.isin(rows.unique(), columns).any())


# -- a net in slabs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Anatomy:
    """All slabs of a net, and the order in which a cycle goes through its variables."""

    n: int  # scale variables; index n stands for none
    slabs: list[Slab]
    weight: list[float]  # of each slab: c^(p·depth), or 0 where its parameter does not count in the norm
    rank: Tensor  # of each variable: the place of its block in a cycle,
    never: int  # or this, if it stays where it is
    coupled: set[int]  # blocks with variables on both sides of one parameter
    reach: Tensor  # per variable, see `solver.reach`
    fan_ins: list[Term]  # of safe biases, in order
    p: float
    tiles: Tiles

    @cached_property
    def index(self) -> Tensor:
        """2 × entries: the variables of each row and column of all slabs."""
        return torch.cat([x for s in self.slabs for x in (s.row_index, s.column_index)]).T.contiguous()

    @cached_property
    def exponent(self) -> Tensor:
        return torch.cat([x for s in self.slabs for x in (s.row_exponent, s.column_exponent)]).T.contiguous()

    @cached_property
    def gain(self) -> Tensor:
        """Per entry: which gain of a safe bias multiplies its gradient, -1 for none."""
        none = [torch.full((s.rows + s.columns,), -1) for s in self.slabs]
        for entries, slab in zip(none, self.slabs, strict=True):
            if slab.column_gain is not None:
                entries[slab.rows :] = slab.column_gain
        return torch.cat(none)

    def table(self) -> Tensor:
        """Slabs × 6: parameter, offset, rows, columns, first row entry, first column entry."""
        entry = [0, *accumulate(length for slab in self.slabs for length in (slab.rows, slab.columns))]
        return torch.tensor([(slab.parameter, slab.offset, slab.rows, slab.columns, entry[2 * i], entry[2 * i + 1])
                             for i, slab in enumerate(self.slabs)])  # fmt: skip

    def lines(self) -> Lines:
        return Lines.joined([
            lines
            for i, (slab, weight) in enumerate(zip(self.slabs, self.weight, strict=True))
            if weight
            for lines in lines_of(slab, i, weight, self.rank, self.never)
        ])  # fmt: skip


def anatomy(
    terms: Sequence[ScaledParameter],
    tensors: Sequence[Tensor],
    n: int,
    birth: Tensor,
    counted: Callable[[ScaledParameter], bool],
    p: float,
    c: float,
    *,
    fixed: Tensor | None = None,
    gains: bool = False,
    tiles: Tiles | None = None,
) -> Anatomy:
    """The slabs of parameters with these terms, as their tensors lie in memory now; InexpressibleError if that fails.

    Args:
        counted: whether a parameter counts in the norm.
        fixed: variables that stay where they are.
        gains: whether biases with a known fan-in are safe biases.
    """
    sizes = tiles or DEFAULT
    scored = [w for w in terms if w.moves and counted(w)]
    weights = {id(w): c ** (p * w.depth) for w in scored}
    rank, never = _ranks(scored, n, birth, fixed)
    if not bool((rank < never).any()):
        raise InexpressibleError("no parameter that counts in the norm has a scale that may move")
    slabs: list[Slab] = []
    fan_ins: list[Term] = []
    for q, (w, tensor) in enumerate(zip(terms, tensors, strict=True)):
        if gains and w.fan_in is not None:
            slabs += slabs_of(w, q, tensor, n, sizes, sum(t.index[..., 0].numel() for t in fan_ins))
            fan_ins.append(w.fan_in)
        else:
            slabs += slabs_of(w, q, tensor, n, sizes)
    return Anatomy(
        n=n,
        slabs=slabs,
        weight=[weights.get(id(terms[slab.parameter]), 0.0) for slab in slabs],
        rank=rank,
        never=never,
        coupled=_coupled(scored, *_ranks(scored, n, birth, None)),
        reach=_reach(scored, n),
        fan_ins=fan_ins,
        p=p,
        tiles=sizes,
    )


def _ranks(terms: list[ScaledParameter], n: int, birth: Tensor, fixed: Tensor | None) -> tuple[Tensor, int]:
    """The place of each variable's block in the cycle; `never` for what is fixed, does not count, or is no variable."""
    occurs = torch.zeros(n + 1, dtype=torch.bool)
    for w in terms:
        for term in (w.out, w.into):
            if term is not None:
                occurs[term.index.reshape(-1).cpu()] = True
    if fixed is not None:
        occurs[:n] &= ~fixed.cpu()[:n]
    occurs[n] = False
    blocks, place = torch.cat([birth.cpu(), birth.new_zeros(1).cpu()]).unique(return_inverse=True)
    never = len(blocks)
    return torch.where(occurs, place, never), never


def _reach(terms: list[ScaledParameter], n: int) -> Tensor:
    """Per variable, its largest positive plus its largest negative exponent (`solver.reach`), cancelled ones too."""
    low, high = torch.zeros(2, n + 1, dtype=torch.float64)
    for w in terms:
        for term, sign in ((w.out, 1.0), (w.into, -1.0)):
            if term is not None:
                index, exponent = term.index.reshape(-1).cpu(), term.exponent.reshape(-1).cpu() * sign
                high.scatter_reduce_(0, index, exponent, "amax")
                low.scatter_reduce_(0, index, exponent, "amin")
    return (high - low).clamp_min(1e-12)


def _coupled(terms: list[ScaledParameter], rank: Tensor, never: int) -> set[int]:
    """Blocks with variables on both sides of one parameter."""
    found: set[int] = set()
    for w in terms:
        if w.out is not None and w.into is not None:
            out, into = (rank[t.index.reshape(-1).cpu()].unique() for t in (w.out, w.into))
            found |= set(out[torch.isin(out, into)].tolist())
    return found - {never}


# -- the plan ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Block:
    """Programs that update the variables of one block, V each, by lines in J jobs at a time, G times.

    A job is one line per variable, all alike. Lines that lie in memory in order ("flat") come first, then those that
    stand upright ("tall"). Everything a program needs is at a place that follows from its number.
    """

    variables: Tensor  # programs × V; n where there is none
    jobs: Tensor  # programs × G × J × 9: what, start, length, step to the next variable and to the next element, and
    # first entry and step of their own scales and of those across. "What" is a parameter, or -1 for a matrix of sums
    positions: Tensor  # programs × G × J × V: row or column of each variable's line; -1 where it has none
    pulls: Tensor  # programs × G × J × V
    flat: tuple[int, int]  # flat jobs at a time, elements of their lines at a time,
    tall: tuple[int, int]  # and of tall ones
    warps: int
    pieces: int  # in which lines are taken
    raw: bool  # some lines are read from weights,
    kept: bool  # some from matrices
    coupled: bool  # a program reads scales that another one of this block writes
    cancels: bool  # some element has to be left out, see `may_cancel`

    def to(self, device: torch.device, dtype: torch.dtype) -> Block:
        return Block(**_moved(self.__dict__, device, dtype))


@dataclass(frozen=True, eq=False)
class Plan:
    """All tables of a fused step. Integers are int32: no parameter may have 2³¹ elements."""

    n: int  # scale variables; index n stands for none
    rates: Tensor  # per variable, of log(R / L): see `_rates`
    # entries: rows and columns of all slabs
    index: Tensor  # 2 × entries
    exponent: Tensor
    gain: Tensor  # per entry: which gain of a safe bias, -1 for none
    # memory
    tiles: Tensor  # × 15, see `_tiles`
    rest: Tensor  # tiles of all other memory, which leave nothing: for a pass that changes weights as it reads them
    nested: bool  # some take neighbouring columns together
    partials: int  # sums that the tiles leave,
    matrices: int  # and elements of the matrices
    chunks: Tensor  # × 7: parameter, first element, length, columns, column of the first, its row entry, column entry
    # what each variable takes from the partial sums
    starts: Tensor
    items: Tensor
    pulls: Tensor
    # the cycle: first from s = 0, and from anywhere
    first: tuple[Block, ...]
    later: tuple[Block, ...]
    # safe biases
    gain_starts: Tensor
    gain_index: Tensor
    gain_exponent: Tensor
    sizes: Tiles

    def to(self, device: torch.device, dtype: torch.dtype) -> Plan:
        """On a device, with real numbers of this dtype."""
        blocks = {k: tuple(b.to(device, dtype) for b in getattr(self, k)) for k in ("first", "later")}
        return Plan(**{**_moved(self.__dict__, device, dtype), **blocks})


def _moved(fields: dict[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {
        k: v.to(device, dtype if v.is_floating_point() else v.dtype) if isinstance(v, Tensor) else v
        for k, v in fields.items()
    }


def make_plan(net: Anatomy, cycles: int = 1) -> Plan:
    """The tables; those of cycles that do not start at 0 only where there are more than one."""
    n, sizes, table = net.n, net.tiles, net.table()
    lines = net.lines()
    plain, weighted = lines[~lines.weighted], lines[lines.weighted]
    readings = _readings(net.slabs, plain, lines if cycles > 1 else weighted, sizes)
    tile_table = _tiles(net.slabs, readings, table)
    sources = _sources(readings, table)
    starts, items, pulls = _items(plain, readings, n)
    return Plan(
        n=n,
        rates=_rates(net),
        index=net.index.to(torch.int32),
        exponent=net.exponent,
        gain=net.gain.to(torch.int32),
        tiles=tile_table.to(torch.int32),
        rest=_rest(net.slabs, readings, table, sizes).to(torch.int32),
        nested=bool((tile_table[:, 5] > 1).any()),
        partials=max((reading.partials_end for reading in readings), default=0),
        matrices=max((reading.matrix_end for reading in readings), default=0),
        chunks=_chunks(net.slabs, table, sizes).to(torch.int32),
        starts=starts,
        items=items,
        pulls=pulls,
        first=tuple(_blocks(weighted, net, sources)),
        later=tuple(_blocks(lines, net, sources)) if cycles > 1 else (),
        **_gain_tables(net.fan_ins),
        sizes=sizes,
    )


def _rates(net: Anatomy) -> Tensor:
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


def _chunks(slabs: list[Slab], table: Tensor, sizes: Tiles) -> Tensor:
    rows = []
    for slab, (_, _, _, _, row_entry, column_entry) in zip(slabs, table.tolist(), strict=True):
        start = torch.arange(0, slab.rows * slab.columns, sizes.chunk)
        length = (slab.rows * slab.columns - start).clamp_max(sizes.chunk)
        row, column = start // slab.columns, start % slab.columns
        same = [torch.full_like(start, x) for x in (slab.parameter, slab.columns, column_entry)]
        rows.append(torch.stack([same[0], slab.offset + start, length, same[1], column, row_entry + row, same[2]], 1))
    return torch.cat(rows)


# -- plain sums, for all blocks at once --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Reading:
    """How tiles read one slab, and where they leave what they find; -1 for what is not wanted."""

    slab: int
    rows: int
    repeats: Repeats
    height: int  # of a program's share, in rows
    width: int  # in columns
    column_sums: int
    row_sums: int
    matrix: int
    turned: bool  # the matrix is stored by columns
    partials_end: int  # sums left by this slab and those before it,
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


def _readings(slabs: list[Slab], plain: Lines, weighed: Lines, sizes: Tiles) -> list[Reading]:
    """All slabs that have plain lines, or weighted ones on columns that are taken together."""
    wanted = {(number, kind) for number, kind in torch.stack([plain.slab, plain.kind], 1).unique(dim=0).tolist()}
    kept = {number for number in weighed.slab.unique().tolist() if slabs[number].repeats.times > 1}
    upright = kept - set(weighed.slab[weighed.kind == ROW].tolist())  # only columns are read of these
    read = sorted({number for number, _ in wanted} | kept)
    share = max(sizes.share, sum(slabs[number].rows * slabs[number].columns for number in read) // sizes.shares)
    readings: list[Reading] = []
    sums = elements = 0
    for number in read:
        slab = slabs[number]
        together = number in kept or (number, COLUMN) in wanted  # rows alone are best read as they lie
        repeats = slab.repeats if together else Repeats(1, slab.columns, 1)
        tile = (sizes.filters, sizes.channels) if repeats.inner > 1 else (sizes.rows, sizes.columns)
        height = -(-share // (tile[1] * repeats.times) // tile[0]) * tile[0]  # in whole tiles
        height, turned = max(height, tile[0]), number in upright
        reading = Reading(number, slab.rows, repeats, height, tile[1], -1, -1, -1, turned, sums, elements)
        if (number, COLUMN) in wanted:
            reading, sums = replace(reading, column_sums=sums), sums + reading.down * repeats.columns
        if (number, ROW) in wanted:
            reading, sums = replace(reading, row_sums=sums), sums + reading.across * slab.rows
        if number in kept:
            reading, elements = replace(reading, matrix=elements), elements + slab.rows * repeats.columns
        readings.append(replace(reading, partials_end=sums, matrix_end=elements))
    return readings


def _tiles(slabs: list[Slab], readings: list[Reading], table: Tensor) -> Tensor:
    """× 15: parameter, first element, rows, columns, elements from row to row; how many neighbours, and how many
    copies at which distance, are taken together; where column sums go, row sums and how far apart they are; where the
    matrix goes, and its steps; the entry of the first element in a safe bias, -1 in others."""
    tiles = [torch.zeros(0, 15, dtype=torch.int64)]
    for reading in readings:
        parameter, offset, rows, pitch, _, column_entry = table[reading.slab].tolist()
        outer, columns, inner = reading.repeats
        r, k = torch.meshgrid(torch.arange(reading.down), torch.arange(reading.across), indexing="ij")
        r, k = r.reshape(-1), k.reshape(-1)
        top, left = r * reading.height, k * reading.width
        nowhere, steps = torch.full_like(r, -1), reading.steps
        tiles.append(torch.stack([
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
            nowhere if slabs[reading.slab].column_gain is None else column_entry + left * inner,
        ], 1))  # fmt: skip
    return torch.cat(tiles)


def _rest(slabs: list[Slab], readings: list[Reading], table: Tensor, sizes: Tiles) -> Tensor:
    """Tiles of slabs that nobody reads."""
    read = {reading.slab for reading in readings}
    tiles = [torch.zeros(0, 15, dtype=torch.int64)]
    for number, (slab, (parameter, offset, *_, column_entry)) in enumerate(zip(slabs, table.tolist(), strict=True)):
        if number not in read:
            entry = -1 if slab.column_gain is None else column_entry
            tiles.append(stretch(parameter, offset, slab.rows * slab.columns, sizes, entry))
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


def _items(lines: Lines, readings: list[Reading], n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each variable, the partial sums that its plain lines consist of, and what they do to it."""
    size = max((reading.slab for reading in readings), default=-1) + 1
    # of each slab and kind: where its sums begin; from line to line, how many stretches, from one to the next
    of = torch.zeros(size, 2, 4, dtype=torch.int64)
    for reading in readings:
        columns = reading.repeats.columns
        of[reading.slab, ROW] = torch.tensor([reading.row_sums, reading.across, reading.across, 1])
        of[reading.slab, COLUMN] = torch.tensor([reading.column_sums, 1, reading.down, columns])
    begin, apart, stretches, step = of[lines.slab, lines.kind].T
    line = torch.repeat_interleave(torch.arange(len(stretches)), stretches)
    stretch = torch.arange(len(line)) - (stretches.cumsum(0) - stretches)[line]
    item = (begin + lines.position * apart)[line] + stretch * step[line]
    owner = lines.variable[line]
    order = torch.argsort(owner, stable=True)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(owner, minlength=n + 1).cumsum(0)])
    return starts.to(torch.int32), item[order].to(torch.int32), lines.pull[line][order]


# -- weighted sums, block by block -------------------------------------------------------------------------------------


def _sources(readings: list[Reading], table: Tensor) -> Tensor:
    """Slabs × 9: where weighted lines are read: parameter or -1 for a matrix, start, rows, columns, elements from row
    to row and from column to column; first row entry, first column entry and entries from column to column."""
    parameter, offset, rows, columns, row_entry, column_entry = table.T
    one = torch.ones_like(rows)
    sources = torch.stack([parameter, offset, rows, columns, columns, one, row_entry, column_entry, one], 1)
    for reading in readings:
        if reading.matrix >= 0:
            shape = [reading.rows, reading.repeats.columns, *reading.steps]
            sources[reading.slab, :6] = torch.tensor([-1, reading.matrix, *shape])
            sources[reading.slab, 8] = reading.repeats.inner
    return sources


def _blocks(lines: Lines, net: Anatomy, sources: Tensor) -> Iterator[Block]:
    rank, never = net.rank, net.never
    cancelling = torch.tensor([may_cancel(slab, net.n) for slab in net.slabs])
    order = torch.argsort(rank[lines.variable], stable=True)
    lines = lines[order]
    bounds = torch.searchsorted(rank[lines.variable].contiguous(), torch.arange(never + 1))
    for name in range(never):
        variables = (rank == name).nonzero().view(-1)
        if len(variables):
            chosen = lines[torch.arange(int(bounds[name]), int(bounds[name + 1]))]
            yield _block(variables, chosen, net.n, sources, name in net.coupled, cancelling, net.tiles)


def _block(
    variables: Tensor, lines: Lines, n: int, sources: Tensor, coupled: bool, cancelling: Tensor, sizes: Tiles
) -> Block:
    # what, start, length, steps to the next variable and the next element, own entry and step, those across
    what, start, rows, columns, down, right, row_entry, column_entry, step = sources[lines.slab].T
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
    # lines of one kind in one slab make one job, with at most one line per variable
    alike = torch.stack([program, tall, lines.slab, lines.kind], 1)
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
    return Block(
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
        cancels=bool(cancelling[lines.slab].any()),
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
