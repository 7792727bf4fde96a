"""Adaptive gradient clipping (NF-ResNets): a gradient is limited by the length of what it moves, unit by unit.

- `functional`: lengths of units, and the clipping
- `reference`: the same, one unit after the other
- `clipping`: the class that acts before each step of an optimizer
"""

from .clipping import AdaptiveGradientClipping
from .functional import clip_gradients_, unit_norms

__all__ = ["AdaptiveGradientClipping", "clip_gradients_", "unit_norms"]
