"""The kernels of the weights as operations of torch, for `torch.compile`, whose code launches them as it does its own.

Of the many small sums over the weights of an EquiNorm layer it would make half a dozen kernels each way; ours are one
each. The sums over inputs and gradients stay in plain torch, where they are taken on the way of something else. Mean
shift rejection's e^g · V stays there too: the code that is generated for it was the faster of the two.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from .weights import (
    Equilibrium,
    Parameters,
    transform_kernel,
    transform_weight,
    transform_weight_backward,
    weight_gradient_kernel,
)

__all__ = ["equilibrated", "equilibrated_backward"]


@triton_op("equinorm::equilibrated", mutates_args=())
def equilibrated(
    weight: Tensor,
    means: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    groups: int,
    two_pass: bool,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """`functional.equilibrate` with ρ = 1, and the bias if there is one, in precision `dtype`; and what is kept.

    Means divided by ρ do the same as ρ does.
    """
    parameters = Parameters(weight, _contiguous(gain), _contiguous(bias))
    equilibrium = Equilibrium(groups, two_pass=two_pass, eps=eps, dtype=dtype)
    kernel = wrap_triton(transform_kernel)
    out, offset, state = transform_weight(parameters, means[None].contiguous(), equilibrium, kernel=kernel)
    return out, _or_nothing(offset, weight), state


@triton_op("equinorm::equilibrated_backward", mutates_args=())
def equilibrated_backward(
    grad: Tensor,
    grad_offset: Tensor | None,
    weight: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    state: Tensor,
    groups: int,
    two_pass: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of weight, means, gain and bias."""
    parameters = Parameters(weight, _contiguous(gain), bias)
    equilibrium = Equilibrium(groups, two_pass=two_pass, eps=0.0, dtype=weight.dtype)
    kernel = wrap_triton(weight_gradient_kernel)
    gradients, for_means = transform_weight_backward(
        grad, parameters, state, equilibrium, grad_offset=_contiguous(grad_offset), kernel=kernel
    )
    for_gain, for_bias = _or_nothing(gradients.gain, weight), _or_nothing(gradients.bias, weight)
    return gradients.weight, for_means.sum(0), for_gain, for_bias


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _or_nothing(tensor: Tensor | None, like: Tensor) -> Tensor:
    """An operation cannot leave out what it promised."""
    return like.new_empty(0) if tensor is None else tensor


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    weight, _, gain, bias, groups, two_pass, *_ = inputs
    ctx.save_for_backward(weight, gain, bias, output[2])
    ctx.options = (groups, two_pass)


def _backward(ctx: Any, grad: Tensor, grad_offset: Tensor, _: Any) -> tuple[Any, ...]:
    weight, gain, bias, state = ctx.saved_tensors
    for_offset = None if bias is None else grad_offset
    gradients = equilibrated_backward(grad, for_offset, weight, gain, bias, state, *ctx.options)
    for_weight, for_means, for_gain, for_bias = gradients
    for_gain, for_bias = None if gain is None else for_gain, None if bias is None else for_bias
    return for_weight, for_means, for_gain, for_bias, None, None, None, None


equilibrated.register_autograd(_backward, setup_context=_keep)
