"""Minimise the objective: Gauss-Seidel cycles as in stock2019, and Newton's method to the exact optimum."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .criteria.exponentials import NEVER, Exponentials, Groups, Point, Quadratic, Sum, imbalance, times

if TYPE_CHECKING:
    from .criteria.norm import Objective
from .symmetry.scales import FROZEN, Scales


@dataclass(frozen=True, eq=False)
class Touch:
    """One matrix in which the variables of a block appear: as its rows (columns are transposed)."""

    layout: int
    transposed: bool
    row: Tensor
    row_exponent: Tensor
    column: Tensor
    column_exponent: Tensor


@dataclass(frozen=True, eq=False)
class Block:
    """Variables opened by one layer, which a Gauss-Seidel cycle updates together (stock2019, algorithm 1)."""

    variables: Tensor
    touches: tuple[Touch, ...]
    total: Sum  # of the rows touched, by place among the variables; the last place takes what belongs to others
    reach: Tensor
    step: float  # 1, or 1/2 where two of the variables meet in one weight


class Cycle:
    """One cycle of ENorm: every block in forward order to its own optimum, the others held (stock2019, eq. 5)."""

    def __init__(self, objective: Objective, birth: Tensor) -> None:
        self.objective = objective
        self.blocks = list(_blocks(objective, birth))

    def run(self, s: Tensor) -> Tensor:
        """The log-scales after one cycle from s. No value is looked at by the host, so it can be captured."""
        o = self.objective
        padded = torch.cat([s, s.new_zeros(1)])
        movable = (~o.fixed).to(o.dtype)
        for block in self.blocks:
            pulls = []
            for touch in block.touches:
                matrix = o.matrices[touch.layout]
                log_row = o.p * padded[touch.row] * touch.row_exponent
                log_column = o.p * padded[touch.column] * touch.column_exponent
                shift = log_column.amax()
                column = (log_column - shift).exp()
                mass = (log_row + shift).exp() * times(matrix.mT if touch.transposed else matrix, column)
                pulls.append((mass * touch.row_exponent).view(-1))
            pull = torch.cat(pulls) if pulls else padded[:0]
            up, down = o.processes.sum(torch.stack([block.total(part.clamp_min(0))[:-1] for part in (pull, -pull)]))
            v = block.variables
            padded[v] += block.step * movable[v] * step_towards(up, down, block.reach, o.p)
        return padded[:-1]


def _blocks(o: Objective, birth: Tensor) -> Iterator[Block]:
    """The variables that occur in the objective, by the layer that opened them, in forward order."""
    occurs = torch.zeros(o.n + 1, dtype=torch.bool)
    occurs[o.index.cpu()] = True
    occurs = o.processes.any(occurs)
    block_of = torch.cat([torch.where(occurs[:-1], birth, -1), torch.tensor([-1])])
    distances = reach(o)
    sides = list(zip(o.split(o.index), o.split(o.exponent), strict=True))
    seen_in: dict[int, list[Touch]] = {}
    for number, ((row, column), (k_row, k_column)) in enumerate(sides):
        straight = Touch(number, False, row, k_row, column, k_column)
        crosswise = Touch(number, True, column, k_column, row, k_row)
        for touch in (straight, crosswise):
            for block in block_of[touch.row.cpu()].unique().tolist():
                seen_in.setdefault(block, []).append(touch)
    names = sorted(set(block_of.tolist()) - {-1})
    layers = [[touch.layout for touch in seen_in.get(name, ())] for name in names]
    coupled = o.processes.any(torch.tensor([len(set(each)) < len(each) for each in layers], dtype=torch.bool))
    for name, is_coupled in zip(names, coupled.tolist(), strict=True):
        touches = seen_in.get(name, [])
        variables = (block_of == name).nonzero().view(-1)
        place = torch.full((o.n + 1,), len(variables))
        place[variables] = torch.arange(len(variables))
        index = torch.cat([place[:0], *(place[touch.row.cpu()].view(-1) for touch in touches)])
        total = Sum(index, len(variables) + 1, o.device)
        variables = variables.to(o.device)
        yield Block(variables, tuple(touches), total, distances[variables], 0.5 if is_coupled else 1.0)


def reach(objective: Exponentials) -> Tensor:
    """Per variable, its largest positive plus its largest negative exponent: 2 where all are ±1."""
    low, high = torch.zeros(2, objective.n + 1, dtype=objective.dtype, device=objective.device)
    high.scatter_reduce_(0, objective.index, objective.exponent, "amax")
    low.scatter_reduce_(0, objective.index, objective.exponent, "amin")
    high, below = objective.processes.largest(torch.stack([high, -low]))
    return (high + below)[: objective.n]


def step_towards(up: Tensor, down: Tensor, reach: Tensor, p: float) -> Tensor:
    """log d with d = sqrt(R / L), the exact minimiser where all exponents are ±1 (stock2019, eq. 5).

    With larger exponents (ReLU²) it stops short of the minimiser, so F never rises. A variable with mass on one side
    only stays where it is.
    """
    both = (up > 0) & (down > 0) & torch.isfinite(up) & torch.isfinite(down)
    ratio = torch.where(both, down, 1.0).log() - torch.where(both, up, 1.0).log()
    return torch.where(both, ratio / (p * reach.clamp_min(1e-12)), 0.0)


class Solution(NamedTuple):
    log_scales: Tensor
    point: Point | None
    imbalance: float
    iterations: int
    converged: bool


def hold_unbalanced(o: Exponentials, point: Point | None = None) -> None:
    """Fix the variables along which F falls for ever: dead units, and whatever hangs on them.

    F has a minimum in a variable iff no direction d with k·d <= 0 in every entry of positive mass moves it. A scale
    that is fixed forces d = 0; an entry k_a·d_a + k_b·d_b <= 0 whose one half is forced to be >= 0 forces the other
    to be <= 0. What is forced from both sides has a minimum, what is forced from one side only has not. What is fixed
    still counts, and may force others.

    `point` is F where nothing is moved, if it is known.
    """
    point = o.at(o.zeros()) if point is None else point
    entries = list(_entries(o, point))
    # scales that no fixed one reaches (the user counted few parameters): look at each one's own entries
    one_sided = ~((point.log_up > NEVER) & (point.log_down > NEVER))
    while True:
        low, high = _forced(o, entries)
        o.loose = ~(low | high)
        stuck = low ^ high
        if not bool(stuck.any()):
            stuck[:-1] = o.loose[:-1] & one_sided & o.free
        if not bool(stuck.any()):
            return
        o.fixed |= stuck


class _Entries(NamedTuple):
    """The rows (or columns) of a matrix, and what is on the other side; on the host, but for the matrix."""

    matrix: Tensor
    present: Tensor  # whether a row has mass
    a: Tensor  # variables of the rows
    a_up: Tensor  # whether their exponent is positive, and whether it is 0
    a_none: Tensor
    b: Tensor  # of the columns
    b_up: Tensor
    b_none: Tensor

    def known(self, low: Tensor, high: Tensor) -> Tensor:
        """Of which columns it is known that they cannot fall."""
        return torch.where(self.b_up, high[self.b], low[self.b] | self.b_none)

    def is_done(self, low: Tensor, high: Tensor) -> bool:
        return bool((torch.where(self.a_up, low[self.a], high[self.a]) | self.a_none).all())


def _entries(o: Exponentials, point: Point) -> Iterator[_Entries]:
    index, k, present = (x.cpu() for x in (o.index, o.exponent, point.log_mass > NEVER))
    up, none = k > 0, k == 0
    sides = (o.split(x) for x in (present, index, up, none))
    for matrix, (p, q), (row, column), (up_row, up_column), (no_row, no_column) in zip(o.light, *sides, strict=True):
        yield _Entries(matrix, p, row, up_row, no_row, column, up_column, no_column)
        yield _Entries(matrix.mT, q, column, up_column, no_column, row, up_row, no_row)


def _forced(o: Exponentials, entries: list[_Entries]) -> tuple[Tensor, Tensor]:
    """Variables that cannot go up, and variables that cannot go down, without F rising somewhere for ever."""
    low, high = o.fixed.to("cpu", copy=True), o.fixed.to("cpu", copy=True)  # d <= 0, d >= 0
    while True:
        before = low.sum() + high.sum()
        for order in (entries, entries[::-1]):  # both ways, so that one sweep carries through the whole depth
            for e in order:
                if e.is_done(low, high):
                    continue
                known = e.known(low, high)
                # all or nothing is the usual case and needs no product
                all_known = bool(known.all())
                if not all_known and not bool(known.any()):
                    continue
                some = e.present
                if not all_known:
                    some = (times(e.matrix, known.to(e.matrix.device, e.matrix.dtype)) > 0).cpu()
                low[e.a[some & e.a_up]] = True
                high[e.a[some & ~(e.a_up | e.a_none)]] = True
        low, high = o.processes.any(torch.stack([low, high]))
        if bool(low.sum() + high.sum() == before):
            return low.to(o.device), high.to(o.device)


FAR = 2.0
"""Where masses differ by more than e^FAR, Newton's method would go one such step at a time."""
ROUGH = 0.01
"""Below this imbalance six digits are not enough to tell whether a step was good."""
PATIENCE = 12
"""Steps without any progress after which the solver stops."""


