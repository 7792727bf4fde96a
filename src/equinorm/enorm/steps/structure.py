"""How a net's parameters lie in memory as matrices whose factors are those of a row times those of a column.

Made once, on the host, from the symmetry and the tensors' strides; what the fused steps are prepared from.

- A **matrix view** is a stretch of a parameter's memory seen as rows × columns, columns innermost, such that the factor
  of an element is that of its row times that of its column. A linear layer is one, a convolution too, contiguous
  (columns are input channel × kernel) or channels last (kernel × input channel); a grouped one has a view per group; a
  gain, a bias or a depthwise kernel is a view of one row. So every pass over the weights runs through memory in order,
  whatever the layout.
- **Entries**: all rows and columns of all views, with the one or two scale variables each depends on.
- **Lines**: where a variable occurs: rows of views, and columns, those with the same scales (the k² of an input
  channel) taken as one. The mass Σ|w|^p on a line pulls the variable up or down (stock2019, eq. 5).

>>> net = net_structure(problem)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import gcd, prod
from typing import NamedTuple

import torch
from torch import Tensor

from ...criteria.norm import Side
from ...symmetry import ScaledParameter, Term
from .protocol import Problem

__all__ = [
    "COLUMN",
    "DEFAULT",
    "ROW",
    "InexpressibleError",
    "Lines",
    "MatrixView",
    "NetStructure",
    "Repeats",
    "Tiles",
    "is_dense",
    "lines_of",
    "matrix_views",
    "may_cancel",
    "net_structure",
]

ROW, COLUMN = 0, 1


class InexpressibleError(ValueError):
    """Some parameter's memory is not made of views; the message says which and why."""


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
    wide: int = 32768  # columns that a view may have although a cut further in would leave fewer


DEFAULT = Tiles()


# -- memory ------------------------------------------------------------------------------------------------------------


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


# -- views and entries -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class MatrixView:
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


def matrix_views(
    w: ScaledParameter, number: int, tensor: Tensor, n: int, tiles: Tiles, gain: int = -1
) -> Iterator[MatrixView]:
    """The views of one parameter; InexpressibleError if there are none. `gain` numbers a safe bias's first gain."""
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
        yield from _cut_views(w.name, number, parts, lengths, 0, n, tiles)
        return
    if tensor.numel() > tiles.flat:
        raise InexpressibleError(f"{w.name} is a safe bias of more than {tiles.flat} numbers")
    numbers = torch.arange(w.fan_in.index[..., 0].numel()).view(w.fan_in.index.shape[:-1]) + gain
    gains = _part(Term(numbers, torch.zeros_like(numbers, dtype=torch.float64)), axes, 1.0)
    yield replace(_view(number, parts, lengths, 0, 0, n), column_gain=gains.flat(lengths, 0, len(lengths))[0])


def _part(term: Term, axes: list[int], sign: float) -> _Part:
    rest = [a for a in range(term.index.ndim) if a not in axes]
    shape = [term.index.shape[a] for a in axes]
    index, exponent = (x.cpu().permute([*axes, *rest]).reshape(shape) for x in (term.index, term.exponent))
    return _Part(index, exponent * sign)


def _cut_views(
    name: str, number: int, parts: list[_Part], shape: list[int], offset: int, n: int, tiles: Tiles
) -> Iterator[MatrixView]:
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
        yield _view(number, parts, shape, 0 if bare and numel <= tiles.flat else cut, offset, n)
        return
    # a grouped convolution: the columns change from one run of rows to the next
    runs = max((part.run_length() for part in parts if not part.within(0, 1) and 0 in part.axes), default=1)
    if runs > 1:
        for start in range(0, shape[0], runs):
            narrowed = [part.narrowed(start, runs) for part in parts]
            inner = offset + start * numel // shape[0]
            yield from _cut_views(name, number, narrowed, [runs, *shape[1:]], inner, n, tiles)
        return
    if numel > tiles.flat and dims > 1:
        raise InexpressibleError(f"the scales of {name} do not separate into rows and columns of its memory")
    yield _view(number, parts, shape, 0, offset, n)


def _view(number: int, parts: list[_Part], shape: list[int], cut: int, offset: int, n: int) -> MatrixView:
    sides: list[list[tuple[Tensor, Tensor]]] = [[], []]
    for part in parts:
        # with a cut at 0 there is one row; what depends on nothing is told once, by the columns
        of_rows = cut > 0 and bool(part.axes) and part.within(0, cut)
        sides[not of_rows].append(part.flat(shape, 0, cut) if of_rows else part.flat(shape, cut, len(shape)))
    entries = [_entries(terms, prod(s), n) for terms, s in zip(sides, (shape[:cut], shape[cut:]), strict=True)]
    return MatrixView(number, offset, *entries[0], *entries[1])


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
    view: Tensor
    kind: Tensor  # ROW or COLUMN
    position: Tensor  # the row, or the column among distinct ones
    pull: Tensor  # exponent times depth weight: what a unit of mass on the line does to F's slope
    weighted: Tensor  # in the first cycle some other scale on the line has moved by the time it is needed

    def __getitem__(self, some: Tensor) -> Lines:
        return Lines(**{name: values[some] for name, values in self.__dict__.items()})

    @staticmethod
    def joined(parts: Sequence[Lines]) -> Lines:
        return Lines(**{name: torch.cat([getattr(part, name) for part in parts]) for name in parts[0].__dict__})


