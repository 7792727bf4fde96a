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
from ...symmetry import ScaledParameter
from ..biases import Gains
from ..optimizer_state import carry_state_, needs_functions, powered_state
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
        self.log_t += s
        self.gains.measure_(self.log_t)
        weights = list(state.weights.values())
        powered = [powered_state(optimizer, weights) for optimizer in state.optimizers]
        for i, (name, tensor) in enumerate(state.weights.items()):
            factor = self.terms(name).factor(padded)
            parts[name].mul_(factor)
            if state.gradients and tensor.grad is not None:
                local(tensor.grad).div_(self._factor(name, tensor.grad, tensor, factor, padded))
            gain = state.biases.gradient_gain(name)
            for optimizer, of in zip(state.optimizers, powered, strict=True):
                for power, held in of.values():
                    if (value := held[i]) is not None:
                        own = self._factor(name, value, tensor, factor, padded)
                        local(value).mul_(own**power if power > 0 or gain is None else (gain / own) ** -power)
                if needs_functions(optimizer, tensor):
                    whole = None if gain is None else sharded_like(gain.expand_as(parts[name]), tensor)
                    along = sharded_like(factor.expand_as(parts[name]), tensor)
                    carry_state_(optimizer, tensor, along, whole, skip=set(of))
            for other in state.companions:
                twin = other.tensor(name)
                local(twin).mul_(self._factor(name, twin, tensor, factor, padded).to(twin.device))
        torch.autograd.graph.increment_version([*state.weights.values()])
        return False

    def imbalance(self, state: TrainingState) -> float:
        return super().imbalance(replace(state, weights={name: local(q) for name, q in state.weights.items()}))

    def _factor(self, name: str, tensor: Tensor, weight: Tensor, factor: Tensor, padded: Tensor) -> Tensor:
        """The factor on the part of a tensor that is here, given that on the part of the weight."""
        where = placement(tensor)
        if where == placement(weight):
            return factor
        if (name, where) not in self._elsewhere:
            self._elsewhere[name, where] = self._whole[name].within(part_of(tensor, name)).to(padded.device)
        return self._elsewhere[name, where].factor(padded)
