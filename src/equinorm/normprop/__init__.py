"""Normalization propagation (Arpit et al. 2016): layers that hand on zero mean and unit variance; see `layers`."""

from __future__ import annotations

from .layers import NormalizationPropagation, propagated_relu

__all__ = ["NormalizationPropagation", "propagated_relu"]
