"""What the steps of all backends have in common: prepared once, a step, and the same step once more.

step = PlainStep(problem, log_t, gains)        # or ForeachStep, TritonStep: `backends.prepare` chooses
if not step.fits(state.weights.values()):      # the model was moved, or laid out anew in memory
    step = ...                                 # prepared anew
can_repeat = step.step(state)
if can_repeat:                                 # and nothing but values has changed
    step.repeat(state)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...balance import beyond_range
from ...criteria.criterion import Counts
from ...models.sharding import local
from ...symmetry import ScaledParameter, Symmetry
from ..biases import Gains, SafeBiases
from ..optimizer_state import needs_functions

__all__ = ["Problem", "Step", "TrainingState"]


@dataclass(frozen=True, eq=False)
class Problem:
    """What a step makes smaller, and by what; it stays the same in training."""

    symmetry: Symmetry
    terms: Mapping[str, ScaledParameter]  # by name: the parameters that move, and safe biases
    counts: Counts
    p: float = 2.0
    c: float = 1.0
    cycles: int = 1
    fixed: Tensor | None = None  # variables that stay where they are, n + 1; by default only the last, which is none
    safe: bool = False  # biases with a known fan-in are safe
    dtype: torch.dtype = torch.float32  # of sums and scales

    @property
    def num_scales(self) -> int:
        return self.symmetry.num_scales

    def tensors(self) -> list[Tensor]:
        """The parameters, in the order of `terms`."""
        return [self.symmetry.tensor(name) for name in self.terms]


@dataclass(frozen=True, eq=False)
class TrainingState:
    """All that one step moves."""

    weights: Mapping[str, Tensor]  # as in `Problem.terms`
    optimizers: Sequence[Optimizer]
    companions: Sequence[Symmetry]
    gradients: bool  # whether `.grad` moves along
    biases: SafeBiases

    def by_functions(self) -> Iterator[Tensor]:
        """The state of parameters of which some is carried by a function, which may write to all of it."""
        for tensor in self.weights.values():
            for optimizer in self.optimizers:
                if needs_functions(optimizer, tensor):
                    held = optimizer.state[tensor].values()
                    yield from (local(value) for value in held if isinstance(value, Tensor))


class Step(ABC):
    """One way to take ENorm cycles and to move all of a `TrainingState` to the new coordinates.

    It writes `log_t`, the log-scales since the start of training, and the gains of safe biases, in place.

    All or nothing: whatever may fail, and all memory that is asked for, comes before the first weight is written.
    """

    name: ClassVar[str]
    """The backend."""

    def __init__(self, problem: Problem, log_t: Tensor, gains: Gains) -> None:
        self.problem, self.log_t, self.gains = problem, log_t, gains
        self._terms_here: dict[str, ScaledParameter] = {}
        self._least = _least_moves(problem, log_t)

    def fits(self, weights: Iterable[Tensor]) -> bool:
        """Whether the weights are where this was prepared for, and as they were in memory."""
        return True

    @abstractmethod
    def step(self, state: TrainingState) -> bool:
        """Balance and move; whether `repeat` would do the same again if nothing but values changes until then."""

    def repeat(self, state: TrainingState) -> None:
        """The step before once more, on the same tensors."""
        self.step(state)

    def own_tensors(self) -> list[Tensor]:
        """What it writes besides a `TrainingState`."""
        return [self.log_t, self.gains.t, self.gains.change]

    def terms(self, name: str) -> ScaledParameter:
        """A parameter's terms, on the device of the scales."""
        if name not in self._terms_here:
            self._terms_here[name] = self.problem.terms[name].to(self.log_t.device)
        return self._terms_here[name]

    def hold_small_(self, s: Tensor) -> None:
        """Half precision: a move within the rounding of weights reaches few of them, so it is not made, nor counted."""
        if self._least is not None:
            s.masked_fill_(s.abs() < self._least[: len(s)], 0.0)

    def representable(self, s: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Half precision has little range: a scale that would leave it stays where it is."""
        if all(q.dtype != torch.float16 for q in weights.values()):
            return s
        terms = [self.terms(w.name) for w in self.problem.symmetry.moving]
        beyond = beyond_range(terms, weights.__getitem__, s)
        return torch.where(self.problem.symmetry.processes.any(beyond), 0.0, s)


def _least_moves(problem: Problem, log_t: Tensor) -> Tensor | None:
    """For each log-scale (and the one that is none) the relative spacing of the coarsest numbers that it moves, where
    these are of half precision; None: nowhere."""
    least = torch.zeros(problem.num_scales + 1, dtype=problem.dtype)
    for w in problem.symmetry.moving:
        dtype = problem.symmetry.tensor(w.name).dtype
        for term in (w.out, w.into):
            if term is not None and dtype in (torch.float16, torch.bfloat16):
                index = term.index.reshape(-1)
                least[index] = least[index].clamp_min(torch.finfo(dtype).eps)
    least[-1] = 0.0
    return least.to(log_t.device) if bool(least.any()) else None
