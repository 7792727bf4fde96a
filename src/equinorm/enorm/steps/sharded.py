"""The ENorm step where parameters are sharded over processes (DTensor: FSDP2, tensor parallel).

Every process sums |w|^p over the parts that it holds. The sums of a block of variables, two numbers for each, are added
up over all processes before the block moves, so that all make the same move; then each multiplies its own parts. No
weight is sent anywhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from ...models.sharding import local, part_of, placement, sharded_like
from ...models.undo import tensors_kept
from ...symmetry import ScaledParameter
from ..biases import Gains
from ..optimizer_state import carry_state_, needs_functions, powered_state
from .moves import Moves, powers
from .plain import PlainStep
from .protocol import Problem, TrainingState

__all__ = ["ShardedStep"]


class ShardedStep(PlainStep):
    """ENorm cycles on the parts that are here, with sums over all processes; its twin for one process is `PlainStep`.

    All processes must take the step together.
    """

    name = "sharded"

    def __init__(self, problem: Problem, log_t: Tensor, gains: Gains) -> None:
        self._whole = problem.terms
        tensors = {name: problem.symmetry.tensor(name) for name in problem.terms}
        parts = {name: part_of(tensor, name) for name, tensor in tensors.items()}
        here = problem.symmetry.local()
        terms = {name: w.within(parts[name], parts[name].share(here.processes)) for name, w in problem.terms.items()}
        super().__init__(replace(problem, symmetry=here, terms=terms), log_t, gains)
        self._prepared_for = [placement(tensor) for tensor in tensors.values()]
        self._elsewhere: dict[tuple[str, Hashable], ScaledParameter] = {}

    def fits(self, weights: Iterable[Tensor]) -> bool:
        return [placement(tensor) for tensor in weights] == self._prepared_for

    def step(self, state: TrainingState) -> bool:
        parts = {name: local(q) for name, q in state.weights.items()}
        s = self.representable(self._cycles(parts), parts)
        padded = torch.cat([s, s.new_zeros(1)])
        moves, weights = Moves(self.objective.dtype), list(state.weights.values())
        powered = [powered_state(optimizer, weights) for optimizer in state.optimizers]
        with tensors_kept([*self.own_tensors(), *state.by_functions()]):
            self.log_t += s
            self.gains.measure_(self.log_t)
            for i, (name, tensor) in enumerate(state.weights.items()):

                def logs(other: Tensor, name: str = name, tensor: Tensor = tensor) -> list[Tensor]:
                    return self._terms_of(name, other, tensor).logs(padded)

                moves.add(parts[name], logs(tensor))
                if state.gradients and tensor.grad is not None:
                    moves.add(local(tensor.grad), [-log for log in logs(tensor.grad)])
                for optimizer, of in zip(state.optimizers, powered, strict=True):
                    for power, held in of.values():
                        if (value := held[i]) is not None:
                            gain = state.biases.log_gradient_gain(name)
                            moves.add(local(value), powers(logs(value), power, gain))
                    if needs_functions(optimizer, tensor):
                        factor, own_gain = self.terms(name).factor(padded), state.biases.gradient_gain(name)
                        whole = None if own_gain is None else sharded_like(own_gain.expand_as(parts[name]), tensor)
                        along = sharded_like(factor.expand_as(parts[name]), tensor)
                        carry_state_(optimizer, tensor, along, whole, skip=set(of))
                for other in state.companions:
                    moves.add(local(other.tensor(name)), logs(other.tensor(name)))
            moves.reserve()
            raised = moves.make()
        torch.autograd.graph.increment_version([*state.weights.values()])
        if raised is not None:
            raise raised
        return False

    def imbalance(self, state: TrainingState) -> float:
        return super().imbalance(replace(state, weights={name: local(q) for name, q in state.weights.items()}))

    def _terms_of(self, name: str, tensor: Tensor, weight: Tensor) -> ScaledParameter:
        """A parameter's terms on the part of a tensor that is here: those of the weight, where it is sharded alike."""
        where = placement(tensor)
        if where == placement(weight):
            return self.terms(name)
        if (name, where) not in self._elsewhere:
            self._elsewhere[name, where] = self._whole[name].within(part_of(tensor, name)).to(self.log_t.device)
        return self._elsewhere[name, where]
