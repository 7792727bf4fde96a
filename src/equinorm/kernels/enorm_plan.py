"""What a fused ENorm step has to do, as tables: made once, on the host, from the symmetry and the tensors' strides.

Everything is told in terms of **slabs**. A slab is a stretch of a parameter's memory seen as rows × columns, columns
innermost, such that the factor of an element is that of its row times that of its column. A linear layer is one slab,
a convolution too, contiguous (columns are input channel × kernel) or channels last (kernel × input channel); a grouped
one is a slab per group; a gain, a bias or a depthwise kernel is a slab of one row. So every pass over the weights runs
through memory in order, whatever the layout.

- **Entries**: all rows and columns of all slabs, with the one or two scale variables each depends on.
- **Lines**: where a variable occurs. Its *row* lines are rows of slabs; its *column* lines are columns, taken together
  where they are evenly spaced (the k² columns of an input channel). The mass Σ|w|^p on a line pulls the variable up or
  down (stock2019, eq. 5).
- A cycle starts at s = 0. A line whose other scales come later in the cycle is a plain sum of |w|^p: all of these are
  read in one pass over **tiles** of the weights. The others are weighted by scales of earlier blocks and are read block
  by block, by **programs** that take a few variables each.
- **Chunks**: all memory that gets a factor, in pieces.

>>> plan = make_plan(anatomy(terms, tensors, num_scales, birth, counted, p=2.0, c=1.2))
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

from ..symmetry import ScaledParameter, Term

ROW, COLUMN = 0, 1


class InexpressibleError(ValueError):
    """Some parameter's memory is not made of slabs; the message says which and why."""


@dataclass(frozen=True)
class Tiles:
    """Sizes of the pieces that programs work on. The defaults suit a large GPU; small ones make small nets a test."""

    rows: int = 16  # a tile of the pass that sums: rows × columns at a time,
    columns: int = 256
    share: int = 16384  # at least so many elements per program,
    shares: int = 2048  # and about so many programs if there is enough to do
    variables: int = 4  # of a block, in one program: few, so that a block of 500 still fills the device,
    line: int = 2048  # and so many elements of their lines at a time
    chunk: int = 4096  # elements that one program rescales
    flat: int = 65536  # largest parameter that may be laid out as one row although its columns have no scales
    narrow: int = 64  # ... which is done for rows shorter than this


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
        self._layout = [(t.shape, t.stride()) for t in parameters]

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
            and (tensor.shape, tensor.stride()) == self._layout[number]
        )


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
        """The common length of runs along the first axis in which nothing changes."""
        changes = (self.index[1:] != self.index[:-1]) | (self.exponent[1:] != self.exponent[:-1])
        edges = [0, *(changes.flatten(1).any(1).nonzero().view(-1) + 1).tolist(), len(self.index)]
        lengths = {b - a for a, b in pairwise(edges)}
        return lengths.pop() if len(lengths) == 1 else 1


