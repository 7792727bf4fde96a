"""Channel sums that whoever made a tensor leaves on it, for the EquiNorm layers that read it.

An EquiNorm layer needs the channel sums of its input, which a ReLU has just had in its hands. So a ReLU that is told to
(`SummingReLU`, `EquiNormConv2d.rectified`) sums on its way and leaves the sums on the tensor itself. They are lost
with the tensor: any other operation makes a new one, which has none, and a write in place is noticed. Then a layer
sums by itself, as it does without.

The sums are differentiable. What a layer finds along them, one number per channel, goes back to the ReLU by itself,
which adds it to the gradient of its output when it reads that anyway.

>>> leave_sums(y, y[:samples].sum((0, 2, 3)), samples)
>>> sums_left(y, samples)
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["is_rectified", "leave_sums", "sums_left"]

_NAME = "_equinorm_left"


class _Left(NamedTuple):
    sums: Tensor | None
    samples: int
    version: int
    """How often the tensor had been written to."""


def leave_sums(y: Tensor, sums: Tensor | None = None, samples: int = 0) -> None:
    """Leave on y, what a ReLU made, the channel sums of its first samples; without sums only that it is rectified."""
    setattr(y, _NAME, _Left(sums, samples, y._version))


def sums_left(x: Tensor, samples: int) -> Tensor | None:
    """The channel sums of the first samples that were left on x; None if there are none, or none that may be used."""
    left = _left_on(x)
    if left is None or left.sums is None or left.samples != samples:
        return None
    # who looks at the gradient of x, or has taken x out of the graph, does not expect a part of it elsewhere
    watched = bool(x._backward_hooks) or x.retains_grad
    return None if watched or left.sums.requires_grad != x.requires_grad else left.sums


def is_rectified(x: Tensor) -> bool:
    """Whether x is what a ReLU made that told so, and nothing has been written to it since."""
    return _left_on(x) is not None


def _left_on(x: Tensor) -> _Left | None:
    left: _Left | None = getattr(x, _NAME, None)
    # tensors of inference mode do not count how often they are written to
    return left if left is not None and not x.is_inference() and left.version == x._version else None