def minimise(
    objective: Exponentials,
    birth: Tensor,
    tol: float,
    deadline: float | None = None,
    limit: int = 1000,
    start: Tensor | None = None,
    first: Point | None = None,
) -> Solution:
    """The log-scales of least F, by Newton's method with conjugate gradients; `first` is F at `start`, if it is known.

    As long as the imbalance is larger than `ROUGH`, large matrices are read in float32; the optimum is one of float64.

    The curvature is a weighted graph Laplacian. Its diagonal preconditions what happens inside a layer; the slow modes
    move whole layers against each other, so a small dense problem over layers takes care of them. Far from the optimum
    the quadratic is taken about equal masses, not about the present ones (see `Quadratic`), and every scale goes half
    its way by itself.
    """
    o = objective
    s = o.zeros() if start is None else start
    point = o.at(s) if first is None else first
    free = o.free & (point.log_up > NEVER) & (point.log_down > NEVER)
    layers, layer = birth.unique(return_inverse=True)
    groups = Groups(o, torch.where(free, layer.to(o.device), len(layers)), len(layers))
    spread = reach(o)
    gap = float(imbalance(point, free))
    light = o.has_light and gap > ROUGH
    best, waited, iterations, far = gap, 0, 0, True
    s_best, point_best = s, point
    while gap > tol and waited < PATIENCE and iterations < limit:
        if iterations and _is_late(o, deadline):
            break
        iterations += 1
        moved = None
        if gap > FAR:
            for _ in range(2):
                s = s - torch.where(free, 0.5 * point.gap / (o.p * spread.clamp_min(1e-12)), 0.0)
                point = o.at(s, light)
            gap = float(imbalance(point, free))
        if gap > FAR and far:
            moved = _stride(o, s, point, free, groups, gap, light)
            far = moved is not None
        if moved is None:
            far = not far and iterations % 5 == 0
            moved = _newton(o, s, point, free, groups, min(0.1, gap), light)
        s, point = moved
        before, gap = gap, float(imbalance(point, free))
        if light and (gap <= ROUGH or gap > 0.9 * before):
            light, point = False, o.at(s)
            gap = float(imbalance(point, free))
        if gap > max(tol, 0.5 * before) and waited:
            s, point = _logarithmic(o, s, point, free, gap)
            gap = float(imbalance(point, free))
        waited = 0 if gap < 0.99 * best else waited + 1
        if gap < best or not best < float("inf"):
            best, s_best, point_best = gap, s, point
    s, point = s_best.clone(), point_best
    if light:  # the best point is one that was seen in float32
        point = o.at(s)
        best = float(imbalance(point, free))
    for variables, direction in flat_directions(o):  # where F does not care, nothing moves
        s[variables] -= (s[variables] @ direction) / (direction @ direction) * direction
    return Solution(s, point, best, iterations, best <= tol)