def slabs_of(w: ScaledParameter, number: int, tensor: Tensor, n: int, tiles: Tiles, gain: int = -1) -> Iterator[Slab]:
    """The slabs of one parameter; InexpressibleError if there are none. `gain` numbers a safe bias's first gain."""
    shape, strides = tensor.shape, tensor.stride()
    if not tensor.numel():
        raise InexpressibleError(f"{w.name} is empty")
    if tensor.numel() >= 2**31:
        raise InexpressibleError(f"{w.name} has {tensor.numel():,} elements, 2³¹ or more")
    axes = sorted((a for a in range(tensor.ndim) if shape[a] > 1), key=lambda a: -strides[a])
    step = 1
    for a in reversed(axes):
        if strides[a] != step:
            raise InexpressibleError(f"the memory of {w.name} is not dense: strides {strides} for {tuple(shape)}")
        step *= shape[a]
    parts = [_part(t, axes, sign) for t, sign in ((w.out, 1.0), (w.into, -1.0)) if t is not None]
    lengths = [shape[a] for a in axes]
    if w.fan_in is None or gain < 0:
        yield from _slabs(w.name, number, parts, lengths, 0, n, tiles)
        return
    if tensor.numel() > tiles.flat:
        raise InexpressibleError(f"{w.name} is a safe bias of more than {tiles.flat} numbers")
    numbers = torch.arange(w.fan_in.index[..., 0].numel()).view(w.fan_in.index.shape[:-1]) + gain
    gains = _part(Term(numbers, torch.zeros_like(numbers, dtype=torch.float64)), axes, 1.0)
    (slab,) = [_slab(number, parts, lengths, 0, 0, n)]
    yield Slab(**{**slab.__dict__, "column_gain": gains.flat(lengths, 0, len(lengths))[0]})


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
        cut = min(cuts, key=lambda t: prod(shape[:t]) + prod(shape[t:]))
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
    position: Tensor  # the row, or the first column
    count: Tensor  # columns taken together,
    step: Tensor  # and how far apart they are
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
             (slab.column_index, slab.column_exponent, rank[slab.row_index].min()))  # fmt: skip
    for kind, (index, exponent, across) in enumerate(sides):
        # one variable twice in an entry, to powers that cancel, has no effect on it
        useless = (index[:, 0] == index[:, 1]) & (exponent.sum(1).abs() < 1e-9)
        for term in (0, 1):
            variable, partner = index[:, term], index[:, 1 - term]
            at = ((variable < n) & (rank[variable] < never) & ~useless).nonzero().view(-1)
            if not len(at):
                continue
            if kind == ROW:
                position, count, step = at, torch.ones_like(at), torch.ones_like(at)
            else:
                key = torch.stack([variable, partner, *(x.view(torch.int64) for x in exponent.T.contiguous())], 1)[at]
                position, count, step = progressions(at, key.unique(dim=0, return_inverse=True)[1])
            v = variable[position]
            yield Lines(
                variable=v,
                slab=torch.full_like(v, number),
                kind=torch.full_like(v, kind),
                position=position,
                count=count,
                step=step,
                pull=exponent[position, term] * weight,
                weighted=(across < rank[v]) | (rank[partner[position]] < rank[v]) | cancels,
            )


def may_cancel(slab: Slab, n: int) -> bool:
    """Whether an element may have one variable in its row and its column (the diagonal in x + conv(x))."""
    rows, columns = slab.row_index[slab.row_index < n], slab.column_index[slab.column_index < n]
    return bool(torch.isin(rows.unique(), columns).any())


