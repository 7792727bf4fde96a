"""Minimise the objective: Gauss-Seidel cycles as in stock2019, and Newton's method to the exact optimum."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .criteria.norm import Objective, Point, Sum, imbalance, times
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
        kept = (~o.dropped).to(o.dtype)
        movable = (~(o.dropped | o.fixed)).to(o.dtype)
        for block in self.blocks:
            pulls = []
            for touch in block.touches:
                matrix = o.matrices[touch.layout]
                log_row = o.p * padded[touch.row] * touch.row_exponent
                log_column = o.p * padded[touch.column] * touch.column_exponent
                shift = log_column.amax()
                column = (log_column - shift).exp() * kept[touch.column]
                mass = (log_row + shift).exp() * times(matrix.mT if touch.transposed else matrix, column)
                pulls.append((mass * kept[touch.row] * touch.row_exponent).view(-1))
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


def reach(objective: Objective) -> Tensor:
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
    point: Point
    imbalance: float
    iterations: int
    converged: bool


def hold_unbalanced(o: Objective) -> None:
    """Drop the variables along which F falls for ever: dead units, and whatever hangs on them.

    F has a minimum in a variable iff no direction d with k·d <= 0 in every entry of positive mass moves it. A scale
    that is fixed forces d = 0; an entry k_a·d_a + k_b·d_b <= 0 whose one half is forced to be >= 0 forces the other
    to be <= 0. What is forced from both sides has a minimum, what is forced from one side only has not.
    """
    zero = torch.zeros(o.n, dtype=o.dtype, device=o.device)
    if bool(o.processes.any(~torch.isfinite(o.at(zero).mass).all())):
        _drop_nonfinite(o)
    low, high = _forced(o)
    o.dropped |= low ^ high
    o.loose = ~(low | high)
    # scales that no fixed one reaches (the user counted few parameters): look at each one's own entries
    while bool(o.loose.any()):
        point = o.at(zero)
        stuck = (point.up > 0) != (point.down > 0)
        if not bool(stuck.any()):
            return
        o.dropped[:-1] |= stuck


def _drop_nonfinite(o: Objective) -> None:
    """Infinite and undefined weights leave the objective, and the scales they carry stay where they are."""
    for matrix, (row, column) in zip(o.matrices, o.split(o.index), strict=True):
        b, r, c = (~torch.isfinite(matrix)).nonzero(as_tuple=True)
        o.dropped[row[b, r]] = True
        o.dropped[column[b, c]] = True
        matrix[b, r, c] = 0.0
    o.dropped = o.processes.any(o.dropped)
    o.dropped[o.n] = False


def _forced(o: Objective) -> tuple[Tensor, Tensor]:
    """Variables that cannot go up, and variables that cannot go down, without F rising somewhere for ever."""
    low, high = o.fixed.clone(), o.fixed.clone()  # d <= 0, d >= 0
    present = o.at(torch.zeros(o.n, dtype=o.dtype, device=o.device)).mass > 0
    entries = [
        side
        for matrix, (row, column), (k_row, k_column), (any_row, any_column) in zip(
            o.matrices, o.split(o.index), o.split(o.exponent), o.split(present), strict=True
        )
        for side in (
            (matrix, row, k_row, any_row, column, k_column),
            (matrix.mT, column, k_column, any_column, row, k_row),
        )
    ]
    while True:
        before = low.sum() + high.sum()
        for order in (entries, entries[::-1]):  # both ways, so that one sweep carries through the whole depth
            for matrix, a, k_a, any_a, b, k_b in order:
                known = torch.where(k_b > 0, high[b], low[b] | (k_b == 0)) | o.dropped[b]
                if not bool((torch.where(k_a > 0, low[a], high[a]) | (k_a == 0)).all()):
                    # all or nothing is the usual case and needs no product
                    some = any_a if bool(known.all()) else times(matrix, (known & ~o.dropped[b]).to(o.dtype)) > 0
                    hit = some & ~o.dropped[a]
                    low[a[hit & (k_a > 0)]] = True
                    high[a[hit & (k_a < 0)]] = True
        low, high = o.processes.any(torch.stack([low, high]))
        if bool(low.sum() + high.sum() == before):
            return low, high


def minimise(
    objective: Objective, birth: Tensor, tol: float, deadline: float | None = None, warm_cycles: int = 3
) -> Solution:
    """The log-scales of least F, by Newton's method with conjugate gradients after a few Gauss-Seidel cycles.

    The Hessian is a weighted graph Laplacian. Its diagonal preconditions what happens inside a layer; the slow modes
    move whole layers against each other, so a small dense problem over layers takes care of them.
    """
    o = objective
    free = o.free & involved(o)
    s = torch.zeros(o.n, dtype=o.dtype, device=o.device)
    groups, group = birth.unique(return_inverse=True)
    group = torch.where(free, group.to(o.device), len(groups))
    cycle = Cycle(o, birth)
    iterations = 0
    for _ in range(warm_cycles):
        s = cycle.run(s)
        iterations += 1
    point = o.at(s)
    gap = float(imbalance(point, free))
    stalled = 0
    while gap > tol and stalled < 5 and not _is_late(o, deadline):
        step = newton_step(o, point, free, group, len(groups), min(0.1, gap))
        length, candidate = 1.0, o.at(s + step)
        slope = float((point.gradient * step)[free].sum())
        while not float(candidate.value - point.value) <= 1e-4 * length * o.p * slope + 1e-14 * float(point.value):
            length /= 2
            if length < 1e-6:
                break
            candidate = o.at(s + length * step)
        iterations += 1
        s, point = s + length * step, candidate
        new_gap = float(imbalance(point, free))
        stalled = stalled + 1 if new_gap > 0.5 * gap else 0
        gap = new_gap
    for variables, direction in flat_directions(o):  # where F does not care, nothing moves
        s[variables] -= (s[variables] @ direction) / (direction @ direction) * direction
    return Solution(s, point, gap, iterations, gap <= tol)


def _is_late(o: Objective, deadline: float | None) -> bool:
    """Whether the time is up, for all processes as soon as it is for one."""
    return deadline is not None and bool(o.processes.any(torch.tensor(time.monotonic() >= deadline)))


def flat_directions(o: Objective) -> list[tuple[Tensor, Tensor]]:
    """Directions along which F does not change, as (variables, components): sets of scales that no fixed one anchors.

    They exist only where the user's choice of parameters leaves a set of scales without a counterpart.
    """
    loose = o.loose[:-1] & o.free & involved(o)
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


def _merge_those_of_others(o: Objective, scales: Scales, labels: Tensor) -> None:
    """What every process has merged by the weights that it holds."""
    roots, weights = scales.find(labels)
    here = torch.stack([torch.where(scales.is_frozen(roots), FROZEN, roots).double(), weights])
    for found, exponents in o.processes.gather(here)[o.processes.count == 1 :]:
        of = found.long()
        scales.freeze(labels[of == FROZEN], why=0)
        for exponent in exponents.unique().tolist():
            linked = (exponents == exponent) & (of != FROZEN)
            scales.merge(labels[linked], of[linked], why=0, exponent=exponent)


def involved(o: Objective) -> Tensor:
    """Variables that occur in at least one entry of the objective."""
    point = o.at(torch.zeros(o.n, dtype=o.dtype, device=o.device))
    return (point.up > 0) | (point.down > 0)


def newton_step(o: Objective, point: Point, free: Tensor, group: Tensor, groups: int, accuracy: float) -> Tensor:
    """Solve H x = -g by conjugate gradients, preconditioned by the diagonal and by the problem over layers."""
    rhs = torch.where(free, -point.gradient, 0.0) / o.p
    diagonal = torch.where(free, o.hessian_diagonal(point), 1.0)
    coarse = o.hessian_between(point, group, groups)
    # along a flat direction only rounding errors are left of `coarse`: they are judged by what they are the rest of
    scale = diagonal.new_zeros(groups + 1).index_add_(0, group, torch.where(free, diagonal, 0.0))[:groups]
    coarse = coarse + torch.diag(1e-10 * scale + (scale == 0).to(o.dtype))
    factor = torch.linalg.cholesky_ex(coarse).L

    def precondition(r: Tensor) -> Tensor:
        sums = torch.zeros(groups + 1, dtype=o.dtype, device=o.device).index_add_(0, group, r)[:groups]
        shift = torch.cholesky_solve(sums[:, None], factor)[:, 0]
        return torch.where(free, r / diagonal + torch.cat([shift, shift.new_zeros(1)])[group], 0.0)

    x, r = torch.zeros_like(rhs), rhs
    z = precondition(r)
    d, rz = z, float(r @ z)
    goal = accuracy**2 * rz
    for _ in range(200):
        hd = torch.where(free, o.hessian_times(point, d), 0.0)
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
