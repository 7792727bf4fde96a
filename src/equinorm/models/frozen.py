"""Which parameters of a model are not trained, and whether they may move all the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from ..symmetry import Symmetry

__all__ = ["Frozen", "check_frozen", "held_by", "trains", "untrained"]

Frozen = Literal["keep", "move"]


def check_frozen(frozen: str) -> None:
    if frozen not in ("keep", "move"):
        raise ValueError(f"frozen must be 'keep' or 'move', got {frozen!r}")


def held_by(optimizers: Iterable[Optimizer]) -> set[int]:
    """The ids of the parameters that these optimizers hold."""
    return {id(q) for optimizer in optimizers for group in optimizer.param_groups for q in group["params"]}


def untrained(symmetry: Symmetry, optimizers: Iterable[Optimizer] | None = None) -> tuple[str, ...]:
    """Parameters that a rescaling would move and that do not train: no gradient, or in none of these optimizers.

    >>> untrained(symmetry, [optimizer])
    ('0.weight', '0.bias')
    """
    held = None if optimizers is None else held_by(optimizers)
    tensors = {w.name: symmetry.tensor(w.name) for w in symmetry.moving}
    return tuple(n for n, q in tensors.items() if not q.requires_grad or (held is not None and id(q) not in held))


def trains(model: nn.Module) -> bool:
    """Whether anything in a model requires gradients."""
    return any(q.requires_grad for q in model.parameters())
