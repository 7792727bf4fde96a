"""Which backend takes the steps: the first that can be used, or the one that was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from ...models.sharding import is_sharded
from ..biases import Gains
from .fused import ParameterLayouts
from .plain import PlainStep
from .protocol import Problem, Step
from .sharded import ShardedStep
from .structure import InexpressibleError

__all__ = ["BACKENDS", "prepare"]

BACKENDS = ("auto", "plain", "foreach", "triton")


def prepare(backend: str, problem: Problem, log_t: Tensor, gains: Gains) -> tuple[Step, dict[str, str]]:
    """A step by this backend, or ("auto") by the first that can be used; and why not by those before it.

    >>> step, why_not = prepare("auto", problem, log_t, gains)
    """
    fused = ("triton", "foreach") if log_t.device.type == "cuda" else ("foreach",)
    tensors, why_not = problem.tensors(), dict[str, str]()
    if any(map(is_sharded, tensors)):
        if backend not in ("auto", "plain"):
            raise ValueError(f"backend={backend!r} is not possible where parameters are sharded: leave it at 'auto'")
        return ShardedStep(problem, log_t, gains), why_not
    for name in (*fused, "plain") if backend == "auto" else (backend,):
        if name == "plain":
            return PlainStep(problem, log_t, gains), why_not
        reason = _why_not(name, tensors)
        try:
            if not reason:
                return _fused(name, problem, log_t, gains), why_not
        except InexpressibleError as error:
            reason = str(error)
        why_not[name] = reason
    raise ValueError(f"backend={backend!r} is not possible here: {why_not[backend]}")


def _fused(name: str, problem: Problem, log_t: Tensor, gains: Gains) -> Step:
    if name == "triton":
        from .triton import TritonStep

        return TritonStep(problem, log_t, gains)
    from .foreach import ForeachStep

    return ForeachStep(problem, log_t, gains)


def _why_not(backend: str, tensors: Sequence[Tensor]) -> str:
    """Why a backend cannot be used on these parameters; empty if it can."""
    device = tensors[0].device
    for q in tensors:
        if q.device != device:
            return f"parameters are on {device} and on {q.device}"
        if type(q) not in (Tensor, nn.Parameter) or q.layout != torch.strided:
            return f"a parameter is a {type(q).__name__} of layout {q.layout}"
        if q.dtype not in ParameterLayouts.dtypes:
            return f"a parameter has dtype {q.dtype}"
    if backend == "foreach":
        return "" if device.type in ("cpu", "cuda") else f"it has not been tried on {device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    from .triton import can_launch

    return "" if can_launch(device) else f"its kernels do not run on {device.type}"