def _stride(
    o: Exponentials, s: Tensor, point: Point, free: Tensor, groups: Groups, gap: float, light: bool
) -> tuple[Tensor, Point] | None:
    """A step about the guess that all rows and columns end with equal mass; None where that brings nothing."""
    centre = 0.5 * (point.log_up + point.log_down)[free].mean()
    for trust in (1.0, 0.5):
        guess = trust * 0.5 * (point.log_mass - centre)  # half of it for the row, half for the column
        model = o.quadratic(point, guess)
        step = conjugate_gradients(model, free, groups, 0.01) / o.p
        if bool(torch.isfinite(step).all()):
            after = o.at(s + step, light)
            if float(imbalance(after, free)) < 0.7 * gap:
                return s + step, after
    return None


def _logarithmic(o: Exponentials, s: Tensor, point: Point, free: Tensor, gap: float) -> tuple[Tensor, Point]:
    """A step of Newton's method on log(incoming / outgoing mass) = 0, which sees light parts as it sees heavy ones.

    What F is made of may differ by any factor (norms of high order, branches of tiny weights); a step on F then only
    moves the heavy parts. The system is not symmetric, so it is solved by BiCGStab.
    """
    signs = o.exponent.sign()
    outgoing = torch.where(o.exponent > 0, 0, 1)
    both = torch.stack([point.log_up, point.log_down])
    padded = torch.cat([both, both.new_zeros(2, 1)], 1)[outgoing, o.index]
    weight = torch.where(o.exponent != 0, (o.exponent.abs().log() + point.log_mass - padded).exp(), 0.0) * signs
    weight = weight.nan_to_num(0.0)
    side = (point.logs - o.tops(point.logs)[o.run]).exp()
    sums = o.crossed(side).clamp_min(1e-300)

    def product(x: Tensor) -> Tensor:
        moved = o.gather(x)
        return torch.where(free, o.scatter(weight * (moved + o.crossed(side * moved) / sums)), 0.0)

    step = _bicgstab(product, torch.where(free, -point.gap, 0.0) / o.p)
    best = s, point, gap
    for length in (1.0, 0.5, 0.25):
        after = o.at(s + length * step)
        new = float(imbalance(after, free))
        if new < best[2]:
            best = s + length * step, after, new
        if best[2] < 0.7 * gap:
            break
    return best[:2]


