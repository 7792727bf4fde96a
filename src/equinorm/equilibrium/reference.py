"""The equations of defazio2018 in plain lines, one output channel after the other: the oracle of the tests.

Everything is a sum, as in the paper: v sums the inputs of a channel over batch and pixels, and r counts the
output elements, times stride². Nothing guards a denominator. Only the two things that the paper leaves open
are added, groups (an output sees the input channels of its own group) and transposed convolutions (which meet
every input with every weight at any stride, so that r has no stride² in it). Gradients come from autograd.

>>> y = equinorm_conv(x, w, lambda x, w: F.conv2d(x, w, stride=2, padding=1), stride=(2, 2))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["equilibrate_weight", "equinorm_conv", "shift", "single_pass_scale", "two_pass_scale"]


def shift(w: list[Tensor], v: list[Tensor]) -> Tensor:
    """b_d of section 4.1 for one output channel; `w[c]` is its window over its c-th input, `v[c]` its sum."""
    window = w[0].numel()
    numerator = denominator = torch.zeros_like(v[0])
    for v_c, w_c in zip(v, w, strict=True):
        numerator = numerator + v_c * w_c.sum()
        denominator = denominator + v_c
    return -numerator / (window * denominator)


def two_pass_scale(w: list[Tensor], v: list[Tensor], b: Tensor, r: float) -> Tensor:
    """s_d of section 4.1: w'_dc sums (w + b) I[w + b > 0]."""
    total = torch.zeros_like(b)
    for v_c, w_c in zip(v, w, strict=True):
        for element in w_c.flatten():
            if element + b > 0:
                total = total + v_c * (element + b)
    return r / total


def single_pass_scale(w: list[Tensor], v: list[Tensor], b: Tensor, r: float) -> Tensor:
    """s_d of "Single pass formulation": the sign of an element is taken not to change when b is added."""
    total = torch.zeros_like(b)
    for v_c, w_c in zip(v, w, strict=True):
        w_plus, n_plus = torch.zeros_like(b), 0
        for element in w_c.flatten():
            if element > 0:
                w_plus = w_plus + element
                n_plus += 1
        total = total + v_c * (w_plus + b * n_plus)
    return r / total


def equilibrate_weight(
    w: Tensor, x: Tensor, r: float, groups: int = 1, two_pass: bool = False, transposed: bool = False
) -> Tensor:
    """w'' of section 4.1. `x` (batch, in, ...) are the inputs that supply the statistics, r belongs to them.

    `w` is (out, in / groups, ...) or, transposed, (in, out / groups, ...).
    """
    v = [x[:, c].sum() for c in range(x.shape[1])]
    inputs = x.shape[1] // groups
    outputs = w.shape[1] if transposed else w.shape[0] // groups
    scale = two_pass_scale if two_pass else single_pass_scale
    new = torch.zeros_like(w)
    for group in range(groups):
        for d in range(outputs):
            # where w has the windows of this output channel, one per input channel of the group
            if transposed:
                places = [(group * inputs + c, d) for c in range(inputs)]
            else:
                places = [(group * outputs + d, c) for c in range(inputs)]
            w_d = [w[place] for place in places]
            v_d = v[group * inputs : (group + 1) * inputs]
            b_d = shift(w_d, v_d)
            s_d = scale(w_d, v_d, b_d, r)
            for place in places:
                new[place] = s_d * (w[place] + b_d)
    return new


def equinorm_conv(
    x: Tensor,
    w: Tensor,
    conv: Callable[[Tensor, Tensor], Tensor],
    stride: Sequence[int],
    groups: int = 1,
    two_pass: bool = False,
    transposed: bool = False,
    samples: int | None = None,
) -> Tensor:
    """The output for x (batch, in, ...), with statistics from the first `samples` of the batch.

    `conv(x, w)` convolves with stride, padding and all else bound to it; the stride is told again for r.
    """
    size_out = conv(x, w).shape[2:]
    part = x[:samples]
    r = part.shape[0] * math.prod(size_out) * (1 if transposed else math.prod(stride))
    return conv(x, equilibrate_weight(w, part, r, groups, two_pass, transposed))
