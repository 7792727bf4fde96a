"""How the work of the kernels is cut into programs: one table, which tests make small so that every loop runs often.

>>> TUNING.tile = 64
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["TUNING", "Tuning"]


@dataclass
class Tuning:
    """Sizes that were fast on an H200. A `Plan` is made with those of its time and remembered."""

    tile: int = 4096
    """Elements that a program has in flight; with 128 threads 32 each, four 16-byte loads of bfloat16."""
    programs: int = 1024
    """Programs that share a pass: about as many as a large device runs at once."""
    few_programs: int = 128
    """As many as it has multiprocessors: fewer would leave some idle."""
    reads: int = 2**22
    """Partial sums that may be read by all programs together, as long as there are more than a few programs."""
    weight_tile: int = 4096
    """Elements of a weight and of its gradient that a program has in flight."""
    chunks: int = 128
    """Output channels of a group are taken together so that no more than this many partial sums are left."""
    products: frozenset[torch.dtype] = frozenset({torch.bfloat16, torch.float16})
    """Precisions in which a convolution may be run as a matrix product. In float32 torch has a switch for each of the
    two that lets it round to TF32, and they are not set alike."""


TUNING = Tuning()