def _bicgstab(product: Callable[[Tensor], Tensor], rhs: Tensor, accuracy: float = 1e-6, limit: int = 300) -> Tensor:
    x, r = torch.zeros_like(rhs), rhs
    shadow, d, rho = r, r, float(r @ r)
    goal = accuracy * rho**0.5
    for _ in range(limit):
        v = product(d)
        along = float(shadow @ v)
        if along == 0 or rho == 0:
            break
        alpha = rho / along
        half = r - alpha * v
        t = product(half)
        square = float(t @ t)
        omega = float(t @ half) / square if square else 0.0
        x, r = x + alpha * d + omega * half, half - omega * t
        if not float(r.norm()) > goal or omega == 0:
            break
        rho, before = float(shadow @ r), rho
        d = r + (rho / before) * (alpha / omega) * (d - omega * v)
    return x if bool(torch.isfinite(x).all()) else torch.zeros_like(x)


def _newton(
    o: Exponentials, s: Tensor, point: Point, free: Tensor, groups: Groups, accuracy: float, light: bool
) -> tuple[Tensor, Point]:
    """Newton's step, shortened until log F has fallen as much as its slope promises."""
    model = o.quadratic(point)
    step = conjugate_gradients(model, free, groups, accuracy) / o.p
    pull = torch.where(free, (point.log_up - point.log_value).exp() - (point.log_down - point.log_value).exp(), 0.0)
    slope = o.p * float((pull * step).sum())
    length, after = 1.0, o.at(s + step, light)
    rounding = 1e-6 if light else 1e-14
    while not float(after.log_value - point.log_value) <= 1e-4 * length * slope + rounding:
        length /= 2
        if length < 1e-6:
            break
        after = o.at(s + length * step, light)
    return s + length * step, after


