"""What the fused steps have in common: one sweep over all weights, then one move of everything that follows them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...models.undo import tensors_kept
from ..biases import Gains
from ..optimizer_state import carry_state_, needs_functions, powered_state, step_is_linear
from .moves import Moves, powers
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

    def move(self) -> BaseException | None:
        """Multiply all tensors by the factors of `s`, and add it to log_t: all of it, or nothing. What interrupted it
        is returned."""
        with tensors_kept(self.own_tensors()):
            self.begin_move()
            return self.finish_move()

    @abstractmethod
    def begin_move(self) -> None:
        """Add `s` to log_t, measure the gains of safe biases, and have all factors ready."""

    @abstractmethod
    def finish_move(self) -> BaseException | None:
        """Multiply all tensors by the factors."""

    @property
    def repeats(self) -> bool:
        """Whether a step on the same tensors needs no new `bind`."""
        return False

    def fits(self, weights: Iterable[Tensor]) -> bool:
        return self.memory.fits(weights)

    def repeat(self, state: TrainingState) -> None:
        self.hold_small_(self.sweep(self.problem.cycles))
        raised = self.move()
        torch.autograd.graph.increment_version([*state.weights.values()])
        if raised is not None:
            raise raised

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
        self.hold_small_(s)
        if (representable := self.representable(s, state.weights)) is not s:
            s.copy_(representable)
        left: dict[str, list[_Left]] = {}  # what the kernels do not reach
        for i, (name, tensor) in enumerate(state.weights.items()):
            gradient = tensor.grad if gradients and gradients[0].tensors[i] is None else None
            found = [] if gradient is None else [_Left(gradient, -1.0)]
            found += [
                _Left(other.tensor(name), 1.0)
                for other, tensors in zip(state.companions, twins, strict=True)
                if tensors.tensors[i] is None
            ]
            for optimizer, of, sets in zip(state.optimizers, powered, carried, strict=True):
                for key, (power, held) in of.items():
                    if (value := held[i]) is not None and sets[key].tensors[i] is None:
                        found.append(_Left(value, power, of_state=True))
                if needs_functions(optimizer, tensor):
                    found.append(_Left(optimizer, skip=set(of)))
            if found:
                left[name] = found
        raised = self._move_with(left, state) if left else self.move()
        torch.autograd.graph.increment_version(weights)
        if raised is not None:
            raise raised
        return not left and representable is s and self.repeats

    def _move_with(self, left: dict[str, list[_Left]], state: TrainingState) -> BaseException | None:
        """Move all tensors, and what is left."""
        moves = Moves(self.s.dtype)
        with tensors_kept([*self.own_tensors(), *state.by_functions()]):
            self.begin_move()
            for name, found in left.items():
                terms, tensor = self.terms(name), state.weights[name]
                logs, log_gain = terms.logs(self.s), state.biases.log_gradient_gain(name)
                for each in found:
                    if isinstance(each.what, Tensor):
                        moves.add(each.what, powers(logs, each.power, log_gain if each.of_state else None))
                    else:
                        factor, gain = terms.factor(self.s), state.biases.gradient_gain(name)
                        carry_state_(each.what, tensor, factor, gain, skip=each.skip)
            moves.reserve()
            raised = self.finish_move()
            return moves.make() or raised


@dataclass(frozen=True, eq=False)
class _Left:
    """A tensor that follows a power of the factor, or an optimizer with state that follows by a function."""

    what: Tensor | Optimizer
    power: float = 1.0
    of_state: bool = False
    skip: Collection[str] = ()
