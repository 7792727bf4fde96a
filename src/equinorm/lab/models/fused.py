"""The same layers with fewer and better filled kernels, for those who ask for them:

    with fused_kernels():
        loss = model(x).square().sum()    # small convolutions, and BatchNorm with the sum and ReLU that follow it

Without, and wherever the kernels cannot be launched, the layers are what they are in torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.nn.utils import parametrize

from ...kernels.dispatch import kernels
from ...meanshift import ScaledKernel
from ...weightnorm import originals

__all__ = ["Conv2d", "add_and_rectify", "fused_kernels"]

_wanted = False


@contextmanager
def fused_kernels() -> Iterator[None]:
    """Use the kernels in here."""
    global _wanted
    before, _wanted = _wanted, True
    try:
        yield
    finally:
        _wanted = before


def _kernels(name: str, *tensors: Tensor | None) -> ModuleType | None:
    return kernels(name, *tensors) if _wanted else None


class Conv2d(nn.Conv2d):
    """A convolution; one of 3 × 3 with few channels, in half precision, can be fused."""

    def forward(self, input: Tensor) -> Tensor:
        return self._then(input)

    def rectified(self, input: Tensor, plus: Tensor | None) -> Tensor:
        """relu(self(input) + plus)."""
        return self._then(input, plus, relu=True)

    def _then(self, x: Tensor, plus: Tensor | None = None, relu: bool = False) -> Tensor:
        weight, log_scale = self._scaled_weight()
        found = _kernels("convolution", x, weight, plus, log_scale) if self.bias is None and self._is_small else None
        if found is not None and x.dtype == _precision(x, weight) and found.fits(x, weight):
            out: Tensor = found.conv3x3(x, weight, plus, relu, log_scale)
            return out
        out = self._conv_forward(x, weight if log_scale is None else self.weight, self.bias)
        out = out if plus is None else out + plus
        return torch.relu(out) if relu else out

    def _scaled_weight(self) -> tuple[Tensor, Tensor | None]:
        """V and g where the weight is e^g · V and that can be done on its way; else the weight."""
        if _wanted and parametrize.is_parametrized(self, "weight"):
            steps = originals(self)
            if len(steps) == 1 and isinstance(steps[0], ScaledKernel):
                return steps.original, steps[0].g
        return self.weight, None

    @property
    def _is_small(self) -> bool:
        return (
            self.kernel_size == (3, 3)
            and self.stride == self.padding == self.dilation == (1, 1)
            and self.groups == 1
            and self.padding_mode == "zeros"
        )


def _precision(x: Tensor, weight: Tensor) -> torch.dtype:
    """In which torch would convolve."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def add_and_rectify(branch: nn.Sequential, x: Tensor, plus: Tensor, relu: nn.Module) -> Tensor:
    """`relu(branch(x) + plus)`; convolutions and BatchNorms take in the sum and the ReLU that follow them.

    Where somebody listens to one of the modules (a hook), each is called by itself.
    """
    parts = list(branch)
    if not _wanted or _listened_to([branch, *branch, relu]):
        x, parts = branch(x), []
    while parts:
        part = parts.pop(0)
        last = not parts
        rectified = type(relu if last else parts[0]) is nn.ReLU
        done = _rectified(part, x, plus if last else None) if rectified else None
        if done is None:
            x = part(x)
        elif last:
            return done
        else:
            x = done
            parts.pop(0)
    out: Tensor = relu(x + plus)
    return out


def _rectified(part: nn.Module, x: Tensor, plus: Tensor | None) -> Tensor | None:
    """relu(part(x) + plus), if there is a way to do it at once."""
    if isinstance(part, Conv2d):
        return part.rectified(x, plus)
    return _batch_norm(part, x, plus)


def _batch_norm(norm: nn.Module, x: Tensor, plus: Tensor | None) -> Tensor | None:
    """relu(norm(x) + plus) in two kernels, if these can be launched."""
    if type(norm) is not nn.BatchNorm2d or not (norm.training and norm.affine) or norm.momentum is None:
        return None
    found = _kernels("batchnorm", x, plus, norm.weight, norm.bias)
    if found is None or norm.weight.dtype != torch.float32 or not found.fits(x, plus):
        return None
    running = norm.running_mean, norm.running_var, norm.num_batches_tracked
    out: Tensor = found.batch_norm(
        x, norm.weight, norm.bias, *running, norm.momentum, norm.eps, plus=plus, relu=True
    )  # fmt: skip
    return out


def _listened_to(modules: Iterable[nn.Module]) -> bool:
    anywhere = (hooks._global_forward_hooks, hooks._global_forward_pre_hooks, hooks._global_backward_hooks)
    return any(anywhere) or any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in modules
    )