class Smooth(Protocol):
    """A function with a value, a gradient and a curvature."""

    def at(self, s: Tensor) -> Any: ...
    def value_at(self, s: Tensor, point: Any) -> Tensor: ...
    def gradient_at(self, point: Any) -> Tensor: ...
    def curvature_at(self, point: Any) -> Any: ...
    def gap_at(self, point: Any) -> float: ...


def descend(
    function: Smooth, s: Tensor, free: Tensor, tol: float, deadline: float | None, limit: int = 300
) -> tuple[Tensor, Any, float, int]:
    """Newton's method with conjugate gradients and a line search: where it ended, its gap, and the steps."""
    point = function.at(s)
    value, gap, iterations, waited = function.value_at(s, point), function.gap_at(point), 0, 0
    while gap > tol and waited < PATIENCE and iterations < limit:
        if deadline is not None and time.monotonic() > deadline:
            break
        iterations += 1
        slope = torch.where(free, function.gradient_at(point), 0.0)
        product, diagonal = function.curvature_at(point)
        live = free & (diagonal > 0)
        step = _solved(product, -slope, torch.where(live, diagonal, 1.0), live, min(0.1, gap))
        expected, length = float(slope @ step), 1.0
        after = function.at(s + step)
        new = function.value_at(s + step, after)
        while not float(new - value) <= 1e-4 * length * expected + 1e-14 * abs(float(value)):
            length /= 2
            if length < 1e-8:
                return s, point, gap, iterations
            after = function.at(s + length * step)
            new = function.value_at(s + length * step, after)
        s, point, value = s + length * step, after, new
        before, gap = gap, function.gap_at(point)
        waited = 0 if gap < 0.99 * before else waited + 1
    return s, point, gap, iterations


def _solved(product: Any, rhs: Tensor, diagonal: Tensor, live: Tensor, accuracy: float) -> Tensor:
    """Conjugate gradients, preconditioned by the diagonal."""
    x, r = torch.zeros_like(rhs), torch.where(live, rhs, 0.0)
    z = r / diagonal
    d, rz = z, float(r @ z)
    goal = accuracy**2 * rz
    for _ in range(500):
        hd = torch.where(live, product(d), 0.0)
        curvature = float(d @ hd)
        if not curvature > 0:
            break
        alpha = rz / curvature
        x, r = x + alpha * d, r - alpha * hd
        z = r / diagonal
        new = float(r @ z)
        if not new > goal:
            break
        d, rz = z + (new / rz) * d, new
    return x


def _is_late(o: Exponentials, deadline: float | None) -> bool:
    """Whether the time is up, for all processes as soon as it is for one."""
    return deadline is not None and bool(o.processes.any(torch.tensor(time.monotonic() >= deadline)))


