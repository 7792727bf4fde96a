"""The ENorm step in torch operations, layer by layer: the twin that the fused steps are compared with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...criteria.norm import Objective, imbalance, layouts
from ...models.undo import tensors_kept
from ...solver import Cycle
from ..biases import Gains
from ..optimizer_state import carry_state_, needs_functions, powered_state
from .moves import Moves, powers
from .protocol import Problem, Step, TrainingState

__all__ = ["PlainStep"]


class PlainStep(Step):
    """ENorm cycles by `solver.Cycle` (stock2019, algorithm 1), and one multiplication for each tensor that moves.

    All that it needs is made here, so that the first step may be captured in a CUDA graph.
    """

    name = "plain"

    def __init__(self, problem: Problem, log_t: Tensor, gains: Gains) -> None:
        super().__init__(problem, log_t, gains)
        device = log_t.device
        counted = layouts(problem.symmetry, problem.p, problem.c, problem.counts)
        processes = problem.symmetry.processes
        self.objective = Objective(problem.num_scales, problem.p, counted, problem.dtype, device, processes)
        if problem.fixed is not None:
            self.objective.fixed |= problem.fixed.to(device)
        for name in problem.terms:
            self.terms(name)
        self._cycle = Cycle(self.objective, problem.symmetry.birth)

    def step(self, state: TrainingState) -> bool:
        s = self.representable(self._cycles(state.weights), state.weights)
        padded = torch.cat([s, s.new_zeros(1)])
        moves, weights = Moves(self.objective.dtype), list(state.weights.values())
        powered = [powered_state(optimizer, weights) for optimizer in state.optimizers]
        with tensors_kept([*self.own_tensors(), *state.by_functions()]):
            self.log_t += s
            self.gains.measure_(self.log_t)
            for i, (name, tensor) in enumerate(state.weights.items()):
                logs = self.terms(name).logs(padded)
                moves.add(tensor, logs)
                if state.gradients and tensor.grad is not None:
                    moves.add(tensor.grad, [-log for log in logs])
                for optimizer, of in zip(state.optimizers, powered, strict=True):
                    for power, held in of.values():
                        if (value := held[i]) is not None:
                            moves.add(value, powers(logs, power, state.biases.log_gradient_gain(name)))
                    if needs_functions(optimizer, tensor):
                        factor, gain = self.terms(name).factor(padded), state.biases.gradient_gain(name)
                        carry_state_(optimizer, tensor, factor, gain, skip=set(of))
                for other in state.companions:
                    moves.add(other.tensor(name), logs)
            moves.reserve()
            raised = moves.make()
        if raised is not None:
            raise raised
        return False

    def _cycles(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The log-scales after the cycles of one step."""
        self.objective.load(weights.__getitem__)
        s = torch.zeros_like(self.log_t, dtype=self.objective.dtype)
        for _ in range(self.problem.cycles):
            s = self._cycle.run(s)
        self.hold_small_(s)
        return s

    def imbalance(self, state: TrainingState) -> float:
        """The largest |log(incoming / outgoing mass)| at the present weights."""
        objective = self.objective
        objective.load(state.weights.__getitem__)
        point = objective.at(torch.zeros_like(self.log_t, dtype=objective.dtype))
        return float(imbalance(point, objective.free & (point.up > 0) & (point.down > 0)))
