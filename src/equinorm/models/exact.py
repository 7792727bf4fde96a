"""Models that cast to float32 inside (most norms of language models do), run in float64 throughout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Exact"]


class Exact(TorchDispatchMode):
    """Inside it whatever would be cast to a floating dtype, or made in one, becomes float64.

    >>> with Exact(), torch.no_grad():
    ...     y = copy.deepcopy(model).double()(x.double())
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype")
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            kwargs["dtype"] = torch.float64
        if func is _GROUPED and args[0].dtype == torch.float64 and args[0].ndim == 2 and args[1].ndim == 3:
            return _by_group(*args, **kwargs)
        return func(*args, **kwargs)


_GROUPED = torch.ops.aten._grouped_mm.default if hasattr(torch.ops.aten, "_grouped_mm") else None


def _by_group(rows: Tensor, matrices: Tensor, offs: Tensor, bias: Any = None, out_dtype: Any = None) -> Tensor:
    """`grouped_mm`, which torch has in no more than float32: rows up to offs[e] times matrix e."""
    out = rows.new_zeros(rows.shape[0], matrices.shape[2])
    start = 0
    for end, matrix in zip(offs.tolist(), matrices, strict=True):
        out[start:end] = rows[start:end] @ matrix
        start = end
    return out
