"""Kernels as operations of torch, for `torch.compile`: it calls them as they are and fuses what stands around them.

Of the many small sums over the weights of an EquiNorm layer it would make a dozen kernels each way; ours are two. The
sums over inputs and gradients stay in plain torch, where they are taken on the way of something else.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .dispatch import module

__all__ = ["equilibrated"]

_OPTIONS = "int groups, bool two_pass, float eps, ScalarType dtype"


def _kernels() -> ModuleType:
    found = module("equilibrium")
    assert found is not None, "this operation is for where there is Triton"
    return found


def _settings(groups: int, two_pass: bool, eps: float, dtype: torch.dtype) -> Any:
    kernels = _kernels()
    return kernels.Settings(kernels.Convolution((), (), (), groups), 1, 1.0, two_pass, eps, dtype)


@torch.library.custom_op(
    "equinorm::equilibrated",
    mutates_args=(),
    schema=f"(Tensor weight, Tensor means, Tensor? gain, {_OPTIONS}) -> (Tensor, Tensor)",
)
def equilibrated(weight: Tensor, means: Tensor, gain: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    """`equilibrium.equilibrate` with ρ = 1, in precision `dtype`; and what its gradient has to know.

    Means divided by ρ do the same as ρ does.
    """
    found: tuple[Tensor, Tensor] = _kernels().transform_weight(weight, means[None], gain, _settings(*options))
    return found


@equilibrated.register_fake
def _(weight: Tensor, means: Tensor, gain: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    groups, _, _, dtype = options
    return torch.empty_like(weight, dtype=dtype), means.new_empty(_kernels().state_size(weight, groups))


@torch.library.custom_op(
    "equinorm::equilibrated_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor weight, Tensor? gain, Tensor state, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def equilibrated_backward(
    grad: Tensor, weight: Tensor, gain: Tensor | None, state: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of weight, of gain (or nothing in its place), and of the means, as partial sums."""
    settings = _settings(*options)
    for_weight, for_gain, for_means = _kernels().transform_weight_backward(grad, weight, gain, state, settings)
    return for_weight, weight.new_empty(0) if for_gain is None else for_gain, for_means


@equilibrated_backward.register_fake
def _(grad: Tensor, weight: Tensor, gain: Tensor | None, state: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    outputs, inputs, groups = *weight.shape[:2], options[0]
    for_gain = weight.new_empty(0) if gain is None else torch.empty_like(gain)
    return torch.empty_like(weight), for_gain, state.new_empty(_kernels().chunks(outputs, groups)[0], inputs * groups)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    weight, _, gain, *options = inputs
    ctx.save_for_backward(weight, gain, output[1])
    ctx.options = options


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    weight, gain, state = ctx.saved_tensors
    for_weight, for_gain, partial = equilibrated_backward(grad, weight, gain, state, *ctx.options)
    return for_weight, partial.sum(0), None if gain is None else for_gain, None, None, None, None


equilibrated.register_autograd(_backward, setup_context=_keep)
