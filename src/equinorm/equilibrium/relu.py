"""A ReLU that leaves the channel sums of its output to the EquiNorm layers that read it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..launch import DTYPES, kernels
from .functional import stats_samples
from .sums import is_rectified, leave_sums

__all__ = ["SummingReLU"]


class SummingReLU(nn.ReLU):
    """`nn.ReLU` that takes the sums which EquiNorm layers behind it need as it writes its output, training on CUDA.

    The layers then neither read their input for the statistics nor add a gradient to it afterwards: this ReLU does, in
    the passes that it makes anyway. Elsewhere it is `nn.ReLU`. `fraction` is the `stats_fraction` of the layers; 0 for
    none, where only the layer before is to do the work of this ReLU (`EquiNormLayer.relu_follows`).

    What autograd hands out as the gradient of the output then lacks the part that comes through the statistics: it
    arrives at this ReLU by itself. Hooks on the output, and those on this module, turn it all off.

    >>> y = SummingReLU(fraction=0.25)(x)     # y carries its sums
    >>> y = SummingReLU()(x, shortcut)        # relu(x + shortcut), in one pass
    """

    def __init__(self, inplace: bool = False, fraction: float = 1.0) -> None:
        super().__init__(inplace)
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(
                f"fraction of SummingReLU is the part of a batch that supplies the statistics of the EquiNorm layers "
                f"behind it: at least 0 (none) and at most 1, got {fraction}"
            )
        self.fraction = fraction

    def forward(self, input: Tensor, plus: Tensor | None = None) -> Tensor:
        """relu(input + plus); of the shape of both."""
        if not torch.compiler.is_compiling() and plus is None and is_rectified(input):
            return input
        if (summed := self._summed(input, plus)) is not None:
            return summed
        return super().forward(input if plus is None else input + plus)

    def _summed(self, x: Tensor, plus: Tensor | None) -> Tensor | None:
        """The output with its sums; None where the kernels cannot be used, or nobody reads the sums."""
        if not (self.training and self.fraction and x.dim() > 1 and x.numel() and x.dtype in DTYPES):
            return None
        if plus is not None and (plus.dtype, plus.shape) != (x.dtype, x.shape):
            return None
        fast = kernels("equinorm.equilibrium.kernels", x, plus)
        samples = stats_samples(self.fraction, x.shape[0])
        made = None if fast is None else fast.rectified(x, plus, samples, self.inplace)
        if made is None:
            return None
        y: Tensor = made[0]
        leave_sums(y, made[1], samples)
        return y

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), f"fraction={self.fraction}")))
