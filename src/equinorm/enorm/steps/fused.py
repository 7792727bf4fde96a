"""What the fused steps have in common: one sweep over all weights, then one move of everything that follows them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..biases import Gains
from ..optimizer_state import carry_state_, needs_functions, powered_state, step_is_linear
from .protocol import Problem, Step, TrainingState

__all__ = ["FusedStep", "ParameterLayouts", "TensorSet"]


@dataclass(frozen=True, eq=False)
class TensorSet:
    """Tensors that follow the parameters, one for each (or None): multiplied by their factors to a power."""

    tensors: Sequence[Tensor | None]
    power: float
    gained: bool = False  # gathers gradients that a safe bias's gain multiplies


class ParameterLayouts:
    """Knows how parameters lie in memory, and whether what follows them lies the same way."""

    dtypes: Collection[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.device = parameters[0].device
        self._layout = [_layout(t) for t in parameters]

    @property
    def count(self) -> int:
        """How many parameters there are."""
        return len(self._layout)

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


class FusedStep(Step):
    """A step on tensors that lie in memory as it was prepared for.

        fused.bind([TensorSet(weights, 1.0), TensorSet(momenta, -1.0)])     # looks at addresses only
        fused.sweep(cycles=1)                                               # fused.s: this step's log-scales
        fused.move()                                                        # log_t, gains and all tensors

    What the kernels do not reach (odd layouts, other devices, state that takes a function) follows after them.
    """

    s: Tensor
    """The log-scales of the last sweep; the last place means "no variable"."""

    def __init__(self, problem: Problem, log_t: Tensor, gains: Gains) -> None:
        super().__init__(problem, log_t, gains)
        self.memory = ParameterLayouts(problem.tensors())
        self.device = self.memory.device

    @abstractmethod
    def bind(self, sets: Sequence[TensorSet]) -> None:
        """Take these tensors for the next sweep and move; the first set holds the parameters."""

    @abstractmethod
    def sweep(self, cycles: int = 1) -> Tensor:
        """The log-scales of this step: `cycles` ENorm cycles from 0."""

    @abstractmethod
    def move(self) -> None:
        """Multiply all tensors by the factors of `s`, and add it to log_t."""

    @property
    def repeats(self) -> bool:
        """Whether a step on the same tensors needs no new `bind`."""
        return False

    def fits(self, weights: Iterable[Tensor]) -> bool:
        return self.memory.fits(weights)

    def repeat(self, state: TrainingState) -> None:
        self.sweep(self.problem.cycles)
        self.move()
        torch.autograd.graph.increment_version([*state.weights.values()])

    def step(self, state: TrainingState) -> bool:
        names, weights = list(state.weights), list(state.weights.values())
        fitting = self.memory.fitting
        powered, carried = [], []
        for optimizer in state.optimizers:
            linear = step_is_linear(optimizer)
            powered.append(powered_state(optimizer, weights))
            carried.append({key: TensorSet(fitting(held), power, linear) for key, (power, held) in powered[-1].items()})
        twins = [TensorSet(fitting(other.tensor(name) for name in names), 1.0) for other in state.companions]
        gradients = [TensorSet(fitting(q.grad for q in weights), -1.0)] if state.gradients else []
        self.bind([TensorSet(weights, 1.0), *(x for sets in carried for x in sets.values()), *twins, *gradients])
        s = self.sweep(self.problem.cycles)[:-1]
        if (representable := self.representable(s, state.weights)) is not s:
            s.copy_(representable)
        self.move()
        torch.autograd.graph.increment_version(weights)
        complete = True
        for i, (name, tensor) in enumerate(state.weights.items()):
            gradient = tensor.grad if gradients and gradients[0].tensors[i] is None else None
            others = [
                other.tensor(name)
                for other, tensors in zip(state.companions, twins, strict=True)
                if tensors.tensors[i] is None
            ]
            left = []  # the optimizers with state that is not done, and what is
            for optimizer, of, sets in zip(state.optimizers, powered, carried, strict=True):
                done = {key for key, tensors in sets.items() if tensors.tensors[i] is not None}
                missing = any(held[i] is not None for key, (_, held) in of.items() if key not in done)
                if missing or needs_functions(optimizer, tensor):
                    left.append((optimizer, done))
            if not (left or others or gradient is not None):
                continue
            complete = False
            factor = self.terms(name).factor(self.s)
            if gradient is not None:
                gradient.div_(factor)
            for optimizer, done in left:
                carry_state_(optimizer, tensor, factor, state.biases.gradient_gain(name), skip=done)
            for twin in others:
                twin.mul_(factor.to(twin.device))
        return complete and representable is s and self.repeats
