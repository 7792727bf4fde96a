"""What a step writes: prepared whole, then written without anything between that could fail.

moves = Moves(float32)
moves.add(weight, (log_out, -log_into))     # multiplies by exp(log_out - log_into); nothing is written yet
moves.add(momentum, (-log_out, log_into))
moves.reserve()                             # the last memory that is asked for
raised = moves.make()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ...models.undo import interrupts_deferred

__all__ = ["Moves", "powers"]

PIECE = 2**20
"""Elements of a factor that are made at a time."""


@dataclass(frozen=True, eq=False)
class Move:
    """Tensors of one shape that a factor multiplies, and others that it divides.

    It is made of its parts, which broadcast together, when it is due.

    Factors of one part are there already.
    """

    multiplied: Sequence[Tensor]
    divided: Sequence[Tensor]
    parts: Sequence[Tensor]
    shape: torch.Size  # of the factor
    are_logs: bool  # the factor is the exponential of the sum of the parts, else their product

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.multiplied, *self.divided]

    def factor(self, scratch: Tensor | None) -> Tensor:
        """The factor, in memory that is there already."""
        if scratch is None or len(self.parts) == 1:
            return self.parts[0]
        made = scratch[: prod(self.shape)].view(self.shape)
        if not self.are_logs:
            return torch.mul(self.parts[0], self.parts[1], out=made)
        torch.add(self.parts[0], self.parts[1], out=made)
        for part in self.parts[2:]:
            made += part
        return made.exp_()


class Moves:
    """Products to be made, of tensors and factors (of a dtype)."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._moves: list[Move] = []
        self._scratch: dict[torch.device, Tensor] = {}

    def add(self, tensor: Tensor, logs: Sequence[Tensor]) -> None:
        """Multiply a tensor by the exponential of the sum of these, which broadcast to its shape together."""
        tensor = tensor.detach()
        logs = [log.to(tensor.device) for log in logs]
        shape = torch.broadcast_shapes(*(log.shape for log in logs))
        if any(log.shape == shape for log in logs):  # no larger than what it is made of
            total = logs[0]
            for log in logs[1:]:
                total = total + log
            self._moves.append(Move([tensor], [], [total.exp()], shape, are_logs=True))
            return
        rows = max(PIECE // max(prod(shape[1:]), 1), 1)
        for start in range(0, shape[0], rows):
            piece = slice(start, start + rows)
            parts = [log if log.shape[0] == 1 else log[piece] for log in logs]
            into = tensor if tensor.shape[0] == 1 else tensor[piece]
            self._moves.append(
                Move([into], [], parts, torch.broadcast_shapes(*(x.shape for x in parts)), are_logs=True)
            )

    def add_products(
        self, multiplied: Sequence[Tensor], divided: Sequence[Tensor], first: Tensor, second: Tensor
    ) -> None:
        """Multiply tensors by the product of two factors, and divide others by it."""
        shape = torch.broadcast_shapes(first.shape, second.shape)
        self._moves.append(Move(multiplied, divided, [first, second], shape, are_logs=False))

    def reserve(self) -> None:
        """Take the memory in which factors are made."""
        largest: dict[torch.device, int] = {}
        for move in self._moves:
            if len(move.parts) > 1:
                device = move.tensors[0].device
                largest[device] = max(largest.get(device, 0), prod(move.shape))
        for device, size in largest.items():
            if device not in self._scratch or len(self._scratch[device]) < size:
                self._scratch[device] = torch.empty(size, dtype=self.dtype, device=device)

    def clear(self) -> None:
        """Forget them; the memory in which factors are made is kept, and stays in the cache."""
        self._moves = []

    def make(self) -> BaseException | None:
        """Make all products; what is raised meanwhile is returned, to be raised when everything is done.

        If one fails twice, those that were made are taken back, and that is raised.
        """
        raised: BaseException | None = None
        with interrupts_deferred():
            for number, move in enumerate(self._moves):
                begun = _Begun()
                try:
                    self._make(move, begun)
                except BaseException as error:
                    raised = raised or error
                    try:
                        self._make(move, begun)
                    except BaseException:
                        self._take_back(self._moves[:number], move, begun.done())
                        raise
        return raised

    def _make(self, move: Move, begun: _Begun) -> None:
        tensors = move.tensors
        factor = move.factor(self._scratch.get(tensors[0].device))
        for number in range(begun.done(), len(tensors)):
            begun.at(number, tensors[number])
            if number < len(move.multiplied):
                tensors[number].mul_(factor)
            else:
                tensors[number].div_(factor)
        begun.number, begun.tensor = len(tensors), None

    def _take_back(self, moves: Sequence[Move], last: Move, written: int) -> None:
        """Undo moves, and the last one as far as it came."""
        for move, count in (*((move, len(move.tensors)) for move in moves), (last, written)):
            for number, tensor in enumerate(move.tensors[:count]):
                factor = move.factor(self._scratch.get(tensor.device))
                if number < len(move.multiplied):
                    tensor.div_(factor)
                else:
                    tensor.mul_(factor)


def powers(logs: Sequence[Tensor], power: float, log_gain: Tensor | None = None) -> list[Tensor]:
    """Logarithms of what state is multiplied by that follows a power of a factor; of a gradient's gain too."""
    powered = [power * log for log in logs]
    return powered if log_gain is None or power > 0 else [*powered, -power * log_gain.to(logs[0])]


class _Begun:
    """Which tensor of a move is being written to, and whether that happened: torch counts what is written."""

    def __init__(self) -> None:
        self.number, self._version = 0, 0
        self.tensor: Tensor | None = None

    def at(self, number: int, tensor: Tensor) -> None:
        self.number, self.tensor, self._version = number, tensor, _version(tensor)

    def done(self) -> int:
        """How many tensors have been written to."""
        return self.number + (self.tensor is not None and _version(self.tensor) != self._version)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
