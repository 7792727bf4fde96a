"""Are two networks the same up to rescaling, and if not, how far apart are they?

Networks that are rescalings of each other compute the same function with different weights, so their weights cannot be
compared as they are. `canonical_` takes each to one and the same member of its family: the one of least L2 norm, which
is unique (stock2019, theorem 1). Units that the norm would let vanish (they read or feed nothing but zeros) do not
count in it and get a scale of their own kind: their largest weights are 1 on geometric average.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from .balance import counting, symmetry_of
from .criteria.criterion import ExponentialProblem
from .criteria.norm import Norm, layouts
from .models.unwrapping import unwrap
from .symmetry import Symmetry, trace

__all__ = ["CanonicalReport", "Comparison", "canonical_", "compare", "distance"]


@dataclass(frozen=True)
class CanonicalReport:
    """What `canonical_` did."""

    norm_before: float  # L2 norm of all parameters that a scale moves
    norm_after: float
    imbalance: float  # largest |log(incoming / outgoing mass)| over the balanced scales
    converged: bool  # imbalance <= tol
    num_scales: int
    dead: int  # of these, of units that read or feed nothing but zeros, put at a fixed scale
    seconds: float  # without tracing

    def __repr__(self) -> str:
        return f"<CanonicalReport: {self}>"

    def __str__(self) -> str:
        if not self.num_scales:
            return "nothing to rescale: the model is its own canonical form"
        dead = f"; {self.dead:,} of them of dead units, put at a fixed scale" if self.dead else ""
        verdict = "canonical" if self.converged else "NOT canonical"
        return (
            f"{verdict} (imbalance {self.imbalance:.1e}) over {self.num_scales:,} scales{dead}; norm "
            f"{self.norm_before:.6g} -> {self.norm_after:.6g}, {self.seconds:.2f} s"
        )


@torch.no_grad()
def canonical_(
    model: nn.Module, example_inputs: Any = None, *, symmetry: Symmetry | None = None, tol: float = 1e-10
) -> CanonicalReport:
    """Rescale a model in place to the one that stands for all rescalings of it.

    Two models have the same canonical form (up to rounding) exactly if one is a rescaling of the other.

        report = equinorm.canonical_(model, torch.randn(1, 3, 224, 224))

    Args:
        symmetry: from `equinorm.trace`, to save tracing again.
        tol: largest `|log(incoming / outgoing mass)|` accepted.
    """
    if not 0 < tol < float("inf"):
        raise ValueError(f"tol must be a positive number, got {tol!r}")
    symmetry = symmetry_of(model, example_inputs, symmetry)
    start = time.monotonic()
    before = _norm(symmetry)
    log_scales, dead, imbalance = canonical_log_scales(symmetry, tol)
    if symmetry.num_scales:
        symmetry.rescale_(log_scales)
    return CanonicalReport(
        before,
        _norm(symmetry),
        imbalance,
        imbalance <= tol,
        symmetry.num_scales,
        int(dead.sum()),
        time.monotonic() - start,
    )


def canonical_log_scales(symmetry: Symmetry, tol: float = 1e-10) -> tuple[Tensor, Tensor, float]:
    """The log-scales that lead to the canonical form, which of them are of dead units, and the imbalance of the others.

    >>> log_scales, dead, imbalance = canonical_log_scales(equinorm.trace(model, x))
    """
    for w in symmetry.moving:
        tensor = symmetry.tensor(w.name)
        if tensor.is_meta:
            raise ValueError(f"parameter {w.name!r} is on the meta device and has no values to rescale")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"parameter {w.name!r} holds infinities or NaN, so it has no canonical form")
    problem = Norm().problem(symmetry, counting(symmetry, None))
    problem.fixed[:-1] |= symmetry.absorbed.to(problem.fixed.device)
    while True:
        problem.hold()
        dead = problem.fixed.clone()
        _leave_out(problem, dead)
        problem.hold()
        if torch.equal(problem.fixed, dead):
            break
    found = problem.solve(tol, None)
    log_scales = found.log_scales.cpu().double()
    still = dead[:-1].cpu()
    log_scales[still] = 0.0
    if bool(still.any()):
        log_scales = log_scales + _scales_of_dead(symmetry, log_scales, still)
    return log_scales, still, found.imbalance


def _leave_out(problem: ExponentialProblem, dead: Tensor) -> None:
    """Weights at dead units do not count: whatever these are scaled to, the others stay where they are."""
    f = problem.objective
    alive = ~dead
    alive[-1] = True  # no variable at all
    matrices = [
        matrix * alive[rows][:, :, None] * alive[columns][:, None, :]
        for matrix, (rows, columns) in zip(f.matrices, f.split(f.index), strict=True)
    ]
    f.enter(matrices, f.split(f.offset))


def _scales_of_dead(symmetry: Symmetry, log_scales: Tensor, dead: Tensor) -> Tensor:
    """Least squares of the logarithms of what is left: of the largest element among those that share their scales.

    That is as large for every rescaling of a model, so the result depends on none. Biases count too.
    """
    n = symmetry.num_scales
    padded = torch.cat([log_scales, log_scales.new_zeros(1)])
    at_dead = torch.cat([dead, torch.zeros(1, dtype=torch.bool)])
    index, exponents, constants = [], [], []
    shift = {w.name: w.shift for w in symmetry.moving}
    for layout in layouts(symmetry, 1.0, 1.0, lambda w: True):
        weight = symmetry.values(layout.name).detach().double().cpu() + shift[layout.name]
        logs = layout.largest(weight).log()
        rows, columns = (side.index for side in (layout.rows, layout.columns))
        b, r, c = ((at_dead[rows][:, :, None] | at_dead[columns][:, None, :]) & torch.isfinite(logs)).nonzero(
            as_tuple=True
        )
        both = torch.stack([rows[b, r], columns[b, c]], 1)
        powers = torch.stack([layout.rows.exponent[b, r], layout.columns.exponent[b, c]], 1)
        index.append(both)
        exponents.append(powers * at_dead[both])
        constants.append(logs[b, r, c] + (padded[both] * powers).sum(1))
    for carried in symmetry.carried:
        value = torch.as_tensor(carried.value(symmetry.model), dtype=torch.float64).cpu().abs()
        of, power = (x.expand(value.shape).reshape(-1) for x in (carried.term.index, carried.term.exponent))
        some = at_dead[of] & (value.reshape(-1) > 0)
        index.append(torch.stack([of[some], torch.full_like(of[some], n)], 1))
        exponents.append(torch.stack([power[some], torch.zeros_like(power[some])], 1))
        constants.append(value.reshape(-1)[some].log())
    return _least_squares(torch.cat(index), torch.cat(exponents), torch.cat(constants), n)


def _least_squares(index: Tensor, exponents: Tensor, constants: Tensor, n: int) -> Tensor:
    """The shortest x with least Σ (constant + k_row x_row + k_column x_column)², by conjugate gradients."""

    flat = index.reshape(-1)

    def times(x: Tensor) -> Tensor:
        return (torch.cat([x, x.new_zeros(1)])[index] * exponents).sum(1)

    def transposed(y: Tensor) -> Tensor:
        return torch.zeros(n + 1, dtype=y.dtype).index_add_(0, flat, (exponents * y[:, None]).reshape(-1))[:n]

    x = torch.zeros(n, dtype=torch.float64)
    r = transposed(-constants)
    d, rr = r, float(r @ r)
    goal = 1e-28 * max(rr, 1e-300)
    for _ in range(20 * n + 50):
        if not rr > goal:
            break
        image = times(d)
        alpha = rr / float(image @ image)
        x, r = x + alpha * d, r - alpha * transposed(image)
        rr, before = float(r @ r), rr
        d = r + (rr / before) * d
    return x


def _norm(symmetry: Symmetry) -> float:
    return sqrt(sum(float(torch.linalg.vector_norm(symmetry.values(w.name).double())) ** 2 for w in symmetry.moving))


# -- two models --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """How far two models are apart, as they are and as canonical forms."""

    distance: float  # Euclidean, of all parameters and floating-point buffers of the canonical forms
    as_they_are: float
    norm: float  # of the first canonical form, to compare with
    num_scales: int
    dead: tuple[int, int]
    parts: tuple[tuple[str, float], ...]  # the distance in each tensor, the largest first

    @property
    def same(self) -> bool:
        """Whether they are the same up to rescaling, and to rounding in float32."""
        return self.distance <= 1e-5 * self.norm

    def __str__(self) -> str:
        verdict = "the same up to rescaling and rounding" if self.same else "different"
        worst = ", ".join(f"{name} {part:.3g}" for name, part in self.parts[:3] if part > 0)
        return (
            f"{verdict}: distance {self.distance:.6g} of canonical forms (norm {self.norm:.6g}), "
            f"{self.as_they_are:.6g} as they are; {self.num_scales:,} free scales"
            + ("" if self.same else f"; most in {worst}")
        )


def distance(a: nn.Module, b: nn.Module, example_inputs: Any) -> float:
    """How far two models of one architecture are apart, whatever rescaling they are given in.

    The Euclidean distance of all parameters and floating-point buffers of their canonical forms, in float64: 0 (up to
    rounding) exactly if one is a rescaling of the other. Neither is changed.

        equinorm.distance(before, after, torch.randn(1, 3, 224, 224))
    """
    return compare(a, b, example_inputs).distance


@torch.no_grad()
def compare(a: nn.Module, b: nn.Module, example_inputs: Any, *, symmetry: Symmetry | None = None) -> Comparison:
    """`distance`, and where it comes from.

    >>> print(compare(before, after, x))
    """
    a, b = unwrap(a), unwrap(b)
    _check_alike(a, b)
    symmetry = trace(a, example_inputs) if symmetry is None else symmetry.bind(a)
    plain = _apart(_tensors(a), _tensors(b))
    forms, dead = [], []
    for model in (a, b):
        twin = copy.deepcopy(model).double()
        dead.append(canonical_(twin, symmetry=symmetry.bind(twin), tol=1e-12).dead)
        forms.append(_tensors(twin))
    parts = _apart(*forms)
    return Comparison(
        distance=_length(parts.values()),
        as_they_are=_length(plain.values()),
        norm=_length(float(torch.linalg.vector_norm(x)) for x in forms[0].values()),
        num_scales=symmetry.num_scales,
        dead=(dead[0], dead[1]),
        parts=tuple(sorted(parts.items(), key=lambda item: -item[1])),
    )


def _check_alike(a: nn.Module, b: nn.Module) -> None:
    one, two = _tensors(a), _tensors(b)
    for name in [*one, *two]:
        if name not in one or name not in two:
            has, lacks = ("first", "second") if name in one else ("second", "first")
            raise ValueError(
                f"only models of one architecture can be compared: the {has} has {name}, the {lacks} has not"
            )
        if one[name].shape != two[name].shape:
            raise ValueError(
                f"only models of one architecture can be compared: {name} has shape {tuple(one[name].shape)} in the "
                f"first and {tuple(two[name].shape)} in the second"
            )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and floating-point buffers, each once."""
    every = (*model.named_parameters(), *model.named_buffers())
    return {name: x.detach().double() for name, x in every if x.is_floating_point()}


def _apart(one: dict[str, Tensor], two: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(torch.linalg.vector_norm(x - two[name].to(x.device))) for name, x in one.items()}


def _length(parts: Any) -> float:
    return sqrt(sum(part**2 for part in parts))
