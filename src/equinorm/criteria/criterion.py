"""What a criterion is: a function of log-scales, and how its least value is found."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..solver import Solution, hold_unbalanced, minimise
from ..symmetry import ScaledParameter, Symmetry
from .exponentials import Exponentials, Point

__all__ = ["Counts", "Criterion", "ExponentialProblem", "Problem", "SmoothProblem"]

Counts = Callable[[ScaledParameter], bool]
"""Whether a parameter counts."""


class Problem:
    """A criterion on a symmetry: its value at log-scales, and its least value."""

    fixed: Tensor  # variables that stay where they are; one place more, for "no variable"
    moves_absorbed = False
    """Whether scales that norms absorb are moved: a norm of weights has no least value along them."""

    @property
    def passes(self) -> int:
        """How often the solver has read the weights' sums."""
        return 0

    def value(self, s: Tensor) -> float:
        raise NotImplementedError

    def hold(self) -> None:
        """Fix what has no optimum."""

    def solve(self, tol: float, deadline: float | None) -> Solution:
        raise NotImplementedError

    def notes(self, s: Tensor) -> tuple[str, ...]:
        """What a user should know about the result."""
        return ()


class Criterion:
    """What a balanced network is best at. Give a subclass a `value`, and it can be balanced for:

    class Peaks(equinorm.criteria.Criterion):
        def value(self, tensors):
            return sum(w.pow(8).sum() for w in tensors.values())

    equinorm.balance_(model, x, criterion=Peaks())
    """

    convex = False
    """Whether the value is a convex function of the log-scales, so that a point without slope is the optimum."""
    tol = 1e-6
    """The slope (relative to the value) or the imbalance that is accepted, where `balance_` is not given one."""
    on_shards = False
    """Whether each process can work on its own part of the weights, where they are sharded over processes."""
    unit = "value"
    """What is measured, for reports."""
    invariances: bool = False
    """Whether `balance_` is to trace with `invariances=True`, so that what norms absorb can be moved."""

    def __repr__(self) -> str:
        options = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if isinstance(v, int | float | str))
        return f"{type(self).__name__}({options})"

    def value(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The criterion of the rescaled parameters that count, by name, in float64; differentiable."""
        raise NotImplementedError(f"{type(self).__name__} has no value(tensors)")

    def problem(self, symmetry: Symmetry, counted: Counts, example_inputs: Any = None) -> Problem:
        """The criterion as a function of a symmetry's log-scales."""
        moving = [w for w in symmetry.moving if counted(w)]
        still = {w.name: symmetry.tensor(w.name).detach().double().cpu() for w in symmetry.parameters if counted(w)}

        def function(s: Tensor) -> Tensor:
            padded = torch.cat([s, s.new_zeros(1)])
            return self.value({**still, **{w.name: still[w.name] * w.factor(padded) for w in moving}})

        return SmoothProblem(function, symmetry.num_scales)


class ExponentialProblem(Problem):
    """The least value of a sum of exponentials."""

    def __init__(self, objective: Exponentials, birth: Tensor) -> None:
        self.objective, self.birth = objective, birth
        self._start: Point | None = None  # F where nothing is moved, and where it is least
        self._end: Solution | None = None

    @property
    def passes(self) -> int:
        return self.objective.passes

    @property
    def fixed(self) -> Tensor:
        return self.objective.fixed

    @fixed.setter
    def fixed(self, value: Tensor) -> None:
        self.objective.fixed = value

    @property
    def start(self) -> Point:
        if self._start is None:
            self._start = self.objective.at(self.objective.zeros())
        return self._start

    def value(self, s: Tensor) -> float:
        here = s.to(self.objective.device)
        end = self._end
        if not bool(here.any()):
            point = self.start
        elif end is not None and end.point is not None and torch.equal(here, end.log_scales):
            point = end.point
        else:
            point = self.objective.at(here)
        return float(point.value)

    def hold(self) -> None:
        hold_unbalanced(self.objective, self.start)

    def solve(self, tol: float, deadline: float | None) -> Solution:
        self._end = minimise(self.objective, self.birth, tol, deadline, first=self.start)
        return self._end


class SmoothProblem(Problem):
    """The least value of a function that autograd can differentiate, by L-BFGS with a line search."""

    def __init__(self, function: Callable[[Tensor], Tensor], n: int, logarithm: bool = True) -> None:
        self.function, self.n = function, n
        self.logarithm = logarithm  # whether the logarithm of a positive value is better to climb down
        self.fixed = torch.zeros(n + 1, dtype=torch.bool)
        self.fixed[n] = True

    def value(self, s: Tensor) -> float:
        with torch.no_grad():
            return float(self.function(s))

    def hold(self) -> None:
        """What has no slope does not matter; what is not a number stays."""
        _, slope = self._slope(torch.zeros(self.n, dtype=torch.float64))
        self.fixed[: self.n] |= ~(slope.abs() > 0)

    def _slope(self, s: Tensor) -> tuple[float, Tensor]:
        s = s.detach().requires_grad_()
        with torch.enable_grad():
            value = self.function(s)
            (slope,) = torch.autograd.grad(value, s)
        return float(value.detach()), slope

    def solve(self, tol: float, deadline: float | None, iterations: int = 600) -> Solution:
        free = ~self.fixed[: self.n]
        s = torch.zeros(self.n, dtype=torch.float64, requires_grad=True)
        start = self.value(s.detach())
        size = abs(start) or 1.0
        done, best, best_s, gap = 0, start, s.detach().clone(), float("inf")
        positive = self.logarithm and start > 0
        options: dict[str, Any] = {"line_search_fn": "strong_wolfe", "tolerance_grad": 0.0, "tolerance_change": 0.0}
        optimizer = torch.optim.LBFGS([s], max_iter=20, history_size=30, **options)

        def closure() -> Tensor:
            value, slope = self._slope(s)
            scale = value if positive and value > 0 else size
            s.grad = torch.where(free, slope, 0.0) / scale
            return torch.tensor(math.log(value) if positive and value > 0 else value / size, dtype=torch.float64)

        while done < iterations and bool(free.any()):
            optimizer.step(closure)
            done += 20
            value, slope = self._slope(s)
            if not value <= best * (1 if best < 0 else 1 + 1e-12) + 1e-300:
                break
            gap = float(torch.where(free, slope, 0.0).abs().amax()) / (abs(value) or 1.0)
            stalled = not value < best - 1e-13 * abs(best)
            best, best_s = value, s.detach().clone()
            if gap <= tol or stalled or (deadline is not None and time.monotonic() > deadline):
                break
        return Solution(best_s, None, gap, done, gap <= tol)
