"""Models that cast to float32 inside (most norms of language models do), run in float64 throughout."""

from __future__ import annotations

from typing import Any

import torch
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
        return func(*args, **kwargs)
