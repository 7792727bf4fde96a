"""Signal propagation: how large activations and gradients are, layer by layer.

arpit2019 (section 5) shows scaled weight norm by these two pictures: a network that keeps ‖h_l‖ and ‖∂ℓ/∂h_l‖ over
its depth can be trained, one that lets them grow or vanish by a factor per layer cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .probe import Batch, Loss, Probe, Result, filters, layers, run, watching, wider


@dataclass(frozen=True, eq=False)
class ForwardNorms(Result):
    """The size of every layer's output, in the order in which the layers run."""

    names: list[str]
    norm: Tensor  # mean over the samples of ‖h_l‖
    rms: Tensor  # √(mean of h²), which does not depend on the width
    input_norm: Tensor  # mean over the samples of ‖x‖; NaN where the inputs are not numbers

    @property
    def ratio(self) -> Tensor:
        """‖h_l‖ / ‖x‖."""
        return self.norm / self.input_norm


@dataclass(frozen=True, eq=False)
class GradientNorms(Result):
    """The size of the loss's gradient at every layer, in the order in which the layers run."""

    names: list[str]
    norm: Tensor  # ‖∂L/∂h_l‖ over the whole batch, h_l the layer's output
    parameters: list[str]
    parameter_norm: Tensor  # ‖∂L/∂W‖ of each weight
    relative: Tensor  # ‖∂L/∂W‖ / ‖W‖


def forward_norms(model: nn.Module, inputs: Any) -> ForwardNorms:
    """How large the output of every layer is (before what follows it: its norm, its activation).

    Layers are the modules that own a weight matrix or kernel. A layer that runs twice is listed twice.

    >>> norms = forward_norms(model, x); list(zip(norms.names, norms.rms))
    """
    found: list[tuple[str, Tensor, Tensor]] = []

    def look(name: str, _: nn.Module, __: Any, output: Tensor) -> None:
        found.append((name, *_sizes(output)))

    with torch.no_grad(), watching(layers(model), look):
        run(model, inputs)
    _expect(found)
    names, norms, rms = zip(*found, strict=True)
    first = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs
    first = first[0] if isinstance(first, tuple | list) else first
    numbers = isinstance(first, Tensor) and first.is_floating_point()
    size = _sizes(first)[0] if numbers else torch.tensor(float("nan"), device=norms[0].device)
    return ForwardNorms(list(names), _stack(norms), _stack(rms), size)


def gradient_norms(model: nn.Module, loss_fn: Loss, batch: Batch) -> GradientNorms:
    """How large the gradient is at the output of every layer, and at every weight.

    >>> norms = gradient_norms(model, F.cross_entropy, (x, y)); norms.norm[0] / norms.norm[-1]
    """
    probe = Probe(model, loss_fn, batch)
    order: list[str] = []
    found: dict[str, Tensor] = {}

    def look(name: str, _: nn.Module, __: Any, output: Tensor) -> None:
        def keep(gradient: Tensor) -> None:
            found[name] = torch.linalg.vector_norm(gradient.detach(), dtype=wider(gradient.dtype))

        order.append(name)
        if output.requires_grad:
            output.register_hook(keep)  # sees the gradient of these values, also if a later op overwrites them

    with watching(layers(model), look):
        _, gradient = probe.gradient()
    _expect(order)
    zero = next(iter(gradient.values())).new_zeros(())
    names = list(dict.fromkeys(order))
    weights = {name: value for name, (value, _) in filters(model).items() if name in gradient}
    sizes = [torch.linalg.vector_norm(gradient[n], dtype=wider(gradient[n].dtype)) for n in weights]
    lengths = [torch.linalg.vector_norm(w, dtype=wider(w.dtype)) for w in weights.values()]
    total = _stack(sizes)
    tiny = torch.finfo(total.dtype).tiny
    relative = total / _stack(lengths).clamp_min(tiny)
    return GradientNorms(names, _stack([found.get(n, zero) for n in names]), list(weights), total, relative)


def _sizes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the first axis of the Euclidean norm, and the root mean square of all elements."""
    values = tensor.detach().to(wider(tensor.dtype) if tensor.is_floating_point() else torch.float32)
    rows = values.reshape(values.shape[0], -1) if values.ndim > 1 else values.reshape(1, -1)
    return torch.linalg.vector_norm(rows, dim=1).mean(), values.square().mean().sqrt()


def _stack(parts: Any) -> Tensor:
    parts = list(parts)
    kind = parts[0].dtype
    for part in parts:
        kind = torch.promote_types(kind, part.dtype)
    return torch.stack([part.to(parts[0].device, kind) for part in parts])


def _expect(found: Any) -> None:
    if not found:
        raise ValueError("the inputs run through no layer of the model: it has no module that owns a weight matrix")


__all__ = ["ForwardNorms", "GradientNorms", "forward_norms", "gradient_norms"]
