"""Gains and biases from data: one pass through a model, in which each layer is set as it is reached.

Salimans & Kingma 2016, section 3. What a layer puts out is corrected on the way: the layers behind it see it set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import counted
from .inputs import call

__all__ = ["InitReport", "Per", "set_as_reached", "standardizing"]

Per = Literal["layer", "channel"]


@dataclass(frozen=True)
class InitReport:
    """What an initialisation from data found on the way."""

    order: tuple[str, ...]
    """The layers in the order in which they were run and set."""
    without_bias: tuple[str, ...]
    """Layers that have no bias: their mean is what it is."""
    constant: Mapping[str, int]
    """Layer -> how many of its outputs do not vary over the batch; these keep their gain."""

    def __str__(self) -> str:
        lines = [f"initialised {counted(len(self.order), 'layer')}: {', '.join(map(_shown, self.order))}"]
        if self.without_bias:
            lines.append(f"  no bias, so their mean is what it is: {', '.join(map(_shown, self.without_bias))}")
        lines += [f"  {_shown(name)}: {counted(n, 'constant output')}" for name, n in self.constant.items()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        parts = [f"{counted(len(self.order), 'layer')} initialised"]
        if self.without_bias:
            parts.append(f"{len(self.without_bias)} without bias")
        if self.constant:
            parts.append(counted(sum(self.constant.values()), "constant output"))
        return f"<InitReport: {', '.join(parts)}>"


def _shown(name: str) -> str:
    return name or "the model itself"


def set_as_reached(
    model: nn.Module,
    inputs: Any,
    layers: Mapping[str, nn.Module],
    set_: Callable[[str, Tensor], tuple[Tensor, int]],
    tensors: Iterable[Tensor],
    without_bias: Iterable[str],
) -> InitReport:
    """Run the model once in its present mode and set each layer when it puts something out for the first time.

    Args:
        set_: sets the layer of that name from its output; returns (what it puts out now, number of constant outputs).
        tensors: all that `set_` may write to. On any error they, and the model's buffers, are left as they were.

    >>> set_as_reached(model, images, {"fc": model.fc}, set_, [model.fc.weight, model.fc.bias], ())
    """
    order: list[str] = []
    constant: dict[str, int] = {}

    def reached(name: str, output: Any) -> Tensor | None:
        if name in order:
            return None
        if not isinstance(output, Tensor):
            raise TypeError(f"{name} puts out a {type(output).__name__}; a layer with a gain puts out a tensor")
        order.append(name)
        output, dead = set_(name, output)
        if dead:
            constant[name] = dead
        return output

    before = [(tensor, tensor.clone()) for tensor in (*tensors, *model.buffers())]
    hooks = [
        layer.register_forward_hook(lambda _, __, output, name=name: reached(name, output))
        for name, layer in layers.items()
    ]
    try:
        call(model, inputs)
        if missing := [name for name in layers if name not in order]:
            raise ValueError(
                f"the inputs never ran through {missing}: leave them out with `keep` when the method is put on the "
                "model, or give inputs that do"
            )
    except BaseException:
        for tensor, value in before:
            tensor.copy_(value)
        raise
    finally:
        for hook in hooks:
            hook.remove()
    return InitReport(tuple(order), tuple(without_bias), constant)


def standardizing(output: Tensor, channel: int, per: Per = "layer") -> tuple[Tensor, Tensor, Tensor]:
    """(μ, 1/σ, which channels vary) of an output whose channels lie in that axis; one number per channel each.

    With `per="layer"` σ is one number for all, the root of their mean variance. Where nothing varies 1/σ is 1.

    >>> mean, scale, varies = standardizing(conv(images), channel=1)
    """
    over = [axis for axis in range(output.ndim) if axis != channel]
    exact = output.to(torch.promote_types(output.dtype, torch.float32))  # half precision is too coarse for statistics
    variance, mean = torch.var_mean(exact, dim=over, correction=0)
    # What is left of a constant after its mean is taken off is rounding, and must not be blown up to 1.
    varies = variance.sqrt() > 10 * torch.finfo(output.dtype).eps * mean.abs()
    if per == "layer":
        variance = variance.mean().expand_as(variance)
    scale = variance.clamp_min(torch.finfo(variance.dtype).tiny).rsqrt()
    return mean, scale.where(varies.any() if per == "layer" else varies, 1.0), varies