def lines_of(view: MatrixView, number: int, weight: float, rank: Tensor, never: int) -> Iterator[Lines]:
    """The lines of one view. `rank` is the place of each variable's block in the cycle, `never` for what stays."""
    n = len(rank) - 1
    cancels = may_cancel(view, n)
    rows = view.row_index, view.row_exponent, rank[view.column_index].min()
    columns = *view.distinct, rank[view.row_index].min()
    for kind, (index, exponent, across) in enumerate((rows, columns)):
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
                view=torch.full_like(v, number),
                kind=torch.full_like(v, kind),
                position=at,
                pull=exponent[at, term] * weight,
                weighted=(across < rank[v]) | (rank[partner[at]] < rank[v]) | cancels,
            )


def may_cancel(view: MatrixView, n: int) -> bool:
    """Whether an element may have one variable in its row and its column (the diagonal in x + conv(x))."""
    rows, columns = view.row_index[view.row_index < n], view.column_index[view.column_index < n]
    return bool(torch.isin(rows.unique(), columns).any())


# -- a net in views ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class NetStructure:
    """All views of a net, and the order in which a cycle goes through its variables."""

    n: int  # scale variables; index n stands for none
    views: list[MatrixView]
    weight: list[float]  # of each view: c^(p·depth), or 0 where its parameter does not count in the norm
    rank: Tensor  # of each variable: the place of its block in a cycle,
    never: int  # or this, if it stays where it is
    coupled: set[int]  # blocks with variables on both sides of one parameter
    reach: Tensor  # per variable, see `solver.reach`
    fan_ins: list[Term]  # of safe biases, in order
    p: float
    tiles: Tiles

    @cached_property
    def index(self) -> Tensor:
        """2 × entries: the variables of each row and column of all views."""
        return torch.cat([x for s in self.views for x in (s.row_index, s.column_index)]).T.contiguous()

    @cached_property
    def exponent(self) -> Tensor:
        return torch.cat([x for s in self.views for x in (s.row_exponent, s.column_exponent)]).T.contiguous()

    @cached_property
    def gain(self) -> Tensor:
        """Per entry: which gain of a safe bias multiplies its gradient, -1 for none."""
        none = [torch.full((s.rows + s.columns,), -1) for s in self.views]
        for entries, view in zip(none, self.views, strict=True):
            if view.column_gain is not None:
                entries[view.rows :] = view.column_gain
        return torch.cat(none)

    def table(self) -> Tensor:
        """Views × 6: parameter, offset, rows, columns, first row entry, first column entry."""
        entry = [0, *accumulate(length for view in self.views for length in (view.rows, view.columns))]
        records = [
            (view.parameter, view.offset, view.rows, view.columns, entry[2 * i], entry[2 * i + 1])
            for i, view in enumerate(self.views)
        ]
        return torch.tensor(records)

    def lines(self) -> Lines:
        weighed = (
            (i, view, weight) for i, (view, weight) in enumerate(zip(self.views, self.weight, strict=True)) if weight
        )
        parts = [lines for i, view, weight in weighed for lines in lines_of(view, i, weight, self.rank, self.never)]
        return Lines.joined(parts)


def net_structure(problem: Problem, tiles: Tiles | None = None) -> NetStructure:
    """The matrix views of a problem's parameters as they lie in memory now; InexpressibleError if that fails."""
    sizes, n, birth = tiles or DEFAULT, problem.num_scales, problem.symmetry.birth
    terms, tensors = list(problem.terms.values()), problem.tensors()
    scored = [w for w in terms if w.moves and problem.counts(w)]
    weights = {id(w): problem.c ** (problem.p * w.depth) for w in scored}
    rank, never = _ranks(scored, n, birth, problem.fixed)
    if not bool((rank < never).any()):
        raise InexpressibleError("no parameter that counts in the norm has a scale that may move")
    views: list[MatrixView] = []
    fan_ins: list[Term] = []
    for q, (w, tensor) in enumerate(zip(terms, tensors, strict=True)):
        if problem.safe and w.fan_in is not None:
            views += matrix_views(w, q, tensor, n, sizes, sum(t.index[..., 0].numel() for t in fan_ins))
            fan_ins.append(w.fan_in)
        else:
            views += matrix_views(w, q, tensor, n, sizes)
    return NetStructure(
        n=n,
        views=views,
        weight=[weights.get(id(terms[view.parameter]), 0.0) for view in views],
        rank=rank,
        never=never,
        coupled=_coupled(scored, *_ranks(scored, n, birth, None)),
        reach=_reach(scored, n),
        fan_ins=fan_ins,
        p=problem.p,
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
    blocks: set[int] = set()
    for w in terms:
        if w.out is not None and w.into is not None:
            out, into = (rank[t.index.reshape(-1).cpu()].unique() for t in (w.out, w.into))
            blocks |= set(out[torch.isin(out, into)].tolist())
    return blocks - {never}
