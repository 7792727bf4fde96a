"""The form that all models have: stages one after the other, then a head."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ..data.augment import mix as mix_rows
from .fused import in_turn

__all__ = ["Chain", "Mix", "named"]

Mix = tuple[int, "Tensor | float", Tensor]
"""Where, with which λ, and with which other example of the batch each example is mixed."""


def named(**parts: nn.Module) -> nn.Sequential:
    """An `nn.Sequential` of named parts; what does nothing (`nn.Identity`) is left out."""
    return nn.Sequential(OrderedDict((name, part) for name, part in parts.items() if type(part) is not nn.Identity))


class Chain(nn.Module):
    """Stages, then a head; the input of an early stage can be mixed over the batch.

    Manifold mixup (Verma et al. 2019) mixes at the input or behind the first or second stage of a residual network;
    their published code draws one of these three with equal chances, and so may whoever calls this:

    >>> model(x, mix=(random.randrange(model.mix_layers), lam, permutation))
    """

    needs_data_init = False
    """Whether `initialise_from_data` is to be called before the optimizer is made."""
    init: Callable[[nn.Module, Tensor], Any]
    """The start from data of the method on weights."""

    def __init__(self, stages: Sequence[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.stages = nn.Sequential(*stages)
        self.head = head
        self.mix_layers = min(3, len(stages))

    def forward(self, x: Tensor, mix: Mix | None = None) -> Tensor:
        if mix is not None and not 0 <= mix[0] < self.mix_layers:
            raise ValueError(f"this model can mix at layers 0 (the input) to {self.mix_layers - 1}, not at {mix[0]}")
        for i, stage in enumerate(self.stages):
            if mix is not None and mix[0] == i:
                x = mix_rows(x, mix[1], mix[2])
            x = in_turn(stage, x)
        logits: Tensor = self.head(x)
        return logits