def flat_directions(o: Exponentials) -> list[tuple[Tensor, Tensor]]:
    """Directions along which F does not change, as (variables, components): sets of scales that no fixed one anchors.

    They exist only where the user's choice of parameters leaves a set of scales without a counterpart.
    """
    loose = o.loose[:-1] & o.free
    if not bool(loose.any()):
        return []
    sides = o.split(o.index)
    # the scales of a loose set can only move together: row^k · column^l = 1 in every entry that has mass
    scales = Scales()
    label = torch.full((o.n + 1,), FROZEN)
    label[:-1][loose.cpu()] = scales.fresh(int(loose.sum()), 0)
    for matrix, (row, column), (k_row, k_column) in zip(o.matrices, sides, o.split(o.exponent), strict=True):
        b, r, c = (matrix > 0).nonzero(as_tuple=True)
        one, two = label[row[b, r].cpu()], label[column[b, c].cpu()]
        ratio = -(k_column[b, c] / k_row[b, r]).cpu()
        for exponent in ratio[(one > 0) & (two > 0)].unique().tolist():
            linked = (ratio == exponent) & (one > 0) & (two > 0)
            scales.merge(one[linked], two[linked], why=0, exponent=exponent)
    variables = loose.nonzero().view(-1)
    labels = label[variables.cpu()]
    _merge_those_of_others(o, scales, labels)
    roots, weights = scales.find(labels)
    moving = ~scales.is_frozen(roots)
    return [
        (variables[members], weights[members].to(o.device, o.dtype))
        for root in roots[moving].unique().tolist()
        for members in [(roots == root).nonzero().view(-1)]
    ]


def _merge_those_of_others(o: Exponentials, scales: Scales, labels: Tensor) -> None:
    """What every process has merged by the weights that it holds."""
    roots, weights = scales.find(labels)
    here = torch.stack([torch.where(scales.is_frozen(roots), FROZEN, roots).double(), weights])
    for found, exponents in o.processes.gather(here)[o.processes.count == 1 :]:
        of = found.long()
        scales.freeze(labels[of == FROZEN], why=0)
        for exponent in exponents.unique().tolist():
            linked = (exponents == exponent) & (of != FROZEN)
            scales.merge(labels[linked], of[linked], why=0, exponent=exponent)


def conjugate_gradients(model: Quadratic, free: Tensor, groups: Groups, accuracy: float) -> Tensor:
    """Solve curvature · x = -gradient, preconditioned by the diagonal and by the problem over layers."""
    o, group, count = model.function, groups.of, groups.count
    live = free & (model.diagonal > 0)
    rhs = torch.where(live, -model.gradient, 0.0)
    diagonal = torch.where(live, model.diagonal, 1.0)
    coarse = model.between(groups, live)
    # along a flat direction only rounding errors are left of `coarse`: they are judged by what they are the rest of
    scale = diagonal.new_zeros(count + 1).index_add_(0, group, torch.where(live, diagonal, 0.0))[:count]
    norm = scale.sqrt().clamp_min(1e-150)
    coarse = coarse / norm[:, None] / norm + torch.diag(1e-10 + (scale == 0).to(o.dtype))
    factor = torch.linalg.cholesky_ex(coarse).L

    def precondition(r: Tensor) -> Tensor:
        sums = torch.zeros(count + 1, dtype=o.dtype, device=o.device).index_add_(0, group, r)[:count]
        shift = torch.cholesky_solve((sums / norm)[:, None], factor)[:, 0] / norm
        return torch.where(live, r / diagonal + torch.cat([shift, shift.new_zeros(1)])[group], 0.0)

    x, r = torch.zeros_like(rhs), rhs
    z = precondition(r)
    d, rz = z, float(r @ z)
    goal = accuracy**2 * rz
    for _ in range(200):
        hd = torch.where(live, model.times(d), 0.0)
        curvature = float(d @ hd)
        if not curvature > 0:
            break
        alpha = rz / curvature
        x, r = x + alpha * d, r - alpha * hd
        z = precondition(r)
        rz_new = float(r @ z)
        if not rz_new > goal:
            break
        d, rz = z + (rz_new / rz) * d, rz_new
    return x
