"""Norms of activations that weight-based methods are compared or combined with; all of them are in `layers`."""

from __future__ import annotations

from .layers import (
    BATCH_RENORM_DEFAULTS,
    TLU,
    BatchRenorm,
    BatchRenorm1d,
    BatchRenorm2d,
    BatchRenorm3d,
    FilterResponseNorm,
    MeanOnlyBatchNorm,
    MeanOnlyBatchNorm1d,
    MeanOnlyBatchNorm2d,
    MeanOnlyBatchNorm3d,
)

__all__ = [
    "BATCH_RENORM_DEFAULTS",
    "TLU",
    "BatchRenorm",
    "BatchRenorm1d",
    "BatchRenorm2d",
    "BatchRenorm3d",
    "FilterResponseNorm",
    "MeanOnlyBatchNorm",
    "MeanOnlyBatchNorm1d",
    "MeanOnlyBatchNorm2d",
    "MeanOnlyBatchNorm3d",
]
