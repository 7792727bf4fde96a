"""When the fused kernels take over from their plain twins: for ordinary tensors on CUDA, run eagerly.

`torch.compile` fuses the plain versions itself, and whatever looks at the single operations of a model (an
export, a trace, functorch, a dispatch mode) has to see them. Without Triton there are no kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

__all__ = ["kernels", "launchable", "plain_only"]

_allowed = True


def kernels(name: str, *tensors: Tensor | None) -> ModuleType | None:
    """`equinorm.kernels.<name>` if its kernels can be launched on these tensors, here and now; else None."""
    return _module(name) if launchable(*tensors) else None


def launchable(*tensors: Tensor | None) -> bool:
    """Whether these are ordinary tensors on one CUDA device, in eager mode; None stands for no tensor."""
    if torch.compiler.is_compiling() or not _allowed:
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    device = given[0].device
    return (
        device.type == "cuda"
        and all(type(tensor) in (Tensor, nn.Parameter) and tensor.device == device for tensor in given)
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
        and forward_ad._current_level < 0
    )


@contextmanager
def plain_only() -> Iterator[None]:
    """Use the plain twins in here, for comparisons.

    >>> with plain_only():
    ...     expected = layer(x)
    """
    global _allowed
    before, _allowed = _allowed, False
    try:
        yield
    finally:
        _allowed = before


@cache
def _module(name: str) -> ModuleType | None:
    try:
        importlib.import_module("triton")
    except ImportError:
        return None
    return importlib.import_module(f"equinorm.kernels.{name}")
