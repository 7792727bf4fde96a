"""Path-magnitudes as even as possible (PathCond, arXiv 2602.19799).

g is the diagonal of the path-magnitude matrix: the derivative of the path norm by w_e², found by one backward pass of
the net with squared weights on an input of ones. A factor λ on a weight multiplies its g by λ⁻², so

    n · log Σ_e g_e - Σ_e log g_e        over the n edges with g_e > 0

is a convex function of the log-scales: the log of a sum of exponentials, minus a linear form.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..models.inputs import call
from ..solver import Solution, descend
from ..symmetry import Symmetry
from .criterion import Counts, Criterion, Problem
from .exponentials import NEVER, Exponentials, Point, Side
from .norm import layout_of

__all__ = ["Path", "path_magnitudes"]


class Path(Criterion):
    """n · log Σ g - Σ log g of the path-magnitudes g, the least there is.

    equinorm.balance_(model, x, criterion=equinorm.criteria.Path())
    """

    convex = True
    tol = 1e-8

    def problem(self, symmetry: Symmetry, counted: Counts, example_inputs: Any = None) -> PathProblem:
        if example_inputs is None:
            raise TypeError("Path runs the model: pass example_inputs too")
        return PathProblem(symmetry, path_magnitudes(symmetry.model, example_inputs))


def path_magnitudes(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """∂(path norm)/∂w² of every parameter, in float64.

    The path norm is the sum of the outputs of the net with squared parameters on an input of ones, in evaluation mode.

    >>> g = path_magnitudes(model, x)["layers.0.weight"]
    """
    twin = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.square_()
            parameter.requires_grad_(True)
        for module in twin.modules():
            mean, variance = getattr(module, "running_mean", None), getattr(module, "running_var", None)
            if isinstance(mean, Tensor) and isinstance(variance, Tensor):
                mean.square_()  # (w/σ)² on the way, and the shift as one more edge of a constant unit
                mean.neg_()
                epsilon = float(getattr(module, "eps", 0.0))
                variance.add_(epsilon).square_().sub_(epsilon)
    ones = pytree.tree_map(
        lambda leaf: torch.ones(leaf.shape, dtype=torch.float64)[:1] if _is_float(leaf) and leaf.ndim else leaf, inputs
    )
    with torch.enable_grad(), _without_dropout(twin):
        outputs = [leaf for leaf in pytree.tree_leaves(call(twin, ones)) if _is_float(leaf)]
        names = dict(twin.named_parameters())
        total = torch.stack([out.sum() for out in outputs]).sum()
        grads = torch.autograd.grad(total, list(names.values()), allow_unused=True)
    return {
        name: torch.zeros_like(w) if g is None else g.detach()
        for (name, w), g in zip(names.items(), grads, strict=True)
    }


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    model.eval()
    yield


class PathProblem(Problem):
    """n · log Σ g exp(-2 k·s) + 2 Σ k·s."""

    def __init__(self, symmetry: Symmetry, magnitudes: dict[str, Tensor]) -> None:
        n = symmetry.num_scales
        sides, matrices, counts = [], [], []
        rest, edges = 0.0, 0
        for w in symmetry.parameters:
            g = magnitudes[w.name].clamp_min(0)
            edges += int((g > 0).sum())
            if not w.moves:
                rest += float(g.sum())
                continue
            layout = layout_of(w, n)
            sides.append(tuple(Side(x.index, -x.exponent) for x in (layout.rows, layout.columns)))
            matrices.append(layout.sums(g, 1.0, torch.float64))
            counts.append(layout.sums((g > 0).double(), 1.0, torch.float64))
        self.n, self.birth, self.edges, self.rest = n, symmetry.birth, edges, rest
        self.function = Exponentials(n, 2.0, sides, torch.float64, torch.device("cpu"))  # type: ignore[arg-type]
        self.function.enter(matrices)
        parts = [part for c in counts for part in (c.sum(2).view(-1), c.sum(1).view(-1))]
        at_places = torch.cat(parts) if parts else self.function.exponent
        self.linear = self.function.scatter(self.function.exponent * at_places)  # Σ_e k_e
        self.constant = sum(float(g[g > 0].log().sum()) for g in (m.clamp_min(0) for m in magnitudes.values()))

    @property
    def fixed(self) -> Tensor:  # type: ignore[override]
        return self.function.fixed

    def hold(self) -> None:
        point = self.function.at(self.function.zeros())
        self.fixed[: self.n] |= (point.log_up == NEVER) & (point.log_down == NEVER)

    def _log_total(self, point: Point) -> Tensor:
        rest = torch.tensor(self.rest, dtype=torch.float64).log()
        return torch.logaddexp(point.log_value, rest)

    def value(self, s: Tensor) -> float:
        return float(self.value_at(s, self.function.at(s))) - self.constant

    # -- what the solver asks for --------------------------------------------------------------------------------------

    def at(self, s: Tensor) -> Point:
        return self.function.at(s)

    def value_at(self, s: Tensor, point: Point) -> Tensor:
        return self.edges * self._log_total(point) - 2.0 * (self.linear @ s)

    def gradient_at(self, point: Point) -> Tensor:
        total = self._log_total(point)
        pull = (point.log_up - total).exp() - (point.log_down - total).exp()
        return torch.where(self.function.free, 2.0 * (self.edges * pull - self.linear), 0.0)

    def curvature_at(self, point: Point) -> Any:
        """Products with the Hessian, and its diagonal."""
        f, total = self.function, self._log_total(point)
        pull = 2.0 * ((point.log_up - total).exp() - (point.log_down - total).exp())
        model = f.quadratic(point)
        present = model.diagonal.abs().amax().clamp_min(1e-300)
        mass = f.scatter(f.exponent.square() * (point.log_mass - total).exp())
        scale = 4.0 * mass.amax() / present  # the quadratic is up to a factor

        def times(x: Tensor) -> Tensor:
            return self.edges * (scale * model.times(x) - pull * (pull @ x))

        return times, self.edges * 4.0 * mass

    def gap_at(self, point: Point) -> float:
        """The largest slope per edge."""
        return float(self.gradient_at(point).abs().amax()) / max(self.edges, 1) if self.n else 0.0

    def solve(self, tol: float, deadline: float | None) -> Solution:
        s, point, gap, iterations = descend(self, self.function.zeros(), self.function.free, tol, deadline)
        return Solution(s, point, gap, iterations, gap <= tol)
