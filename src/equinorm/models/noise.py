"""Noise that multiplies the inputs of units (ruff2020, section 4.4); mean shift rejection and unit filters have it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import counted
from ..launch import dense, kernels
from .handle import Handle
from .kinds import MethodHook

__all__ = ["InputNoise", "NoisyInput", "add_input_noise_"]


class InputNoise(nn.Module):
    """x · U(1 - a, 1 + a) while training, x otherwise (ruff2020, section 4.4, with a = 0.1).

    The paper does not say what the noise is drawn over; here it is drawn for every element, with `per="channel"` once
    for each channel of each example, or with `per="example"` once for each example.
    """

    def __init__(self, a: float = 0.1, per: str = "element") -> None:
        super().__init__()
        if not 0.0 <= a <= 1.0:
            raise ValueError(f"the amplitude of the noise must lie in [0, 1], got {a}")
        if per not in ("element", "channel", "example"):
            raise ValueError(f'noise is drawn per "element", "channel" or "example", got {per!r}')
        self.a, self.per = a, per

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.a == 0.0:
            return x
        fused = kernels("equinorm.msr.kernels", x) if self.per == "element" else None
        if fused is not None and dense(x):
            out: Tensor = fused.noisy(x, self.a)
            return out
        own = {"element": x.ndim, "channel": 2, "example": 1}[self.per]  # axes along which factors differ
        drawn = torch.empty_like(x) if own == x.ndim else x.new_empty(*x.shape[:own], *(1,) * (x.ndim - own))
        return x * drawn.uniform_(1.0 - self.a, 1.0 + self.a)

    def extra_repr(self) -> str:
        return f"a={self.a}" + (f", per={self.per!r}" if self.per != "element" else "")


def add_input_noise_(units: Iterable[nn.Module], a: float = 0.1, per: str = "element") -> Handle:
    """Put `InputNoise` before each of `units`, as ruff2020 (section 4.4) does before every residual unit.

    The first argument of a unit (given by keyword: the first parameter of its `forward`) is multiplied while that
    unit is in training mode, so that branch and skip see the same noise. State dicts do not change. `remove()`
    what is returned to undo it.

    >>> noise = add_input_noise_(module for module in model.modules() if isinstance(module, BasicBlock))
    """
    noise = NoisyInput(InputNoise(a, per))
    hooks = [unit.register_forward_pre_hook(noise, with_kwargs=True) for unit in units]
    return Handle(f"{noise.noise} before {counted(len(hooks), 'module')}", hooks)


class NoisyInput(MethodHook):
    """A forward pre-hook; a class, not a closure, so that units can still be pickled."""

    label = "InputNoise"

    def __init__(self, noise: InputNoise) -> None:
        self.noise = noise

    def __call__(
        self, unit: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not unit.training:
            return None
        if arguments:
            return (self.noise(arguments[0]), *arguments[1:]), keywords
        first = next(iter(inspect.signature(unit.forward).parameters), "")
        if first not in keywords:
            return None  # the unit's own error is the better one
        return (), {**keywords, first: self.noise(keywords[first])}