def progressions(at: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions by group as arithmetic progressions: first, count and step of each.

    >>> progressions(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 0, 1]))    # every second one
    """
    order = torch.argsort(group, stable=True)
    position, group = at[order], group[order]
    lengths = torch.bincount(group)
    first = lengths.cumsum(0) - lengths
    place = torch.arange(len(position)) - first[group]
    step = torch.where(lengths > 1, position[(first + 1).clamp_max(len(position) - 1)] - position[first], 1)
    off = position != position[first][group] + place * step[group]
    irregular = torch.zeros_like(lengths, dtype=torch.bool)
    irregular[group[off]] = True
    # a group that is not evenly spaced falls into runs of neighbours
    starts = (place == 0) | (irregular[group] & (position != torch.roll(position, 1) + 1))
    begins = starts.nonzero().view(-1)
    counts = torch.diff(begins, append=torch.tensor([len(position)]))
    owner = group[begins]
    return position[begins], counts, torch.where(irregular[owner], 1, step[owner])


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
    """Programs that update the variables of one block; V variables each."""

    variables: Tensor  # programs × V; n where there is none
    starts: Tensor  # programs + 1: which jobs are whose
    jobs: Tensor  # jobs × 9: parameter, offset, rows, columns, kind, count, step, first entry of its kind, of the other
    positions: Tensor  # jobs × V: row or first column of each variable's line; -1 where it has none
    pulls: Tensor  # jobs × V
    step: float  # 1, or 1/2 where two of the variables meet in one weight
    coupled: bool  # a program reads scales that another one of this block writes
    cancels: bool  # some element has to be left out, see `may_cancel`
    longest: int  # elements of the longest line

    def to(self, device: torch.device) -> Block:
        moved = {k: v.to(device) for k, v in self.__dict__.items() if isinstance(v, Tensor)}
        return Block(**{**self.__dict__, **moved})


@dataclass(frozen=True, eq=False)
class Plan:
    """All tables of a fused step. Integers are int32: no parameter may have 2³¹ elements."""

    n: int  # scale variables; index n stands for none
    reach: Tensor  # per variable, see `solver.reach`
    # entries: rows and columns of all slabs
    index: Tensor  # 2 × entries
    exponent: Tensor
    gain: Tensor  # per entry: which gain of a safe bias, -1 for none
    # memory
    tiles: Tensor  # × 8: parameter, first element, rows, width, pitch, column sums at, row sums at (-1: none), apart
    partials: int  # sums that the tiles leave
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

    def to(self, device: torch.device) -> Plan:
        moved = {k: v.to(device) for k, v in self.__dict__.items() if isinstance(v, Tensor)}
        blocks = {k: tuple(b.to(device) for b in getattr(self, k)) for k in ("first", "later")}
        return Plan(**{**self.__dict__, **moved, **blocks})


def make_plan(net: Anatomy, cycles: int = 1) -> Plan:
    """The tables; those of cycles that do not start at 0 only where there are more than one."""
    n, sizes, table = net.n, net.tiles, net.table()
    lines = net.lines()
    tile_table, partials, starts, items, pulls = _plain_sums(net.slabs, table, lines[~lines.weighted], n, sizes)
    return Plan(
        n=n,
        reach=net.reach,
        index=net.index.to(torch.int32),
        exponent=net.exponent,
        gain=net.gain.to(torch.int32),
        tiles=tile_table.to(torch.int32),
        partials=partials,
        chunks=_chunks(net.slabs, table, sizes).to(torch.int32),
        starts=starts,
        items=items,
        pulls=pulls,
        first=tuple(_blocks(lines[lines.weighted], net, table)),
        later=tuple(_blocks(lines, net, table)) if cycles > 1 else (),
        **_gain_tables(net.fan_ins),
        sizes=sizes,
    )


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


def _plain_sums(
    slabs: list[Slab], table: Tensor, lines: Lines, n: int, sizes: Tiles
) -> tuple[Tensor, int, Tensor, Tensor, Tensor]:
    """Tiles over every slab that has plain lines, and which of their sums belong to which variable."""
    wanted = {(number, kind) for number, kind in torch.stack([lines.slab, lines.kind], 1).unique(dim=0).tolist()}
    read = sorted({number for number, _ in wanted})
    total = sum(slabs[number].rows * slabs[number].columns for number in read)
    height = max(sizes.share, total // sizes.shares) // sizes.columns
    height = -(-max(height, sizes.rows) // sizes.rows) * sizes.rows  # rows of a program's share, in whole tiles
    tiles, used = [], 0
    # of each slab: where its sums begin, and in how many stretches they are
    column_sums, row_sums = torch.zeros(2, len(slabs), 2, dtype=torch.int64)
    for number in read:
        parameter, offset, rows, columns = table[number, :4].tolist()
        down, across = -(-rows // height), -(-columns // sizes.columns)
        at_columns = at_rows = -1
        if (number, COLUMN) in wanted:
            at_columns, used = used, used + down * columns
            column_sums[number] = torch.tensor([at_columns, down])
        if (number, ROW) in wanted:
            at_rows, used = used, used + rows * across
            row_sums[number] = torch.tensor([at_rows, across])
        r, k = torch.meshgrid(torch.arange(down), torch.arange(across), indexing="ij")
        r, k = r.reshape(-1), k.reshape(-1)
        top, left = r * height, k * sizes.columns
        tiles.append(torch.stack([
            torch.full_like(r, parameter),
            offset + top * columns + left,
            (rows - top).clamp_max(height),
            (columns - left).clamp_max(sizes.columns),
            torch.full_like(r, columns),
            at_columns + r * columns + left if at_columns >= 0 else torch.full_like(r, -1),
            at_rows + top * across + k if at_rows >= 0 else torch.full_like(r, -1),
            torch.full_like(r, across),
        ], 1))  # fmt: skip
    items, owner, pull = _items(lines, table, column_sums, row_sums)
    order = torch.argsort(owner, stable=True)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(owner, minlength=n + 1).cumsum(0)])
    return (
        torch.cat([torch.zeros(0, 8, dtype=torch.int64), *tiles]),
        used,
        starts.to(torch.int32),
        items[order].to(torch.int32),
        pull[order],
    )


def _items(lines: Lines, table: Tensor, column_sums: Tensor, row_sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each plain line, the partial sums it consists of: one for each of its columns and each stretch of a slab."""
    rows = (lines.kind == ROW)[:, None]
    at, stretches = torch.where(rows, row_sums[lines.slab], column_sums[lines.slab]).T
    width = table[lines.slab, 3]
    begin = torch.where(rows[:, 0], at + lines.position * stretches, at + lines.position)
    apart = torch.where(rows[:, 0], 1, width)
    lengths = stretches * lines.count
    line = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    place = torch.arange(len(line)) - (lengths.cumsum(0) - lengths)[line]
    stretch, column = place // lines.count[line], place % lines.count[line]
    item = begin[line] + stretch * apart[line] + column * lines.step[line]
    return item, lines.variable[line], lines.pull[line]


