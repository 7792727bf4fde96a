"""Filters of all shapes and dtypes, for tests of kernels."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

dtypes = st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16])
SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 9), st.lists(st.integers(1, 3), min_size=1, max_size=3))


def laid_out(x: Tensor, channels_last: bool) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.to(memory_format=formats[x.dim()]) if channels_last and x.dim() in formats else x


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    tolerance = 4 * torch.finfo(dtype).eps
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance * scale)
