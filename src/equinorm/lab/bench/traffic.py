"""What processes send each other: the collectives of a block of code, counted as they pass torch's dispatcher.

>>> with Traffic() as seen:
...     optimizer.step()
>>> seen.bytes, seen.numbers, [one.name for one in seen.collectives]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Collective", "Traffic"]

_NAMESPACES = ("c10d", "_c10d_functional")
_USUAL = {  # what is in the names of torch's operators
    "all_reduce": ("allreduce", "all_reduce"),
    "all_gather": ("allgather", "all_gather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_to_all": ("alltoall", "all_to_all"),
    "broadcast": ("broadcast",),
}


@dataclass(frozen=True)
class Collective:
    """One collective: of a gather what comes out, of a reduction what goes in."""

    name: str  # all_reduce, all_gather, reduce_scatter, ...
    numbers: int
    bytes: int

    @property
    def sent(self) -> int:
        """Bytes on the wire: of n processes in a ring each sends (n - 1)/n of this. To reduce for all is to reduce for
        one and to gather, so it counts twice."""
        return self.bytes * (2 if self.name == "all_reduce" else 1)


class Traffic(TorchDispatchMode):
    """Every collective of this thread while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []

    @property
    def numbers(self) -> int:
        return sum(one.numbers for one in self.collectives)

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.collectives)

    @property
    def sent(self) -> int:
        return sum(one.sent for one in self.collectives)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = _usual(function)
        if name is not None:
            c10d = function.namespace == "c10d"  # which writes into its first argument
            numbers, size = max(_size(args[:1] if c10d else [result]), _size(args[1:] if c10d else args))
            self.collectives.append(Collective(name, numbers, size))
        return result


def _size(values: Iterable[Any]) -> tuple[int, int]:
    found = list(_tensors(values))
    return sum(t.numel() for t in found), sum(t.numel() * t.element_size() for t in found)


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _usual(function: Any) -> str | None:
    """The usual name of a collective; None for all other operators.

    >>> _usual(torch.ops.c10d._allgather_base_.default)
    'all_gather'
    """
    if function.namespace not in _NAMESPACES:
        return None
    operator = function._schema.name
    return next((usual for usual, parts in _USUAL.items() if any(part in operator for part in parts)), None)