# -- weighted sums, block by block -------------------------------------------------------------------------------------


def _blocks(lines: Lines, net: Anatomy, table: Tensor) -> Iterator[Block]:
    rank, never = net.rank, net.never
    cancelling = torch.tensor([may_cancel(slab, net.n) for slab in net.slabs])
    order = torch.argsort(rank[lines.variable], stable=True)
    lines = lines[order]
    bounds = torch.searchsorted(rank[lines.variable].contiguous(), torch.arange(never + 1))
    for name in range(never):
        variables = (rank == name).nonzero().view(-1)
        if len(variables):
            chosen = lines[torch.arange(int(bounds[name]), int(bounds[name + 1]))]
            yield _block(variables, chosen, net.n, table, name in net.coupled, cancelling, net.tiles.variables)


def _block(variables: Tensor, lines: Lines, n: int, table: Tensor, coupled: bool, cancelling: Tensor, V: int) -> Block:
    programs = -(-len(variables) // V)
    padded = torch.full((programs * V,), n)
    padded[: len(variables)] = variables
    place = torch.zeros(n + 1, dtype=torch.int64)
    place[variables] = torch.arange(len(variables))
    program, lane = place[lines.variable] // V, place[lines.variable] % V
    # lines of one kind in one slab make one job, with at most one line per variable
    alike = torch.stack([program, lines.slab, lines.kind, lines.count, lines.step], 1)
    _, place_in = torch.cat([alike, lane[:, None]], 1).unique(dim=0, return_inverse=True)
    key = torch.cat([alike, _occurrence(place_in)[:, None]], 1)
    jobs, job = key.unique(dim=0, return_inverse=True)
    positions, pulls = torch.full((len(jobs), V), -1), torch.zeros(len(jobs), V, dtype=torch.float64)
    positions[job, lane] = lines.position
    pulls[job, lane] = lines.pull
    slab, by_row = table[jobs[:, 1]], jobs[:, 2] == ROW
    length = torch.where(by_row, slab[:, 3], slab[:, 2] * jobs[:, 3])
    entries = torch.where(by_row[:, None], slab[:, 4:6], slab[:, 4:6].flip(1))
    return Block(
        variables=padded.view(programs, V).to(torch.int32),
        starts=torch.searchsorted(jobs[:, 0].contiguous(), torch.arange(programs + 1)).to(torch.int32),
        jobs=torch.cat([slab[:, :4], jobs[:, 2:5], entries], 1).to(torch.int32),
        positions=positions.to(torch.int32),
        pulls=pulls,
        step=0.5 if coupled else 1.0,
        coupled=coupled and bool(len(jobs)),
        cancels=bool(cancelling[jobs[:, 1]].any()),
        longest=int(length.max()) if len(jobs) else 0,
    )


def _occurrence(values: Tensor) -> Tensor:
    """How many times each value came before."""
    order = torch.argsort(values, stable=True)
    lengths = torch.bincount(values)
    first = lengths.cumsum(0) - lengths
    seen = torch.empty_like(values)
    seen[order] = torch.arange(len(values)) - first[values[order]]
    return seen
